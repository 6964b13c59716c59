"""The pools of an engine's ranks: none is promised from that a rank lacks, none is let go that may be promised from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kv_connect.pools import PoolPart, RankPools, RanksReady
from kv_core.errors import ConfigError
from kv_core.transfer import HostExtent
from kv_testing.connect import DictCopier
from kv_testing.threads import threads_left
from kv_testing.wait import until
from kv_tiers import HostPool

CHUNK_BYTES = 4096


@dataclass(slots=True)
class Device(DictCopier):
    """A device to which memory of a pool is made ready chunk by chunk.

    limit: how many bytes of a pool it takes at most.
    failure: what it raises beyond that.
    attached: names of pools that it knows.
    """

    limit: int = 1 << 40
    failure: Exception = field(default_factory=lambda: ConfigError("no more memory may be locked"))
    attached: list[str] = field(default_factory=list)
    prepared: dict[str, int] = field(default_factory=dict)

    @property
    def is_queued(self) -> bool:
        return True

    @property
    def stores_behind(self) -> bool:
        return True

    def attach(self, pool: str, view: memoryview) -> None:
        self.attached.append(pool)

    def detach(self, pool: str) -> None:
        self.attached.remove(pool)

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        for extent in extents:
            assert extent.pool in self.attached
            if extent.offset + extent.nbytes > self.limit:
                raise self.failure
            self.prepared[extent.pool] = extent.offset + extent.nbytes


@contextmanager
def pools(*names: str, slots: int = 4) -> Iterator[list[HostPool]]:
    made = [HostPool.anonymous(name, CHUNK_BYTES, slots) for name in names]
    yield made
    for pool in made:
        pool.close()


def test_memory_is_ready_once_it_has_been_made_so() -> None:
    with pools("a") as (pool,):
        device, whole = Device(), len(pool.view)
        rank, scheduler = RankPools([device], for_scheduler=True), RanksReady(1)
        rank.add(pool)
        scheduler.receive(0, rank.ready)
        last = HostExtent("a", whole - CHUNK_BYTES, CHUNK_BYTES)
        assert not scheduler.have([last])
        rank.follow(scheduler.wanted("a"))
        until(lambda: rank.ready == {"a": whole})
        assert device.prepared == {"a": whole} and not scheduler.have([last])
        scheduler.receive(0, rank.ready)
        assert scheduler.have([last])
        assert not scheduler.have([HostExtent("another", 0, CHUNK_BYTES)])
        rank.close()
        assert device.attached == []


@pytest.mark.parametrize("failure", [ConfigError("no more memory may be locked"), RuntimeError("the device failed")])
def test_memory_that_cannot_be_made_ready_is_not_tried_for_ever(failure: Exception) -> None:
    with pools("a") as (pool,):
        device = Device(limit=0, failure=failure)
        rank = RankPools([device], for_scheduler=True)
        rank.add(pool)
        rank.follow(PoolPart("a", CHUNK_BYTES))
        until(lambda: "a" in rank._refused)
        device.limit = 1 << 40
        rank.follow(PoolPart("a", CHUNK_BYTES))
        assert rank.ready == {"a": 0} and not device.prepared
        rank.close()


def test_memory_that_no_thread_can_make_ready_is_made_so_later() -> None:
    """Or is let go without having been."""
    with pools("a", "b") as both:
        device = Device()
        rank = RankPools([device], for_scheduler=True)
        for pool in both:
            rank.add(pool)
        with threads_left():
            rank.follow(PoolPart("a", CHUNK_BYTES))
            rank.follow(PoolPart("b", CHUNK_BYTES))
        assert device.attached == ["b"] and rank.ready == {"b": 0}
        rank.follow(PoolPart("b", CHUNK_BYTES))
        until(lambda: rank.ready == {"b": CHUNK_BYTES})
        rank.close()


def test_all_ranks_must_have_it() -> None:
    scheduler = RanksReady(2)
    extent = HostExtent("a", 0, CHUNK_BYTES)
    scheduler.receive(0, {"a": CHUNK_BYTES})
    assert not scheduler.have([extent])
    scheduler.receive(1, {"a": CHUNK_BYTES - 1})
    assert not scheduler.have([extent])
    scheduler.receive(1, {"a": CHUNK_BYTES})
    assert scheduler.have([extent])
    scheduler.receive(0, {})
    assert not scheduler.have([extent])


@pytest.mark.parametrize("for_scheduler", [True, False])
def test_a_pool_is_kept_until_the_scheduler_is_at_a_later_one(for_scheduler: bool) -> None:
    with pools("a", "b", "c") as (first, second, third):
        device = Device()
        rank = RankPools([device], for_scheduler=for_scheduler)
        for pool in (first, second, third):
            rank.add(pool)
        assert device.attached == (["a", "b", "c"] if for_scheduler else ["c"])
        if for_scheduler:
            rank.follow(PoolPart("a", 0))
            rank.follow(PoolPart("never met here", 0))
            assert device.attached == ["a", "b", "c"]
            rank.follow(PoolPart("b", 0))
            assert device.attached == ["b", "c"]
        rank.close()


class Promises(RuleBasedStateMachine):
    """A server that is restarted, two ranks and a scheduler that come to each of its pools at their own time, and
    messages that take a while: whatever the scheduler may promise from, every rank has."""

    @initialize()
    def start(self) -> None:
        self.made: list[HostPool] = []
        self.devices = [Device(), Device()]
        self.ranks = [RankPools([device], for_scheduler=True) for device in self.devices]
        self.scheduler = RanksReady(2)
        self.at = [0, 0]
        self.scheduler_at = 0
        self.plans: list[tuple[PoolPart, str | None]] = []
        self.restart()
        for rank in self.ranks:
            rank.add(self.made[0])

    def restart(self) -> None:
        self.made.append(HostPool.anonymous(f"pool {len(self.made)}", CHUNK_BYTES, 2))

    @precondition(lambda self: len(self.made) < 12)
    @rule()
    def server_restarts(self) -> None:
        self.restart()

    @rule(number=st.integers(0, 1))
    def rank_meets_the_server(self, number: int) -> None:
        if self.at[number] < len(self.made) - 1:
            self.at[number] = len(self.made) - 1
            self.ranks[number].add(self.made[-1])

    @precondition(lambda self: not any(promise for _, promise in self.plans))
    @rule()
    def scheduler_meets_the_server(self) -> None:
        """Not while it has promised anything that has not been copied (`RemoteCache`)."""
        self.scheduler_at = len(self.made) - 1

    @rule()
    def scheduler_plans(self) -> None:
        pool = self.made[self.scheduler_at].name
        promise = pool if self.scheduler.have([HostExtent(pool, CHUNK_BYTES, CHUNK_BYTES)]) else None
        self.plans.append((self.scheduler.wanted(pool), promise))

    @precondition(lambda self: self.plans)
    @rule(answering=st.sets(st.integers(0, 1)))
    def ranks_take_a_step(self, answering: set[int]) -> None:
        wanted, promise = self.plans.pop(0)
        for number, (rank, device) in enumerate(zip(self.ranks, self.devices, strict=True)):
            rank.follow(wanted)
            if promise is not None:
                assert promise in device.attached and device.prepared[promise] == 2 * CHUNK_BYTES
            if rank._thread is not None:
                rank._thread.join(10)
            if number in answering:
                self.scheduler.receive(number, rank.ready)

    def teardown(self) -> None:
        for rank in getattr(self, "ranks", ()):
            rank.close()
        for pool in getattr(self, "made", ()):
            pool.close()


TestPromises = Promises.TestCase
TestPromises.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
