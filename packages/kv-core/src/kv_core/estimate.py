"""Online estimators of durations.

An `Estimator` fits seconds to a few features (a fixed part, bytes, tokens) by least squares of the relative error, so
that short samples count as much as long ones. Coefficients are never negative. Old samples fade, and a single outlier
has little effect. If the last few samples are all far off in the same direction, or the last several are off on average
by more than their spread explains, all earlier samples are discarded, because what is measured has changed.

The published `coefficients` settle after some samples and then stay until the fit is `_DEADBAND` away from them. So a
decision based on them does not flap while samples are noisy, and changes once when their distribution does.
"""

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from math import inf, log, sqrt
from operator import mul
from typing import Final

_DEADBAND: Final = 0.15
_CLIP: Final = 4.0
"""A sample counts as at most this many times, and at least one part in this many, of what was expected."""
_SHORTEST_S: Final = 1e-7
_FAR_OFF_LOG: Final = log(1.6)
_FEW: Final = 4
"""This many consecutive samples, each far off, are a change."""
_SEVERAL: Final = 12
_OFF_ON_AVERAGE: Final = 0.18  # a logarithm: 20 %
_SPREADS: Final = 1.5
"""Samples are a change if the mean of their log ratios to the expectation exceeds both 20 % and this many standard
deviations of a single one, which is five of their mean."""
_AMOUNT: Final = 1
"""The index of the feature that measures the amount of work. Where samples leave it open, time is assumed to be
proportional to it: the fit penalises every other feature, by one sample and a hundredth of the weight of all."""


class Estimator:
    """Estimates one duration. Features are non-negative; the first is 1. Not thread-safe."""

    def __init__(self, features: int, *, memory: int = 64, min_samples: int = 4) -> None:
        """memory: number of samples after which older ones fade.
        min_samples: with fewer, there is no estimate.
        """
        self._features = features
        self._memory = memory
        self._keep = 1.0 - 1.0 / memory
        self._min_samples = min_samples
        self._said: tuple[float, ...] | None = None
        self._last: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_SEVERAL)
        self._ratios: deque[float] = deque(maxlen=_SEVERAL)  # their logs of seconds measured to seconds expected
        self._ratios_by: tuple[float, ...] | None = None  # the coefficients of that expectation
        self._forget()

    def _forget(self) -> None:
        count = self._features
        self._products = [[0.0] * count for _ in range(count)]
        self._seconds, self._mean = [0.0] * count, [0.0] * count
        self._weight = 0.0
        self._fit_at = 0
        self._settled_at: float = 2 * self._min_samples
        self.samples = 0

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Add a sample. Constant time."""
        if not seconds > 0.0:
            return
        sample, seconds = tuple(features), max(seconds, _SHORTEST_S)
        self._last.append((sample, seconds))
        expected = None if self._said is None else self._expected(self._said, sample)
        if expected is not None and (new := self._since_a_change(log(seconds / expected))):
            self._forget()
            for one, its_seconds in new:
                self._count(one, its_seconds, its_seconds)
            self._last.clear()
            self._ratios.clear()
            self._said = self._ratios_by = self._fit()
            return
        if expected is None:
            self._count(sample, seconds, seconds)
        else:
            self._count(sample, min(max(seconds, expected / _CLIP), expected * _CLIP), expected)

    def trust(self) -> None:
        """Publish a fit even to fewer samples than `min_samples`, if there is any."""
        self._min_samples = max(1, min(self._min_samples, self.samples))

    @property
    def coefficients(self) -> tuple[float, ...] | None:
        """Seconds for one of each feature; None: nothing is known yet."""
        if self.samples >= self._fit_at and (self.samples >= self._min_samples or self._said is not None):
            # A sample among many moves the fit little, and engines ask in every step.
            self._fit_at = self.samples + max(1, min(self.samples, self._memory) // 8)
            fit = self._fit()
            mean = [of_feature / self._weight for of_feature in self._mean]
            small = [1.0, *(part / 4 for part in mean[1:])]  # the fixed part shows there
            is_settling = self.samples >= self._settled_at
            if is_settling:  # the first fits are rough, whatever they agree with
                self._settled_at = 2 * self.samples if self.samples < self._memory else inf
            if (
                self._said is None
                or is_settling
                or _difference(self._said, fit, mean) > _DEADBAND
                or _difference(self._said, fit, small) > 2.5 * _DEADBAND
            ):
                self._said = fit
        return self._said

    def seconds(self, features: Sequence[float]) -> float | None:
        """The expected duration for these features; None while unknown."""
        said = self.coefficients
        return None if said is None else _dot(said, features)

    @staticmethod
    def _expected(said: tuple[float, ...], sample: Sequence[float]) -> float:
        return max(_dot(said, sample), _SHORTEST_S)

    def _since_a_change(self, ratio: float) -> list[tuple[tuple[float, ...], float]]:
        """The last samples, if what is measured has changed before them; else none. ratio: the last one's."""
        ratios, said = self._ratios, self._said
        if self._ratios_by is said or said is None:
            ratios.append(ratio)
        else:
            self._ratios_by = said
            ratios.clear()
            ratios.extend(log(seconds / self._expected(said, sample)) for sample, seconds in self._last)
        if abs(ratios[-1]) > _FAR_OFF_LOG and len(ratios) >= _FEW:
            few = list(ratios)[-_FEW:]
            if min(few) > _FAR_OFF_LOG or max(few) < -_FAR_OFF_LOG:
                return list(self._last)[-_FEW:]
        if len(ratios) == _SEVERAL and abs(mean := sum(ratios) / _SEVERAL) > _OFF_ON_AVERAGE:
            variance = sum((ratio - mean) ** 2 for ratio in ratios) / _SEVERAL
            if abs(mean) > _SPREADS * sqrt(variance):
                return list(self._last)
        return []

    def _count(self, sample: Sequence[float], seconds: float, scale: float) -> None:
        """scale: what an error is relative to."""
        keep, weight = self._keep, 1.0 / (scale * scale)
        for row, mine in enumerate(sample):
            weighted = weight * mine
            products = zip(self._products[row], sample, strict=True)
            self._products[row] = [keep * product + weighted * other for product, other in products]
            self._seconds[row] = keep * self._seconds[row] + weighted * seconds
            self._mean[row] = keep * self._mean[row] + mine
        self._weight = keep * self._weight + 1.0
        self.samples += 1

    def _fit(self) -> tuple[float, ...]:
        """Non-negative least squares: of all subsets of the features, the best fit with no coefficient below 0."""
        everything = [number for number in range(self._features) if self._products[number][number] > 0.0]
        ridge = [1e-6 if number == _AMOUNT else 0.01 + 1.0 / self._weight for number in range(self._features)]
        best, least = (0.0,) * self._features, 0.0  # the error, minus that with no feature at all
        for count in range(len(everything), 0, -1):
            for chosen in combinations(everything, count):
                solved = _solve(
                    [
                        [self._products[row][column] * (1.0 + ridge[row] * (row == column)) for column in chosen]
                        for row in chosen
                    ],
                    [self._seconds[row] for row in chosen],
                )
                if solved is None or min(solved) < 0.0:
                    continue
                if count == self._features:  # nothing with fewer is better
                    return tuple(solved)
                gained = sum(part * self._seconds[row] for part, row in zip(solved, chosen, strict=True))
                if -gained < least:
                    least = -gained
                    given = dict(zip(chosen, solved, strict=True))
                    best = tuple(given.get(number, 0.0) for number in range(self._features))
        return best


def _dot(coefficients: Sequence[float], features: Sequence[float]) -> float:
    total: float = sum(map(mul, coefficients, features))
    return total


def _difference(one: Sequence[float], other: Sequence[float], point: Sequence[float]) -> float:
    """The difference at this point, relative to the first."""
    before, after = _dot(one, point), _dot(other, point)
    return abs(after - before) / max(before, 1e-12)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """By Gaussian elimination; None: the matrix is singular, or nearly so."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        pivot = rows[at][at]  # the diagonal suffices for a positive definite matrix
        if pivot <= 1e-12 * matrix[at][at]:
            return None
        for below in rows[at + 1 :]:
            part = below[at] / pivot
            for column in range(at, size + 1):
                below[column] -= part * rows[at][column]
    solved = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][column] * solved[column] for column in range(at + 1, size))
        solved[at] = (rows[at][size] - known) / rows[at][at]
    return solved
