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
        self._published: tuple[float, ...] | None = None
        self._last: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_SEVERAL)
        self._ratios: deque[float] = deque(maxlen=_SEVERAL)  # for each of them, log(measured / expected seconds)
        self._ratios_by: tuple[float, ...] | None = None  # the coefficients that gave the expected seconds
        self._forget()

    def _forget(self) -> None:
        count = self._features
        self._products = [[0.0] * count for _ in range(count)]
        self._seconds, self._mean = [0.0] * count, [0.0] * count
        self._weight = 0.0
        self._fit_at = 0
        self._settled_at: float = 2 * self._min_samples
        self.samples = 0

    def add(self, features: Sequence[float], seconds: float, *, is_beyond: bool = False) -> None:
        """Add a sample. Constant time. is_beyond: of far more work than all before, from which nothing can be expected
        of it."""
        if not seconds > 0.0:
            return
        sample, seconds = tuple(features), max(seconds, _SHORTEST_S)
        self._last.append((sample, seconds))
        expected = None if self._published is None or is_beyond else self._expected(self._published, sample)
        if expected is not None and (recent := self._samples_since_change(log(seconds / expected))):
            self._forget()
            for recent_sample, recent_s in recent:
                self._count(recent_sample, recent_s, recent_s)
            self._last.clear()
            self._ratios.clear()
            self._published = self._ratios_by = self._fit()
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
        if self.samples >= self._fit_at and (self.samples >= self._min_samples or self._published is not None):
            # A sample among many moves the fit little, and engines ask in every step.
            self._fit_at = self.samples + max(1, min(self.samples, self._memory) // 8)
            fit = self._fit()
            mean = [total / self._weight for total in self._mean]
            small_work = [1.0, *(part / 4 for part in mean[1:])]  # the fixed part shows there
            is_settling = self.samples >= self._settled_at
            if is_settling:  # the first fits are rough, whatever they agree with
                self._settled_at = 2 * self.samples if self.samples < self._memory else inf
            if (
                self._published is None
                or is_settling
                or _difference(self._published, fit, mean) > _DEADBAND
                or _difference(self._published, fit, small_work) > 2.5 * _DEADBAND
            ):
                self._published = fit
        return self._published

    def seconds(self, features: Sequence[float]) -> float | None:
        """The expected duration for these features; None while unknown."""
        published = self.coefficients
        return None if published is None else _dot(published, features)

    @staticmethod
    def _expected(coefficients: tuple[float, ...], sample: Sequence[float]) -> float:
        return max(_dot(coefficients, sample), _SHORTEST_S)

    def _samples_since_change(self, ratio: float) -> list[tuple[tuple[float, ...], float]]:
        """The last samples, if what is measured has changed before them; else none. ratio: the last sample's."""
        ratios, published = self._ratios, self._published
        if self._ratios_by is published or published is None:
            ratios.append(ratio)
        else:
            self._ratios_by = published
            ratios.clear()
            ratios.extend(log(seconds / self._expected(published, sample)) for sample, seconds in self._last)
        if abs(ratios[-1]) > _FAR_OFF_LOG and len(ratios) >= _FEW:
            latest = list(ratios)[-_FEW:]
            if min(latest) > _FAR_OFF_LOG or max(latest) < -_FAR_OFF_LOG:
                return list(self._last)[-_FEW:]
        if len(ratios) == _SEVERAL and abs(mean := sum(ratios) / _SEVERAL) > _OFF_ON_AVERAGE:
            variance = sum((ratio - mean) ** 2 for ratio in ratios) / _SEVERAL
            if abs(mean) > _SPREADS * sqrt(variance):
                return list(self._last)
        return []

    def _count(self, sample: Sequence[float], seconds: float, scale: float) -> None:
        """Add a sample to the sums. scale: the seconds that its error is relative to."""
        keep, weight = self._keep, 1.0 / (scale * scale)
        for row, row_feature in enumerate(sample):
            weighted = weight * row_feature
            products = zip(self._products[row], sample, strict=True)
            self._products[row] = [keep * product + weighted * feature for product, feature in products]
            self._seconds[row] = keep * self._seconds[row] + weighted * seconds
            self._mean[row] = keep * self._mean[row] + row_feature
        self._weight = keep * self._weight + 1.0
        self.samples += 1

    def _fit(self) -> tuple[float, ...]:
        """Non-negative least squares: of all subsets of the features, the best fit with no coefficient below 0."""
        usable = [number for number in range(self._features) if self._products[number][number] > 0.0]
        ridge = [1e-6 if number == _AMOUNT else 0.01 + 1.0 / self._weight for number in range(self._features)]
        best, least = (0.0,) * self._features, 0.0  # the error, minus that with no feature at all
        for count in range(len(usable), 0, -1):
            for subset in combinations(usable, count):
                solved = _solve(
                    [
                        [self._products[row][column] * (1.0 + ridge[row] * (row == column)) for column in subset]
                        for row in subset
                    ],
                    [self._seconds[row] for row in subset],
                )
                if solved is None or min(solved) < 0.0:
                    continue
                if count == self._features:  # nothing with fewer is better
                    return tuple(solved)
                reduction = sum(part * self._seconds[row] for part, row in zip(solved, subset, strict=True))
                if -reduction < least:
                    least = -reduction
                    solution = dict(zip(subset, solved, strict=True))
                    best = tuple(solution.get(number, 0.0) for number in range(self._features))
        return best


def _dot(coefficients: Sequence[float], features: Sequence[float]) -> float:
    total: float = sum(map(mul, coefficients, features))
    return total


def _difference(old: Sequence[float], new: Sequence[float], point: Sequence[float]) -> float:
    """The difference of two sets of coefficients at this point, relative to the old one."""
    old_s, new_s = _dot(old, point), _dot(new, point)
    return abs(new_s - old_s) / max(old_s, 1e-12)


def _solve(matrix: list[list[float]], rhs: list[float]) -> list[float] | None:
    """By Gaussian elimination; None: the matrix is singular, or nearly so."""
    size = len(rhs)
    rows = [[*row, value] for row, value in zip(matrix, rhs, strict=True)]
    for diagonal in range(size):
        pivot = rows[diagonal][diagonal]  # the diagonal suffices for a positive definite matrix
        if pivot <= 1e-12 * matrix[diagonal][diagonal]:
            return None
        for row in rows[diagonal + 1 :]:
            part = row[diagonal] / pivot
            for column in range(diagonal, size + 1):
                row[column] -= part * rows[diagonal][column]
    solved = [0.0] * size
    for diagonal in reversed(range(size)):
        solved_part = sum(rows[diagonal][column] * solved[column] for column in range(diagonal + 1, size))
        solved[diagonal] = (rows[diagonal][size] - solved_part) / rows[diagonal][diagonal]
    return solved
