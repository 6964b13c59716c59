"""The data of `kv top`: a server's report, and the change since the previous one."""

from dataclasses import dataclass

from kv_tiers.cache.host import TIER
from kv_tiers.lanes.health import Health

from kv_server.report import CacheReport, Report, TierReport


@dataclass(frozen=True, slots=True)
class TierRow:
    """chunks: each once, however many groups and shards are stored of it, if the tier reports groups.
    by_group: of each group of layers; empty if the tier does not report that.
    cut_chunks: of which only first parts are left, every group and shard counted.
    in_bytes_s, out_bytes_s: stored there and loaded from there per second; None while that is not known.
    """

    name: str
    health: str
    used_bytes: int | None
    capacity_bytes: int | None
    chunks: int | None
    in_bytes_s: float | None
    out_bytes_s: float | None
    waiting_chunks: int
    by_group: tuple[int, ...] = ()
    cut_chunks: int = 0

    @property
    def is_up(self) -> bool:
        return self.health == Health.UP.name.lower()


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One format's cache.

    name, models: as in `CacheReport`.
    hit_ratio: of the chunks requested since the previous report; None: there were none, or no previous report.
    hit_ratio_ever: since the start; None: nothing was requested.
    """

    fingerprint: str
    chunk_bytes: int
    sessions: int
    hit_ratio: float | None
    hit_ratio_ever: float | None
    tiers: list[TierRow]
    name: str = ""
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """A report, with the rates since the previous one."""

    report: Report
    caches: list[CacheRow]


class Watch:
    """Remembers the previous report. Rates use the server's clock, so a late answer does not distort them."""

    def __init__(self) -> None:
        self._before: Report | None = None

    def take(self, report: Report) -> Picture:
        before, self._before = self._before, report
        if before is not None and (before.pid != report.pid or before.uptime_s >= report.uptime_s):
            before = None  # another server
        seconds = report.uptime_s - before.uptime_s if before is not None else 0.0
        old = {(cache.group_bytes, cache.fingerprint): cache for cache in before.caches} if before is not None else {}
        rows = [_cache_row(cache, old.get((cache.group_bytes, cache.fingerprint)), seconds) for cache in report.caches]
        return Picture(report, rows)


def _cache_row(cache: CacheReport, before: CacheReport | None, seconds: float) -> CacheRow:
    counts, nbytes = cache.counts, cache.chunk_bytes
    # Groups of layers differ in size.
    stored_bytes = cache.payload_bytes / counts.chunks_resident if counts.chunks_resident else nbytes
    ratio_now = None
    pool_in = pool_out = None
    if before is not None:
        hit = counts.chunks_hit - before.counts.chunks_hit
        ratio_now = _ratio(hit, counts.chunks_asked - before.counts.chunks_asked)
        pool_in = (counts.chunks_committed - before.counts.chunks_committed) * stored_bytes / seconds
        pool_out = (counts.bytes_loaded - before.counts.bytes_loaded) / seconds
    pool = TierRow(
        TIER,
        Health.UP.name.lower(),
        counts.slots_used * nbytes,
        counts.slots_total * nbytes,
        cache.chunks,
        pool_in,
        pool_out,
        0,
        cache.by_group,
    )
    tiers_before = {tier.name: tier for tier in before.tiers} if before is not None else {}
    tiers = [_tier_row(tier, tiers_before.get(tier.name), stored_bytes, seconds) for tier in cache.tiers]
    ratio_ever = _ratio(counts.chunks_hit, counts.chunks_asked)
    tiers = [pool, *tiers]
    models = tuple(cache.models)
    return CacheRow(cache.fingerprint, nbytes, cache.sessions, ratio_now, ratio_ever, tiers, cache.name, models)


def _tier_row(tier: TierReport, before: TierReport | None, nbytes: float, seconds: float) -> TierRow:
    health = tier.health.lower() + (f": {tier.why}" if tier.why and tier.health != Health.UP.name else "")
    return TierRow(
        tier.name,
        health,
        tier.used_bytes,
        tier.capacity_bytes,
        max(tier.by_group) if tier.by_group else tier.chunks,
        None if before is None else (tier.stored - before.stored) * nbytes / seconds,
        None if before is None else (tier.loaded - before.loaded) * nbytes / seconds,
        tier.waiting + tier.under_way,
        tier.by_group,
        tier.cut_chunks,
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None
