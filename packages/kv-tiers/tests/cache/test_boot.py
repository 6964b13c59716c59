"""The boot measurement: a tier's speed is known before a request waits for it, and nothing else changes."""

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kv_core.cost import Costs
from kv_core.keys import ChunkKey
from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_testing import throttled
from kv_testing.faults import FaultyTier
from kv_testing.redis_servers import AskedServer
from kv_testing.s3_server import s3_server
from kv_testing.threads import threads_left
from kv_testing.wait import joined
from kv_tiers import ColdConfig, HostConfig, LocalCache, build_local_cache
from kv_tiers.build import tier_factory
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.tier import Tier, TierContext

CHUNK_BYTES = 256 << 10
KEYS = key_chain(8)
COMPUTES_IN_100_MS = Costs(0, (0.1 / (8 * 16), 0.0), (0.0, 0.0))


def cache_over(directory: Path, **options: Any) -> AbstractContextManager[LocalCache]:
    return cache_above({"type": "disk", "directory": str(directory), "capacity_bytes": "64MiB", **options})


@contextmanager
def cache_above(*tiers: dict[str, Any]) -> Iterator[LocalCache]:
    cache = build_local_cache(
        HostConfig(capacity_bytes=16 * slot_bytes_for(CHUNK_BYTES)),
        group_bytes=(CHUNK_BYTES,),
        fingerprint="f",
        tiers=tiers,
        cold=ColdConfig(wait_s=10.0, drain_s=1.0),
    )
    try:
        yield cache
    finally:
        cache.close()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """What an earlier process has left."""
    with cache_over(tmp_path / "kv") as cache:
        lease = cache.begin_store(KEYS, "w")
        cache.commit(lease)
    return tmp_path / "kv"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> float:
    """Bytes a second of every disk that is made: a chunk takes as long as may be measured."""
    speed = CHUNK_BYTES / 1.05

    def make(options: dict[str, object], context: TierContext) -> Tier:
        return throttled.ThrottledTier(tier_factory("disk")(options, context), speed)

    monkeypatch.setattr("kv_tiers.build.tier_factory", lambda name: make)
    return speed


def wait_for(cache: LocalCache) -> None:
    assert cache.lower._boot is not None
    joined(cache.lower._boot._thread, within_s=30)


def files_of(directory: Path) -> dict[Path, tuple[int, int]]:
    stats = {path: path.stat() for path in directory.rglob("*") if path.is_file()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def test_the_first_request_does_not_wait_for_a_tier_that_is_slower_than_computing(filled: Path, slow: float) -> None:
    with cache_over(filled) as cache:
        wait_for(cache)
        cost = cache.lower.states()[0].load_cost
        assert cost is not None and 1 / cost[1] == pytest.approx(slow, rel=0.3)
        assert cache.lower.states()[0].lane.loaded == 1  # which is enough to know
        plan = cache.lookup(KEYS, "r", wait_for_promotion=True, costs=COMPUTES_IN_100_MS)
        assert (plan.chunks, plan.ended) == (0, Ended.ABSENT)
        assert plan.choice is not None and plan.choice.skipped is not None
        assert (plan.choice.skipped.chunks, plan.choice.skipped.tier) == (8, "disk")


def test_what_is_measured_is_known_at_a_start_and_costs_no_room_and_no_write(filled: Path) -> None:
    """Of a tier that is never written to, either."""
    with cache_over(filled, write="never") as cache:
        before = files_of(filled)
        wait_for(cache)
        assert cache.lower.states()[0].load_cost is not None
        assert files_of(filled) == before
        counts = cache.counts()
        assert counts.slots_used == counts.read_leases == counts.lookups == 0
        plan = cache.lookup(KEYS, "r", wait_for_promotion=True)
        assert plan.ended is Ended.PENDING


def test_an_empty_tier_is_not_measured(tmp_path: Path) -> None:
    with cache_over(tmp_path / "kv") as cache:
        wait_for(cache)
        assert cache.lower.states()[0].load_cost is None
        assert cache.lower.states()[0].lane.loaded == 0


@pytest.mark.parametrize("kind", ["shared_fs", "valkey", "s3"])
def test_what_others_have_left_at_a_remote_tier_is_measured_too(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Among values that are none of ours."""
    if kind == "shared_fs":
        (tmp_path / "shared").mkdir()
        tier = {"type": kind, "directory": str(tmp_path / "shared")}
    else:
        tier = request.getfixturevalue(kind)
    with cache_above(tier) as cache:
        wait_for(cache)
        assert cache.lower.states()[0].load_cost is None  # there was nothing
        lease = cache.begin_store(KEYS, "w")
        cache.commit(lease)
    with cache_above(tier) as cache:
        wait_for(cache)
        state = cache.lower.states()[0]
        assert state.load_cost is not None and state.lane.loaded == 8
        assert state.lane.stored == state.lane.damaged == 0


@pytest.fixture
def valkey() -> Iterator[dict[str, Any]]:
    server = AskedServer()
    server.ask("SET", "kv:another's", "x")
    yield {"type": "valkey", "url": server.url, "piece_bytes": "64KiB"}
    server.remove()


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with s3_server(tmp_path) as options:
        yield {"type": "s3", "prefix": "kv", **options}


def test_a_tier_that_lists_nothing_is_not_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is away, at a start: the log says so, and nothing waits."""
    with caplog.at_level(logging.INFO), cache_above({"type": "valkey", "url": f"unix://{tmp_path}/nobody"}) as cache:
        wait_for(cache)
        assert "is not measured" in caplog.text and "Traceback" not in caplog.text
        lease = cache.begin_store(KEYS, "w")
        cache.commit(lease)
        assert cache.lookup(KEYS, "r").chunks == 8


class Named(FaultyTier):
    """A disk that hangs or fails on command, and names chunks."""

    names_fail = False

    def some_keys(self, count: int) -> list[ChunkKey]:
        if self.names_fail:
            raise RuntimeError("told to fail")
        return KEYS[:count]


@pytest.mark.parametrize("fault", ["hang", "down", "bug", "flip", "names"])
def test_a_tier_that_fails_while_it_is_measured_delays_nothing(
    filled: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    made: list[Named] = []

    def make(options: dict[str, object], context: TierContext) -> Tier:
        made.append(Named(tier_factory("disk")(options, context)))
        made[0].fault, made[0].names_fail = ("", True) if fault == "names" else (fault, False)
        return made[0]

    monkeypatch.setattr("kv_tiers.build.tier_factory", lambda name: make)
    with cache_over(filled) as cache:
        if fault != "hang":
            wait_for(cache)
        assert cache.lower.states()[0].load_cost is None
        lease = cache.begin_store(key_chain(2, branch="new"), "w")
        cache.commit(lease)
        assert cache.lookup(key_chain(2, branch="new"), "r").chunks == 2
        if fault == "hang":
            with pytest.raises(BufferError):
                cache.close()
            assert not cache.lower._boot._thread.is_alive()  # type: ignore[union-attr]
        made[0].let_go()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-boot-measurement"]


class SlowToName(FaultyTier):
    """Says what it holds when it is closed, or after a while."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.asked, self.closed = threading.Event(), threading.Event()
        self.was_closed_meanwhile: bool | None = None

    def some_keys(self, count: int) -> list[ChunkKey]:
        self.asked.set()
        self.was_closed_meanwhile = self.closed.wait(0.2)
        return []

    def close(self) -> None:
        self.closed.set()
        super().close()


def test_no_tier_is_closed_while_it_says_what_it_holds_or_asked_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SlowToName] = []

    def make(options: dict[str, object], context: TierContext) -> Tier:
        made.append(SlowToName(tier_factory("disk")(options, context)))
        return made[-1]

    monkeypatch.setattr("kv_tiers.build.tier_factory", lambda name: make)
    disks = [
        {"type": "disk", "name": name, "directory": str(tmp_path / name), "capacity_bytes": "64MiB"} for name in "ab"
    ]
    with cache_above(*disks):
        assert made[0].asked.wait(10)
    assert [tier.was_closed_meanwhile for tier in made] == [False, None]


def test_a_system_without_a_thread_for_the_measurement_starts_without_it(filled: Path) -> None:
    with threads_left(3), cache_over(filled) as cache:  # the pool's, and those of the tier
        assert cache.lookup(KEYS, "r", wait_for_promotion=True).ended is Ended.PENDING
