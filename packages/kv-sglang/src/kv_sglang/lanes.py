"""Loads and stores between the host pool and SGLang's blocks on the device, each on its own thread.

Immediate decisions (is the page there, does it stay) are made on the caller's thread, but not the copies, which take
time. SGLang makes the same calls on several ranks and relies on equal answers, so no answer depends on the progress of
a thread: an accepted load is carried out, and an offered store gets its turn. An error on a thread is a bug or a device
fault, and turns the cache off; the thread continues, so that no caller waits in vain.
"""

import itertools
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol

import torch
from kv_connect.halves.copies import await_copies
from kv_core.device import CopyEvent
from kv_core.errors import CopyFailed
from kv_core.keys import ChunkKey
from kv_core.service import ReadLease
from kv_cuda.choose import BoundCopier

from kv_sglang.pages import PageStore, PoolBinding, lies_in
from kv_sglang.pools import first_slots

MAX_WAITING_PAGES: Final = 4096
"""Limit of pages waiting to be stored. SGLang keeps them on the device until their turn; pages beyond it are not
stored."""
_END_S: Final = 30.0
_MAX_PAGES: Final = 1 << 16


@dataclass(slots=True)
class _LoadBatch:
    """Loads that started together.

    layers: copies in flight, by layer.
    over: no more will follow.
    landed: all have arrived, and every forward pass has waited for them.
    missed: a forward pass could not wait for a layer.
    """

    layers: list[CopyEvent] = field(default_factory=list)
    over: bool = False
    landed: bool = False
    missed: bool = False


class LayerGate:
    """SGLang's `layer_done_counter`: it numbers batches of loads, and lets a forward pass through layer by layer.

    A layer that never arrives blocks nothing: the pass continues with whatever the slots contain, and `finish` reports
    it before any result is used. One side opens and fills batches, another thread waits for them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: dict[int, _LoadBatch] = {}
        self._opened = -1
        self.consumer_index = -1

    def open(self) -> int:
        """Open a batch; returns its number."""
        with self._changed:
            self._opened += 1
            self._batches[self._opened] = _LoadBatch()
            return self._opened

    def let_through(self, number: int, event: CopyEvent) -> None:
        """The batch's next layer has been copied once `event` is done."""
        with self._changed:
            self._batches[number].layers.append(event)
            self._changed.notify_all()

    def end(self, number: int, *, landed: bool) -> None:
        """End this batch: nothing more is written for it."""
        with self._changed:
            batch = self._batches[number]
            batch.over, batch.landed = True, landed
            self._changed.notify_all()

    def set_consumer(self, index: int) -> None:
        """Set the batch that the next forward pass reads; -1: none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """The forward pass is about to read this layer; layers are counted from this rank's first."""
        with self._changed:
            batch = self._batches.get(self.consumer_index)
            if batch is None:
                return
            self._changed.wait_for(lambda: len(batch.layers) > layer or batch.over)
            event = batch.layers[layer] if len(batch.layers) > layer else None
        if event is not None:
            try:
                event.hold_engine()
            except Exception:  # noqa: BLE001  # whatever it is: the pass goes on without this layer, and is not used
                batch.missed = True

    def finish(self, number: int) -> bool:
        """Wait until nothing is written for this batch, and forget it. True if all of it arrived, or there is none."""
        with self._changed:
            batch = self._batches.get(number)
            if batch is None:
                return True
            self._changed.wait_for(lambda: batch.over)
            del self._batches[number]
            return batch.landed and not batch.missed

    def finish_all(self) -> None:
        """The same for every batch."""
        for number in list(self._batches):
            self.finish(number)
        self.consumer_index = -1


TurnOff = Callable[[str, BaseException], None]


class Point(Protocol):
    """A point in the device's work, such as torch's events."""

    def synchronize(self) -> None:
        """Return when it has been reached."""


@dataclass(frozen=True, slots=True)
class _AdmittedLoad:
    """One request's pages, leased by `holder`, their slots on the device, one per token, and the tiers that they come
    from."""

    lease: ReadLease
    holder: str
    indices: torch.Tensor
    tiers: Mapping[ChunkKey, str]


class LoadLane:
    """Loads pages of waiting requests to the device, batch by batch. Call its methods from one thread."""

    def __init__(self, store: PageStore, copier: BoundCopier, turn_off: TurnOff) -> None:
        """copier: between chunks and the device. turn_off: called with the reason after a failure that ends loading."""
        self.gate = LayerGate()  # where forward passes wait for the layers
        self._store = store
        self._binding = PoolBinding(copier)
        self._turn_off = turn_off
        self._numbers = itertools.count()
        self._taken: dict[str, _AdmittedLoad] = {}
        self._batches: queue.SimpleQueue[tuple[int, list[_AdmittedLoad], Sequence[Point]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-sglang loads", daemon=True)
        self._thread.start()

    def ready(self, request: str, hashes: Sequence[str]) -> int:
        """How many leading pages can be loaded now. Never waits."""
        return self._store.ready(hashes, self._asker(request)) if hashes else 0

    def take(self, request: str, hashes: Sequence[str], indices: torch.Tensor) -> bool:
        """Load exactly these pages with the next batch. False: they are gone.

        indices: the device's slots, one per token.
        """
        holder = f"{self._store.name}-load-{next(self._numbers)}"
        tiers = self._store.tiers_of(self._asker(request))
        lease = self._store.lease(self._store.keys(hashes), holder)
        self._store.forget_asker(self._asker(request))
        if lease is None:
            self._store.cache.end(holder)
            return False
        self._taken[request] = _AdmittedLoad(lease, holder, indices, tiers)
        self._store.received(hashes)
        return True

    def give_back(self, request: str) -> bool:
        """Cancel this request's load. False: it took nothing, or its batch has started."""
        load = self._taken.pop(request, None)
        if load is not None:
            self._store.cache.end(load.holder)
        return load is not None

    def start(self, ready: Sequence[Point]) -> int:
        """Load everything that was taken. Returns the batch's number at the gate; -1: there is nothing to load.

        ready: when the slots are known, and nothing that was enqueued before writes to them any more.
        """
        if not self._taken:
            return -1
        loads, self._taken = list(self._taken.values()), {}
        number = self.gate.open()
        self._batches.put((number, loads, ready))
        return number

    def give_all_back(self) -> None:
        for request in list(self._taken):
            self.give_back(request)

    def reset(self) -> None:
        """Finish the loads that have started, and cancel the others."""
        self.give_all_back()
        self.gate.finish_all()

    def close(self) -> None:
        """The same, and release the pool's memory."""
        self.reset()
        self._batches.put(None)
        self._thread.join(_END_S)
        if not self._thread.is_alive():  # else a copy is in flight
            self._binding.unbind()

    def _asker(self, request: str) -> str:
        return f"{self._store.name}-ask-{request}"

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            number, loads, ready = batch
            landed = False
            try:
                for point in ready:
                    point.synchronize()
                landed = self._carry(number, loads)
            except Exception as error:  # noqa: BLE001  # the forward pass waits for the end of this batch
                self._turn_off(f"pages could not be loaded: {error}", error)
            try:
                for load in loads:
                    self._store.cache.end(load.holder)
            finally:
                self.gate.end(number, landed=landed)

    def _carry(self, number: int, loads: Sequence[_AdmittedLoad]) -> bool:
        store, pool = self._store, self._store.cache.pool
        pairs = [
            pair
            for load in loads
            for pair in zip(load.lease.extents, _slots(load.indices, len(load.lease.extents), store), strict=True)
        ]
        is_there = all(lies_in(load.lease, pool) for load in loads)
        events = self._binding.on(pool).load_layers(store.plan(pairs)) if is_there else []
        for event in events:
            self.gate.let_through(number, event)
        await_copies(events)
        # Bytes that did not stay in place while they were read may belong to another page.
        released = [store.cache.release(load.lease) for load in loads]
        for load, is_good in zip(loads, released, strict=True):
            store.count_loaded(load.lease, load.tiers, is_good=is_good and is_there)
        return all(released) and is_there


@dataclass(frozen=True, slots=True)
class _OfferedPages:
    """Pages to be stored, those before them in the prompt, and the points that the device must have reached first."""

    hashes: Sequence[str]
    before: Sequence[str]
    indices: torch.Tensor
    written: Sequence[Point]


class StoreLane:
    """Stores pages in the order in which they were offered. Call its methods from one thread."""

    def __init__(self, store: PageStore, turn_off: TurnOff) -> None:
        self._store = store
        self._turn_off = turn_off
        self._changed = threading.Condition()
        self._offers: deque[_OfferedPages | bool | None] = deque()  # a bool: the answer, without storing; None: the end
        self._under_way = 0
        self._waiting_pages = 0
        self._answers: deque[bool] = deque()
        self._thread = threading.Thread(target=self._run, name="kv-sglang stores", daemon=True)
        self._thread.start()

    def offer(
        self, hashes: Sequence[str], before: Sequence[str], indices: torch.Tensor, written: Sequence[Point]
    ) -> None:
        """Store these pages, or answer `False` in their turn. They must stay on the device until then.

        before: the pages before them. indices: the device's slots, one per token. written: when they can be read.
        """
        with self._changed:
            has_room = self._waiting_pages + len(hashes) <= MAX_WAITING_PAGES
            self._waiting_pages += len(hashes) if has_room else 0
            self._put(_OfferedPages(hashes, before, indices, written) if has_room else False)

    def answer_in_turn(self, stored: bool) -> None:
        """Give this answer in turn without a copy: another rank stores the pages, or none does."""
        with self._changed:
            self._put(stored)

    def answered(self) -> int:
        """How many answers are waiting for `take_answer`."""
        with self._changed:
            return len(self._answers)

    def take_answer(self) -> bool:
        """Whether the pages of the oldest offer not answered yet are stored."""
        with self._changed:
            return self._answers.popleft()

    def settle(self) -> None:
        """Return once nothing is read from the device any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)

    def reset(self) -> None:
        """Wait for every store, and drop the answers."""
        self.settle()
        with self._changed:
            self._answers.clear()

    def close(self) -> None:
        """The same, and end the thread."""
        self.reset()
        with self._changed:
            self._put(None)
        self._thread.join(_END_S)

    def _put(self, offer: _OfferedPages | bool | None) -> None:
        self._offers.append(offer)
        self._under_way += 1
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offers)
                offer = self._offers.popleft()
            if offer is None:
                return
            stored = self._carry(offer) if isinstance(offer, _OfferedPages) else offer
            with self._changed:
                self._waiting_pages -= len(offer.hashes) if isinstance(offer, _OfferedPages) else 0
                self._under_way -= 1
                self._answers.append(stored)
                self._changed.notify_all()

    def _carry(self, offer: _OfferedPages) -> bool:
        try:
            for point in offer.written:
                point.synchronize()
            slots = _slots(offer.indices, len(offer.hashes), self._store)
            return all(self._store.write(offer.hashes, slots, offer.before))
        except Exception as error:  # noqa: BLE001  # SGLang waits for an answer to everything that it offered
            self._turn_off(f"pages could not be stored: {error}", error)
            return False


def _slots(indices: torch.Tensor, pages: int, store: PageStore) -> list[int]:
    slots = first_slots(indices.cpu(), pages, store.pages.page_slots)
    if slots is None:
        raise CopyFailed(f"SGLang's {indices.numel()} slots are not those of {pages} whole pages")
    return slots


class Chains:
    """Bounded: the pages seen longest ago are forgotten. Not thread-safe.

    SGLang offers pages for storing without the prompt that precedes them. The store needs it: a page is worthless
    without the pages before it, so these must not be evicted to make room.
    """

    def __init__(self, max_pages: int = _MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._before: OrderedDict[str, str] = OrderedDict()  # a page's hash → the hash of the page before it

    def tell(self, hashes: Sequence[str]) -> None:
        """Record that these follow each other in a prompt."""
        for before, page in pairwise(hashes):
            self._before[page] = before
            self._before.move_to_end(page)
        while len(self._before) > self._max_pages:
            self._before.popitem(last=False)

    def before(self, page: str) -> list[str]:
        """The pages before this one, from the prompt's first, or from the first that is known."""
        found: list[str] = []
        while (page := self._before.get(page, "")) and len(found) < self._max_pages:
            found.append(page)
        return found[::-1]
