"""Host memory that is registered with the driver: slice by slice, ahead of its use, and nothing left behind."""

import os
import resource
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_core.errors import ConfigError, InputError, MisuseError
from kv_core.transfer import HostExtent
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.copy.pinned import CudaRegistrar, PinnedMapping, give_back_mapping, share_mapping
from kv_cuda.quantise import QuantisingCopier
from kv_testing.layouts import TOKENS, small_caches
from kv_testing.pool_memory import pool_memory
from kv_testing.threads import threads_left
from kv_testing.wait import until


class Driver:
    """Answers as told and remembers what it was asked."""

    def __init__(self, status: int = 0, room: int = 1 << 30) -> None:
        self.status = status
        self.room = room
        self.held: dict[int, int] = {}
        self.asked = 0

    def register(self, address: int, nbytes: int) -> int:
        self.asked += 1
        if sum(self.held.values()) + nbytes > self.room:
            return 2
        if self.status == 0:
            assert address not in self.held
            self.held[address] = nbytes
        return self.status

    def unregister(self, address: int) -> int:
        del self.held[address]
        return 0


@pytest.mark.gpu
def test_memory_that_cannot_be_registered_leaves_no_error_for_the_engine() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert CudaRegistrar(device).register(4096, 4096) != 0  # no mapping of ours is there
    assert CudaRegistrar(device).unregister(4096) != 0
    assert torch.zeros(4, device=device).add_(1.0).sum().item() == 4.0


def nobody_pins() -> None:
    until(lambda: not any(thread.name == "kv-pin" for thread in threading.enumerate()))


def test_chunks_anywhere_are_pinned_in_one_call() -> None:
    driver = Driver()
    pinned = PinnedMapping(0, 8192, driver, slice_bytes=1024, ahead_bytes=lambda _: 0)
    pinned.pin(5000, 100, 1020, nbytes=10)
    nobody_pins()
    assert sorted(driver.held) == [0, 1024, 4096, 5120]


@given(
    pins=st.lists(st.tuples(st.integers(0, 999), st.integers(1, 400)), max_size=20),
    slice_bytes=st.integers(1, 300),
    ahead_bytes=st.integers(0, 700),
)
def test_the_slices_that_are_used_are_pinned_and_those_behind_them_each_once(
    pins: list[tuple[int, int]], slice_bytes: int, ahead_bytes: int
) -> None:
    driver = Driver()
    pinned = PinnedMapping(5000, 1000, driver, slice_bytes=slice_bytes, ahead_bytes=lambda _: ahead_bytes)
    wanted: set[int] = set()
    behind: set[int] = set()
    for offset, nbytes in pins:
        nbytes = min(nbytes, 1000 - offset)
        pinned.pin(offset, nbytes=nbytes)
        wanted |= {at // slice_bytes for at in range(offset, offset + nbytes)}
        last = (offset + nbytes - 1) // slice_bytes
        behind |= {last + 1 + number for number in range(max(1, ahead_bytes // slice_bytes))}
        assert driver.held.keys() >= {5000 + at * slice_bytes for at in wanted}
    nobody_pins()
    held = {(address - 5000) // slice_bytes: nbytes for address, nbytes in driver.held.items()}
    assert wanted <= held.keys() <= wanted | behind
    assert held == {at: min(slice_bytes, 1000 - at * slice_bytes) for at in held}
    assert pinned.pinned_bytes == sum(driver.held.values())
    pinned.unpin()
    assert not driver.held


def test_a_pool_that_is_used_from_its_start_is_pinned_before_it_is_used() -> None:
    class Slow(Driver):
        def register(self, address: int, nbytes: int) -> int:
            by.append(threading.current_thread().name)
            return super().register(address, nbytes)

    by: list[str] = []
    pinned = PinnedMapping(0, 8 * 1024, Slow(), slice_bytes=1024, ahead_bytes=lambda _: 3 * 1024)
    for offset in range(0, 8 * 1024, 512):
        pinned.pin(offset, nbytes=512)
        nobody_pins()
    assert by == [threading.current_thread().name, *["kv-pin"] * 7]
    pinned.unpin()


def test_what_cannot_be_pinned_ahead_costs_nothing_until_it_is_needed() -> None:
    driver = Driver(room=2048)
    pinned = PinnedMapping(0, 8192, driver, slice_bytes=1024, ahead_bytes=lambda _: 0)
    for _ in range(5):
        for slice_number in (0, 1):
            pinned.pin(slice_number * 1024, nbytes=10)
            nobody_pins()
    assert driver.asked == 3
    with pytest.raises(ConfigError, match="cudaError 2"):
        pinned.pin(2048, nbytes=10)
    pinned.unpin()
    assert not driver.held


def test_without_a_thread_nothing_is_pinned_ahead_and_all_else_goes_on() -> None:
    driver = Driver()
    pinned = PinnedMapping(0, 4096, driver, slice_bytes=1024, ahead_bytes=lambda _: 0)
    with threads_left():
        pinned.pin(0, nbytes=10)
        pinned.pin(1024, nbytes=10)
        assert list(driver.held) == [0, 1024]
        pinned.unpin()
    assert not driver.held
    pinned.pin(0, nbytes=10)
    nobody_pins()
    assert list(driver.held) == [0, 1024]
    pinned.unpin()


def test_who_ends_a_mapping_waits_for_one_slice_at_most() -> None:
    class Held(Driver):
        def register(self, address: int, nbytes: int) -> int:
            begun.set()
            assert may_end.wait(30)
            return super().register(address, nbytes)

    begun, may_end = threading.Event(), threading.Event()
    driver = Held()
    pinned = PinnedMapping(0, 64 * 1024, driver, slice_bytes=1024, ahead_bytes=lambda _: 64 * 1024)
    pinned.pin_ahead()
    assert begun.wait(30)
    ending = threading.Thread(target=pinned.unpin)
    ending.start()
    until(lambda: pinned._is_ending)
    may_end.set()
    ending.join()
    nobody_pins()
    assert driver.asked == 1 and not driver.held


def test_a_limit_on_locked_memory_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = PinnedMapping(0, 1 << 20, Driver(status=2))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 << 10, 64 << 10))
    with pytest.raises(ConfigError, match=r"cudaError 2.*may lock 64 KiB.*ulimit -l unlimited.*memlock=-1"):
        pinned.pin(0, nbytes=1)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(ConfigError, match="make the host tier smaller"):
        pinned.pin(0, nbytes=1)
    assert pinned.pinned_bytes == 0


def test_memory_that_another_copier_of_this_process_pinned_is_no_error() -> None:
    PinnedMapping(0, 4096, Driver(status=712)).pin(0, nbytes=1)


def test_copiers_of_one_pool_share_its_registration_until_the_last_has_left() -> None:
    driver = Driver()
    first, second = (share_mapping(1 << 20, 4096, driver, memory=None, slice_bytes=1024) for _ in range(2))
    other = share_mapping(1 << 21, 4096, driver, memory=None, slice_bytes=1024)
    assert first is second is not other
    first.pin(0, nbytes=4096)
    second.pin(0, nbytes=4096)
    other.pin(3072, nbytes=1)
    give_back_mapping(first)
    assert len(driver.held) == 5
    give_back_mapping(second)
    assert list(driver.held) == [(1 << 21) + 3072]
    give_back_mapping(other)
    assert not driver.held
    again = share_mapping(1 << 20, 4096, driver, memory=None, slice_bytes=2048)
    assert again is not first
    give_back_mapping(again)


@pytest.mark.parametrize("quantised", [False, True])
def test_no_chunk_lies_across_two_slices_whatever_its_group(quantised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's chunks may be smaller than others of the pool, whose slots have room for the largest."""
    cache = small_caches()["NHD, K‖V"]
    exact = cache.layout.canonical_format(32 * TOKENS)
    stored = cache.layout.quantised_format("int8", 32 * TOKENS) if quantised else exact
    pages = -(-stored.nbytes // 4096) + 2
    driver, slot_bytes = Driver(), pages * 4096
    monkeypatch.setattr("kv_cuda.copy.memory.CudaRegistrar", lambda device: driver)
    monkeypatch.setattr("kv_cuda.copy.memory.node_of", lambda device: None)
    monkeypatch.setattr("kv_cuda.copy.memory.SLICE_BYTES", (4 * pages + 1) * 4096)
    largest = slot_bytes - 100
    copier: GpuCopier | QuantisingCopier = GpuCopier(cache.layout, cache.make(), exact, largest_chunk_bytes=largest)
    if quantised:
        copier = QuantisingCopier(cache.layout, stored, copier, torch.device("cpu"), largest_chunk_bytes=largest)
    copier._device = torch.device("cuda")  # only for what is registered
    view = pool_memory(40 * slot_bytes)
    with pytest.raises(InputError, match="does not begin at a page"):
        copier.attach("pool", view[16:])
    copier.attach("pool", view)
    pool = copier._pools["pool"]
    for slot in range(40):
        pool.chunk(HostExtent("pool", slot * slot_bytes, stored.nbytes))
    nobody_pins()
    starts = sorted(driver.held)
    for slot in range(40):
        first = starts[0] + slot * slot_bytes
        within = [start for start in starts if start <= first and first + stored.nbytes <= start + driver.held[start]]
        assert len(within) == 1
    pool.release()
    assert not driver.held


def test_a_forked_child_has_no_pins_and_is_told_so() -> None:
    driver = Driver()
    pinned = PinnedMapping(0, 4096, driver)
    pinned.pin(0, nbytes=1)
    child = os.fork()
    if child == 0:
        try:
            pinned.pin(0, nbytes=1)
        except MisuseError:
            pinned.unpin()
            os._exit(0 if driver.held else 2)  # the parent's is not the child's to undo
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    pinned.unpin()
    assert not driver.held
