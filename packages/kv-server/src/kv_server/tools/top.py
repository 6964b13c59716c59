"""What `kv top` shows: a server's report, and the change since the previous one. It is readable without colours too."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kv_core.errors import ConfigError
from kv_core.log import on_one_line
from kv_tiers.cache.host import TIER
from kv_tiers.tier import TierUsage
from kv_tiers.tier_state import Health, TierState

from kv_server.report import CacheReport, Report

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError:
    raise ConfigError("`kv top` needs the package rich: pip install 'kv-server[top]'") from None

_BAR_CHARS: Final = 12
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MAX_ROWS: Final = 12
"""Rows of sessions, and of tenants, so that a terminal has room for them."""


@dataclass(frozen=True, slots=True)
class TierRow:
    """The pool, or a tier below it.

    in_bytes_s, out_bytes_s: stored there and loaded from there per second; None while that is not known.
    """

    name: str
    usage: TierUsage
    in_bytes_s: float | None
    out_bytes_s: float | None
    waiting_chunks: int = 0
    health: Health = Health.UP
    why: str = ""


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One format's cache.

    hit_ratio: of the chunks requested since the previous report; None: there were none, or no previous report.
    hit_ratio_ever: since the start; None: nothing was requested.
    """

    report: CacheReport
    hit_ratio: float | None
    hit_ratio_ever: float | None
    tiers: list[TierRow]


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
    stored_bytes = cache.held.payload_bytes / counts.chunks_resident if counts.chunks_resident else nbytes
    ratio_now = None
    pool_in = pool_out = None
    if before is not None:
        hit = counts.chunks_hit - before.counts.chunks_hit
        ratio_now = _ratio(hit, counts.chunks_asked - before.counts.chunks_asked)
        pool_in = (counts.chunks_committed - before.counts.chunks_committed) * stored_bytes / seconds
        pool_out = (counts.bytes_loaded - before.counts.bytes_loaded) / seconds
    used_bytes, capacity_bytes = counts.slots_used * nbytes, counts.slots_total * nbytes
    usage = TierUsage(cache.held.chunks, used_bytes, capacity_bytes, by_group=cache.held.by_group)
    tiers_before = {tier.name: tier for tier in before.tiers} if before is not None else {}
    tiers = [_tier_row(tier, tiers_before.get(tier.name), stored_bytes, seconds) for tier in cache.tiers]
    ratio_ever = _ratio(counts.chunks_hit, counts.chunks_asked)
    return CacheRow(cache, ratio_now, ratio_ever, [TierRow(TIER, usage, pool_in, pool_out), *tiers])


def _tier_row(tier: TierState, before: TierState | None, nbytes: float, seconds: float) -> TierRow:
    return TierRow(
        tier.name,
        tier.usage,
        None if before is None else (tier.lane.stored - before.lane.stored) * nbytes / seconds,
        None if before is None else (tier.lane.loaded - before.lane.loaded) * nbytes / seconds,
        tier.spill.waiting + tier.spill.under_way,
        tier.health,
        tier.why,
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def plain_console() -> Console:
    """A console for output that is read once or by a program: no colours, and wide enough without a terminal."""
    console = Console(no_color=True, highlight=False)
    return console if console.is_terminal else Console(no_color=True, highlight=False, width=140)


@contextmanager
def on_screen() -> Iterator[Callable[[RenderableType], None]]:
    """Take over the whole terminal, and restore it at the end. Each picture is shown until the next."""
    with Live(screen=True, auto_refresh=False, transient=True) as live:
        yield lambda picture: live.update(picture, refresh=True)


def draw(picture: Picture | None, where: str, away: str) -> RenderableType:
    """picture: the last one, if any. away: why the server does not answer now, or ""."""
    parts: list[RenderableType] = [_head(picture, where, away)]
    if picture is not None:
        for row in picture.caches:
            parts += [_cache(row), Text()]
        if not picture.caches:
            parts.append(Text("No engine has registered yet.", style="dim"))
        parts += [_tenants(picture.report), Text(), _sessions(picture.report)]
    return Group(*parts)


def _head(picture: Picture | None, where: str, away: str) -> Text:
    head = Text()
    if away:
        head.append(f"▲ away at {time.strftime('%H:%M:%S')}: {on_one_line(away)}\n", style="bold red")
        head.append("  asking again; the last known state follows\n" if picture else "")
    if picture is None:
        return head if away else head.append(f"asking {on_one_line(where)}")
    report = picture.report
    head.append("kv-server ", style="bold")
    head.append(
        f"{on_one_line(report.package)}, process {report.pid}, up {_span(report.uptime_s)}, at {on_one_line(where)}\n"
    )
    opening = f", opening {report.opening}" if report.opening else ""
    orphans = f", {report.orphans} ended while writing" if report.orphans else ""
    peers = ""
    if report.peers is not None:
        peers = f", {report.peers.connections} connections of peers, {_bytes(report.peers.sent_bytes)} sent to them"
    head.append(f"{len(report.sessions)} sessions{orphans}, {len(picture.caches)} formats{opening}{peers}\n")
    for state in (state for cache in report.caches for state in cache.directories.values()):
        head.append(f"directory: {on_one_line(state.spelled())}\n", style="bold red" if state.why else "")
    for drain in (cache.drain for cache in report.caches if cache.drain is not None):
        what = "is being drained" if drain.phase == "draining" else "stores nothing new until kv drain --end"
        head.append(f"this host {what}: {on_one_line(drain.spelled())}\n", style="bold")
    return head


def _cache(row: CacheRow) -> Table:
    cache = row.report
    title = (
        f"hit ratio {_percent(row.hit_ratio)} now, {_percent(row.hit_ratio_ever)} in all    "
        f"{cache.sessions} sessions, chunks of {_bytes(cache.chunk_bytes)}, "
        f"format {cache.fingerprint[:40] or '(unnamed)'}"
    )
    if cache.name:
        title = f"cache {cache.name}{' of ' + ', '.join(cache.models) if cache.models else ''}\n{title}"
    table = _table("\n".join(_plain(line).plain for line in title.split("\n")))
    table.add_column("tier", style="bold", no_wrap=True)
    has_groups = any(len(tier.usage.by_group) > 1 for tier in row.tiers)
    chunks = "chunks (by group)" if has_groups else "chunks"
    for name in ("in use", "of", chunks, "in/s", "out/s", "to store"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("health")
    for tier in row.tiers:
        table.add_row(
            _plain(tier.name),
            _bytes(tier.usage.used_bytes),
            _bytes(tier.usage.capacity_bytes),
            _chunks(tier.usage),
            _bytes(tier.in_bytes_s),
            _bytes(tier.out_bytes_s),
            f"{tier.waiting_chunks:,}",
            _bar(tier.usage),
            _health(tier),
        )
    return table


def _sessions(report: Report) -> Table:
    table = _table("sessions")
    for name in ("session", "process"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("engine")
    table.add_column("shards", justify="right")
    table.add_column("facts")
    for session in report.sessions[:_MAX_ROWS]:
        facts = ", ".join(f"{name} {value}" for name, value in session.facts.items())
        process = str(session.pid) if session.pid else "elsewhere"
        table.add_row(str(session.session), process, _plain(session.engine), str(session.shards), _plain(facts))
    _add_unlisted(table, len(report.sessions))
    return table


def _tenants(report: Report) -> Table:
    table = _table("tenants")
    table.add_column("tenant", no_wrap=True)
    for name in ("in use", "quota", "chunks"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [tenant for cache in report.caches for tenant in cache.tenants]
    for tenant in rows[:_MAX_ROWS]:
        shared = not tenant.tag.strip("0")
        label = (
            _plain(tenant.name)
            if tenant.name
            else Text("(shared)" if shared else f"tag {on_one_line(tenant.tag)}", style="dim")
        )
        table.add_row(label, _bytes(tenant.used_bytes), _bytes(tenant.quota_bytes), f"{tenant.chunks:,}")
    unlisted = sum(cache.tenants_known - len(cache.tenants) for cache in report.caches)
    _add_unlisted(table, len(rows) + unlisted)
    return table


def _table(title: str) -> Table:
    table = Table(title=_plain(title, "bold"), title_justify="left", title_style="", header_style="dim")
    table.box, table.pad_edge, table.padding = None, False, (0, 2, 0, 0)
    return table


def _add_unlisted(table: Table, rows: int) -> None:
    if rows > _MAX_ROWS:
        table.add_row("…", "", "", f"and {rows - _MAX_ROWS} more")


def _plain(text: str, style: str = "") -> Text:
    """Text from outside: no markup, and nothing that moves the cursor."""
    return Text(on_one_line(text), style=style)


def _chunks(usage: TierUsage) -> str:
    """Each chunk once, however many groups and shards are stored of it, if the tier reports groups."""
    if usage.chunks is None:
        return "–"
    by_group = f" ({' / '.join(f'{chunks:,}' for chunks in usage.by_group)})" if len(usage.by_group) > 1 else ""
    cut = f", {usage.cut_chunks:,} cut" if usage.cut_chunks else ""
    return f"{max(usage.by_group, default=usage.chunks):,}{by_group}{cut}"


def _health(tier: TierRow) -> Text:
    if tier.health is Health.UP:
        return Text("● up", style="green")
    return _plain(f"▲ {tier.health.name.lower()}{': ' if tier.why else ''}{tier.why}", "bold red")


def _bar(usage: TierUsage) -> str:
    if not usage.capacity_bytes or usage.used_bytes is None:
        return ""
    share = min(1.0, usage.used_bytes / usage.capacity_bytes)
    full = round(share * _BAR_CHARS)
    return f"{'█' * full}{'░' * (_BAR_CHARS - full)} {share:4.0%}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "–"
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_UNITS[unit]}"


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1%}"


def _span(seconds: float) -> str:
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {remainder} s" if minutes else f"{remainder} s"
