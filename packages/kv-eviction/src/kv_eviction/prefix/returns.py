"""How soon a chunk is requested again, learnt from a sample of all requests, whatever the tier holds.

Every chunk has a class (`class_of`). For each class and interval of age we count how many chunks reached the interval
and how many of those returned within it: a life table, in which chunks that are still away do no harm (Kaplan and
Meier, J. Am. Stat. Assoc. 53, 1958). A class with few chunks falls back on the table of all.

The table gives the value of keeping a chunk of some age: the highest rate of returns over any time of keeping it (the
index of Gittins, J. R. Stat. Soc. B 41, 1979, for a job that may be stopped). Beckmann et al., "LHD: Improving Cache
Hit Rate by Maximizing Hit Density", NSDI 2018, rank cached objects by a similar value.

The sample is of keys, and of what is requested, not of what is held: so the tables do not depend on the policy that
uses them, and nothing has to be kept in order to learn whether it returns.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final

from kv_core.keys import ChunkKey

_OF_REQUESTS: Final = 32
CLASSES: Final = 1 + 2 * _OF_REQUESTS
LAST: Final = 0
"""The last chunk of a prompt that was requested once: if it is partial, it never returns."""
_INTERVALS_PER_OCTAVE: Final = 2
_INTERVALS: Final = 19
_AT_CAPACITY: Final = 10
"""The interval that ends at the age of the tier's capacity; the first ends at a 32nd of it, the last at 16 times."""
_PRIOR_CHUNKS: Final = 20.0
"""The weight of the table of all classes in that of one, and of an interval in the next, in chunks."""
_NEVER: Final = 2e-4
"""The prior probability of a return: almost none."""
_DECAY: Final = 0.99
"""What counts keep from one estimate to the next, a quarter of the capacity later."""
_LEAST_PERIOD: Final = 1000


def growth_of(chunks_new: int, continues: bool) -> int:
    """What a request tells about all chunks of its prompt: how many chunks it added, and to something known or not."""
    step = 0 if chunks_new <= 1 else 1 if chunks_new <= 4 else 2 if chunks_new <= 16 else 3
    return 2 * step + continues


def class_of(uses: int, growth: int) -> int:
    """uses: how often the chunk was requested. growth: `growth_of` the latest of those requests."""
    step = uses - 1 if uses <= 2 else 2 if uses <= 5 else 3
    return 1 + 8 * step + growth


def ended(chunk_class: int) -> int:
    """The class of the same chunks once the latest of those requests is known to have ended its user's turn."""
    return chunk_class + _OF_REQUESTS * (0 < chunk_class <= _OF_REQUESTS)


class _Request:
    """The chunks of the sample that were requested at one time, and not since."""

    __slots__ = ("away", "keys", "requested_at")

    def __init__(self, keys: Sequence[ChunkKey], now: int) -> None:
        self.keys = keys
        self.requested_at = now
        self.away: dict[int, int] = {}
        """How many of them, by class."""


class _Known:
    """A chunk of the sample. latest: the request that was its latest."""

    __slots__ = ("chunk_class", "latest", "uses")

    def __init__(self, latest: _Request) -> None:
        self.latest = latest
        self.uses = 0
        self.chunk_class = LAST


class Returns:
    """Times and ages are in chunks requested. Amortised constant time per chunk of the sample."""

    def __init__(self, capacity_chunks: int) -> None:
        octaves = [(interval - _AT_CAPACITY) / _INTERVALS_PER_OCTAVE for interval in range(_INTERVALS)]
        self._ends = [max(1.0, capacity_chunks * 2**octave) for octave in octaves]
        self._widths = [end - begin for begin, end in zip([0.0, *self._ends], self._ends, strict=False)]
        self._known: dict[ChunkKey, _Known] = {}
        self._aging: list[deque[_Request]] = [deque() for _ in range(_INTERVALS)]  # by the interval they are in
        self._returned = [[0.0] * _INTERVALS for _ in range(CLASSES)]
        self._reached = [[0.0] * _INTERVALS for _ in range(CLASSES)]  # and left: by a return, or by ageing
        self._worth = [[0.0] * (_INTERVALS + 1) for _ in range(CLASSES)]
        self._period = max(_LEAST_PERIOD, capacity_chunks // 4)
        self._next_period = 0

    def requested(self, keys: Sequence[ChunkKey], growth: int, now: int, *, has_end: bool) -> None:
        """A prompt of which these chunks are in the sample is requested. has_end: its last chunk is among them."""
        self._advance(now)
        request = _Request(keys, now)
        away = request.away
        previous, interval = request, 0
        for place, key in enumerate(keys, 1):
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _Known(request)
            else:
                if known.latest is not previous:  # most chunks of a prompt have the same
                    previous = known.latest
                    interval = min(bisect_right(self._ends, now - previous.requested_at), _INTERVALS - 1)
                previous.away[known.chunk_class] -= 1
                self._returned[known.chunk_class][interval] += 1.0
                self._reached[known.chunk_class][interval] += 1.0
                known.latest = request
            known.uses += 1
            is_last = has_end and place == len(keys) and known.uses == 1
            chunk_class = known.chunk_class = LAST if is_last else class_of(known.uses, growth)
            away[chunk_class] = away.get(chunk_class, 0) + 1
        self._aging[0].append(request)

    def turn_ended(self, keys: Sequence[ChunkKey]) -> None:
        """The latest request of the last of these, which are in the sample, ended its user's turn."""
        latest = None
        for key in reversed(keys):
            known = self._known.get(key)
            if known is None or latest not in (None, known.latest):
                continue
            latest, before = known.latest, known.chunk_class
            known.chunk_class = ended(before)
            latest.away[before] -= 1
            latest.away[known.chunk_class] = latest.away.get(known.chunk_class, 0) + 1

    def _advance(self, now: int) -> None:
        """Count the chunks that have reached the end of an interval without a return, and forget the oldest."""
        for interval, aging in enumerate(self._aging):
            until = now - self._ends[interval]
            while aging and aging[0].requested_at <= until:
                request = aging.popleft()
                for chunk_class, chunks in request.away.items():
                    self._reached[chunk_class][interval] += chunks
                if interval + 1 < _INTERVALS:
                    self._aging[interval + 1].append(request)
                    continue
                for key in request.keys:
                    if self._known[key].latest is request:
                        del self._known[key]
        if now >= self._next_period:
            self._next_period = now + self._period
            self._estimate()

    def worth(self, chunk_class: int, age: float) -> float:
        """Expected returns per time of keeping a chunk that was requested this long ago."""
        return self._worth[chunk_class][bisect_right(self._ends, age)]

    def _estimate(self) -> None:
        pooled = []
        hazard = _NEVER
        for interval in range(_INTERVALS):
            returned = sum(counts[interval] for counts in self._returned)
            reached = sum(counts[interval] for counts in self._reached)
            hazard = (returned + _PRIOR_CHUNKS * hazard) / (reached + _PRIOR_CHUNKS)
            pooled.append(hazard)
        of_all = self._best_rates(pooled)
        for chunk_class, (all_returned, all_reached) in enumerate(zip(self._returned, self._reached, strict=True)):
            self._worth[chunk_class][:_INTERVALS] = (
                of_all
                if not any(all_reached)
                else self._best_rates(
                    [
                        (returned + _PRIOR_CHUNKS * prior) / (reached + _PRIOR_CHUNKS)
                        for returned, reached, prior in zip(all_returned, all_reached, pooled, strict=True)
                    ]
                )
            )
        for counts in (*self._returned, *self._reached):
            counts[:] = [count * _DECAY for count in counts]

    def _best_rates(self, hazards: list[float]) -> list[float]:
        """The value at each interval's beginning: the most returns per time, over all times at which to give up.

        With the time kept and the returns, both added up from the end, as the two axes, that is the slope of the upper
        hull of these points.
        """
        still_away, time_kept, returns = 1.0, 0.0, 0.0
        points = [(0.0, 0.0)]
        for hazard, width in zip(hazards, self._widths, strict=True):
            returned = still_away * hazard
            returns += returned
            time_kept += width * (still_away - returned / 2)
            still_away -= returned
            points.append((time_kept, returns))
        rates = [0.0] * _INTERVALS
        hull = [points[-1]]
        for interval in range(_INTERVALS - 1, -1, -1):
            time_kept, returns = points[interval]
            while len(hull) > 1 and _slope(points[interval], hull[-2]) >= _slope(points[interval], hull[-1]):
                hull.pop()
            rates[interval] = _slope(points[interval], hull[-1])
            hull.append(points[interval])
        return rates


def _slope(start: tuple[float, float], end: tuple[float, float]) -> float:
    time_kept = end[0] - start[0]
    return (end[1] - start[1]) / time_kept if time_kept > 0 else 0.0
