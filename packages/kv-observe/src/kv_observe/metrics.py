"""The caches of a process as Prometheus metrics. `docs/observability.md` lists every name.

What a cache counts itself (its counters, the states of its tiers) is read at the scrape and is complete. What only
events carry (from which tier, why, how long) is summed as they arrive; dropped events are missing there and counted by
`kv_events_dropped_total`.

Labels have few values: one cache per format, one tier per configured tier, and words of a fixed list.
"""

import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Final, TypeVar

from kv_core.errors import ConfigError, MisuseError
from kv_core.service import CacheCounts
from kv_tiers.cache.admin import TenantUse
from kv_tiers.cache.host import TIER
from kv_tiers.cache.local import LocalCache
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.events.events import (
    Committed,
    DamageFound,
    EngineMeasured,
    Evicted,
    Forgotten,
    LoadEnded,
    LookedUp,
    Promoted,
    Spilled,
)
from kv_tiers.tier_state import SERVING, Health, TierState

from kv_observe.lives import SPANS, Distribution, Lives

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
    raise ConfigError("metrics need the package prometheus-client: pip install 'kv-observe[metrics]'") from None

BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

BUCKETS_RATIO: Final = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

MAX_TENANTS: Final = 64
"""Tenants with their own label in each cache: those with a quota, then the largest. The rest are `others`."""

Labels = tuple[str, ...]

_COUNTED: Final = {
    "lookups": ("Lookups with a final answer, by why they ended", "ended"),
    "chunks_asked": ("Chunks that these lookups requested, without those that the engine had",),
    "chunks_hit": ("Those of these chunks that were held, by tier", "tier"),
    "hit_bytes": ("Bytes of the chunks that were held", "tier"),
    "evictions": ("Chunks that left a tier to make room", "tier", "cause"),
    "damaged": ("Chunks whose bytes were wrong", "tier"),
    "transfer_bytes": ("Bytes to a tier (store) and from it (load)", "tier", "direction"),
    "chunks_declined": ("Held chunks that were computed because that was estimated to be faster", "tier"),
}
"""What is counted of events: what that is, and its labels besides the cache."""


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
        self._counts: dict[str, Counter[Labels]] = {name: Counter() for name in _COUNTED}
        self._transfer_seconds: dict[Labels, Distribution] = {}
        self._ratios: dict[Labels, Distribution] = {}
        self._lives: dict[str, Lives] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        bus.subscribe(self)

    def exposition(self) -> tuple[bytes, str]:
        """All metrics in Prometheus's text format, and the content type of that."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def take(self, occurred: Occurred) -> None:
        cache, sizes, counts = occurred.source.name, occurred.source.sizes, self._counts
        with self._lock:
            self._follow_lives(occurred)
            match occurred.event:
                case LookedUp(ended="PENDING"):
                    pass  # the same holder will look up again
                case LookedUp() as lookup:
                    counts["lookups"][cache, lookup.ended.lower()] += 1
                    counts["chunks_asked"][cache,] += lookup.chunks_asked
                    if lookup.choice is not None:
                        declined = lookup.chunks_hit - max(lookup.choice.chunks, lookup.own_chunks)
                        counts["chunks_declined"][cache, TIER] += max(0, declined)
                        if (skipped := lookup.choice.skipped) is not None:
                            counts["chunks_declined"][cache, skipped.tier] += skipped.chunks
                    for tier, chunks in Counter(lookup.tiers_hit).items():
                        counts["chunks_hit"][cache, tier] += chunks
                    for group, needed in enumerate(lookup.shape.needed(lookup.chunks_hit)):
                        nbytes = lookup.shape.shards * sizes.of_group(group)
                        for tier, chunks in Counter(
                            lookup.tiers[max(lookup.own_chunks, needed.start) : needed.stop]
                        ).items():
                            counts["hit_bytes"][cache, tier] += chunks * nbytes
                case LoadEnded(how="released") as load:
                    self._add_transfer((cache, TIER, "load"), load.nbytes, load.seconds)
                case Committed() as stored:
                    if stored.keys:
                        self._add_transfer((cache, TIER, "store"), sizes.total(stored.keys), stored.seconds)
                case Promoted() as promoted:
                    self._add_transfer((cache, promoted.tier, "load"), promoted.nbytes, promoted.seconds)
                    if not promoted.missing:
                        self._add_estimate((cache, promoted.tier), promoted.estimated_s, promoted.seconds)
                case EngineMeasured(samples):
                    for sample in samples:
                        what = TIER if sample.what == "load" else sample.what
                        self._add_estimate((cache, what), sample.estimated_s, sample.took_s)
                case Spilled() as spilled:
                    self._add_transfer((cache, spilled.tier, "store"), spilled.nbytes, spilled.seconds)
                case Evicted() as evicted:
                    counts["evictions"][cache, evicted.tier, evicted.cause] += len(evicted.keys)
                case DamageFound() as damaged:
                    counts["damaged"][cache, damaged.tier] += len(damaged.keys)

    def _follow_lives(self, occurred: Occurred) -> None:
        lives, at_s = self._lives.setdefault(occurred.source.name, Lives()), occurred.at_s
        match occurred.event:
            case Committed() | Promoted() as stored:
                lives.stored(stored.keys, at_s)
            case LookedUp() as lookup if lookup.ended != "PENDING":
                lives.used(lookup.keys[: lookup.chunks_hit * lookup.shape.keys_per_chunk], at_s)
            case Evicted(tier=tier, keys=keys) if tier == TIER:
                lives.evicted(keys, at_s)
            case Forgotten(everything=True):
                lives.cleared()
            case Forgotten(keys=keys):
                lives.forgotten(keys)

    def _add_transfer(self, labels: Labels, nbytes: int, seconds: float) -> None:
        self._counts["transfer_bytes"][labels] += nbytes
        self._transfer_seconds.setdefault(labels, Distribution(BUCKETS_S)).add(seconds)

    def _add_estimate(self, labels: Labels, estimated_s: float | None, took_s: float) -> None:
        if estimated_s:
            self._ratios.setdefault(labels, Distribution(BUCKETS_RATIO)).add(took_s / estimated_s)

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now. From any thread."""
        yield from self._from_events()
        scraped: list[tuple[str, LocalCache, CacheCounts, list[TierState]]] = []
        tenants: list[tuple[str, list[TenantUse]]] = []
        for cache in self._caches():
            try:
                scraped.append((cache.events.name, cache, cache.counts(), cache.lower.states()))
                tenants.append((cache.events.name, cache.admin.tenants()))
            except MisuseError:  # it was closed just now
                continue
        yield from _from_counts([(name, cache, counts) for name, cache, counts, _ in scraped])
        yield from _from_tiers([(name, state) for name, _, _, states in scraped for state in states])
        yield from _from_tenants(tenants)
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
            families = [
                counter(name, about, self._counts[name], *labels) for name, (about, *labels) in _COUNTED.items()
            ]
            families += [
                _histogram("transfer_seconds", "From requesting chunks from a tier to their arrival, or from handing "
                           "chunks to a tier to their being stored", self._transfer_seconds, "tier", "direction"),
                _histogram("estimate_ratio", "Measured divided by estimated time of loads from a tier, loads into the "
                           "engine (host) and prefill steps (compute)", self._ratios, "of"),
            ]  # fmt: skip
            for span, about in SPANS.items():
                lived: dict[Labels, Distribution] = {
                    (cache, role): found
                    for cache, lives in self._lives.items()
                    for (of, role), found in lives.spans.items()
                    if of == span
                }
                families.append(_histogram(f"chunk_{span}_seconds", f"{about}, of a sample", lived, "role"))
        yield from families


def _from_counts(caches: Sequence[tuple[str, LocalCache, CacheCounts]]) -> Iterator[Metric]:
    pool: dict[Labels, float] = {}
    leases: dict[Labels, float] = {}
    group_chunks: dict[Labels, float] = {}
    for name, cache, counts in caches:
        slots = {
            "resident": counts.chunks_resident,
            "reserved": counts.chunks_reserved,
            "leaving": max(0, counts.slots_used - counts.chunks_resident - counts.chunks_reserved),
            "free": max(0, counts.slots_total - counts.slots_used),
        }
        for state, number in slots.items():
            pool[name, state] = number * cache.pool.slot_bytes
        leases[name, "read"], leases[name, "write"] = counts.read_leases, counts.write_leases
        for group, chunks in enumerate(cache.admin.held().by_group):
            group_chunks[name, str(group)] = chunks
    yield gauge("pool_bytes", "The host pool's memory, by what it is used for", pool, "state")
    yield gauge("leases", "Open leases; promises count as reads", leases, "kind")
    sizes: dict[Labels, float] = {(name,): cache.pool.chunk_bytes for name, cache, _ in caches}
    yield gauge("chunk_bytes", "The size of the largest chunk", sizes)
    held: dict[Labels, float] = {(name,): cache.holds.chunks for name, cache, _ in caches}
    yield gauge("handed_over_chunks", "Chunks that are held for another engine", held)
    frozen: dict[Labels, float] = {(name,): cache.parts.host.is_frozen for name, cache, _ in caches}
    yield gauge("frozen", "1 while nothing new is stored and nothing is evicted, else 0", frozen)
    about = "Chunks of a group of layers in the pool, each counted once however many shards are held"
    yield gauge("pool_group_chunks", about, group_chunks, "group")
    for total, about in _TOTALS.items():
        yield counter(total, about, {(name,): getattr(counts, total) for name, _, counts in caches})


_TOTALS: Final = {
    "chunks_committed": "Chunks stored in the host pool",
    "chunks_refused": "Chunks that were not stored: there was no room, or they were worth less than what is held",
    "chunks_forgotten": "Chunks forgotten on request",
    "chunks_adopted": "Chunks of an earlier process found in a named pool",
    "leases_expired": "Promises and read leases that expired because their holder had gone silent",
    "tokens_saved": "Tokens that engines were advised to load, which they neither computed nor had themselves",
}
"""Fields of `CacheCounts`, and what each counts."""


def _from_tiers(tiers: Sequence[tuple[str, TierState]]) -> Iterator[Metric]:
    yield from tabulated("tier", _TIER, [((cache, state.name), state) for cache, state in tiers])
    group_chunks: dict[Labels, float] = {}
    busy: dict[Labels, float] = {}
    used: dict[Labels, float] = {}
    quotas: dict[Labels, float] = {}
    for cache, state in tiers:
        labels = (cache, state.name)
        for group, chunks in enumerate(state.usage.by_group):
            group_chunks[*labels, str(group)] = chunks
        for one in state.usage.quotas:
            used[*labels, one.tenant], quotas[*labels, one.tenant] = one.used_bytes, one.quota_bytes
        busy[*labels, "load"], busy[*labels, "store"] = state.lane.seconds_loading, state.lane.seconds_storing
    about = "Chunks of a group of layers that the tier holds, each counted once, if it reports them"
    yield gauge("tier_group_chunks", about, group_chunks, "tier", "group")
    yield gauge("tier_tenant_bytes", "Bytes that a tenant with a quota there uses, by its tag", used, "tier", "tenant")
    yield gauge("tier_tenant_quota_bytes", "The quota of a tenant that has one there", quotas, "tier", "tenant")
    yield counter("tier_busy_seconds", "Time spent in calls to the tier", busy, "tier", "direction")


def _from_tenants(caches: Sequence[tuple[str, list[TenantUse]]]) -> Iterator[Metric]:
    used: dict[Labels, float] = {}
    quota: dict[Labels, float] = {}
    for cache, uses in caches:
        ordered = sorted(uses, key=lambda use: (use.quota_bytes is None, -use.used_bytes))
        for use in ordered[:MAX_TENANTS]:
            used[cache, use.tenant.hex()] = use.used_bytes
            if use.quota_bytes is not None:
                quota[cache, use.tenant.hex()] = use.quota_bytes
        if unlabelled := ordered[MAX_TENANTS:]:
            used[cache, "others"] = sum(use.used_bytes for use in unlabelled)
    yield gauge("tenant_bytes", "Bytes of the pool that a tenant uses, by its tag", used, "tenant")
    yield gauge("tenant_quota_bytes", "The quota of a tenant that has one", quota, "tenant")


def counter(name: str, about: str, values: Mapping[Labels, float], *labels: str) -> Metric:
    """A counter of each cache; labels: the additional ones."""
    return _filled(CounterMetricFamily(f"kv_{name}", f"{about}.", labels=("cache", *labels)), values)


def gauge(name: str, about: str, values: Mapping[Labels, float], *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"kv_{name}", f"{about}.", labels=("cache", *labels)), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Labels, float]) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(name: str, about: str, values: Mapping[Labels, Distribution], *labels: str) -> Metric:
    family = HistogramMetricFamily(f"kv_{name}", f"{about}.", labels=("cache", *labels))
    for label_values, histogram in values.items():
        family.add_metric(label_values, histogram.buckets(), histogram.sum)
    return family


State = TypeVar("State")
Table = Mapping[str, tuple[Callable[..., Metric], str, Callable[[State], float | None]]]
"""For each metric its kind, its description, and its value; None: it has none now."""


def tabulated(prefix: str, table: Table[State], states: Sequence[tuple[Labels, State]]) -> Iterator[Metric]:
    """states: by cache and tier."""
    for name, (kind, about, value_of) in table.items():
        values = {labels: float(value) for labels, state in states if (value := value_of(state)) is not None}
        yield kind(f"{prefix}_{name}", about, values, "tier")


_TIER: Final[Table[TierState]] = {
    "healthy": (gauge, "1 while the tier answers, else 0", lambda of: of.health in SERVING),
    "full": (gauge, "1 while the tier takes no more chunks, else 0", lambda of: of.health is Health.FULL),
    "chunks": (
        gauge,
        "Chunks that the tier holds, if it reports them; every group and shard is counted",
        lambda of: of.usage.chunks,
    ),
    "cut_chunks": (
        gauge,
        "Chunks of which only the first parts are left",
        lambda of: None if of.usage.chunks is None else of.usage.cut_chunks,
    ),
    "used_bytes": (gauge, "Bytes that the tier uses, if it reports them", lambda of: of.usage.used_bytes),
    "capacity_bytes": (gauge, "Bytes that the tier may use, if it reports them", lambda of: of.usage.capacity_bytes),
    "queued_chunks": (gauge, "Chunks in the queue in front of the tier", lambda of: of.lane.queued),
    "load_bytes_per_second": (
        gauge,
        "Estimated speed of loads from the tier, once known",
        lambda of: 1.0 / of.load_cost[1] if of.load_cost is not None and of.load_cost[1] > 0.0 else None,
    ),
    "waiting_chunks": (gauge, "Chunks that are still to be stored in the tier", lambda of: of.spill.waiting),
    "downs": (counter, "Times that the tier failed and was backed off from", lambda of: of.lane.downs),
    "failed_reads": (counter, "Chunks that the tier's device could not read", lambda of: of.lane.read_failed),
    "approximate_chunks": (
        counter,
        "Loaded chunks of which only the first parts were read",
        lambda of: of.lane.approximate,
    ),
    "upgraded_chunks": (counter, "Times that such a chunk in the pool was upgraded", lambda of: of.upgraded),
    "lost_chunks": (counter, "Chunks evicted before they were stored in the tier", lambda of: of.spill.lost),
}
