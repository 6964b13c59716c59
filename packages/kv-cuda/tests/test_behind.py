"""Layerwise loads on a CPU: a thread copies the layers in their order, and who waits for one has all of it."""

import random
import weakref
from collections.abc import Iterator
from threading import Event

import pytest
import torch
from kv_core.errors import MisuseError
from kv_core.extent import HostExtent
from kv_core.transfer import TransferPlan, plan_transfer
from kv_cuda import CpuCopier
from kv_cuda.copy import behind
from kv_cuda.copy.behind import LayerCopy, copy_behind, copying_thread, pays_behind
from kv_cuda.kernels import installed_kernels
from kv_testing.layouts import BLOCKS, TOKENS, SmallCache, small_caches

CHUNK = 3 * TOKENS
CACHES = small_caches()
every_cache = pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
needs_c = pytest.mark.skipif(installed_kernels() is None, reason="kv-tiers is not installed, or without a compiler")


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
        self.copier = CpuCopier(layout, self.tensors, described, pays_behind=lambda nbytes: True)
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


def test_one_thread_copies_a_layer_and_the_others_wait_for_it() -> None:
    begun, may_end = Event(), Event()
    copied: list[int] = []

    def first() -> None:
        begun.set()
        assert may_end.wait(30)
        copied.append(0)

    events = copy_behind([first, lambda: copied.append(1)])
    assert begun.wait(30)
    assert not events[0].done()
    events[1].wait()  # not behind the first
    assert copied == [1]
    may_end.set()
    for event in events:
        event.wait()
    assert copied == [1, 0]


def test_a_copy_that_fails_says_so_to_all_who_wait_for_that_layer_and_no_other() -> None:
    def fail() -> None:
        raise MisuseError("beyond the pool")

    bad, good = copy_behind([fail, lambda: None])
    for _ in range(2):
        with pytest.raises(MisuseError, match="beyond the pool"):
            bad.wait()
    with pytest.raises(MisuseError, match="beyond the pool"):
        bad.done()
    good.wait()
    assert good.done()


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
