"""The kernels of the codec `floats` in numpy, for where nothing was compiled: three quarters as fast as in C."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_codecs.kernels import BFLOAT16, FLOAT16, FLOAT32, Bytes, Words

_CACHED: Final = 1 << 15
"""How many numbers are processed at a time, so that numpy's passes over them stay in the processor's cache."""


class NumpyFloats:
    """`FloatKernels` in numpy."""

    name = "numpy"

    def split(self, kind: int, words: Words, coded: Bytes, rest: Bytes) -> None:
        planes = _planes(kind, rest, words.size)
        for piece in pieces_of(words.size):
            _SPLITS[kind](words[piece], coded[piece], [plane[piece] for plane in planes])

    def join(self, kind: int, coded: Bytes, rest: Bytes, words: Words) -> None:
        planes = _planes(kind, rest, words.size)
        for piece in pieces_of(words.size):
            _JOINS[kind](coded[piece], [plane[piece] for plane in planes], words[piece])

    def histogram(self, symbols: Bytes) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.bincount(symbols, minlength=256)
        return counts


def pieces_of(numbers: int) -> list[slice]:
    """Parts of so many numbers that stay in the cache."""
    return [slice(first, min(first + _CACHED, numbers)) for first in range(0, numbers, _CACHED)]


def _planes(kind: int, rest: Bytes, numbers: int) -> list[Words]:
    """Views of the planes that are stored unchanged."""
    if kind in (BFLOAT16, FLOAT16):
        return [rest]
    return [rest[: 2 * numbers].view("<u2"), rest[2 * numbers :]]


def _split_bfloat16(words: Words, coded: Bytes, rest: list[Words]) -> None:
    wide = np.right_shift(words, 7)
    coded[...] = wide
    np.bitwise_and(wide, 0x100, out=wide)
    np.right_shift(wide, 1, out=wide)
    np.bitwise_or(wide, np.bitwise_and(words, 0x7F), out=wide)
    rest[0][...] = wide


def _join_bfloat16(coded: Bytes, rest: list[Words], words: Words) -> None:
    signed = words.view(np.int16)
    signed[...] = rest[0].view(np.int8)  # widened with its sign, which is the number's
    np.bitwise_and(signed, np.int16(-0x7F81), out=signed)
    exponents = coded.astype(np.int16)
    np.left_shift(exponents, 7, out=exponents)
    np.bitwise_or(signed, exponents, out=signed)


def _split_float16(words: Words, coded: Bytes, rest: list[Words]) -> None:
    coded[...] = np.right_shift(words, 8)
    rest[0][...] = words.view(np.uint8)[::2]


def _join_float16(coded: Bytes, rest: list[Words], words: Words) -> None:
    words[...] = coded
    np.left_shift(words, 8, out=words)
    np.bitwise_or(words, rest[0], out=words)


def _split_float32(words: Words, coded: Bytes, rest: list[Words]) -> None:
    turned = np.bitwise_or(np.left_shift(words, 1), np.right_shift(words, 31))
    halves = turned.view(np.uint16)
    rest[0][...] = halves[::2]
    rest[1][...] = halves[1::2]  # its low byte
    coded[...] = np.right_shift(halves[1::2], 8)


def _join_float32(coded: Bytes, rest: list[Words], words: Words) -> None:
    words[...] = coded
    np.left_shift(words, 8, out=words)
    np.bitwise_or(words, rest[1], out=words)
    np.left_shift(words, 16, out=words)
    np.bitwise_or(words, rest[0], out=words)
    low = np.left_shift(words, 31)
    np.right_shift(words, 1, out=words)
    np.bitwise_or(words, low, out=words)


_SPLITS: Final = {BFLOAT16: _split_bfloat16, FLOAT16: _split_float16, FLOAT32: _split_float32}
_JOINS: Final = {BFLOAT16: _join_bfloat16, FLOAT16: _join_float16, FLOAT32: _join_float32}
