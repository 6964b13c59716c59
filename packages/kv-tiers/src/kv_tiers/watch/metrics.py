"""The caches of a process as Prometheus metrics. `docs/observability.md` lists every name.

What a cache counts itself (its counters, the states of its tiers) is read at the scrape and is complete. What only
events carry (from which tier, why, how long) is summed as they arrive; dropped events are missing there and counted by
`kv_events_dropped_total`.

Labels have few values: one cache per format, one tier per configured tier, and words of a fixed list.
"""

import platform
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Final

from kv_core.errors import ConfigError, MisuseError
from kv_core.service import CacheCounts

from kv_tiers.cache.admin import TenantUse
from kv_tiers.cache.host import TIER
from kv_tiers.cache.local import LocalCache
from kv_tiers.cache.lower_tiers import TierState
from kv_tiers.directory_state import DirectoryState
from kv_tiers.drain_state import DrainState
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.events.events import (
    Committed,
    Damaged,
    EngineMeasured,
    Evicted,
    LoadEnded,
    LookedUp,
    Promoted,
    Spilled,
)
from kv_tiers.lanes.health import Health

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
    )
except ImportError:
    raise ConfigError("metrics need the package prometheus-client: pip install 'kv-tiers[http]'") from None

BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

BUCKETS_RATIO: Final = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

MAX_TENANTS: Final = 64
"""Tenants with their own label in each cache: those with a quota, then the largest. The rest are `others`."""

_Labels = tuple[str, ...]


class _Histogram:
    def __init__(self, bounds: Sequence[float] = BUCKETS_S) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, by upper bound."""
        total = 0
        cumulative = []
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self.counts, strict=True):
            total += count
            cumulative.append((bound, float(total)))
        return cumulative


class Metrics(Subscriber):
    """Counts from its construction on. `exposition` may be called from any thread."""

    def __init__(
        self,
        bus: EventBus,
        caches: Callable[[], Iterable[LocalCache]],
        others: Callable[[], Iterable[Metric]] = tuple,
    ) -> None:
        """bus: of these caches; this subscribes to it. caches: returns those that exist now. others: what a scrape
        shows besides the caches."""
        self._bus = bus
        self._caches = caches
        self._others = others
        self._lock = threading.Lock()  # guards what follows
        self._lookups: Counter[_Labels] = Counter()
        self._chunks_asked: Counter[_Labels] = Counter()
        self._chunks_hit: Counter[_Labels] = Counter()
        self._bytes_hit: Counter[_Labels] = Counter()
        self._evictions: Counter[_Labels] = Counter()
        self._damaged: Counter[_Labels] = Counter()
        self._transfer_bytes: Counter[_Labels] = Counter()
        self._transfer_seconds: dict[_Labels, _Histogram] = {}
        self._declined: Counter[_Labels] = Counter()
        self._ratios: dict[_Labels, _Histogram] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(self.families))
        bus.subscribe(self)

    def exposition(self) -> tuple[bytes, str]:
        """All metrics in Prometheus's text format, and the content type of that."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def take(self, occurred: Occurred) -> None:
        cache, sizes = occurred.source.name, occurred.source.sizes
        with self._lock:
            match occurred.event:
                case LookedUp(ended="PENDING"):
                    pass  # the same holder will look up again
                case LookedUp() as lookup:
                    self._lookups[cache, lookup.ended.lower()] += 1
                    self._chunks_asked[cache,] += lookup.chunks_asked
                    if lookup.choice is not None:
                        self._declined[cache, TIER] += lookup.chunks_hit - lookup.choice.chunks
                        if (skipped := lookup.choice.skipped) is not None:
                            self._declined[cache, skipped.tier] += skipped.chunks
                    for tier, chunks in Counter(lookup.tiers).items():
                        self._chunks_hit[cache, tier] += chunks
                    for group, needed in enumerate(lookup.shape.needed(lookup.chunks_hit)):
                        nbytes = lookup.shape.shards * sizes.of_group(group)
                        for tier, chunks in Counter(lookup.tiers[needed.start : needed.stop]).items():
                            self._bytes_hit[cache, tier] += chunks * nbytes
                case LoadEnded(how="released") as load:
                    self._transferred((cache, TIER, "load"), load.nbytes, load.seconds)
                case Committed() as stored:
                    if stored.keys:
                        self._transferred((cache, TIER, "store"), sizes.total(stored.keys), stored.seconds)
                case Promoted() as promoted:
                    self._transferred((cache, promoted.tier, "load"), promoted.nbytes, promoted.seconds)
                    if not promoted.missing:
                        self._was_estimated((cache, promoted.tier), promoted.estimated_s, promoted.seconds)
                case EngineMeasured(samples):
                    for sample in samples:
                        what = TIER if sample.what == "load" else sample.what
                        self._was_estimated((cache, what), sample.estimated_s, sample.took_s)
                case Spilled() as spilled:
                    self._transferred((cache, spilled.tier, "store"), spilled.nbytes, spilled.seconds)
                case Evicted() as evicted:
                    self._evictions[cache, evicted.tier, evicted.cause] += len(evicted.keys)
                case Damaged() as damaged:
                    self._damaged[cache, damaged.tier] += len(damaged.keys)
                case _:
                    pass

    def _transferred(self, labels: _Labels, nbytes: int, seconds: float) -> None:
        self._transfer_bytes[labels] += nbytes
        self._transfer_seconds.setdefault(labels, _Histogram()).add(seconds)

    def _was_estimated(self, labels: _Labels, estimated_s: float | None, took_s: float) -> None:
        if estimated_s:
            self._ratios.setdefault(labels, _Histogram(BUCKETS_RATIO)).add(took_s / estimated_s)

    def families(self) -> Iterator[Metric]:
        """All metrics as they are now. From any thread."""
        yield from self._from_events()
        known: list[tuple[str, LocalCache, CacheCounts, list[TierState]]] = []
        tenants: list[tuple[str, list[TenantUse]]] = []
        drains: list[tuple[str, DrainState]] = []
        for cache in self._caches():
            try:
                known.append((cache.events.name, cache, cache.counts(), cache.lower.states()))
                tenants.append((cache.events.name, cache.admin.tenants()))
                if (drain := cache.drain.state()) is not None:
                    drains.append((cache.events.name, drain))
            except MisuseError:  # it was closed just now
                continue
        yield from _from_counts([(name, cache, counts) for name, cache, counts, _ in known])
        tiers = [(name, state) for name, _, _, states in known for state in states]
        yield from _from_tiers(tiers)
        yield from directory_families(
            (name, state.name, state.directory) for name, state in tiers if state.directory is not None
        )
        yield from _from_tenants(tenants)
        yield from drain_families(drains)
        dropped, failures = self._bus.events_dropped, self._bus.failures
        yield CounterMetricFamily("kv_events_dropped", "Events that found the bus's queue full.", value=dropped)
        yield CounterMetricFamily(
            "kv_subscriber_failures", "Times that a subscriber of events raised an exception.", value=failures
        )
        build = InfoMetricFamily("kv_build", "Which release this is.", labels=())
        build.add_metric((), {"version": version("kv-tiers"), "python": platform.python_version()})
        yield build
        yield from self._others()

    def _from_events(self) -> Iterator[Metric]:
        with self._lock:
            seconds = HistogramMetricFamily(
                "kv_transfer_seconds",
                "From requesting chunks from a tier to their arrival, or from handing chunks to a tier to their "
                "being stored.",
                labels=("cache", "tier", "direction"),
            )
            for labels, histogram in self._transfer_seconds.items():
                seconds.add_metric(labels, histogram.buckets(), histogram.sum)
            ratios = HistogramMetricFamily(
                "kv_estimate_ratio",
                "Measured divided by estimated time of loads from a tier, loads into the engine (host) and prefill "
                "steps (compute).",
                labels=("cache", "of"),
            )
            for labels, histogram in self._ratios.items():
                ratios.add_metric(labels, histogram.buckets(), histogram.sum)
            families = [
                _counter("lookups", "Lookups with a final answer, by why they ended", self._lookups, "ended"),
                _counter("chunks_asked", "Chunks that these lookups requested", self._chunks_asked),
                _counter("chunks_hit", "Those of these chunks that were held, by tier", self._chunks_hit, "tier"),
                _counter("hit_bytes", "Bytes of the chunks that were held", self._bytes_hit, "tier"),
                _counter("evictions", "Chunks that left a tier to make room", self._evictions, "tier", "cause"),
                _counter("damaged", "Chunks whose bytes were wrong", self._damaged, "tier"),
                _counter("transfer_bytes", "Bytes to a tier (store) and from it (load)", self._transfer_bytes, "tier",
                         "direction"),
                _counter("chunks_declined", "Held chunks that were computed because that was estimated to be faster",
                         self._declined, "tier"),
                seconds,
                ratios,
            ]  # fmt: skip
        yield from families


class _Collector:
    """Called by the registry at a scrape."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families()


def _from_counts(caches: Sequence[tuple[str, LocalCache, CacheCounts]]) -> Iterator[Metric]:
    pool = GaugeMetricFamily(
        "kv_pool_bytes", "The host pool's memory, by what it is used for.", labels=("cache", "state")
    )
    leases = GaugeMetricFamily("kv_leases", "Open leases; promises count as reads.", labels=("cache", "kind"))
    held = GaugeMetricFamily("kv_handed_over_chunks", "Chunks that are held for another engine.", labels=("cache",))
    of_group = GaugeMetricFamily(
        "kv_pool_group_chunks",
        "Chunks of a group of layers in the pool, each counted once however many shards are held.",
        labels=("cache", "group"),
    )
    sizes = GaugeMetricFamily("kv_chunk_bytes", "The size of the largest chunk.", labels=("cache",))
    totals: dict[str, dict[_Labels, int]] = {name: {} for name in _TOTALS}
    for name, cache, counts in caches:
        slot_bytes = cache.pool.slot_bytes
        leaving = counts.slots_used - counts.chunks_resident - counts.chunks_reserved
        states = {
            "resident": counts.chunks_resident,
            "reserved": counts.chunks_reserved,
            "leaving": max(0, leaving),
            "free": counts.slots_total - counts.slots_used,
        }
        for state, slots in states.items():
            pool.add_metric((name, state), slots * slot_bytes)
        leases.add_metric((name, "read"), counts.read_leases)
        leases.add_metric((name, "write"), counts.write_leases)
        sizes.add_metric((name,), cache.pool.chunk_bytes)
        held.add_metric((name,), cache.holds.chunks)
        for group, chunks in enumerate(cache.admin.held().by_group):
            of_group.add_metric((name, str(group)), chunks)
        for total, values in totals.items():
            values[name,] = getattr(counts, total)
    yield from (pool, leases, sizes, held, of_group)
    for total, values in totals.items():
        yield _counter(total, _TOTALS[total], values)


_TOTALS: Final = {
    "chunks_committed": "Chunks stored in the host pool",
    "chunks_refused": "Chunks that were not stored because there was no room",
    "chunks_forgotten": "Chunks forgotten on request",
    "chunks_adopted": "Chunks of an earlier process found in a named pool",
    "leases_expired": "Promises and read leases that expired because their holder had gone silent",
}
"""Fields of `CacheCounts`, and what each counts."""


def _from_tiers(tiers: Sequence[tuple[str, TierState]]) -> Iterator[Metric]:
    labels = ("cache", "tier")
    healthy = GaugeMetricFamily("kv_tier_healthy", "1 while the tier answers, else 0.", labels=labels)
    full = GaugeMetricFamily("kv_tier_full", "1 while the tier takes no more chunks, else 0.", labels=labels)
    chunks = GaugeMetricFamily(
        "kv_tier_chunks",
        "Chunks that the tier holds, if it reports them; every group and shard is counted.",
        labels=labels,
    )
    of_group = GaugeMetricFamily(
        "kv_tier_group_chunks",
        "Chunks of a group of layers that the tier holds, each counted once, if it reports them.",
        labels=(*labels, "group"),
    )
    cut = GaugeMetricFamily("kv_tier_cut_chunks", "Chunks of which only the first parts are left.", labels=labels)
    used = GaugeMetricFamily("kv_tier_used_bytes", "Bytes that the tier uses, if it reports them.", labels=labels)
    capacity = GaugeMetricFamily(
        "kv_tier_capacity_bytes", "Bytes that the tier may use, if it reports them.", labels=labels
    )
    queued = GaugeMetricFamily("kv_tier_queued_chunks", "Chunks in the queue in front of the tier.", labels=labels)
    speed = GaugeMetricFamily(
        "kv_tier_load_bytes_per_second", "Estimated speed of loads from the tier, once known.", labels=labels
    )
    waiting = GaugeMetricFamily(
        "kv_tier_waiting_chunks", "Chunks that are still to be stored in the tier.", labels=labels
    )
    busy: dict[_Labels, float] = {}
    downs: dict[_Labels, float] = {}
    lost: dict[_Labels, float] = {}
    unread: dict[_Labels, float] = {}
    approximate: dict[_Labels, float] = {}
    refined: dict[_Labels, float] = {}
    for cache, state in tiers:
        place = (cache, state.name)
        healthy.add_metric(place, float(state.health.serves))
        full.add_metric(place, float(state.health is Health.FULL))
        for family, value in (
            (chunks, state.usage.chunks),
            (cut, None if state.usage.chunks is None else state.usage.cut_chunks),
            (used, state.usage.used_bytes),
            (capacity, state.usage.capacity_bytes),
        ):
            if value is not None:
                family.add_metric(place, value)
        for group, group_chunks in enumerate(state.usage.by_group):
            of_group.add_metric((*place, str(group)), group_chunks)
        queued.add_metric(place, state.lane.queued)
        if state.load_cost is not None and state.load_cost[1] > 0.0:
            speed.add_metric(place, 1.0 / state.load_cost[1])
        waiting.add_metric(place, state.spill.waiting)
        busy[*place, "load"], busy[*place, "store"] = state.lane.seconds_loading, state.lane.seconds_storing
        downs[place], lost[place] = state.lane.downs, state.spill.lost
        unread[place], approximate[place] = state.lane.read_failed, state.lane.approximate
        refined[place] = state.refined
    yield from (healthy, full, chunks, of_group, cut, used, capacity, queued, speed, waiting)
    yield _counter("tier_busy_seconds", "Time spent in calls to the tier", busy, "tier", "direction")
    yield _counter("tier_downs", "Times that the tier failed and was backed off from", downs, "tier")
    yield _counter("tier_failed_reads", "Chunks that the tier's device could not read", unread, "tier")
    yield _counter(
        "tier_approximate_chunks", "Loaded chunks of which only the first parts were read", approximate, "tier"
    )
    yield _counter("tier_refined_chunks", "Times that such a chunk in the pool was refined", refined, "tier")
    yield _counter("tier_lost_chunks", "Chunks evicted before they were stored in the tier", lost, "tier")


def _from_tenants(caches: Sequence[tuple[str, list[TenantUse]]]) -> Iterator[Metric]:
    labels = ("cache", "tenant")
    used = GaugeMetricFamily("kv_tenant_bytes", "Bytes of the pool that a tenant uses, by its tag.", labels=labels)
    quota = GaugeMetricFamily("kv_tenant_quota_bytes", "The quota of a tenant that has one.", labels=labels)
    for cache, uses in caches:
        largest = sorted(uses, key=lambda use: (use.quota_bytes is None, -use.used_bytes))
        for use in largest[:MAX_TENANTS]:
            used.add_metric((cache, use.tenant.hex()), use.used_bytes)
            if use.quota_bytes is not None:
                quota.add_metric((cache, use.tenant.hex()), use.quota_bytes)
        if rest := largest[MAX_TENANTS:]:
            used.add_metric((cache, "others"), sum(use.used_bytes for use in rest))
    yield from (used, quota)


def directory_families(states: Iterable[tuple[str, str, DirectoryState]]) -> Iterator[Metric]:
    """Metrics of what tiers with a directory know of other hosts. states: for each tier its cache, its name and its
    state."""
    known = list(states)
    if not known:
        return
    for name, (about, is_counter, value_of) in _DIRECTORY.items():
        kind = CounterMetricFamily if is_counter else GaugeMetricFamily
        family = kind(f"kv_directory_{name}", about, labels=("cache", "tier"))
        for cache, tier, state in known:
            family.add_metric((cache, tier), float(value_of(state)))
        yield family


def drain_families(states: Iterable[tuple[str, DrainState]]) -> Iterator[Metric]:
    """Metrics of caches that are being drained, or were. states: for each its name and its progress."""
    known = list(states)
    if not known:
        return
    under_way = GaugeMetricFamily("kv_drain_under_way", "1 while chunks are offered to other hosts.", labels=("cache",))
    chunks = GaugeMetricFamily(
        "kv_drain_chunks",
        "Chunks of the pool and, when their turn has come, of the host's own tiers, by what became of them.",
        labels=("cache", "state"),
    )
    moved = GaugeMetricFamily("kv_drain_moved_bytes", "Bytes that other hosts have fetched since.", labels=("cache",))
    for cache, state in known:
        under_way.add_metric((cache,), state.phase == "draining")
        moved.add_metric((cache,), state.moved_bytes)
        for name in ("moved", "elsewhere", "refused", "gone", "left"):
            chunks.add_metric((cache, name), getattr(state, name))
    yield from (under_way, chunks, moved)


_DIRECTORY: Final[dict[str, tuple[str, bool, Callable[[DirectoryState], float]]]] = {
    "up": ("1 while the directory can be read and written, else 0.", False, lambda of: not of.why),
    "lag_seconds": ("Seconds since the directory was last read to its end.", False, lambda of: of.lag_s),
    "hosts": ("Other hosts that are known.", False, lambda of: of.hosts),
    "exact_hosts": ("Other hosts whose chunks are known exactly.", False, lambda of: of.exact),
    "left_out_hosts": ("Other hosts whose chunks are not tracked for lack of room.", False, lambda of: of.left_out),
    "chunks": ("Known chunks of other hosts, counted once per host.", False, lambda of: of.names),
    "used_bytes": ("Memory that the known chunks take.", False, lambda of: of.used_bytes),
    "listed_chunks": ("Chunks of this server that are announced to other hosts.", False, lambda of: of.listed or 0),
    "entries": ("Entries of other hosts that were applied.", True, lambda of: of.entries),
    "gaps": ("Times that entries of a host were missing.", True, lambda of: of.gaps),
    "repairs": ("Times that a host was queried for missing entries.", True, lambda of: of.repairs),
    "failed_repairs": ("Times that a host did not answer such a query.", True, lambda of: of.failed_repairs),
    "repair_bytes": ("Bytes transferred by repairs.", True, lambda of: of.repair_bytes),
    "not_here": ("Chunks that a host lacked although the directory listed them.", True, lambda of: of.not_here),
}
"""For each metric its description, whether it only grows, and its value."""


def _counter(name: str, about: str, values: Mapping[_Labels, float], *labels: str) -> Metric:
    """A counter of each cache; labels: the additional ones."""
    family = CounterMetricFamily(f"kv_{name}", f"{about}.", labels=("cache", *labels))
    for own, value in values.items():
        family.add_metric(own, value)
    return family
