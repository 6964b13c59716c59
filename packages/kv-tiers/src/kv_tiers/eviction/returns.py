"""How likely something comes back, learnt from what came back: by class and age, with nothing known beforehand.

Samples are watched from a use to the next one, or until they are too old to tell anything. Of each class and each
interval of age it is counted how many that reached the interval came back within it: a life table, in which those that
were lost from sight halfway do no harm (Kaplan and Meier, J. Am. Stat. Assoc. 53, 1958). A class of which little is
known leans on the coarser class that its name begins with.

From the table follows what keeping a chunk of some age is worth: the most returns per time of keeping it that any time
of keeping gives (the index of Gittins, J. R. Stat. Soc. B 41, 1979, for a job that may be stopped). Beckmann et al.,
"LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018, rank cached objects by a similar one.
"""

import math
from collections import deque
from typing import Final

Class = tuple[int, ...]

_PER_OCTAVE: Final = 4
_INTERVALS: Final = 36
_AT_CAPACITY: Final = 20
"""The interval that ends where the age is the tier's capacity; the first ends at a 32nd of it, the last at 13 times."""
_PRIOR_SAMPLES: Final = 16.0
"""What a coarser class counts for in a finer one, in samples."""
_NEVER: Final = 2e-4
"""What is believed of every interval before anything is known: next to nobody comes back."""
_REFRESH_EVERY: Final = 100
_LOST: Final = -1


class Sample:
    """One use, until the next. kind: its class, which may be corrected while nothing is counted yet."""

    __slots__ = ("born", "ended_in", "kind")

    def __init__(self, kind: Class, born: int) -> None:
        self.kind = kind
        self.born = born
        self.ended_in: int | None = None


class Returns:
    """Times and ages are in chunks stored. Amortised constant time a sample; at most as many samples as chunks."""

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity = capacity_chunks
        self._most_samples = max(1024, capacity_chunks)
        self._samples = 0
        self._ends = [max(1.0, capacity_chunks * 2 ** ((k - _AT_CAPACITY) / _PER_OCTAVE)) for k in range(_INTERVALS)]
        self._aging: list[deque[Sample]] = [deque() for _ in range(_INTERVALS - 1)]
        self._returned: dict[Class, list[float]] = {}
        self._stayed: dict[Class, list[float]] = {}
        self._worth: dict[Class, list[float]] = {}
        self._until_refresh = 1

    def watch(self, kind: Class, now: int) -> Sample:
        """Something of this class was used just now."""
        sample = Sample(kind, now)
        self._aging[0].append(sample)
        self._samples += 1
        if self._samples > self._most_samples:  # the oldest is lost from sight, which the table can bear
            next(aging for aging in reversed(self._aging) if aging).popleft()
            self._samples -= 1
        return sample

    def came_back(self, sample: Sample, now: int) -> None:
        if sample.ended_in is None:
            sample.ended_in = self._interval(now - sample.born)

    def lose(self, sample: Sample) -> None:
        """Nobody would notice any more if it came back."""
        sample.ended_in = _LOST

    def advance(self, now: int) -> None:
        """Count those that have reached the end of an interval. Not before: who returns early would count too soon."""
        for interval, aging in enumerate(self._aging):
            born_before = now - self._ends[interval]
            while aging and aging[0].born < born_before:
                sample = aging.popleft()
                if sample.ended_in is None or sample.ended_in > interval:
                    self._count(self._stayed, sample.kind, interval)
                    if interval + 1 < len(self._aging):
                        self._aging[interval + 1].append(sample)
                        continue
                elif sample.ended_in == interval:
                    self._count(self._returned, sample.kind, interval)
                self._samples -= 1
        self._until_refresh -= 1
        if not self._until_refresh:
            self._until_refresh = _REFRESH_EVERY
            self._worth.clear()

    def worth(self, kind: Class, age: int) -> float:
        """Expected returns per time of keeping one that was last used so long ago."""
        by_interval = self._worth.get(kind)
        if by_interval is None:
            by_interval = self._worth[kind] = self._rate(self._chances(kind))
        return by_interval[self._interval(age)]

    def _interval(self, age: int) -> int:
        if age <= self._ends[0]:
            return 0
        return min(_INTERVALS - 1, math.ceil(math.log2(age / self._capacity) * _PER_OCTAVE - 1e-9) + _AT_CAPACITY)

    def _count(self, table: dict[Class, list[float]], kind: Class, interval: int) -> None:
        for known in range(len(kind) + 1):
            table.setdefault(kind[:known], [0.0] * _INTERVALS)[interval] += 1

    def _chances(self, kind: Class) -> list[float]:
        """Of coming back within each interval, having reached it."""
        chances = [_NEVER] * _INTERVALS
        none = [0.0] * _INTERVALS
        for known in range(len(kind) + 1):
            returned, stayed = self._returned.get(kind[:known], none), self._stayed.get(kind[:known], none)
            chances = [
                (back + _PRIOR_SAMPLES * coarser) / (back + away + _PRIOR_SAMPLES)
                for back, away, coarser in zip(returned, stayed, chances, strict=True)
            ]
        return chances

    def _rate(self, chances: list[float]) -> list[float]:
        """At each interval's beginning: the most returns per time, over all times to give up."""
        widths = [end - begin for begin, end in zip([0.0, *self._ends], self._ends, strict=False)]
        rates = []
        for first in range(_INTERVALS):
            still_away, returns, kept, best = 1.0, 0.0, 0.0, 0.0
            for chance, width in zip(chances[first:], widths[first:], strict=True):
                back = still_away * chance
                returns += back
                kept += width * (still_away - back / 2)
                still_away -= back
                best = max(best, returns / kept if kept else 0.0)
            rates.append(best)
        return rates
