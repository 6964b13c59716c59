"""What engines looked up, loaded and stored during the last hour, day and month: for the page, in bounded memory.

The server's counters are read every few seconds, and what they have grown by is added to a period of each span. A
period in which they were not read, because the server did not run or answer, is not there.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

from kv_server.report import CacheReport, Report

SAMPLE_S: Final = 5.0
"""How often the counters are read."""
SPANS: Final = {"hour": (5, 720), "day": (60, 1440), "month": (900, 2880)}
"""By name, the seconds of a period, and the limit of periods."""

Amounts = tuple[int, int, int, int]
"""Chunks that were looked up, and those of them that were held; bytes that engines loaded, and that they stored."""
_NONE: Final[Amounts] = (0, 0, 0, 0)


class Past(msgspec.Struct, frozen=True):
    """One span, oldest period first. The lists are parallel.

    step_s: the seconds of a period.
    limit: how many periods there are at most.
    starts_s: when each began, in seconds since 1970.
    chunks_asked, chunks_hit: looked up then, and those of them that were held.
    loaded_bytes, stored_bytes: by engines.
    """

    step_s: int
    limit: int
    starts_s: list[int]
    chunks_asked: list[int]
    chunks_hit: list[int]
    loaded_bytes: list[int]
    stored_bytes: list[int]


@dataclass(slots=True)
class _Period:
    start_s: int
    amounts: Amounts


class Timeline:
    """The spans of one server. For one thread."""

    def __init__(self) -> None:
        self._before: dict[str, Amounts] | None = None  # by cache, as it was read last; None: never
        self._periods = {name: deque[_Period](maxlen=limit) for name, (_, limit) in SPANS.items()}

    def add(self, report: Report, at_s: float) -> None:
        """at_s: when the report was made, in seconds since 1970."""
        now = {cache.name: _amounts(cache) for cache in report.caches}
        before, self._before = now if self._before is None else self._before, now
        grown = _NONE
        for name, amounts in now.items():
            grown = _sum(grown, tuple(max(0, n - old) for n, old in zip(amounts, before.get(name, _NONE), strict=True)))
        for name, (step_s, _) in SPANS.items():
            periods, start_s = self._periods[name], int(at_s) // step_s * step_s
            if periods and periods[-1].start_s >= start_s:  # later, if the machine's clock was set back
                periods[-1].amounts = _sum(periods[-1].amounts, grown)
            else:
                periods.append(_Period(start_s, grown))

    def past(self, name: str) -> Past:
        """name: one of `SPANS`."""
        periods = self._periods[name]
        columns = [list(column) for column in zip(*(period.amounts for period in periods), strict=True)] or [[]] * 4
        return Past(*SPANS[name], [period.start_s for period in periods], *columns)


def _amounts(cache: CacheReport) -> Amounts:
    counts = cache.counts
    promoted = sum(tier.lane.loaded for tier in cache.tiers)  # into the pool, but by no engine
    stored = max(0, counts.chunks_committed - promoted) * cache.chunk_bytes
    return counts.chunks_asked, counts.chunks_hit, counts.bytes_loaded, stored


def _sum(one: Amounts, other: tuple[int, ...]) -> Amounts:
    lookups, hits, loaded, stored = (a + b for a, b in zip(one, other, strict=True))
    return lookups, hits, loaded, stored
