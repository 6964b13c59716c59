"""The bus never costs its publishers anything, and the caches tell on it what happened, once a call."""

import gc
import logging
import re
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import pytest
from kv_core.clock import HandClock
from kv_core.cost import Costs, Measured
from kv_core.keys import tenant_tag
from kv_core.service import ReadLease
from kv_core.testing import key_chain, keys_of
from kv_eviction import LruPolicy
from kv_observe.metrics import Metrics
from kv_server import RemoteCache, ServerConfig
from kv_server.caches import cache_name
from kv_server.peers.metrics import directory_families, drain_families, peer_families
from kv_server.report import DirectoryState, DrainState, PeersServed
from kv_server.server import CacheServer
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.tower import Tower
from kv_testing.wait import joined, until
from kv_tiers import HostPool, LocalCache
from kv_tiers.cache.spill import WriteMode
from kv_tiers.config import ColdConfig, HostConfig
from kv_tiers.events import events
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.lanes.lane import Health
from prometheus_client.parser import text_string_to_metric_families

Told = TypeVar("Told")


class Gathered(Subscriber):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.all: list[Occurred] = []
        self.flushes = 0
        self.is_closed = False

    def take(self, occurred: Occurred) -> None:
        self.all.append(occurred)

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        self.is_closed = True

    def of(self, kind: type[Told]) -> list[Told]:
        return [one.event for one in self.all if isinstance(one.event, kind)]


def ended(holder: str) -> events.HolderEnded:
    return events.HolderEnded(holder)


@pytest.fixture
def bus() -> Iterator[EventBus]:
    made = EventBus(interval_s=0.001)
    yield made
    made.close()


# The bus.


def test_nobody_subscribes_and_nothing_is_made() -> None:
    bus = EventBus()
    cache = LocalCache(HostPool.anonymous("test", CHUNK_BYTES, 2), events=bus.source())
    assert not cache.events.on
    cache.commit(cache.begin_store(key_chain(2), "w"))
    cache.lookup(key_chain(2), "r")
    cache.end("r")
    assert not bus._queue and bus._thread is None
    cache.close()


def test_a_cache_that_was_closed_or_could_not_be_opened_leaves_nothing_behind() -> None:
    """A client comes back every two seconds while a directory of its server's tiers is missing."""
    bus = EventBus()
    source = bus.source("opened")
    source.changes_since(0)
    left = weakref.ref(source)
    del source
    gc.collect()
    assert left() is None
    bus.close()


class Waits:
    """A lock that records how often it was waited for."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.count = 0
        self.release = lock.release

    def acquire(self, blocking: bool = True) -> bool:
        self.count += blocking
        return self._lock.acquire(blocking)


def test_a_bus_to_which_nothing_is_published_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked twenty times a second, which took a server that stored for SGLang more time than the stores."""
    bus, gathered = EventBus(interval_s=0.001), Gathered()
    monkeypatch.setattr(bus, "_asleep", waits := Waits(bus._asleep))
    source = bus.source()
    bus.subscribe(gathered)
    for number in range(3):
        until(lambda: waits.count == number + 1)  # noqa: B023  # it is called at once
        source.publish(ended(f"{number}"))
        until(lambda: len(gathered.all) == number + 1)  # noqa: B023
    bus.close()
    assert waits.count in (3, 4)  # after the last event, if it was not closed before


def test_events_are_told_in_order_with_their_source_and_time() -> None:
    clock = HandClock(100.0)
    bus = EventBus(interval_s=0.001, clock=clock)
    gathered = Gathered()
    first, second = bus.source("first", (64,)), bus.source("second")
    bus.subscribe(gathered)
    first.publish(ended("a"))
    clock.advance(5)
    second.publish(ended("b"))
    assert bus.flush()
    assert [(one.source.name, one.at_s, one.event) for one in gathered.all] == [
        ("first", 100.0, ended("a")),
        ("second", 105.0, ended("b")),
    ]
    assert bus.wall_s(105.0) - bus.wall_s(100.0) == pytest.approx(5.0, abs=1.0)
    assert gathered.flushes
    bus.close()


class Held(Gathered):
    """Waits in the middle of the first event until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let_go = threading.Event(), threading.Event()

    def take(self, occurred: Occurred) -> None:
        self.entered.set()
        assert self.let_go.wait(10)
        super().take(occurred)


def test_a_subscriber_that_hangs_costs_a_bounded_queue_and_drops_are_counted() -> None:
    bus = EventBus(max_queued=3, interval_s=0.001)
    held = Held()
    bus.subscribe(held)
    source = bus.source()
    source.publish(ended("0"))
    assert held.entered.wait(10)
    for number in range(1, 11):
        source.publish(ended(str(number)))  # returns, whatever the subscriber does
    assert bus.events_dropped == 7
    held.let_go.set()
    assert bus.flush()
    assert [event.holder for event in held.of(events.HolderEnded)] == ["0", "1", "2", "3"]
    bus.close()


def test_a_subscriber_that_never_comes_back_keeps_nobody_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    bus = EventBus(interval_s=0.001)
    held = Held()
    bus.subscribe(held)
    bus.source().publish(ended("a"))
    assert held.entered.wait(10)
    bus.close(timeout_s=0.01)
    assert "hangs" in caplog.text and not held.is_closed
    held.let_go.set()


def test_a_subscriber_that_raises_harms_nobody_else(bus: EventBus, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Subscriber):
        def take(self, occurred: Occurred) -> None:
            raise ValueError("a bug")

        def flush(self) -> None:
            raise OSError("no space")

    gathered = Gathered()
    bus.subscribe(Broken())
    bus.subscribe(gathered)
    source = bus.source()
    for holder in "abc":
        source.publish(ended(holder))
    with caplog.at_level(logging.ERROR):
        assert bus.flush()
    assert len(gathered.all) == 3
    assert bus.failures >= 4
    assert len([record for record in caplog.records if "Broken failed" in record.message]) == 1


def test_closing_tells_what_is_queued_and_closes_the_subscribers() -> None:
    bus = EventBus(interval_s=60.0)
    gathered = Gathered()
    bus.subscribe(gathered)
    source = bus.source()
    for number in range(5000):
        source.publish(ended(str(number)))
    bus.close()
    assert len(gathered.all) == 5000 and gathered.is_closed and not source.on
    late = Gathered()
    bus.subscribe(late)
    bus.close()
    assert not bus.source().on


def test_many_threads_publish_and_every_event_is_told_or_counted() -> None:
    bus = EventBus(max_queued=500, interval_s=0.0005)
    gathered = Gathered()
    bus.subscribe(gathered)
    source = bus.source()

    def publish(name: int) -> None:
        for number in range(2000):
            source.publish(ended(f"{name} {number}"))

    threads = [threading.Thread(target=publish, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        joined(thread)
    bus.close()
    assert len(gathered.all) + bus.events_dropped == 8000
    for name in range(4):  # each thread's in its order
        numbers = [int(e.holder.split()[1]) for e in gathered.of(events.HolderEnded) if e.holder.startswith(f"{name} ")]
        assert numbers == sorted(numbers)


# What a cache tells.


class Watched:
    """A cache whose events are gathered."""

    def __init__(self, slots: int = 4, **options: object) -> None:
        self.bus = EventBus(interval_s=0.001)
        self.clock = HandClock()
        self.gathered = Gathered()
        self.bus.subscribe(self.gathered)
        pool = HostPool.anonymous("test", CHUNK_BYTES, slots)
        source = self.bus.source("c", (CHUNK_BYTES,))
        self.cache = LocalCache(pool, clock=self.clock, policy=LruPolicy(), events=source, **options)  # type: ignore[arg-type]

    def told(self) -> list[events.Event]:
        """Since this was asked last."""
        assert self.bus.flush()
        found = [one.event for one in self.gathered.all]
        self.gathered.all.clear()
        return found

    def close(self) -> None:
        self.cache.close()
        self.bus.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


def test_a_store_a_lookup_and_a_load_are_told_once_each(watched: Watched) -> None:
    keys, cache = key_chain(3), watched.cache
    lease = cache.begin_store(keys, "w")
    watched.clock.advance(2)
    cache.commit(lease)
    assert watched.told() == [
        events.StoreBegun("w", lease.id, keys, keys, (), ""),
        events.Committed("w", lease.id, keys, 2.0),
    ]
    cache.lookup([*keys, *key_chain(1, branch="x")], "r")
    lease = cache.load(keys, "r")
    assert isinstance(lease, ReadLease)
    watched.clock.advance(3)
    cache.release(lease)
    cache.end("r")
    assert watched.told() == [
        events.LookedUp("r", [*keys, *key_chain(1, branch="x")], keys_of(1), 3, ("host",) * 3, "ABSENT"),
        events.LoadBegun("r", lease.id, keys, 0),
        events.LoadEnded("r", lease.id, 3, 3 * CHUNK_BYTES, 3.0, "released"),
        events.HolderEnded("r"),
    ]


def test_a_load_of_what_is_not_held_says_how_much_is_missing(watched: Watched) -> None:
    watched.cache.load(key_chain(2), "r")
    assert watched.told() == [events.LoadBegun("r", 0, key_chain(2), 2)]


def test_a_request_is_not_told_of_where_nobody_wants_to_know_of_any() -> None:
    """It would keep its keys alive for nothing. What changes in the cache is told all the same."""

    class Changes(Gathered):
        wants_requests = False

    bus, changes = EventBus(interval_s=0.001), Changes()
    bus.subscribe(changes)
    cache = LocalCache(HostPool.anonymous("test", CHUNK_BYTES, 2), events=bus.source())

    def a_request() -> list[str]:
        cache.commit(cache.begin_store(key_chain(1), "w"))
        cache.lookup(key_chain(1), "r")
        cache.load(key_chain(1), "r")
        cache.end("r")
        assert bus.flush()
        told, changes.all = [type(one.event).__name__ for one in changes.all], []
        return told

    assert a_request() == ["StoreBegun", "Committed"]
    bus.subscribe(Gathered())
    assert a_request() == ["StoreBegun", "Committed", "LookedUp", "LoadBegun", "LoadEnded", "HolderEnded"]
    cache.close()
    bus.close()


def test_what_was_evicted_is_told_once_a_call_with_its_cause(watched: Watched) -> None:
    old, new = key_chain(4, branch="old"), key_chain(3, branch="new")
    watched.cache.commit(watched.cache.begin_store(old, "w"))
    watched.told()
    watched.cache.begin_store(new, "w2")
    evicted, begun = watched.told()
    assert evicted == events.Evicted("host", list(reversed(old))[:3], "store", "w2", "lru")
    assert isinstance(begun, events.StoreBegun) and begun.reserved == new


def test_a_store_that_is_refused_says_which_and_why(watched: Watched) -> None:
    keys = key_chain(6)
    lease = watched.cache.begin_store(keys, "w")
    (begun,) = watched.told()
    assert isinstance(begun, events.StoreBegun)
    assert (begun.reserved, begun.refused, begun.why) == (keys[:4], keys[4:], lease.refused)
    watched.cache.end("w")
    assert watched.told() == [events.Aborted("w", lease.id, keys[:4]), events.HolderEnded("w")]


def test_leases_that_expire_are_told_with_their_kind(watched: Watched) -> None:
    keys = key_chain(2)
    watched.cache.commit(watched.cache.begin_store(keys, "w"))
    watched.cache.lookup(keys, "r")
    watched.cache.load(keys, "r")
    watched.told()
    watched.clock.advance(301)
    watched.cache.counts()
    kinds = [(event.kind, event.chunks) for event in watched.told() if isinstance(event, events.LeaseExpired)]
    assert kinds == [("promise", 2), ("load", 2)]


def test_what_was_forgotten_is_told(watched: Watched) -> None:
    watched.cache.forget(key_chain(2))
    watched.cache.clear()
    assert watched.told() == [events.Forgotten(key_chain(2)), events.Forgotten((), everything=True)]


def watched_tower(*modes: WriteMode, **options: Any) -> tuple[Tower, EventBus, Gathered]:
    bus, gathered = EventBus(interval_s=0.001), Gathered()
    bus.subscribe(gathered)
    return Tower(*modes, events=bus.source("tower", (CHUNK_BYTES,)), **options), bus, gathered


def test_the_way_down_and_up_is_told_with_tier_bytes_and_keys() -> None:
    tower, bus, gathered = watched_tower("through")
    keys = key_chain(4)
    tower.store_below(keys)
    assert tower.fetch(keys).chunks == 4
    assert bus.flush()
    down = gathered.of(events.Spilled)
    assert [key for event in down for key in event.keys][:4] == keys
    assert {event.tier for event in down} == {"tier0"} and not any(event.refused for event in down)
    assert sum(event.nbytes for event in down[:2]) == 4 * CHUNK_BYTES
    up = gathered.of(events.Promoted)
    assert [key for event in up for key in event.keys] == keys
    assert all(event.tier == "tier0" and event.holder == "r" and not event.missing for event in up)
    assert "promotion" in {event.cause for event in gathered.of(events.Evicted)}
    answers = [(event.ended, event.tiers) for event in gathered.of(events.LookedUp)]
    assert answers[0][0] == "PENDING" and answers[-1] == ("ALL_HELD", ("tier0",) * 4)
    tower.close()
    bus.close()


def test_write_back_evicts_for_the_watermark() -> None:
    cold = ColdConfig(batch_bytes=2 * 4096, spill_share=0.5, drain_s=0.2)
    tower, bus, gathered = watched_tower("back", slots=4, cold=cold)
    tower.store(key_chain(4))
    tower.run()
    assert bus.flush()
    evicted = gathered.of(events.Evicted)
    assert evicted and {event.cause for event in evicted} == {"watermark"}
    tower.close()
    bus.close()


def test_a_tier_that_fails_and_comes_back_is_told_twice_and_damage_names_its_chunk() -> None:
    tower, bus, gathered = watched_tower("through")
    keys = key_chain(2)
    tower.store_below(keys)
    tower.tiers[0].fault = "flip"
    tower.fetch(keys)
    tower.tiers[0].fault = "down"
    tower.store(key_chain(2, branch="more"))
    tower.run()
    tower.close()  # it comes back before this ends
    bus.close()
    assert [(event.was, event.now) for event in gathered.of(events.TierHealth)][:2] == [
        ("UP", "DOWN"),
        ("DOWN", "UP"),
    ]
    (damaged, *_) = gathered.of(events.DamageFound)
    assert damaged.tier == "tier0" and damaged.keys[0] in keys and "checksum" in damaged.reason


def test_a_call_that_hangs_is_told_when_somebody_asks() -> None:
    tower, bus, gathered = watched_tower("through", threads=2)
    tower.tiers[0].fault = "hang"
    tower.store(key_chain(1))
    until(lambda: "store" in tower.tiers[0].calls)
    tower.clock.advance(11.0)
    assert tower.lanes[0].health()[0] is Health.STUCK
    assert bus.flush()
    assert [event.now for event in gathered.of(events.TierHealth)] == ["STUCK"]
    tower.tiers[0].let_go()
    tower.close()
    bus.close()


def test_a_server_has_one_bus_and_names_each_formats_cache_on_it() -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        config = ServerConfig(host=HostConfig(capacity_bytes=1 << 20), socket=f"{home}/kv.sock")
        server = CacheServer(config)
        gathered = Gathered()
        server.bus.subscribe(gathered)
        thread = threading.Thread(target=server.serve)
        thread.start()
        for fingerprint in ("f", "g"):
            remote = RemoteCache(server.socket_path, group_bytes=(CHUNK_BYTES,), fingerprint=fingerprint)
            remote.lookup(key_chain(1), "r")
            remote.close()
        server.stop()
        thread.join(30)
        asked = [one.source.name for one in gathered.all if isinstance(one.event, events.LookedUp)]
        assert asked == [cache_name(((CHUNK_BYTES,), "f")), cache_name(((CHUNK_BYTES,), "g"))]
        assert gathered.is_closed


# What the page says.

PAGE = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()


def test_the_page_lists_every_event_and_no_other() -> None:
    listed = re.findall(r"`([A-Z][A-Za-z]+)`[,.]", PAGE.split("## Events")[1].split("## Metrics")[0])
    assert listed == [kind.__name__ for kind in get_args(events.Event)]


def test_the_page_lists_every_metric_and_no_other_with_its_type_and_labels() -> None:
    tower, bus, _ = watched_tower("through", tier_quotas={tenant_tag("a tenant"): 1})
    known = DirectoryState(why="", lag_s=0.1, used_bytes=200, listed=5, not_here=0, hosts=2, exact=2, names=10)
    others = [
        *peer_families(PeersServed()),
        *directory_families([("cache", "peers", known)]),
        *drain_families([("cache", DrainState("draining"))]),
    ]
    metrics = Metrics(bus, lambda: [tower.cache], lambda: others)
    keys = key_chain(2)
    tower.store(keys)
    tower.run()
    tower.ask(keys)
    tower.read(keys)
    tower.cache.end("r")
    tower.crowd_out()
    tower.tiers[0].fault = "delay"
    for _ in range(4):  # until it is known how long they take
        tower.fetch(keys)
        tower.cache.end("r")
        tower.crowd_out()
    tower.fetch(keys)
    tower.cache.lookup(keys, "r", costs=Costs(0, (1e-3, 0.0), (9.0, 0.0)))
    tower.cache.measured([Measured("compute", 1.0, 1.1)])
    tower.cache.end("r")
    tower.crowd_out()
    tower.tiers[0].fault = "flip"
    tower.fetch(keys)
    tower.cache.admin.set_quota(tenant_tag("a tenant"), tower.cache.pool.slot_bytes)
    assert bus.flush()
    exposed = {}
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"cache", "le"}
        exposed[name] = (family.type, labels)
    rows = re.findall(r"^- `(kv_[a-z_]+)`(?: \{([a-z, ]+)\})?(?:: |$)", PAGE, re.MULTILINE)
    (said,) = re.findall(r"are counters, (.*?) histograms, all others gauges", PAGE)
    kinds = dict.fromkeys(re.findall(r"`(kv_\w+)`", said), "histogram")
    listed = {
        name: (
            "counter" if name.endswith("_total") else kinds.get(name, "gauge"),
            set(filter(None, labels.replace(" ", "").split(","))),
        )
        for name, labels in rows
    }
    assert len(rows) == len(listed)
    assert listed == exposed
    tower.close()
    bus.close()
