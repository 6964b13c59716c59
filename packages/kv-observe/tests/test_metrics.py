"""The exposition is what Prometheus's own parser reads, keeps its conventions, and says what happened."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import count

import pytest
from kv_core import KeySpace, tenant_tag
from kv_core.cost import Costs, Measured
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_observe import metrics as metrics_module
from kv_observe.lives import SAMPLED
from kv_observe.metrics import BUCKETS_S, Metrics
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.shapes import keys_for
from kv_testing.tower import Tower
from kv_testing.wait import until
from kv_tiers import HostPool, LocalCache
from kv_tiers.build import build_local_cache
from kv_tiers.config import HostConfig
from kv_tiers.events.bus import EventBus
from kv_tiers.tenants import Tenant
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class Scraped:
    """A tower with metrics, and what a scrape of it says."""

    def __init__(self, group_bytes: tuple[int, ...] = (CHUNK_BYTES,)) -> None:
        self.bus = EventBus(interval_s=0.001)
        self.tower = Tower("through", events=self.bus.source("c", group_bytes), group_bytes=group_bytes)
        self.metrics = Metrics(self.bus, lambda: [self.tower.cache])

    def families(self) -> dict[str, Metric]:
        assert self.bus.flush()
        body, content_type = self.metrics.exposition()
        assert content_type.startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(body.decode())}

    def value(self, sample_name: str, **labels: str) -> float:
        """The sample's of these labels (and any `cache`)."""
        found = [
            sample.value
            for family in self.families().values()
            for sample in family.samples
            if sample.name == sample_name and {k: v for k, v in sample.labels.items() if k != "cache"} == labels
        ]
        assert len(found) == 1, (sample_name, labels, found)
        return found[0]


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    made = Scraped()
    yield made
    made.tower.close()
    made.bus.close()


def work(scraped: Scraped) -> None:
    """Something of everything: stores, hits of both tiers, a miss, evictions, a damaged chunk, a tier that fails."""
    tower = scraped.tower
    keys = key_chain(4)
    tower.store_below(keys)
    tower.fetch(keys)
    tower.read(keys)
    tower.fetch([*keys, *key_chain(1, branch="never")])
    tower.cache.end("r")
    tower.crowd_out()
    tower.tiers[0].fault = "flip"
    tower.store(key_chain(8, branch="others"))
    tower.run()
    tower.fetch(keys)
    tower.tiers[0].fault = "down"
    tower.store(key_chain(2, branch="more"))
    tower.run()


def test_bytes_are_those_of_each_group_and_of_what_a_hit_needs() -> None:
    made = Scraped((CHUNK_BYTES, 40, 7))
    shape = ChunkShape(4, (ALL, Coverage("window", 5), STATE))
    keys = keys_for(shape, 2)
    made.tower.store(keys)
    made.tower.run()
    assert made.tower.cache.lookup(keys, "r", shape=shape).chunks == 2
    needed = [keys[place] for place in shape.needed_places(2)]
    made.tower.read(needed)
    assert made.value("kv_hit_bytes_total", tier="host") == 2 * CHUNK_BYTES + 40 + 7
    assert made.value("kv_transfer_bytes_total", tier="host", direction="load") == 2 * CHUNK_BYTES + 40 + 7
    for tier in ("host", "tier0"):
        stored = made.value("kv_transfer_bytes_total", tier=tier, direction="store")
        assert stored == 2 * (CHUNK_BYTES + 40 + 7)
    made.tower.cache.end("r")
    made.tower.cache.forget(keys[2:3])
    made.tower.run()
    for group, chunks in enumerate((2, 2, 1)):
        assert made.value("kv_pool_group_chunks", group=str(group)) == chunks
        assert made.value("kv_tier_group_chunks", tier="tier0", group=str(group)) == chunks
    made.tower.close()
    made.bus.close()


def test_the_parser_reads_it_and_the_conventions_are_kept(scraped: Scraped) -> None:
    """What `promtool check metrics` looks at: names, units, HELP, and what each type's samples must be called."""
    work(scraped)
    families = scraped.families()
    assert len(families) > 20
    for name, family in families.items():
        assert name.startswith("kv_"), name
        assert family.documentation.endswith("."), name
        assert family.type in ("counter", "gauge", "histogram"), (name, family.type)
        assert not any(word in name.split("_") for word in ("ms", "kb", "mb", "count", "milliseconds"))
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name == f"{name}_total"
            elif family.type == "gauge":
                assert not sample.name.endswith("_total")
            assert set(sample.labels) <= {
                "cache", "tier", "direction", "cause", "state", "kind", "ended", "le", "version", "python", "tenant",
                "of", "group", "role",
            }  # fmt: skip


def test_what_was_estimated_is_compared_with_what_it_took_and_what_was_declined_is_counted(scraped: Scraped) -> None:
    tower = scraped.tower
    keys = key_chain(4)
    tower.store_below(keys)
    tower.tiers[0].fault = "delay"
    for _ in range(6):
        tower.fetch(keys)
        tower.cache.end("r")
        tower.crowd_out()
    known = scraped.value("kv_estimate_ratio_count", of="tier0")
    assert known >= 2
    assert scraped.value("kv_estimate_ratio_sum", of="tier0") / known == pytest.approx(1.0, rel=0.6)
    assert scraped.value("kv_tier_load_bytes_per_second", tier="tier0") > 0
    tower.cache.measured([Measured("load", 1.0, 2.0), Measured("compute", 0.5, 0.4)])
    assert scraped.value("kv_estimate_ratio_sum", of="host") == 2.0
    assert scraped.value("kv_estimate_ratio_bucket", of="compute", le="0.8") == 1.0
    shape = ChunkShape(256)
    dear = Costs(0, (1e-9, 0.0), (9.0, 0.0))
    tower.cache.lookup(keys, "r", shape=shape, wait_for_promotion=True, costs=dear)  # quicker than the tier
    tower.fetch(keys, "s")
    plan = tower.cache.lookup(keys, "s", shape=shape, costs=dear)  # and than the pool
    assert plan.chunks == 4 and plan.choice is not None and plan.choice.chunks == 0
    assert scraped.value("kv_chunks_declined_total", tier="tier0") == 4
    assert scraped.value("kv_chunks_declined_total", tier="host") == 4
    tower.tiers[0].fault = ""


def test_hits_are_counted_by_where_they_came_from_and_questions_asked_again_are_not(scraped: Scraped) -> None:
    tower = scraped.tower
    keys = key_chain(4)
    tower.store_below(keys)
    tower.fetch(keys)  # asks several times until all has come up
    assert scraped.value("kv_lookups_total", ended="all_held") == 1
    assert scraped.value("kv_chunks_asked_total") == 4
    assert scraped.value("kv_chunks_hit_total", tier="tier0") == 4
    assert scraped.value("kv_hit_bytes_total", tier="tier0") == 4 * CHUNK_BYTES
    tower.read(keys)
    tower.fetch(keys, "r2")
    tower.cache.end("r2")
    assert scraped.value("kv_chunks_hit_total", tier="host") == 4
    assert scraped.value("kv_transfer_bytes_total", tier="tier0", direction="load") == 4 * CHUNK_BYTES
    assert scraped.value("kv_transfer_bytes_total", tier="host", direction="load") == 4 * CHUNK_BYTES
    assert scraped.value("kv_transfer_bytes_total", tier="tier0", direction="store") >= 4 * CHUNK_BYTES


def test_why_chunks_left_and_what_was_damaged(scraped: Scraped) -> None:
    work(scraped)
    counts = scraped.tower.cache.counts()
    by_cause = {
        sample.labels["cause"]: sample.value
        for sample in scraped.families()["kv_evictions"].samples
        if sample.labels["tier"] == "host"
    }
    assert sum(by_cause.values()) == counts.chunks_evicted
    assert {"store", "promotion"} <= set(by_cause)
    assert scraped.value("kv_damaged_total", tier="tier0") >= 1
    assert scraped.value("kv_tier_healthy", tier="tier0") == 0
    assert scraped.value("kv_tier_downs_total", tier="tier0") == 1
    assert scraped.value("kv_chunks_committed_total") == counts.chunks_committed


def test_a_sampled_chunk_has_a_life_until_it_is_evicted(scraped: Scraped) -> None:
    tower = scraped.tower
    keys = next(keys for number in count() if not (keys := key_chain(1, branch=str(number)))[0][-1] % SAMPLED)
    tower.store(keys)
    tower.run()
    tower.ask(keys)
    tower.cache.end("r")
    assert scraped.value("kv_chunk_gap_seconds_count", role="unused") == 1
    assert scraped.value("kv_chunk_residence_seconds_count", role="once") == 0
    tower.crowd_out()
    for span in ("residence", "idle"):
        assert scraped.value(f"kv_chunk_{span}_seconds_count", role="once") == 1


def test_the_histogram_is_cumulative_and_agrees_with_itself(scraped: Scraped) -> None:
    work(scraped)
    samples = scraped.families()["kv_transfer_seconds"].samples
    places = {(sample.labels["tier"], sample.labels["direction"]) for sample in samples}
    assert ("tier0", "load") in places and ("tier0", "store") in places
    for tier, direction in places:
        own = [sample for sample in samples if (sample.labels["tier"], sample.labels["direction"]) == (tier, direction)]
        buckets = [sample.value for sample in own if sample.name.endswith("_bucket")]
        (count,) = [sample.value for sample in own if sample.name.endswith("_count")]
        assert len(buckets) == len(BUCKETS_S) + 1
        assert buckets == sorted(buckets) and buckets[-1] == count > 0


def test_present_values_are_asked_of_the_cache_and_add_up_to_the_pool(scraped: Scraped) -> None:
    tower = scraped.tower
    tower.store(key_chain(3))
    writing = tower.cache.begin_store(key_chain(2, branch="w"), "w")
    tower.cache.lookup(key_chain(3), "r")
    states = {sample.labels["state"]: sample.value for sample in scraped.families()["kv_pool_bytes"].samples}
    slot = tower.cache.pool.slot_bytes
    assert states == {"resident": 3 * slot, "reserved": 2 * slot, "leaving": 0, "free": 3 * slot}
    assert scraped.value("kv_leases", kind="read") == 1 and scraped.value("kv_leases", kind="write") == 1
    tower.cache.release(writing)


def test_tenants_are_told_by_their_tags_and_are_bounded(scraped: Scraped, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, slot = scraped.tower.cache, scraped.tower.cache.pool.slot_bytes
    space = KeySpace("m", "", "", "", 1, "c")
    tags = [tenant_tag(f"tenant {number}") for number in range(4)]
    for number, tag in enumerate(tags):
        keys = [space.key(bytes([number, at] * 16), tenant=tag) for at in range(number)]
        cache.commit(cache.begin_store(keys, "w"))
    cache.admin.set_quota(tags[1], 2 * slot)
    assert scraped.value("kv_tenant_bytes", tenant=tags[3].hex()) == 3 * slot
    assert scraped.value("kv_tenant_quota_bytes", tenant=tags[1].hex()) == 2 * slot
    monkeypatch.setattr(metrics_module, "MAX_TENANTS", 2)
    told = {sample.labels["tenant"]: sample.value for sample in scraped.families()["kv_tenant_bytes"].samples}
    assert told == {tags[1].hex(): slot, tags[3].hex(): 3 * slot, "others": 2 * slot}
    cache.admin.set_quota(tags[1], None)


def test_quotas_of_tiers_are_told() -> None:
    ann, slot = tenant_tag("ann"), 1 << 16
    tier = {"type": "dram", "capacity_bytes": 8 * slot, "quota_bytes": {"ann": 4 * slot}}
    cache = build_local_cache(
        HostConfig(capacity_bytes=8 * slot),
        group_bytes=(slot,),
        fingerprint="f",
        tiers=[tier],
        tenants=[Tenant("ann", ann)],
    )
    cache.commit(cache.begin_store(key_chain(2, salt="ann"), "w"))
    until(lambda: cache.lower.states()[0].usage.chunks == 2)
    bus = EventBus()
    body = Metrics(bus, lambda: [cache]).exposition()[0].decode()
    told = dict(line.rsplit(" ", 1) for line in body.splitlines() if "kv_tier_tenant" in line and line[0] != "#")
    assert all(f'tenant="{ann.hex()}"' in name and 'tier="dram"' in name for name in told)
    assert [float(told[name]) / slot for name in sorted(told)] == [2, 4]
    cache.close()
    bus.close()


def test_dropped_events_are_told() -> None:
    bus = EventBus(max_queued=0, interval_s=0.001)
    cache = LocalCache(HostPool.anonymous("test", CHUNK_BYTES, 2), events=bus.source("c", (CHUNK_BYTES,)))
    metrics = Metrics(bus, lambda: [cache])
    cache.lookup(key_chain(1), "r")
    body, _ = metrics.exposition()
    assert b"kv_events_dropped_total 1.0" in body
    cache.close()
    assert b"kv_pool_bytes{" not in metrics.exposition()[0]  # a closed cache is left out, and nothing raises
    bus.close()


def test_a_reader_in_another_thread_sees_whole_numbers(scraped: Scraped) -> None:
    """Scrapes while events come: no exception, and counters never go back."""
    before = 0.0
    keys = key_chain(1)
    scraped.tower.store(keys)
    for number in range(50):
        scraped.tower.cache.lookup(keys, "r")
        lease = scraped.tower.cache.load(keys, "r")
        assert isinstance(lease, ReadLease)
        scraped.tower.cache.release(lease)
        text = scraped.metrics.exposition()[0].decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "kv_lookups_total":
                    assert before <= sample.value <= number + 1
                    before = sample.value


def test_without_the_package_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import kv_tiers, kv_server.cli\n"
        "from kv_core.errors import ConfigError\n"
        "try:\n    import kv_observe.metrics\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert "pip install 'kv-observe[metrics]'" in said.stdout
