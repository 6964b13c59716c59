"""Rotary position embeddings of keys, taken back and applied again (Su et al., RoFormer, arXiv 2104.09864).

A head's element j and element j + head_dim / 2 are a point in the plane, turned by position × frequency j, as in Llama.
Engines store keys turned; what tokens have in common shows only once they are turned back.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float32]
Frequencies = NDArray[np.float64]
"""[head_dim / 2], radians per token."""
_Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Cosines and sines."""
MOST_POSITION_BITS: Final = 32
"""Bits of the first position in a payload."""
_HALVED: Final = 6
"""How often an angle is halved: its series is then exact to float64."""


class Turner:
    """Cosines and sines of the same frequencies from many positions on, as an array for the kernels.

    Computed by products alone, so they are the same on every machine; C libraries' functions differ in the last place.
    Keeps what does not depend on the first position. Safe to call from several threads at once.
    """

    def __init__(self, frequencies: Frequencies) -> None:
        self._powers = [_unit(frequencies)]  # the turns by 2 ** bit positions
        for _ in range(MOST_POSITION_BITS - 1):
            self._powers.append(_product(self._powers[-1], self._powers[-1]))
        self._places: tuple[int, _Points] | None = None

    def fill(self, first: int, out: NDArray[np.float32]) -> None:
        """out: [2, head_dim / 2, tokens], cosines and sines of as many positions from `first` on."""
        start = np.ones_like(self._powers[0][0]), np.zeros_like(self._powers[0][0])
        for bit in range(first.bit_length()):
            if first >> bit & 1:
                start = _product(start, self._powers[bit])
        cos, sin = self._places_of(out.shape[-1])
        out[0], out[1] = _product((cos, sin), (start[0][:, None], start[1][:, None]))

    def _places_of(self, tokens: int) -> _Points:
        """[head_dim / 2, tokens]: the points of the positions from 0 on."""
        cached = self._places
        if cached is None or cached[0] != tokens:
            cos, sin = (np.ones_like(self._powers[0][0])[:, None], np.zeros_like(self._powers[0][0])[:, None])
            for power in self._powers:
                if cos.shape[1] >= tokens:
                    break
                next_points = _product((cos, sin), (power[0][:, None], power[1][:, None]))
                cos, sin = (np.concatenate(pair, 1) for pair in zip((cos, sin), next_points, strict=True))
            cached = self._places = (
                tokens,
                (np.ascontiguousarray(cos[:, :tokens]), np.ascontiguousarray(sin[:, :tokens])),
            )
        return cached[1]


def turns(frequencies: Frequencies, first: int, tokens: int) -> tuple[Numbers, Numbers]:
    """Cosines and sines of this many positions from `first` on, each [tokens, 1, head_dim / 2]."""
    turned = np.empty((2, len(frequencies), tokens), np.float32)
    Turner(frequencies).fill(first, turned)
    cos, sin = np.ascontiguousarray(turned.transpose(0, 2, 1))[:, :, None]
    return cos, sin


def _product(left: _Points, right: _Points) -> _Points:
    """The product of points of the plane, as complex numbers."""
    return left[0] * right[0] - left[1] * right[1], left[0] * right[1] + left[1] * right[0]


def _unit(frequencies: Frequencies) -> _Points:
    """The points at these angles: by the series of a fraction of each angle, doubled repeatedly."""
    small = frequencies / (1 << _HALVED)
    square = small * small
    cos = 1 - square / 2 * (1 - square / 12 * (1 - square / 30 * (1 - square / 56)))
    sin = small * (1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72))))
    for _ in range(_HALVED):
        cos, sin = _product((cos, sin), (cos, sin))
    return cos, sin


def turn_back(numbers: Numbers, cos: Numbers, sin: Numbers) -> Numbers:
    """Turn keys back to position 0. numbers: [tokens, heads, head_dim], at the positions of `cos` and `sin`."""
    return turn(numbers, cos, -sin)


def turn(numbers: Numbers, cos: Numbers, sin: Numbers) -> Numbers:
    """Turn keys from position 0 to these positions: the reverse of `turn_back`."""
    half = numbers.shape[-1] // 2
    low, high = numbers[..., :half], numbers[..., half:]
    turned = np.empty_like(numbers)
    np.multiply(low, cos, out=turned[..., :half])
    turned[..., :half] -= high * sin
    np.multiply(high, cos, out=turned[..., half:])
    turned[..., half:] += low * sin
    return turned
