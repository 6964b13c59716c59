"""Rotary position embeddings of keys, taken back and applied again (Su et al., RoFormer, arXiv 2104.09864).

A head's element j and element j + head_dim / 2 are a point in the plane, turned by position × frequency j, as Llama has
them. Engines store keys turned; what is common to tokens shows only where they are turned back.
"""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float32]
Frequencies = NDArray[np.float64]
"""[head_dim / 2], radians a token."""


def turns(frequencies: Frequencies, first: int, tokens: int) -> tuple[Numbers, Numbers]:
    """Cosines and sines of this many positions from `first` on, each [tokens, 1, head_dim / 2]."""
    angles = (first + np.arange(tokens, dtype=np.float64))[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def turn_back(numbers: Numbers, cos: Numbers, sin: Numbers) -> Numbers:
    """Keys at position 0. numbers: [tokens, heads, head_dim], at the positions of `cos` and `sin`."""
    return _turned(numbers, cos, -sin)


def turn(numbers: Numbers, cos: Numbers, sin: Numbers) -> Numbers:
    """The reverse of `turn_back`."""
    return _turned(numbers, cos, sin)


def _turned(numbers: Numbers, cos: Numbers, sin: Numbers) -> Numbers:
    half = numbers.shape[-1] // 2
    low, high = numbers[..., :half], numbers[..., half:]
    turned = np.empty_like(numbers)
    np.multiply(low, cos, out=turned[..., :half])
    turned[..., :half] -= high * sin
    np.multiply(high, cos, out=turned[..., half:])
    turned[..., half:] += low * sin
    return turned
