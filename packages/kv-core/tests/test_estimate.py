"""Estimates follow what is measured, hold still while it is noise, and forget what has changed."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.estimate import Estimator

RATES = st.floats(1e-12, 1e-3)
FIXED = st.floats(1e-6, 1.0)


def fed(estimator: Estimator, line: tuple[float, float], sizes: list[int], noise: float = 0.0, seed: int = 1) -> None:
    rng = random.Random(seed)
    for size in sizes:
        estimator.add((1.0, size), (line[0] + line[1] * size) * rng.lognormvariate(0.0, noise))
        _ = estimator.coefficients  # as if somebody decided by it


def sizes(count: int, seed: int = 2) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 1 << 24) for _ in range(count)]


def test_before_there_are_samples_nothing_is_known() -> None:
    estimator = Estimator(2, min_samples=3)
    assert estimator.coefficients is None and estimator.seconds((1.0, 5.0)) is None
    fed(estimator, (1.0, 1e-6), sizes(2))
    assert estimator.seconds((1.0, 5.0)) is None
    fed(estimator, (1.0, 1e-6), sizes(1, seed=9))
    assert estimator.seconds((1.0, 5.0)) is not None


@given(FIXED, st.floats(1e-9, 1e-6))
@settings(max_examples=30, deadline=None)
def test_a_line_is_found(fixed_s: float, byte_s: float) -> None:
    estimator = Estimator(2)
    fed(estimator, (fixed_s, byte_s), sizes(100))
    for size, off in ((1 << 21, 0.5), (1 << 23, 0.25), (1 << 24, 0.35)):  # where it is seldom measured it may be rough
        assert estimator.seconds((1.0, size)) == pytest.approx(fixed_s + byte_s * size, rel=off)


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(-1.0, 1e4)), max_size=40))
def test_whatever_was_measured_more_never_takes_less(samples: list[tuple[float, float]]) -> None:
    estimator = Estimator(3)
    for size, seconds in samples:
        estimator.add((1.0, size, size * size), seconds)
    if (known := estimator.coefficients) is not None:
        assert min(known) >= 0.0
        expected = [estimator.seconds((1.0, size, size * size)) or 0.0 for size in (0, 1, 10, 1000, 1e6)]
        assert expected == sorted(expected)


@given(FIXED, RATES, st.integers(0, 1000))
@settings(max_examples=15, deadline=None, derandomize=True)  # three seeds in a thousand look like a change
def test_noise_does_not_move_it_often(fixed_s: float, rate: float, seed: int) -> None:
    """Samples off by 30 % in either direction: after it has settled, what it says changes a few times in 500."""
    estimator = Estimator(2)
    fed(estimator, (fixed_s, rate), sizes(150), noise=0.3, seed=seed)
    said = []
    for size, one in zip(sizes(500, seed=seed + 7), range(500), strict=True):
        fed(estimator, (fixed_s, rate), [size], noise=0.3, seed=seed * 1000 + one)
        said.append(estimator.coefficients)
    assert sum(before != after for before, after in pairwise(said)) <= 12


@pytest.mark.parametrize("factor", [0.01, 0.1, 10.0, 100.0])
def test_what_has_changed_is_learnt_from_a_few_samples(factor: float) -> None:
    estimator = Estimator(2)
    fed(estimator, (0.001, 1e-9), sizes(1000), noise=0.1)
    fed(estimator, (0.001 * factor, 1e-9 * factor), sizes(6, seed=3), noise=0.1)
    size = 1 << 23
    assert estimator.seconds((1.0, size)) == pytest.approx(factor * (0.001 + 1e-9 * size), rel=0.4)


@pytest.mark.parametrize("seed", range(5))
def test_what_has_become_slower_by_a_half_is_learnt_from_a_dozen_samples(seed: int) -> None:
    estimator = Estimator(2)
    fed(estimator, (0.001, 1e-9), sizes(1000), noise=0.2)
    fed(estimator, (0.0015, 1.5e-9), sizes(16, seed=3), noise=0.2, seed=seed)
    size = 1 << 23
    assert estimator.seconds((1.0, size)) == pytest.approx(1.5 * (0.001 + 1e-9 * size), rel=0.2)


def test_one_sample_that_is_far_off_is_not_believed() -> None:
    estimator = Estimator(2)
    fed(estimator, (0.001, 1e-9), sizes(100))
    before = estimator.seconds((1.0, 1 << 23))
    estimator.add((1.0, 1 << 23), 1e3)
    estimator.add((1.0, 1 << 23), 1e-9)
    assert estimator.seconds((1.0, 1 << 23)) == pytest.approx(before, rel=0.16)


def test_samples_of_one_size_are_taken_to_follow_it() -> None:
    """Else ten times as much would be expected to take as long, or computing to cost nothing."""
    estimator = Estimator(3)
    rng = random.Random(4)
    for _ in range(20):
        size = rng.randrange(500, 600)
        estimator.add((1.0, size, size * size / 2), 1.0 * rng.lognormvariate(0.0, 0.3))
    known = estimator.seconds((1.0, 5500.0, 5500.0**2 / 2))
    assert known is not None and known > 3.0
