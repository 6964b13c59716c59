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
from kv_tiers.tier_state import Health

from kv_server.report import CacheReport, Report
from kv_server.wire import Format

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
class Picture:
    """A report, and what changed since the previous one.

    before: the caches then, by format; empty: no previous report of this server is known.
    seconds: since then.
    """

    report: Report
    before: dict[Format, CacheReport]
    seconds: float


class Watch:
    """Remembers the previous report. Rates use the server's clock, so a late answer does not distort them."""

    def __init__(self) -> None:
        self._before: Report | None = None

    def take(self, report: Report) -> Picture:
        before, self._before = self._before, report
        if before is None or before.pid != report.pid or before.uptime_s >= report.uptime_s:  # it is another server
            return Picture(report, {}, 0.0)
        caches = {(cache.group_bytes, cache.fingerprint): cache for cache in before.caches}
        return Picture(report, caches, report.uptime_s - before.uptime_s)


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
        for cache in picture.report.caches:
            parts += [_cache(cache, picture), Text()]
        if not picture.report.caches:
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
    head.append(f"{len(report.sessions)} sessions{orphans}, {len(report.caches)} formats{opening}{peers}\n")
    if report.frozen:
        head.append("frozen: it stores nothing new and evicts nothing until kv freeze --end\n", style="bold")
    for state in (state for cache in report.caches for state in cache.directories.values()):
        head.append(f"directory: {on_one_line(state.spelled())}\n", style="bold red" if state.why else "")
    for drain in (cache.drain for cache in report.caches if cache.drain is not None):
        what = "is being drained" if drain.phase == "draining" else "stores nothing new until kv drain --end"
        head.append(f"this host {what}: {on_one_line(drain.spelled())}\n", style="bold")
    return head


def _cache(cache: CacheReport, picture: Picture) -> Table:
    before = picture.before.get((cache.group_bytes, cache.fingerprint))
    then, counts, seconds = (before or cache).counts, cache.counts, picture.seconds
    hit_ratio = _ratio(counts.chunks_hit - then.chunks_hit, counts.chunks_asked - then.chunks_asked)
    title = (
        f"hit ratio {_percent(hit_ratio)} now, {_percent(_ratio(counts.chunks_hit, counts.chunks_asked))} in all    "
        f"{cache.sessions} sessions, chunks of {_bytes(cache.chunk_bytes)}, "
        f"format {cache.fingerprint[:40] or '(unnamed)'}"
    )
    of_models = " of " + ", ".join(cache.models) if cache.models else ""
    table = _table(*([f"cache {cache.name}{of_models}"] if cache.name else []), title)
    table.add_column("tier", style="bold", no_wrap=True)
    slot_bytes = cache.chunk_bytes
    used_bytes, capacity_bytes = counts.slots_used * slot_bytes, counts.slots_total * slot_bytes
    pool = TierUsage(cache.held.chunks, used_bytes, capacity_bytes, by_group=cache.held.by_group)
    has_groups = any(len(usage.by_group) > 1 for usage in (pool, *(tier.usage for tier in cache.tiers)))
    chunks = "chunks (by group)" if has_groups else "chunks"
    for name in ("in use", "of", chunks, "in/s", "out/s", "to store"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("health")
    # Groups of layers differ in size.
    stored_bytes = cache.held.payload_bytes / counts.chunks_resident if counts.chunks_resident else slot_bytes

    def add(name: str, usage: TierUsage, moved_bytes: tuple[float, float] | None, waiting: int, health: Text) -> None:
        """moved_bytes: in and out since the previous report; None: not known."""
        rates = ("–", "–") if moved_bytes is None else (_bytes(moved / seconds) for moved in moved_bytes)
        used = (_bytes(usage.used_bytes), _bytes(usage.capacity_bytes), _chunks(usage))
        table.add_row(_plain(name), *used, *rates, f"{waiting:,}", _bar(usage), health)

    entered_bytes = (counts.chunks_committed - then.chunks_committed) * stored_bytes
    moved = None if before is None else (entered_bytes, float(counts.bytes_loaded - then.bytes_loaded))
    add(TIER, pool, moved, 0, _health(Health.UP, ""))
    tiers_before = {} if before is None else {tier.name: tier.lane for tier in before.tiers}
    for tier in cache.tiers:
        lane, was = tier.lane, tiers_before.get(tier.name)
        stored, loaded = (0, 0) if was is None else (lane.stored - was.stored, lane.loaded - was.loaded)
        moved = None if was is None else (stored * stored_bytes, loaded * stored_bytes)
        waiting = tier.spill.waiting + tier.spill.under_way
        add(tier.name, tier.usage, moved, waiting, _health(tier.health, tier.why))
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
    for name in ("in the pool", "quota", "chunks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("below, of its quota there")
    rows = [(cache, tenant) for cache in report.caches for tenant in cache.tenants]
    for cache, tenant in rows[:_MAX_ROWS]:
        shared = not tenant.tag.strip("0")
        label = (
            _plain(tenant.name)
            if tenant.name
            else Text("(shared)" if shared else f"tag {on_one_line(tenant.tag)}", style="dim")
        )
        below = ", ".join(
            f"{tier.name} {_bytes(quota.used_bytes)} of {_bytes(quota.quota_bytes)}"
            for tier in cache.tiers
            for quota in tier.usage.quotas
            if quota.tenant == tenant.tag
        )
        in_pool = _bytes(tenant.used_bytes), _bytes(tenant.quota_bytes), f"{tenant.chunks:,}"
        table.add_row(label, *in_pool, _plain(below or "–"))
    unlisted = sum(cache.tenants_known - len(cache.tenants) for cache in report.caches)
    _add_unlisted(table, len(rows) + unlisted)
    return table


def _table(*lines: str) -> Table:
    title = Text("\n").join(_plain(line, "bold") for line in lines)
    table = Table(title=title, title_justify="left", title_style="", header_style="dim")
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


def _health(health: Health, why: str) -> Text:
    if health is Health.UP:
        return Text("● up", style="green")
    return _plain(f"▲ {health.name.lower()}{': ' if why else ''}{why}", "bold red")


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
