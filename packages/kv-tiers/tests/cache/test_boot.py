"""The boot measurement: a tier's speed is known before a request waits for it, and nothing else changes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kv_core.cost import Costs
from kv_core.keys import ChunkKey
from kv_core.lookup import Ended
from kv_core.testing import key_chain
from kv_tiers import ColdConfig, HostConfig, LocalCache, build_local_cache
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.registry import tier_factory
from kv_tiers.testing import throttled
from kv_tiers.testing.faults import FaultyTier
from kv_tiers.testing.wait import joined
from kv_tiers.tier import Tier, TierContext

CHUNK_BYTES = 256 << 10
KEYS = key_chain(8)
COMPUTES_IN_100_MS = Costs(0, (0.1 / (8 * 16), 0.0), (0.0, 0.0))


@contextmanager
def cache_over(directory: Path, **options: Any) -> Iterator[LocalCache]:
    disk = {"type": "disk", "directory": str(directory), "capacity_bytes": "64MiB", **options}
    cache = build_local_cache(
        HostConfig(capacity_bytes=16 * slot_bytes_for(CHUNK_BYTES)),
        group_bytes=(CHUNK_BYTES,),
        fingerprint="f",
        tiers=[disk],
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
