"""The history of a server: what it adds up is what was counted, for a month at most, and it is served."""

import os
import random
from collections.abc import Iterator

import pytest
from kv_core.service import CacheCounts, ReadLease
from kv_core.testing import key_chain
from kv_server.http import timeline
from kv_server.http.timeline import SPANS, Timeline
from kv_server.report import CacheReport, Report
from kv_testing.http import Served, problem, store
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import until
from kv_tiers.tier import TierUsage
from kv_tiers.tier_state import Health, Held, LaneCounts, SpillCounts, TierState
from msgspec.structs import asdict

START_S = 1_800_000_000


def cache_report(name: str, asked: int, hit: int, loaded_bytes: int, committed: int, promoted: int = 0) -> CacheReport:
    counts = dict.fromkeys(CacheCounts.__dataclass_fields__, 0) | {
        "chunks_asked": asked, "chunks_hit": hit, "bytes_loaded": loaded_bytes, "chunks_committed": committed,
    }  # fmt: skip
    lane = LaneCounts(loaded=promoted)
    tier = TierState("disk", Health.UP, "", TierUsage(None, 1, 2), lane, SpillCounts(), None)
    return CacheReport(4096, (4096,), "f", "pool", 0, CacheCounts(**counts), Held(0, 0, ()), [tier], name=name)


def report(*caches: CacheReport) -> Report:
    return Report(os.getpid(), "0", [], 0, list(caches))


def test_each_span_adds_up_what_the_counters_have_grown_by_and_keeps_no_more_than_its_periods() -> None:
    kept, rng = Timeline(), random.Random(1)
    asked, at_s = 1000, float(START_S)
    kept.add(report(cache_report("a", asked, 10, 20, 30)), at_s)  # counted before there was a timeline
    grown: list[tuple[float, int]] = []
    while at_s < START_S + 33 * 86400:
        at_s += rng.choice([5, 5, 5, 61, 900, 7200])
        asked += (more := rng.randrange(100))
        grown.append((at_s, more))
        kept.add(report(cache_report("a", asked, 10, 20, 30)), at_s)
    for name, (step_s, most) in SPANS.items():
        past = kept.past(name)
        assert len(past.starts_s) <= most
        assert all(start_s % step_s == 0 for start_s in past.starts_s)
        assert past.starts_s == sorted(set(past.starts_s))
        assert sum(past.chunks_asked) == sum(more for at_s, more in grown if at_s >= past.starts_s[0])
        assert set(past.chunks_hit + past.loaded_bytes + past.stored_bytes) == {0}
    assert len(kept.past("hour").starts_s) == 720


def test_caches_come_and_go_and_a_clock_that_is_set_back_loses_nothing() -> None:
    kept = Timeline()
    kept.add(report(), START_S)
    kept.add(report(cache_report("a", 8, 4, 100, 3, promoted=1)), START_S + 5)
    kept.add(report(cache_report("a", 9, 4, 100, 3, promoted=3), cache_report("b", 5, 5, 50, 1)), START_S + 10)
    kept.add(report(cache_report("b", 6, 6, 60, 1)), START_S - 3600)
    kept.add(report(cache_report("a", 2, 1, 0, 0), cache_report("b", 6, 6, 60, 1)), START_S + 15)
    assert asdict(kept.past("hour")) == {
        "step_s": 5,
        "limit": 720,
        "starts_s": [START_S, START_S + 5, START_S + 10, START_S + 15],
        "chunks_asked": [0, 8, 7, 2],
        "chunks_hit": [0, 4, 6, 1],
        "loaded_bytes": [0, 100, 60, 0],
        "stored_bytes": [0, 8192, 4096, 0],
    }
    assert kept.past("day").chunks_asked == [17]
    assert Timeline().past("day").starts_s == []


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(timeline, "SAMPLE_S", 0.05)
    made = Served()
    yield made
    made.close()


def test_it_is_served(served: Served) -> None:
    until(lambda: served.get("/history/hour").json()["starts_s"])
    cache = served.join()
    store(cache, 4)
    assert cache.lookup(key_chain(6), "r").chunks == 4
    lease = cache.load(key_chain(4), "r")
    assert isinstance(lease, ReadLease)
    cache.release(lease)
    for span in SPANS:
        until(lambda span=span: sum(served.get(f"/history/{span}").json()["loaded_bytes"]) == 4 * CHUNK_BYTES)
        past = served.get(f"/history/{span}").json()
        assert (sum(past["chunks_asked"]), sum(past["chunks_hit"])) == (6, 4)
        assert sum(past["stored_bytes"]) == 4 * served.get("/status").json()["caches"][0]["chunk_bytes"]
    assert "hour, day, month" in problem(served.get("/history/year"), 404)
    cache.close()
