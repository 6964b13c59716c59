"""The codes of the codec `kvtc`: a fixed family for asymmetric numeral systems, one for each of many widths of a
distribution.

Components of keys and values, in whole steps, follow a logistic distribution, to within 0.005 bits per number on two
models. So a payload holds no tables: for each few rows it names the code that fits. Asymmetric numeral systems are
Jarek Duda's (arXiv 1311.2540), here those by ranges, with shares of a 256th: what is looked up then fits into a
processor's registers.

All codes are made with integers alone, so they are the same on every machine; docs/formats/kvtc.md specifies them.
"""

from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

DAMAGED: Final = "its numbers are damaged"
LANES: Final = 64
"""Lanes that decode a vector of numbers side by side."""
ROW_LANES: Final = 16
"""Of these the lanes of one row: a vector has four rows' numbers of so many tokens."""
UNIT_TOKENS: Final = 256
SYMBOLS: Final = 32
ESCAPED: Final = SYMBOLS - 1
"""The symbol of a number that is stored as it is."""
ZERO_SYMBOL: Final = 16
"""The symbol of the numbers from 0 on: of 2 ** low bits of them."""
SHARES: Final = 256
"""The sum of a code's shares."""
CODES: Final = 82
MOST_LOW_BITS: Final = 11
"""With as many low bits, symbols cover all numbers of 16 bits."""
_ONE: Final = 1 << 48
_LEAST_SHARE: Final = _ONE >> 11
"""A symbol that is rarer has no code of its own."""
_LEAST_SCALE, _SCALE_UNIT, _GROWTH = 200, 4096, (23, 20)
"""The scale of the first distribution, the parts of a step that it is counted in, and its growth to the next one."""
_WIDEST_SCALE: Final = 2 * _SCALE_UNIT
"""The widest distribution whose numbers are symbols; one low bit more serves twice this width."""
_TWICE_LN_2: Final = 5678
"""A wide distribution's mean distance from 0, in 1 / 4096 of its scale."""
MEAN_UNIT: Final = 1 << 12
"""The parts of a step in which the mean distance from 0 is counted that decides on a code."""


@dataclass(frozen=True)
class RowCodes:
    """low_bits: how many bits of a number are stored uncoded, uint8 [codes].
    shares: of each symbol, uint8 [codes, `SYMBOLS`]; 0: such numbers are escaped.
    starts: the sum of the shares before, uint8 [codes, `SYMBOLS`].
    symbols: for each of `SHARES` values the symbol whose share it is in, uint8 [codes, `SHARES`].
    limits: the first code is for numbers whose mean distance from 0 is at most this, in 1 / `MEAN_UNIT` of a step, and
        so on; int64 [codes].
    """

    low_bits: NDArray[np.uint8]
    shares: NDArray[np.uint8]
    starts: NDArray[np.uint8]
    symbols: NDArray[np.uint8]
    limits: NDArray[np.int64]


@cache
def row_codes() -> RowCodes:
    """All codes, created when they are first needed, in some 0.1 s."""
    codes = RowCodes(
        np.zeros(CODES, np.uint8),
        np.zeros((CODES, SYMBOLS), np.uint8),
        np.zeros((CODES, SYMBOLS), np.uint8),
        np.zeros((CODES, SHARES), np.uint8),
        np.zeros(CODES, np.int64),
    )
    scale, means = _LEAST_SCALE, []
    for code in range(CODES):
        low_bits = min(MOST_LOW_BITS, max(0, (scale // _WIDEST_SCALE).bit_length()))
        shares = shares_of(_weights(scale, low_bits))
        starts = np.cumsum([0, *shares[:-1]])
        codes.low_bits[code], codes.shares[code], codes.starts[code] = low_bits, shares, starts
        codes.symbols[code] = np.repeat(np.arange(SYMBOLS), shares)
        means.append(_mean_distance(scale))
        scale = scale * _GROWTH[0] // _GROWTH[1]
    codes.limits[:] = [*((one + other) // 2 for one, other in pairwise(means)), np.iinfo(np.int64).max]
    for field in fields(codes):
        getattr(codes, field.name).flags.writeable = False
    return codes


def shares_of(weights: list[int]) -> list[int]:
    """Shares of `SHARES` for these weights of `_ONE`, the last one of which is for all that is escaped."""
    coded = [weight if weight >= _LEAST_SHARE else 0 for weight in weights[:ESCAPED]]
    coded.append(_ONE - sum(coded))
    shares = [max(1, weight * SHARES // _ONE) if weight else 0 for weight in coded]
    shares[ESCAPED] = max(1, shares[ESCAPED])
    used = [symbol for symbol in range(SYMBOLS) if shares[symbol]]
    while sum(shares) < SHARES:
        shares[max(used, key=lambda symbol: Fraction(coded[symbol], 2 * shares[symbol] + 1))] += 1
    while sum(shares) > SHARES:
        larger = [symbol for symbol in used if shares[symbol] > 1]
        shares[min(larger, key=lambda symbol: Fraction(coded[symbol], 2 * shares[symbol] - 1))] -= 1
    return shares


def _weights(scale: int, low_bits: int) -> list[int]:
    """The shares of `_ONE` that symbols have in a logistic distribution of this many parts of a step, the last one of
    which is for all other numbers."""
    half = _half_a_step(scale)
    step = half * half // _ONE
    for _ in range(low_bits):
        step = step * step // _ONE
    # The shares of the numbers below each symbol's, from the middle outwards, where powers of `step` are small.
    first, power = _ONE * _ONE // half, _ONE
    above = []
    for _ in range(ZERO_SYMBOL):
        above.append(_ONE * _ONE // (_ONE + power * first // _ONE))
        power = power * step // _ONE
    under, power = [], step
    for _ in range(ZERO_SYMBOL):
        under.append(_ONE - _ONE * _ONE // (_ONE + power * half // _ONE))
        power = power * step // _ONE
    below = [*reversed(under), *above]
    weights = [more - less for less, more in pairwise(below)]
    return [*weights, _ONE - sum(weights)]


def _half_a_step(scale: int) -> int:
    """e ** (-half a step / the scale) of `_ONE`, nearly, by whole numbers alone."""
    return _ONE * (64 * scale) ** 32 // (64 * scale + _SCALE_UNIT) ** 32


def _mean_distance(scale: int) -> int:
    """From 0, in 1 / `MEAN_UNIT` of a step."""
    if scale > 16 * _SCALE_UNIT:
        return scale * _TWICE_LN_2 // _SCALE_UNIT
    half, total = _half_a_step(scale), 0
    power = half
    for _ in range(400):
        total += _ONE - _ONE * _ONE // (_ONE + power)
        power = power * half // _ONE * half // _ONE
    return 2 * total * MEAN_UNIT // _ONE


def unit_numbers(tokens: int) -> int:
    """How many numbers share a code, to whole vectors of this many tokens."""
    return max(1, UNIT_TOKENS // tokens) * LANES * -(-tokens // ROW_LANES)
