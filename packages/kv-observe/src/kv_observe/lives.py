"""Histograms of life in the pool: how long chunks stay, between which uses, and how long unused before they leave.

From a sample of the keys, with a record for each sampled chunk that is held: constant memory, and nothing on the path
of a request. A chunk's role is how it has served so far: `unused` since it was stored, used `once`, or `again`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, Literal

from kv_core.keys import ChunkKey

Span = Literal["residence", "idle", "gap"]
SPANS: Final[dict[Span, str]] = {
    "residence": "From storing a chunk in the pool to its eviction",
    "idle": "From the last use of a chunk, or from storing it, to its eviction",
    "gap": "From storing a chunk, or from a use of it, to its next use",
}
BUCKETS_LIFE_S: Final = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_ROLES: Final = ("unused", "once", "again")
_MAX_RECORDS: Final = 1 << 15
SAMPLED: Final = 32
"""One key in so many, of those whose chunks live."""


class Distribution:
    """bounds: upper ones of its buckets, ascending; there is one more without."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, by upper bound."""
        return list(zip((*map(repr, self._bounds), "+Inf"), map(float, accumulate(self.counts)), strict=True))


class Lives:
    """Of one pool. Times are seconds of any clock that does not go back."""

    def __init__(self, every: int = SAMPLED) -> None:
        """every: one key in so many is in the sample; a power of two, at most 256."""
        self._mask = every - 1
        self._records: dict[ChunkKey, tuple[float, float, int]] = {}  # stored, used or stored last, uses
        self.spans = {(span, role): Distribution(BUCKETS_LIFE_S) for span in SPANS for role in _ROLES}
        """By role."""

    def stored(self, keys: Iterable[ChunkKey], now_s: float) -> None:
        for key in self._sampled(keys):
            if len(self._records) >= _MAX_RECORDS:
                del self._records[next(iter(self._records))]
            self._records[key] = now_s, now_s, 0

    def used(self, keys: Iterable[ChunkKey], now_s: float) -> None:
        for key in self._sampled(keys):
            if (record := self._records.get(key)) is not None:
                stored_s, last_s, uses = record
                self._add("gap", uses, now_s - last_s)
                self._records[key] = stored_s, now_s, uses + 1

    def evicted(self, keys: Iterable[ChunkKey], now_s: float) -> None:
        for key in self._sampled(keys):
            if (record := self._records.pop(key, None)) is not None:
                stored_s, last_s, uses = record
                self._add("residence", uses, now_s - stored_s)
                self._add("idle", uses, now_s - last_s)

    def forgotten(self, keys: Iterable[ChunkKey]) -> None:
        """They left for another reason than room."""
        for key in self._sampled(keys):
            self._records.pop(key, None)

    def cleared(self) -> None:
        self._records.clear()

    def _sampled(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        mask = self._mask
        return [key for key in keys if not key[-1] & mask]

    def _add(self, span: Span, uses: int, seconds: float) -> None:
        self.spans[span, _ROLES[min(uses, len(_ROLES) - 1)]].add(max(0.0, seconds))
