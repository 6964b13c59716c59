"""Moves a prompt's pages between SGLang's blocks on the device and the cache, for a hand-over.

Unlike a hit, a hand-over has no fallback: SGLang aborts a request whose pages do not arrive. So a page is stored
whatever the request's options for storing, is held for the decode engine, and is waited for within the bounds of
`handover`. Every call comes from a thread that may wait.

SGLang frees a request's blocks as soon as it gives up the request, and they may be reused at once. So a room is closed
before that: from then on nothing that is read from the blocks is stored, and nothing is written to them.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kv_connect.halves.copies import await_copies
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.service import Ended, ReadLease, WriteLease
from kv_core.transfer import Copy, TransferPlan
from kv_cuda import Copier
from kv_remote.messages import MAX_KEYS

from kv_sglang.lanes import Point
from kv_sglang.names import Names
from kv_sglang.pages import PageStore, PoolBinding, lies_in

_log = limited_logger(__name__)

LANES: Final = 4
"""Threads that move pages: a request that waits for its pages delays a quarter of the others, not all."""
_FIRST_WAIT_S: Final = 0.001
_LONGEST_WAIT_S: Final = 0.05
_AWAY_S: Final = 5.0
"""How long to wait for a server that is away. It may be restarted, or get no processor for a second or two, and SGLang
aborts the request when this is over."""
_NUMBERS: Final = itertools.count()
_AWAY: Final = "the cache server is away"

Wanted = Callable[[], bool]
"""Whether SGLang still has the pages for this request. Once false, they may belong to another."""


class Exchange:
    """For one thread. copier: between chunks and the device."""

    def __init__(
        self, store: PageStore, copier: Copier, in_doubt: Callable[[], bool], *, wait_s: float, hold_s: float
    ) -> None:
        """in_doubt: whether the engine's pages may belong to other weights than the key space's.
        wait_s: how long to wait for another's store, for room, or for a page that is missing.
        hold_s: how long stored pages are held, and how long to wait for a page that is being promoted, unless `wait_s`
            is longer.
        """
        self._store = store
        self._binding = PoolBinding(copier)
        self._in_doubt = in_doubt
        self._wait_s = wait_s
        self._hold_s = hold_s
        self._name = f"{store.name}-hand-over-{next(_NUMBERS)}"

    def put(self, names: Names, first: int, slots: Sequence[int], is_wanted: Wanted) -> str:
        """Store pages `first …` of the prompt from `slots`, the first slot of each. Empty, or why they are not stored.

        Nothing that was read after the pages were no longer wanted is stored.
        """
        # In this order: pages not in doubt before the keys were made have the weights that the keys name.
        in_doubt = self._in_doubt()
        last = first + len(slots)
        before = self._store.keys(names.hashes[max(0, last - MAX_KEYS) : first], tenant=names.tenant)
        keys = self._store.keys(names.hashes[first:last], tenant=names.tenant)
        if in_doubt or not keys or self._in_doubt():
            return "the weights have changed, and the engine's caches were not emptied since"
        tail = keys[-1] if names.tail_tokens and last == len(names.hashes) else None
        away, full = _PollPauses(max(_AWAY_S, self._wait_s)), _PollPauses(self._wait_s)
        while is_wanted():
            refused = self._put(before, dict(zip(keys, slots, strict=True)), tail, names.tail_tokens, is_wanted)
            # Pages that another thread is storing are found once it has committed them.
            plan = self._store.cache.lookup(keys, self._name)
            self._store.cache.end(self._name)
            if plan.chunks == len(keys):
                return ""
            if not is_wanted():
                break
            is_away = plan.ended is Ended.REFUSED
            if not (away if is_away else full).again():
                return refused or (_AWAY if is_away else "another thread has not finished storing them")
        return "the request has ended"

    def get(
        self,
        names: Names,
        first: int,
        slots: Sequence[int],
        is_wanted: Wanted,
        lock: threading.Lock,
        *,
        given_by: str = "",
    ) -> str:
        """Load pages `first …` of the prompt to `slots`. Empty, or why they are not loaded.

        lock: held while the device is written to, so that nothing is written while another thread holds it.
        given_by: the revision of the weights with which they were computed, according to the other engine.
        """
        keys = self._store.keys(names.hashes[first : first + len(slots)], given_by, tenant=names.tenant)
        if not keys:
            return "the weights of the engine are not known"
        cache, pending = self._store.cache, _PollPauses(max(self._hold_s, self._wait_s))
        away, missing = _PollPauses(max(_AWAY_S, self._wait_s)), _PollPauses(self._wait_s)
        try:
            while is_wanted():
                plan = cache.lookup(keys, self._name, wait_for_promotion=True)
                if plan.chunks == len(keys) and (lease := self._store.lease(keys, self._name)) is not None:
                    return self._get(lease, slots, is_wanted, lock, dict(zip(keys, plan.tiers, strict=True)))
                if plan.ended is Ended.PENDING:
                    waiting, missing = pending, _PollPauses(self._wait_s)
                else:
                    waiting = away if plan.ended is Ended.REFUSED else missing
                if not waiting.again():
                    if waiting is away:
                        return _AWAY
                    return f"page {first + plan.chunks} of the prompt is not in the cache"
                if waiting is not pending:
                    # Only a new lookup asks the lower tiers again: the page may be there by now, or the cache have
                    # stopped waiting for one that is still on its way.
                    cache.end(self._name)
            return "the request has ended"
        finally:
            cache.end(self._name)

    def release_pages(self, names: Names, pages: int | None = None, *, given_by: str = "") -> None:
        """The engine has so many leading pages, or all: they need not be held for it. given_by: as for `get`."""
        if keys := self._store.keys(names.hashes[:pages], given_by, tenant=names.tenant):
            self._store.cache.received(keys)

    def close(self) -> None:
        """Release the pool's memory. No copy may be in flight."""
        self._binding.unbind()

    def _put(
        self,
        before: Sequence[ChunkKey],
        place: dict[ChunkKey, int],
        tail: ChunkKey | None,
        tail_tokens: int,
        is_wanted: Wanted,
    ) -> str:
        """Store pages that are not held; returns why some were refused, or an empty string."""
        cache = self._store.cache
        keys = list(place)
        try:
            lease = cache.begin_store([*before, *keys], self._name, hold_s=self._hold_s)
            if not place.keys() >= set(lease.keys):
                # An earlier page has left the pool, and its bytes are not available to be written again.
                cache.release(lease)
                lease = cache.begin_store(keys, self._name, hold_s=self._hold_s)
            pool = cache.pool
            if lease.keys and lies_in(lease, pool):
                await_copies([self._binding.on(pool).store(self._plan(lease, place, tail, tail_tokens))])
                if is_wanted():
                    cache.commit(lease)
            return lease.refused
        finally:
            cache.end(self._name)

    def _plan(
        self, lease: WriteLease, place: dict[ChunkKey, int], tail: ChunkKey | None, tail_tokens: int
    ) -> TransferPlan:
        """A partial page's chunk is filled up with its own tokens, so that it contains nothing of another request."""
        pairs = list(zip(lease.keys, lease.extents, strict=True))
        plan = self._store.plan((extent, place[key]) for key, extent in pairs if key != tail)
        if not lease.keys or lease.keys[-1] != tail:
            return plan
        partial = TransferPlan((Copy(pairs[-1][1], 0, place[tail], tail_tokens),), plan.chunk_tokens)
        return TransferPlan(plan.parts + partial.repeated().parts, plan.chunk_tokens)

    def _get(
        self,
        lease: ReadLease,
        slots: Sequence[int],
        is_wanted: Wanted,
        lock: threading.Lock,
        tiers: dict[ChunkKey, str],
    ) -> str:
        cache = self._store.cache
        try:
            pool = cache.pool
            copier = self._binding.on(pool)  # not with the lock: releasing the memory of a previous pool takes time
            with lock:
                if not is_wanted():
                    return "the request has ended"
                if lies_in(lease, pool):
                    await_copies([copier.load(self._store.plan(zip(lease.extents, slots, strict=True)))])
        finally:
            # Bytes that did not stay in place while they were read may belong to another page.
            is_good = cache.release(lease)
        self._store.count_loaded(lease, tiers, is_good=is_good)
        return "" if is_good else "pages left the cache while they were read"


class _PollPauses:
    """Growing pauses until the time is over, which begins with the first."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._until: float | None = None
        self._next_s = _FIRST_WAIT_S

    def again(self) -> bool:
        """Pause; False at once if the time is over."""
        if self._until is None:
            self._until = time.monotonic() + self._most_s
        left = self._until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._next_s, left))
        self._next_s = min(self._next_s * 2, _LONGEST_WAIT_S)
        return True


@dataclass(slots=True, eq=False)
class OutgoingRoom:
    """A request of the prefill engine.

    room: its number, which SGLang may give to another request once this one has ended.
    is_open: whether SGLang still has its blocks.
    lock: held while its metadata are read, or its outcome is recorded under its number.
    """

    room: int
    names: Names
    is_open: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        with self.lock:
            self.is_open = False


@dataclass(slots=True, eq=False)
class IncomingRoom:
    """A request of the decode engine.

    attempt: its own, while another request may have the same number (`kv_sglang.transfer`).
    first: the first page that it lacks.
    slots: the first slot of that page and of each one after it.
    aux_index: the place of its first token among SGLang's metadata.
    loaded: how many pages of the prompt have been loaded.
    ready: when nothing that was enqueued before writes to its blocks any more.
    lock: held while its blocks are written to.
    is_open: whether SGLang still has its blocks.
    given_by: the revision of the prefill engine's weights, once it is known.
    """

    names: Names
    first: int
    slots: list[int]
    aux_index: int
    loaded: int
    ready: Point
    attempt: bytes
    is_open: bool = True
    given_by: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Return once nothing is written: a copy in flight, of a few megabytes, is waited for."""
        with self.lock:
            self.is_open = False


Job = Callable[[Exchange], None]


class Lanes:
    """Threads, each with its own exchange. The jobs of one room run in order."""

    def __init__(self, make_exchange: Callable[[], Exchange]) -> None:
        self._queues: list[queue.SimpleQueue[Job]] = [queue.SimpleQueue() for _ in range(LANES)]
        for number, jobs in enumerate(self._queues):
            run = threading.Thread(
                target=_run, args=(jobs, make_exchange()), name=f"kv-hand-over-{number}", daemon=True
            )
            run.start()

    def add(self, room: int, job: Job) -> None:
        """job: raises only for a bug, and reports the request's outcome to SGLang itself."""
        self._queues[room % LANES].put(job)


def _run(jobs: "queue.SimpleQueue[Job]", exchange: Exchange) -> None:
    while True:
        job = jobs.get()
        try:
            job(exchange)
        except Exception:  # noqa: BLE001  # the thread serves other requests
            _log.exception("a hand-over ended because of a bug")
