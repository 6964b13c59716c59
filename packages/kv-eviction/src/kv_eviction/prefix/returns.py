"""The probability that something is used again, learnt online by role, age and traits, without prior knowledge.

Each sample is observed from one use to the next, or until it is too old to be informative. For each role and interval
of age we count how many of the samples that reached the interval returned within it (its *hazard*): a life table, in
which censored samples do no harm (Kaplan and Meier, J. Am. Stat. Assoc. 53, 1958). A role with few samples falls back
on the table of all roles, and an age that no sample has reached yet on the age before it.

A trait (a prompt of so many chunks, a turn that added so many) raises or lowers the probability at every age by one
factor, and the factors of all traits multiply (Cox, "Regression models and life-tables", J. R. Stat. Soc. B 34, 1972).
So a trait is learnt from all samples that have it; a table for each combination would have only a few. The factor
is the number of returns observed over the number expected without it, both counted as ages pass; the table in turn
weights a sample by its factors (Breslow's estimate, in the discussion of Cox's paper).

The probabilities give the value of keeping a chunk of some age: the highest rate of returns over any time of keeping it
(the index of Gittins, J. R. Stat. Soc. B 41, 1979, for a job that may be stopped). Beckmann et al., "LHD: Improving
Cache Hit Rate by Maximizing Hit Density", NSDI 2018, rank cached objects by a similar value.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

Trait = tuple[int, ...]
"""A trait and its value, both defined by the caller."""

_INTERVALS_PER_OCTAVE: Final = 2
_INTERVALS: Final = 18
_AT_CAPACITY: Final = 10
"""The interval that ends at the age of the tier's capacity; the first ends at a 32nd of it, the last at 11 times."""
_PRIOR_SAMPLES: Final = 16.0
"""The weight of an interval as the prior of the next one, in samples."""
_PRIOR_RETURNS: Final = 8.0
"""Returns, both observed and expected, with which a factor starts: about as many are needed to move it far from 1."""
_NEVER: Final = 2e-4
"""The prior probability of a return: almost none."""
_STEPS_PER_OCTAVE: Final = 2
_MAX_STEPS: Final = 12
_MAX_FACTOR: Final = 2.0 ** (_MAX_STEPS / _STEPS_PER_OCTAVE)
_MIN_FACTOR: Final = 1 / _MAX_FACTOR
"""Probabilities are quantised in steps of half an octave, from a 64th of the role's to 64 times as much."""
_REFRESH_EVERY: Final = 100
_LOST: Final = -1
_ALL: Final = -1


class Kind(NamedTuple):
    """Segments with the same value at the same age. step: the probability relative to the role's, in half octaves."""

    role: int
    step: int


class Factor:
    """The factor of one trait. value: returned / expected, cached because it is read far more often than it changes."""

    __slots__ = ("expected", "returned", "value")

    def __init__(self) -> None:
        self.returned = self.expected = _PRIOR_RETURNS
        self.value = 1.0


class Sample:
    """One use, observed until the next. role, factors: may be corrected as long as nothing has been counted.

    used_at: when it was. ended_in: the interval of age in which the next use was, or `_LOST`; None: there was none yet.
    """

    __slots__ = ("ended_in", "factors", "role", "used_at")

    def __init__(self, role: int, factors: list[Factor], used_at: int) -> None:
        self.role = role
        self.factors = factors
        self.used_at = used_at
        self.ended_in: int | None = None


class Returns:
    """Times and ages are in chunks stored. Amortised constant time per sample; at most as many samples as chunks."""

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity = capacity_chunks
        self._most_samples = max(1024, capacity_chunks)
        self._samples = 0
        octaves = [(interval - _AT_CAPACITY) / _INTERVALS_PER_OCTAVE for interval in range(_INTERVALS)]
        # The age at which each interval ends.
        self._ends = [max(1.0, capacity_chunks * 2**octave) for octave in octaves]
        self._aging: list[deque[Sample]] = [deque() for _ in range(_INTERVALS - 1)]  # by the interval they are in
        self._factors: dict[Trait, Factor] = {}
        # By role and interval: the samples that returned, and those that reached it, weighted by their factors.
        self._returned: dict[int, list[float]] = {_ALL: [0.0] * _INTERVALS}
        self._exposed: dict[int, list[float]] = {_ALL: [0.0] * _INTERVALS}
        self._hazards: dict[int, list[float]] = {}  # cached, by role and interval
        self._worth: dict[Kind, list[float]] = {}  # cached, by kind and interval
        self._until_refresh = 1

    def factors(self, traits: Sequence[Trait]) -> list[Factor]:
        factors = []
        for trait in traits:
            factor = self._factors.get(trait)
            if factor is None:
                factor = self._factors[trait] = Factor()
            factors.append(factor)
        return factors

    def kind(self, role: int, factors: Sequence[Factor]) -> Kind:
        return Kind(role, round(math.log2(_product(factors)) * _STEPS_PER_OCTAVE))

    def watch(self, role: int, factors: list[Factor], now: int) -> Sample:
        """Begin a sample: something of this role and these traits was used just now."""
        sample = Sample(role, factors, now)
        self._aging[0].append(sample)
        self._samples += 1
        if self._samples > self._most_samples:  # stop observing the oldest, which the table tolerates
            next(aging for aging in reversed(self._aging) if aging).popleft()
            self._samples -= 1
        return sample

    def observe_return(self, sample: Sample, now: int) -> None:
        if sample.ended_in is None:
            sample.ended_in = self._interval(now - sample.used_at)

    def stop_watching(self, sample: Sample) -> None:
        """End the sample's observation: a return would go unnoticed from now on."""
        sample.ended_in = _LOST

    def advance(self, now: int) -> None:
        """Count samples that have reached the end of an interval. Not before: early returns would be counted first."""
        for interval, aging in enumerate(self._aging):
            used_before = now - self._ends[interval]
            while aging and aging[0].used_at < used_before:
                sample = aging.popleft()
                if sample.ended_in is None or sample.ended_in > interval:
                    self._count(sample, interval, 0.0)
                    if interval + 1 < len(self._aging):
                        self._aging[interval + 1].append(sample)
                        continue
                elif sample.ended_in == interval:
                    self._count(sample, interval, 1.0)
                self._samples -= 1
        self._until_refresh -= 1
        if not self._until_refresh:
            self._until_refresh = _REFRESH_EVERY
            self._hazards.clear()
            self._worth.clear()

    def worth(self, kind: Kind, age: int) -> float:
        """Expected returns per time of keeping a segment that was last used this long ago."""
        by_interval = self._worth.get(kind)
        if by_interval is None:
            factor = 2.0 ** (kind.step / _STEPS_PER_OCTAVE)
            # Several returns within an interval count as one.
            hazards = [-math.expm1(-hazard * factor) for hazard in self._role_hazards(kind.role)]
            by_interval = self._worth[kind] = self._best_rates(hazards)
        return by_interval[self._interval(age)]

    def _interval(self, age: int) -> int:
        if age <= self._ends[0]:
            return 0
        steps = math.ceil(math.log2(age / self._capacity) * _INTERVALS_PER_OCTAVE - 1e-9)
        return min(_INTERVALS - 1, steps + _AT_CAPACITY)

    def _count(self, sample: Sample, interval: int, returned: float) -> None:
        # A sample that returns does so halfway through the interval on average, and is not exposed for the rest.
        exposed = _product(sample.factors) * (1 - returned / 2)
        role = sample.role
        expected = exposed * (self._hazards.get(role) or self._role_hazards(role))[interval]
        for factor in sample.factors:
            factor.returned += returned
            factor.expected = total_expected = factor.expected + expected / factor.value
            factor.value = factor.returned / total_expected
        if role not in self._returned:
            self._returned[role], self._exposed[role] = [0.0] * _INTERVALS, [0.0] * _INTERVALS
        if returned:
            self._returned[_ALL][interval] += returned
            self._returned[role][interval] += returned
        self._exposed[_ALL][interval] += exposed
        self._exposed[role][interval] += exposed

    def _role_hazards(self, role: int) -> list[float]:
        """For each interval, the probability of a return within it, given that it was reached. All factors are 1."""
        hazards = self._hazards.get(role)
        if hazards is None:
            hazards = []
            hazard = _NEVER
            for returned, exposed in zip(self._returned[_ALL], self._exposed[_ALL], strict=True):
                hazard = (returned + _PRIOR_SAMPLES * hazard) / (exposed + _PRIOR_SAMPLES)
                hazards.append(hazard)
            if role in self._returned:
                ratio = 1.0  # of this role's hazards to those of all roles
                for interval, (returned, exposed) in enumerate(
                    zip(self._returned[role], self._exposed[role], strict=True)
                ):
                    expected = exposed * hazards[interval]
                    ratio = (returned + _PRIOR_RETURNS * ratio) / (expected + _PRIOR_RETURNS)
                    hazards[interval] *= ratio
            self._hazards[role] = hazards
        return hazards

    def _best_rates(self, hazards: list[float]) -> list[float]:
        """The value at each interval's beginning: the most returns per time, over all times at which to give up."""
        widths = [end - begin for begin, end in zip([0.0, *self._ends], self._ends, strict=False)]
        rates = []
        for first in range(_INTERVALS):
            still_away, returns, time_kept, best = 1.0, 0.0, 0.0, 0.0
            for hazard, width in zip(hazards[first:], widths[first:], strict=True):
                returned = still_away * hazard
                returns += returned
                time_kept += width * (still_away - returned / 2)
                still_away -= returned
                if time_kept and returns > best * time_kept:
                    best = returns / time_kept
            rates.append(best)
        return rates


def _product(factors: Sequence[Factor]) -> float:
    product = 1.0
    for factor in factors:
        product *= factor.value
    return product if _MIN_FACTOR < product < _MAX_FACTOR else min(_MAX_FACTOR, max(_MIN_FACTOR, product))
