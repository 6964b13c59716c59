"""A read that fails is a fault of the device: a miss that damages nothing, and health shows it."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from kv_core.clock import HandClock
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Loaded, ReadFailed, Refused, Stored, StoreOutcome, Unstorable
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_remote.shared_fs import make_shared_fs_tier
from kv_testing.media import full_device, slabs_of, unreadable_device
from kv_testing.tower import leading
from kv_tiers import chunk_header
from kv_tiers.lanes.jobs import Arrival, Outgoing
from kv_tiers.lanes.lane import Health, Lane
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.tier_contract import aligned_pages, content
from kv_tiers.tier import Read, Tier, TierContext
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for

CONTEXT = TierContext(5000, 8192, "failed reads")
FORM = chunk_header.format_id(CONTEXT.fingerprint)
KEYS = key_chain(4)


class Bench:
    """A lane over a real tier; `run` does its jobs in their order."""

    def __init__(self, tier: Tier, clock: HandClock) -> None:
        self.tier = tier
        self.clock = clock
        self.lane = Lane(tier, FORM, threads=0, backoff_s=1.0, max_backoff_s=4.0, clock=clock)

    def run(self) -> None:
        while self.lane.step():
            pass

    def store(self, keys: list[ChunkKey]) -> list[StoreOutcome]:
        chunks, stored = [], []
        for key, parent in zip(keys, [None, *keys], strict=False):
            pages = aligned_pages(slot_bytes_for(CONTEXT.chunk_bytes))
            pages[: CONTEXT.chunk_bytes] = content(key, CONTEXT.chunk_bytes)
            chunks.append(Outgoing(key, parent, pages, CONTEXT.chunk_bytes))
        assert self.lane.store(chunks, stored.extend)
        self.run()
        return stored

    def load(self, keys: list[ChunkKey]) -> list[type]:
        """What became of each; those that were loaded are the bytes that were stored."""
        pages = [aligned_pages(CONTEXT.slot_bytes) for _ in keys]
        reads = [
            Read(key, bytearray(chunk_header.HEADER_BYTES), page, CONTEXT.chunk_bytes)
            for key, page in zip(keys, pages, strict=True)
        ]
        arrived: list[Arrival] = []
        assert self.lane.load(reads, arrived.extend)
        self.run()
        for key, page, arrival in zip(keys, pages, arrived, strict=True):
            if isinstance(arrival.outcome, Loaded):
                assert bytes(page[: CONTEXT.chunk_bytes]) == content(key, CONTEXT.chunk_bytes)
        return [type(arrival.outcome) for arrival in arrived]

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.run()

    @property
    def health(self) -> Health:
        return self.lane.health()[0]


def disk_tier(root: Path, clock: HandClock, *, directories: int = 1, chunks: int = 16) -> DiskTier:
    paths = [str(root / f"tier{number}") for number in range(directories)]
    settings = {"directory": paths, "capacity_bytes": bytes_for(CONTEXT, chunks, directories)}
    return DiskTier(msgspec.convert(settings, DiskConfig), CONTEXT, LruPolicy(), clock=clock)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Bench]:
    clock = HandClock()
    bench = Bench(disk_tier(tmp_path, clock), clock)
    yield bench
    bench.lane.close()


@pytest.fixture
def two_disks(tmp_path: Path) -> Iterator[Bench]:
    """Chunks 0 and 2 of a prompt are on the one, 1 and 3 on the other."""
    clock = HandClock()
    bench = Bench(disk_tier(tmp_path, clock, directories=2), clock)
    yield bench
    bench.lane.close()


def slabs(bench: Bench) -> list:
    assert isinstance(bench.tier, DiskTier)
    return slabs_of(bench.tier)


def test_a_disk_whose_every_read_fails_rests_and_loses_nothing(disk: Bench, tmp_path: Path) -> None:
    assert disk.store(KEYS) == [Stored()] * 4
    with unreadable_device(slabs(disk)):
        assert Loaded not in disk.load(KEYS)
        assert disk.health is Health.DOWN
        assert "Input/output error" in disk.lane.health()[1]
        for _ in range(5):  # it is probed, and what it has cannot be read yet
            disk.pass_time(5.0)
            assert disk.health is Health.DOWN
        assert leading(disk.lane, KEYS) == 0
    counts = disk.lane.counts()
    assert (counts.damaged, counts.discarded, counts.downs) == (0, 0, 1)
    assert counts.read_failed > 0
    disk.pass_time(100.0)
    assert disk.health is Health.UP
    assert disk.load(KEYS) == [Loaded] * 4
    disk.lane.close()
    again = Bench(disk_tier(tmp_path, disk.clock), disk.clock)
    assert again.load(KEYS) == [Loaded] * 4
    again.lane.close()


def test_a_chunk_that_could_not_be_read_and_has_left_since_is_forgotten(disk: Bench) -> None:
    """A failing disk may have very many of them."""
    assert isinstance(disk.tier, DiskTier)
    chunks = disk.tier._chunks
    with chunks.lock:
        chunks.pass_over(KEYS[:3])
    disk.clock.advance(60.0)
    with chunks.lock:
        chunks.pass_over(KEYS[3:])
    assert chunks.is_passed_over(KEYS[3])
    disk.clock.advance(60.0)
    assert not chunks.is_passed_over(KEYS[3])
    assert not chunks.has_unreadable()


def test_chunks_that_cannot_be_read_are_passed_over_for_a_while_and_others_are_served(two_disks: Bench) -> None:
    assert two_disks.store(KEYS) == [Stored()] * 4
    with unreadable_device(slabs(two_disks)[1:]):
        assert two_disks.load(KEYS) == [Loaded, ReadFailed, Loaded, ReadFailed]
        assert two_disks.health is Health.DOWN
        two_disks.pass_time(1.0)
        assert two_disks.health is Health.UP  # the other disk can be read
        assert two_disks.tier.holds(KEYS) == [True, False, True, False]
        assert two_disks.load(KEYS) == [Loaded, Absent, Loaded, Absent]  # not tried each time anew
        assert two_disks.health is Health.UP
    two_disks.pass_time(100.0)
    assert two_disks.tier.holds(KEYS) == [True] * 4
    assert two_disks.load(KEYS) == [Loaded] * 4


def test_a_chunk_that_could_not_be_read_is_replaced_when_it_is_stored_again(two_disks: Bench) -> None:
    assert two_disks.store(KEYS) == [Stored()] * 4
    with unreadable_device(slabs(two_disks)[1:]):
        two_disks.load(KEYS)
    two_disks.pass_time(1.0)
    assert two_disks.tier.holds(KEYS) == [True, False, True, False]
    assert two_disks.store(KEYS) == [Stored()] * 4
    assert two_disks.tier.holds(KEYS) == [True] * 4
    assert two_disks.load(KEYS) == [Loaded] * 4
    assert two_disks.tier.usage().chunks == 4


def test_a_call_that_names_a_chunk_twice_leases_it_twice_while_others_are_passed_over(two_disks: Bench) -> None:
    assert two_disks.store(KEYS) == [Stored()] * 4
    with unreadable_device(slabs(two_disks)[1:]):
        two_disks.load(KEYS)
        two_disks.pass_time(1.0)
        first, other, second = KEYS[0], KEYS[1], KEYS[2]
        assert two_disks.load([first, first, other, second]) == [Loaded, Loaded, Absent, Loaded]
    assert isinstance(two_disks.tier, DiskTier)
    two_disks.tier.clear()
    assert two_disks.tier._index.is_idle() and two_disks.tier._index.used_units == 0


def test_a_device_that_keeps_failing_is_rested_longer_each_time(two_disks: Bench) -> None:
    """Its probes succeed, as there is something that can be read."""
    assert two_disks.store(KEYS) == [Stored()] * 4
    with unreadable_device(slabs(two_disks)[1:]):
        for key, backoff_s in ((KEYS[1], 1.0), (KEYS[3], 2.0)):
            assert two_disks.load([key]) == [ReadFailed]
            two_disks.pass_time(backoff_s - 0.1)
            assert two_disks.health is Health.DOWN
            two_disks.pass_time(0.2)
            assert two_disks.health is Health.UP
    assert two_disks.load(KEYS[:1]) == [Loaded]


def test_a_full_disk_shows_in_health_and_serves_what_it_has(disk: Bench) -> None:
    first = key_chain(2, branch="first")
    assert disk.store(first) == [Stored()] * 2
    assert disk.health is Health.UP
    with full_device(slabs(disk)):
        assert [type(outcome) for outcome in disk.store(KEYS)] == [Refused] * 4
        assert disk.health is Health.FULL
        assert "No space left" in disk.lane.health()[1]
        assert leading(disk.lane, first) == 2
    assert disk.load(first) == [Loaded] * 2
    assert disk.health is Health.FULL
    disk.pass_time(100.0)
    assert disk.store(KEYS) == [Stored()] * 4  # somebody has made room
    assert disk.health is Health.UP


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """For this process: the system refuses with EFBIG, as it refuses with ENOSPC on a full medium."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_too_large_for_a_shared_file_system_is_the_chunks_fault(tmp_path: Path) -> None:
    tier = make_shared_fs_tier({"directory": str(tmp_path)}, CONTEXT)
    bench = Bench(tier, HandClock())
    assert bench.store(KEYS[:2]) == [Stored()] * 2
    with no_file_larger_than(4096):
        outcomes = bench.store(KEYS[2:])
    assert [type(outcome) for outcome in outcomes] == [Unstorable] * 2
    assert all(os.strerror(errno.EFBIG) in str(outcome) for outcome in outcomes)
    assert bench.health is Health.UP
    assert bench.load(KEYS[:2]) == [Loaded] * 2
    assert bench.store(KEYS[2:]) == [Stored()] * 2
    bench.lane.close()


def test_a_shared_file_that_cannot_be_read_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_shared_fs_tier({"directory": str(tmp_path)}, CONTEXT)
    bench = Bench(tier, HandClock())
    assert bench.store(KEYS) == [Stored()] * 4
    real = os.preadv

    def preadv(file: int, buffers: list[memoryview], at: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(os.path.basename(KEYS[1].path())):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    assert bench.load(KEYS) == [Loaded, ReadFailed, Loaded, Loaded]
    assert bench.health is Health.DOWN
    assert bench.lane.counts().damaged == 0
    monkeypatch.undo()
    bench.pass_time(1.0)
    assert bench.load(KEYS) == [Loaded] * 4
    bench.lane.close()
