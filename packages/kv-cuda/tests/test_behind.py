"""Layers that a thread of the CPU copies in their order, to the engine and away from it; who waits for one has it."""

import os
import random
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from kv_core.errors import CopyFailed, InputError, MisuseError
from kv_core.transfer import HostExtent, TransferPlan, plan_transfer
from kv_cuda import CpuCopier
from kv_cuda.copy import behind
from kv_cuda.copy.behind import LayerCopy, LayerInPieces, copy_behind, copying_thread, pays_behind
from kv_cuda.kernels import installed_kernels
from kv_testing.layouts import BLOCKS, TOKENS, SmallCache, small_caches
from kv_testing.threads import threads_left
from kv_testing.wait import until

CHUNK = 3 * TOKENS
CACHES = small_caches()
every_cache = pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
needs_c = pytest.mark.skipif(installed_kernels() is None, reason="there is no C compiler")


@pytest.fixture
def busy() -> Iterator[Event]:
    """The thread has other work until this is set."""
    free = Event()
    working = copying_thread().submit(free.wait)
    yield free
    free.set()
    working.result()


class Loaded:
    """Two chunks of random bytes, to be loaded into a cache of zeros by a thread, and the same loaded in one piece."""

    def __init__(self, cache: SmallCache) -> None:
        layout = cache.layout
        described = layout.canonical_format(CHUNK)
        self.pool = bytearray(random.Random(7).randbytes(2 * described.nbytes))
        blocks = random.Random(8).sample(range(BLOCKS), 2 * CHUNK // TOKENS)
        extents = [HostExtent("pool", number * described.nbytes, described.nbytes) for number in range(2)]
        self.plan: TransferPlan = plan_transfer(
            extents, blocks, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=0, last_token=2 * CHUNK
        )
        self.layers = layout.layers
        self.wanted, self.tensors = cache.make(), cache.make()
        whole = CpuCopier(layout, self.wanted, described)
        self.copier = CpuCopier(layout, self.tensors, described, stores_behind=True, pays_behind=lambda nbytes: True)
        for copier in (whole, self.copier):
            copier.attach("pool", memoryview(self.pool))
        whole.load(self.plan).wait()

    def is_loaded(self) -> bool:
        return all(torch.equal(*map(_bytes, pair)) for pair in zip(self.tensors, self.wanted, strict=True))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@needs_c
@every_cache
def test_the_thread_loads_every_layer(cache: SmallCache) -> None:
    loaded = Loaded(cache)
    events = loaded.copier.load_layers(loaded.plan)
    assert len(events) == loaded.layers
    copying_thread().submit(lambda: None).result()
    assert all(event.done() for event in events)
    assert loaded.is_loaded()


@needs_c
@every_cache
def test_a_layer_that_the_thread_has_not_begun_is_copied_by_those_who_wait(cache: SmallCache, busy: Event) -> None:
    loaded = Loaded(cache)
    events = loaded.copier.load_layers(loaded.plan)
    assert not any(event.done() for event in events)
    assert not loaded.is_loaded()
    for event in reversed(events):
        event.hold_engine()
    assert loaded.is_loaded()


class Stored(Loaded):
    """The same blocks, full of the chunks, to be gathered into an empty pool by a thread."""

    def __init__(self, cache: SmallCache) -> None:
        super().__init__(cache)
        self.chunks = bytes(self.pool)
        self.copier.load(self.plan).wait()
        self.pool[:] = bytes(len(self.pool))
        store = self.copier.store_layers(self.plan)
        assert store is not None and store.layers == self.layers
        self.store = store


@needs_c
@every_cache
def test_the_thread_stores_every_layer_when_it_is_computed(cache: SmallCache, busy: Event) -> None:
    """As it is then, and the rest all at once; also those who wait before the thread has begun."""
    stored = Stored(cache)
    for tensor in stored.tensors:  # nothing was read before it is asked for
        _bytes(tensor).zero_()
    stored.pool[:] = stored.chunks
    stored.copier.load(stored.plan).wait()
    stored.pool[:] = bytes(len(stored.pool))
    last = stored.layers - 1
    events = [stored.store.gather((last,)), stored.store.gather(range(last))]
    assert not any(event.done() for event in events) and not any(stored.pool)
    events[0].wait()
    assert not events[1].done() and any(stored.pool) and stored.pool != stored.chunks
    busy.set()
    copying_thread().submit(lambda: None).result()
    assert events[1].done() and stored.pool == stored.chunks


@needs_c
def test_few_bytes_and_parts_of_blocks_are_stored_in_one_piece() -> None:
    cache = next(iter(CACHES.values()))
    stored = Stored(cache)
    few = CpuCopier(cache.layout, stored.tensors, cache.layout.canonical_format(CHUNK))
    few.attach("pool", memoryview(stored.pool))
    assert few.store_layers(stored.plan) is None
    (first, *_) = stored.plan.copies
    part = TransferPlan((replace(first, tokens=TOKENS - 1),), CHUNK)
    assert stored.copier.store_layers(part) is None
    with pytest.raises(InputError):
        stored.copier.store_layers(TransferPlan((replace(first, first_slot=1 << 30),), CHUNK))


@needs_c
@every_cache
def test_a_whole_store_goes_on_behind_the_call_and_those_who_wait_make_it(cache: SmallCache, busy: Event) -> None:
    stored = Stored(cache)
    assert stored.copier.stores_behind
    for is_waited_for in (True, False):
        stored.pool[:] = bytes(len(stored.pool))
        event = stored.copier.store(stored.plan)
        assert not event.done() and not any(stored.pool)
        if is_waited_for:
            event.wait()
        else:
            busy.set()
            copying_thread().submit(lambda: None).result()
        assert event.done() and stored.pool == stored.chunks


@needs_c
def test_a_store_is_complete_when_it_returns_where_nobody_holds_its_blocks_or_it_is_small(busy: Event) -> None:
    cache = next(iter(CACHES.values()))
    stored = Stored(cache)
    described = cache.layout.canonical_format(CHUNK)
    held_by_nobody = CpuCopier(cache.layout, stored.tensors, described, pays_behind=lambda nbytes: True)
    one_processor = CpuCopier(
        cache.layout, stored.tensors, described, stores_behind=True, pays_behind=lambda nbytes: False
    )
    small = CpuCopier(
        cache.layout, stored.tensors, described, stores_behind=True, pays_behind=lambda nbytes: nbytes > 1 << 30
    )
    assert [copier.stores_behind for copier in (held_by_nobody, one_processor, small)] == [False, False, True]
    for copier in (held_by_nobody, one_processor, small):
        copier.attach("pool", memoryview(stored.pool))
        stored.pool[:] = bytes(len(stored.pool))
        assert copier.store(stored.plan).done() and stored.pool == stored.chunks
    (first, *_) = stored.plan.copies
    with pytest.raises(InputError):
        stored.copier.store(TransferPlan((replace(first, first_slot=1 << 30),), CHUNK))


@needs_c
def test_a_pool_that_is_detached_meanwhile_is_read_to_the_end(busy: Event) -> None:
    """An engine that ends, or meets another server, must not have its copies read what is mapped no more."""
    loaded = Loaded(next(iter(CACHES.values())))
    events = loaded.copier.load_layers(loaded.plan)
    loaded.copier.detach("pool")
    with pytest.raises(BufferError):
        loaded.pool.clear()  # as closing a mapping would
    for event in events:
        event.wait()
    assert loaded.is_loaded()


@needs_c
def test_what_has_no_thread_is_copied_by_the_call_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor keeps it until it has a thread, when the blocks and the slots belong to others."""
    executor = ThreadPoolExecutor(1)
    monkeypatch.setattr(behind, "copying_thread", lambda: executor)
    cache = next(iter(CACHES.values()))
    loaded, stored = Loaded(cache), Stored(cache)
    with threads_left():
        events = [*loaded.copier.load_layers(loaded.plan), stored.copier.store(stored.plan)]
    assert all(event.done() for event in events)
    assert loaded.is_loaded() and stored.pool == stored.chunks
    stored.pool[:] = bytes(len(stored.pool))
    for tensor in loaded.tensors:
        _bytes(tensor).fill_(1)
    executor.submit(lambda: None).result()
    assert not any(stored.pool) and all(bool((_bytes(tensor) == 1).all()) for tensor in loaded.tensors)
    executor.shutdown()


class HeldUp:
    """A copy that ends when it may, and then adds its number."""

    def __init__(self, copied: list[int]) -> None:
        self.begun, self.may_end = Event(), Event()
        self._copied = copied

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(30)
        self._copied.append(0)

    def end_when_waited_for(self, copy: LayerCopy, monkeypatch: pytest.MonkeyPatch) -> None:
        """It ends when somebody waits for it."""
        lock, may_end = copy._lock, self.may_end

        class Waited:
            def acquire(self, *, blocking: bool) -> bool:
                if blocking:
                    may_end.set()
                return lock.acquire(blocking=blocking)

            def release(self) -> None:
                lock.release()

        monkeypatch.setattr(copy, "_lock", Waited())


def test_one_thread_copies_a_layer_and_the_others_wait_for_it() -> None:
    copied: list[int] = []
    first = HeldUp(copied)
    events = copy_behind([first, lambda: copied.append(1)])
    assert first.begun.wait(30)
    assert not events[0].done()
    events[1].wait()  # not behind the first
    assert copied == [1]
    first.may_end.set()
    for event in events:
        event.wait()
    assert copied == [1, 0]


def test_the_thread_and_a_caller_that_waits_share_the_pieces_of_a_layer() -> None:
    begun, others_copied = Event(), Event()
    copied: list[tuple[int, str]] = []

    def held_up() -> None:
        begun.set()
        assert others_copied.wait(30)
        copied.append((0, threading.current_thread().name))

    def piece(number: int) -> None:
        copied.append((number, threading.current_thread().name))
        if number == 3:
            others_copied.set()

    pieces = copy_behind([held_up, *(partial(piece, number) for number in range(1, 4)), partial(piece, 4)])
    layer, after = LayerInPieces(pieces[:4]), pieces[4]
    assert begun.wait(30)
    assert not layer.done()
    layer.wait()
    assert layer.done()
    mine = threading.current_thread().name
    assert sorted(copied[:3]) == [(1, mine), (2, mine), (3, mine)], "nothing of the layer after it"
    assert [name for number, name in copied if number == 0] != [mine]
    after.wait()
    assert sorted(number for number, _ in copied) == [0, 1, 2, 3, 4]


def test_a_layer_of_which_a_piece_fails_says_so_when_no_other_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hears of it may give the memory to others at once."""
    copied: list[int] = []
    held_up = HeldUp(copied)

    def fail() -> None:
        raise MisuseError("beyond the pool")

    pieces = copy_behind([fail, held_up])
    layer = LayerInPieces(pieces)
    assert held_up.begun.wait(30)
    assert not layer.done()
    held_up.end_when_waited_for(pieces[1], monkeypatch)
    for _ in range(2):
        with pytest.raises(CopyFailed, match="beyond the pool"):
            layer.wait()
        assert copied == [0]
    with pytest.raises(CopyFailed, match="beyond the pool"):
        layer.done()


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    """A store that nobody waits for would never end, and the engine would hold its blocks for ever."""
    copying_thread().submit(lambda: None).result()
    child = os.fork()
    if child == 0:
        try:
            (copy,) = copy_behind([lambda: None])
            until(copy.done)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_copy_that_fails_says_so_to_all_who_wait_for_that_layer_and_no_other() -> None:
    def fail() -> None:
        raise MisuseError("beyond the pool")

    bad, good = copy_behind([fail, lambda: None])
    for _ in range(2):
        with pytest.raises(CopyFailed, match="beyond the pool"):
            bad.wait()
    with pytest.raises(CopyFailed, match="beyond the pool"):
        bad.done()
    good.wait()
    assert good.done()


def test_a_copy_that_fails_while_somebody_looks_is_not_taken_for_one_that_has_arrived() -> None:
    class Ending(LayerCopy):
        """Ends when `done` has looked at the first of its fields."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in ("_copy", "_failure") and not vars(self).get("is_ending"):
                vars(self)["is_ending"] = True
                self.copy()
            return value

    def fail() -> None:
        raise MisuseError("beyond the pool")

    with pytest.raises(CopyFailed, match="beyond the pool"):
        Ending(fail).done()


def test_who_waits_for_the_thread_copies_the_layers_after_it_meanwhile() -> None:
    """And only until the thread is done."""
    begun, is_copied = Event(), Event()
    copied: list[tuple[int, str]] = []

    def held_up() -> None:
        begun.set()
        assert is_copied.wait(30)

    def layer(number: int) -> None:
        copied.append((number, threading.current_thread().name))
        if number == 2:
            is_copied.set()

    events = copy_behind([held_up, *(partial(layer, number) for number in range(1, 4))])
    assert begun.wait(30)
    events[0].wait()
    mine = threading.current_thread().name
    assert copied[:2] == [(1, mine), (2, mine)]
    for event in events:
        event.wait()
    assert [number for number, _ in copied] == [1, 2, 3] and all(event.done() for event in events)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system alone places threads here")
def test_the_thread_leaves_the_processor_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is given a copy, and after the caller has waited for it. Or the two take turns on one processor."""
    processors, allowed = os.sched_getaffinity(0), os.sched_getaffinity
    if len(processors) < 2:
        pytest.skip("there is one processor")
    held_up = HeldUp([])
    copying_thread().submit(lambda: None).result()
    monkeypatch.setattr(behind.os, "sched_getaffinity", lambda _process: processors)
    first, second, *_ = processors
    try:
        os.sched_setaffinity(0, {first})  # so that this thread runs there for certain
        (copy,) = copy_behind([held_up])
        assert held_up.begun.wait(30)
        assert allowed(behind._thread_ids[0]) == processors - {first}
        os.sched_setaffinity(0, {second})
        held_up.end_when_waited_for(copy, monkeypatch)
        copy.wait()
        assert allowed(behind._thread_ids[0]) == processors - {second}
    finally:
        os.sched_setaffinity(0, processors)


def test_a_copy_that_is_interrupted_is_made_again() -> None:
    """A signal's handler may raise in it: half of a layer is not one that has arrived."""
    copied: list[int] = []

    def interrupted() -> None:
        copied.append(0)
        if len(copied) == 1:
            raise KeyboardInterrupt

    copy = LayerCopy(interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy.wait()
    assert not copy.done()
    copy.wait()
    assert copy.done() and len(copied) == 2


def test_what_has_been_copied_is_let_go() -> None:
    """Or a pool could not be closed while anybody has the events."""

    class Copied:
        def __call__(self) -> None: ...

    memory = Copied()
    alive = weakref.ref(memory)
    copy = LayerCopy(memory)
    del memory
    assert alive() is not None
    copy.wait()
    assert alive() is None
    assert copy.done()


def test_few_bytes_and_engines_that_are_bound_to_one_processor_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind.os, "sched_getaffinity", lambda _process: {0, 1}, raising=False)
    assert pays_behind(1 << 30)
    assert not pays_behind(1 << 10)
    monkeypatch.setattr(behind.os, "sched_getaffinity", lambda _process: {1}, raising=False)
    assert not pays_behind(1 << 30)
