"""A cache that is passed on goes on as if nothing had happened, whatever was under way, with as much memory or less."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core.clock import HandClock
from kv_core.coverage import ChunkShape, Coverage
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.service import LoadFailed, ReadLease, WriteLease
from kv_core.testing import key_chain
from kv_server.shrinking import shrink
from kv_server.succession import saved_pool
from kv_server.succession.channel import Channel
from kv_server.succession.image import (
    CacheImage,
    Passed,
    PoolImage,
    end_inherited_leases,
    restore_cache,
    restore_pool,
    restore_tiers,
)
from kv_server.succession.saved_pool import image_to_save
from kv_testing.service_contract import CHUNK_BYTES, assert_adds_up
from kv_tiers.cache.host import ClosedError
from kv_tiers.cache.local import LocalCache
from kv_tiers.events.bus import EventBus
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.testing.tier_contract import content

SLOTS = 12
LEASE_S = 50.0
CLIENTS = ("0123abcd.1/a", "0123abcd.1/b", "0123abcd.2l/a")
branches, lengths, holders = st.integers(0, 3), st.integers(1, 4), st.sampled_from([*CLIENTS, "job"])


def cross(message: Any, kind: Any) -> Any:
    """As it arrives in the other process."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    sending, receiving = Channel(ours), Channel(theirs)
    try:
        sending.send(message)
        return receiving.receive(kind, within_s=5)[0]
    finally:
        sending.close()
        receiving.close()


class PassedOn(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.clock = HandClock()
        pool = HostPool.shared("p", CHUNK_BYTES, SLOTS)
        self.cache = self.on(pool)
        self.reads: dict[int, ReadLease] = {}
        self.writes: dict[int, WriteLease] = {}
        self.passed: tuple[Passed, PoolImage] | None = None
        self.upto = self.cache.changes_since(0).upto
        self.found: set[ChunkKey] = set()

    def on(self, pool: HostPool) -> LocalCache:
        return LocalCache(pool, lease_s=LEASE_S, clock=self.clock, events=EventBus().source("c", (CHUNK_BYTES,)))

    def keys(self, branch: int, length: int) -> list[ChunkKey]:
        return key_chain(length, branch=str(branch), salt="ann" if branch == 3 else None)

    @rule(branch=branches, length=lengths, holder=holders)
    def ask(self, branch: int, length: int, holder: str) -> None:
        self.cache.lookup(self.keys(branch, length), holder, shape=ChunkShape(16, (Coverage("all", 0),), 1))

    @rule(branch=branches, length=lengths, holder=holders, lasting=st.booleans())
    def load(self, branch: int, length: int, holder: str, lasting: bool) -> None:
        lease = self.cache.load(self.keys(branch, length), holder, lasting=lasting)
        if not isinstance(lease, LoadFailed):
            self.reads[lease.id] = lease

    @rule(branch=branches, length=lengths, holder=holders, hold_s=st.sampled_from([0.0, 0.0, 20.0]))
    def store(self, branch: int, length: int, holder: str, hold_s: float) -> None:
        lease = self.cache.begin_store(self.keys(branch, length), holder, hold_s=hold_s)
        self.writes[lease.id] = lease

    @rule(branch=branches)
    def put(self, branch: int) -> None:
        self.store(branch, 4, CLIENTS[0], 0.0)
        self.finish_store(-1, gives_up=False)

    @rule(number=st.integers(0, 100), gives_up=st.booleans())
    def finish_store(self, number: int, gives_up: bool) -> None:
        if self.writes:
            lease = self.writes.pop(list(self.writes)[number % len(self.writes)])
            for key, extent in zip(lease.keys, lease.extents, strict=True):
                self.cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
            if gives_up:
                assert self.cache.release(lease)
            else:
                self.cache.commit(lease)

    @rule(number=st.integers(0, 100))
    def finish_load(self, number: int) -> None:
        if self.reads:
            lease = self.reads.pop(list(self.reads)[number % len(self.reads)])
            view = self.cache.pool.view
            copied = [bytes(view[extent.offset : extent.offset + extent.nbytes]) for extent in lease.extents]
            if self.cache.release(lease):
                assert copied == [content(key, CHUNK_BYTES) for key in lease.keys]

    @rule(holder=holders)
    def end(self, holder: str) -> None:
        self.cache.end(holder)
        self.forget_ended()

    @rule()
    def the_other_process_has_ended(self) -> None:
        """Its own leases go, and ours that have begun since stay."""
        leases = self.cache.parts.leases
        reads, writes, _ = leases.entries()
        inherited = {one.number for one in (*reads, *writes) if one.number <= leases.restored_upto}
        end_inherited_leases(self.cache)
        left = {entry.number for entries in leases.entries()[:2] for entry in entries}
        assert {one.number for one in (*reads, *writes)} - left == (
            {one.number for one in (*reads, *writes) if one.holder == "job" and one.number in inherited}
        )
        self.forget_ended()

    def forget_ended(self) -> None:
        left = self.cache.parts.leases.entries()
        numbers = {entry.number for entries in left[:2] for entry in entries}
        self.reads = {number: lease for number, lease in self.reads.items() if number in numbers}
        self.writes = {number: lease for number, lease in self.writes.items() if number in numbers}

    @rule(branch=branches, length=lengths)
    def forget(self, branch: int, length: int) -> None:
        self.cache.forget(self.keys(branch, length))

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @rule(branch=branches, length=lengths, name=st.sampled_from("xy"), unpins=st.booleans())
    def pin(self, branch: int, length: int, name: str, unpins: bool) -> None:
        if unpins:
            self.cache.admin.unpin(name)
        else:
            self.cache.admin.pin(self.keys(branch, length), name)

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def prepare(self) -> None:
        if self.passed is None:
            passed = Passed(((CHUNK_BYTES,), "f"), self.cache)
            self.passed = passed, cross(passed.pool_image(), PoolImage)

    @rule(is_taken=st.booleans(), slots=st.sampled_from([SLOTS, SLOTS, 8, 3]))
    def pass_on(self, is_taken: bool, slots: int) -> None:
        self.prepare()
        assert self.passed is not None
        (passed, pool_image), self.passed = self.passed, None
        old = self.cache
        with old.parts.host.lock:
            image = cross(passed.cache_image(), CacheImage)
        if not is_taken:
            passed.end()
            return
        before = self.seen(old)
        descriptor = os.dup(old.pool.descriptor)
        new = self.on(HostPool.shared("p", CHUNK_BYTES, slots, mapped_slots=SLOTS, descriptor=descriptor))
        restore_pool(new, pool_image)
        restore_cache(new, image)
        restore_tiers(new, image)
        if slots == old.pool.slots:
            assert self.seen(new) == before
        assert {entry.number for entries in new.parts.leases.entries()[:2] for entry in entries} == (
            {entry.number for entries in old.parts.leases.entries()[:2] for entry in entries}
        )
        old.parts.host.stop()
        self.cache = new

    @rule(times=st.integers(1, 30))
    def give_memory_back(self, times: int) -> None:
        """Whatever is leased. Copies that are in progress find their bytes where they are (`finish_load`)."""
        pool, before = self.cache.pool, self.cache.admin.resident_keys()
        more = [shrink(self.cache, lambda cache: False) for _ in range(times)]
        assert set(self.cache.admin.resident_keys()) <= set(before)
        if more[-1] is None:
            assert not pool.above and 512 * os.fstat(pool.descriptor).st_blocks <= pool.slots * pool.slot_bytes

    @rule(slots=st.sampled_from([3, 8]), branch=branches)
    def shrink_while_one_reads(self, slots: int, branch: int) -> None:
        for stored in (branch, 0, 1, 2):
            self.put(stored)
        self.load(branch, 4, CLIENTS[2], lasting=True)
        self.pass_on(is_taken=True, slots=slots)
        self.give_memory_back(9)
        for key in self.cache.admin.resident_keys():
            lease = self.cache.load([key], CLIENTS[1])
            assert isinstance(lease, ReadLease)
            self.reads[lease.id] = lease
            self.finish_load(-1)
        while self.reads:
            self.finish_load(-1)

    def seen(self, cache: LocalCache) -> object:
        """All that anyone can see, after what ends by the clock has ended."""
        counts = cache.counts()
        keys = [self.keys(branch, 4) for branch in range(4)]
        return (
            counts,
            sorted(cache.admin.resident_keys()),
            [cache.admin.where(some) for some in keys],
            cache.admin.pins(),
            cache.admin.tenants(),
            cache.holds.chunks,
            cache.holds.until_s(),
            cache.cleared_for_s(),
            cache.changes_since(self.upto),
            cache.pool.slots_used,
        )

    @invariant()
    def it_adds_up(self) -> None:
        if hasattr(self, "cache"):
            counts = self.cache.counts()
            assert_adds_up(replace(counts, slots_total=max(counts.slots_total, counts.slots_used)))
            changes = self.cache.changes_since(self.upto)
            assert changes.is_whole
            self.upto = changes.upto
            for change in changes.changes:
                left = set(change.keys) or self.found  # none are named where all have left
                self.found = self.found | set(change.keys) if change.entered else self.found - left
            assert self.found == set(self.cache.admin.resident_keys())

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for holder in (*CLIENTS, "job"):
            self.cache.end(holder)
        for name in "xy":
            self.cache.admin.unpin(name)
        self.clock.advance(1000)
        assert self.cache.counts().slots_used <= self.cache.pool.slots
        self.cache.forget(self.cache.admin.resident_keys())
        assert self.cache.counts().slots_used == 0
        self.give_memory_back(2)
        assert not self.cache.pool.unused


TestPassedOn = PassedOn.TestCase
TestPassedOn.settings = settings(deadline=None, stateful_step_count=60, max_examples=100)


def test_a_chunk_that_moves_counts_once() -> None:
    """A store in the middle of it evicts what it needs and no more."""
    machine = PassedOn()
    machine.begin()
    for branch in range(3):
        machine.put(branch)
    machine.forget(0, 4)  # at the pool's beginning
    machine.pass_on(is_taken=True, slots=8)
    cache, pages, leases = machine.cache, machine.cache.pool.pages, list[WriteLease]()

    def while_copying(slot: int) -> memoryview:
        if not leases:
            leases.append(cache.begin_store(key_chain(1, branch="new"), CLIENTS[0]))
        return pages(slot)

    cache.pool.pages = while_copying  # type: ignore[method-assign]
    assert cache.pool.above
    shrink(cache, lambda cache: True)
    assert not cache.pool.above
    assert (len(leases[0].keys), len(cache.admin.resident_keys())) == (1, 7)
    machine.teardown()


def test_nothing_is_overwritten_once_its_checksum_is_to_be_left_to_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that goes on while a server stops would have its bytes vouched for under the key that was there before."""
    pool = HostPool.shared("p", CHUNK_BYTES, SLOTS)
    cache = LocalCache(pool)
    lease = cache.begin_store(key_chain(SLOTS), "w")
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
    cache.commit(lease)
    monkeypatch.setattr("os.path.samestat", lambda *_: True)

    def late(chunk: memoryview) -> bytes:
        with pytest.raises(ClosedError):
            cache.begin_store(key_chain(1, branch="late"), "job")
        return checksum_of(chunk)

    monkeypatch.setattr(saved_pool, "checksum_of", late)
    (saved := tmp_path / "pool").touch()
    index = image_to_save(saved, ((CHUNK_BYTES,), "f"), cache, ())
    assert index is not None and len(index.checksums) == SLOTS
    cache.close()


def test_chunks_that_nobody_has_verified_are_verified_by_whoever_goes_on(tmp_path: Path) -> None:
    """They come from an earlier server's pool, whose file may have been damaged before this process had it."""
    keys, wanted = key_chain(3), ((CHUNK_BYTES,), "f")
    pool = HostPool.shared("p", CHUNK_BYTES, SLOTS)
    cache = LocalCache(pool)
    lease = cache.begin_store(keys, "w")
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
    cache.commit(lease)
    slots = [cache.parts.index.find(key) for key in keys]
    claimed = {slot: checksum_of(memoryview(content(key, CHUNK_BYTES))) for key, slot in zip(keys, slots, strict=True)}
    with cache.parts.host.lock:
        cache.parts.host.doubt(claimed)
    pool.view[lease.extents[1].offset] ^= 1
    saved = tmp_path / "pool"
    saved.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.path.samestat", lambda *_: True)
        index = image_to_save(saved, wanted, cache, ())
    assert index is not None
    assert dict(zip(index.pool.at, index.checksums, strict=True)) == claimed  # not of the bytes as they are
    passed = Passed(wanted, cache)
    pool_image = cross(passed.pool_image(), PoolImage)
    with cache.parts.host.lock:
        image = cross(passed.cache_image(), CacheImage)
    after = LocalCache(HostPool.shared("p", CHUNK_BYTES, SLOTS, descriptor=os.dup(pool.descriptor)))
    restore_pool(after, pool_image)
    restore_cache(after, image)
    assert after.lookup(keys, "r").chunks == 1
    assert after.counts().chunks_damaged == 1
    after.end("r")
    after.close()
    cache.close()
