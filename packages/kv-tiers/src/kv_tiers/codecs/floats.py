"""Floating point numbers, lossless: their exponents take two or three bits each, and nothing else gets smaller.

Keys and values have few exponents, often, and signs and mantissas that are as good as random. So the exponents are
entropy coded (zstandard's Huffman coder, its search for repetitions as good as off) and the rest is stored as it is:
bfloat16 becomes a third smaller, float32 a sixth. What the numbers are is found out chunk by chunk, from a sample: a
codec need not be told, and a wrong guess costs bytes, never correctness. docs/formats/floats.md has the bytes.

Needs the package `zstandard` (the extra `kv-tiers[zstd]`).
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_tiers.codec import Codec, CodecError
from kv_tiers.codecs.byte_coder import FRAME_SYMBOLS, ByteCoder, Bytes
from kv_tiers.options import read_options
from kv_tiers.tier import TierContext

_HEAD: Final = struct.Struct("<B3x")
_FRAME_BYTES: Final = struct.Struct("<I")
_BLOCK_NUMBERS: Final = FRAME_SYMBOLS
"""A part of the encoding: every block but the last has so many numbers, and a frame of its own."""
_CACHED_NUMBERS: Final = 1 << 15
"""How many are worked on at a time, so that numpy's passes over them stay in the processor's cache."""
_SAMPLE: Final = (16, 256)
"""From how many places, and how many numbers in a row from each."""
_WORTH_BITS: Final = 0.25
"""By how much a number must get smaller, in bits, for its chunk to be tried at all."""

Words = NDArray[Any]


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


@dataclass(frozen=True, slots=True)
class _Kind:
    """How numbers are taken apart.

    code: its name in a payload.
    word: a number as an unsigned integer.
    rest: what is stored as it is, one plane after the other.
    split, join: of some numbers, between the words, the plane that is coded, and the rest.
    """

    code: int
    word: str
    rest: tuple[str, ...]
    split: Callable[[Words, Bytes, list[Words]], None]
    join: Callable[[Bytes, list[Words], Words], None]

    @property
    def itemsize(self) -> int:
        return np.dtype(self.word).itemsize

    def plane_bytes(self, numbers: int) -> int:
        """Of the rest of so many numbers."""
        return (self.itemsize - 1) * numbers


_KINDS: Final = {
    kind.code: kind
    for kind in (
        _Kind(1, "<u2", ("u1",), _split_bfloat16, _join_bfloat16),
        _Kind(2, "<u2", ("u1",), _split_float16, _join_float16),
        _Kind(3, "<u4", ("<u2", "u1"), _split_float32, _join_float32),
    )
}


class FloatsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nothing can be chosen."""


def make_floats_codec(options: Mapping[str, object], context: TierContext) -> Codec:
    """The factory of the codec `floats`, which has no options.

    Raises:
        ConfigError: there are options, or the package zstandard is not installed.
    """
    read_options(FloatsConfig, options, "codec floats")
    return FloatsCodec()


class FloatsCodec:
    """One frame for the exponents of each block of numbers, and the rest of them behind it."""

    name = "floats"
    is_lossless = True

    def __init__(self) -> None:
        """Raises `ConfigError`."""
        self._coder = ByteCoder(self.name)

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        kind = _likeliest(chunk)
        if kind is None or len(out) < _HEAD.size:
            return None
        words = np.frombuffer(chunk, kind.word, len(chunk) // kind.itemsize)
        tail = chunk[words.nbytes :]
        _HEAD.pack_into(out, 0, kind.code)
        at = _HEAD.size
        for first in range(0, words.size, _BLOCK_NUMBERS):
            block = words[first : first + _BLOCK_NUMBERS]
            coded = np.empty(block.size, np.uint8)
            rest = np.empty(kind.plane_bytes(block.size), np.uint8)
            planes = _planes(kind, rest, block.size)
            for some in _pieces(block.size):
                kind.split(block[some], coded[some], [plane[some] for plane in planes])
            frame = self._coder.encode(coded)
            end = at + _FRAME_BYTES.size + len(frame) + rest.size
            if end + len(tail) > len(out):
                return None
            _FRAME_BYTES.pack_into(out, at, len(frame))
            at += _FRAME_BYTES.size
            out[at : at + len(frame)] = frame
            out[end - rest.size : end] = rest.data
            at = end
        out[at : at + len(tail)] = tail
        return at + len(tail)

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if len(payload) < _HEAD.size or (kind := _KINDS.get(payload[0])) is None or any(payload[1 : _HEAD.size]):
            raise CodecError("it does not begin as a payload of this codec does")
        words = np.frombuffer(out, kind.word, len(out) // kind.itemsize)
        at = _HEAD.size
        for first in range(0, words.size, _BLOCK_NUMBERS):
            block = words[first : first + _BLOCK_NUMBERS]
            if len(payload) - at < _FRAME_BYTES.size:
                raise CodecError(f"it ends behind {at} bytes, where a frame begins")
            (frame_bytes,) = _FRAME_BYTES.unpack_from(payload, at)
            at += _FRAME_BYTES.size
            rest_at = at + frame_bytes
            end = rest_at + kind.plane_bytes(block.size)
            if end > len(payload):
                raise CodecError(f"it ends behind {len(payload)} bytes, within a block that ends at {end}")
            coded = self._coder.decode(payload[at:rest_at], block.size)
            planes = _planes(kind, np.frombuffer(payload, np.uint8, end - rest_at, rest_at), block.size)
            for some in _pieces(block.size):
                kind.join(coded[some], [plane[some] for plane in planes], block[some])
            at = end
        tail = out[words.nbytes :]
        if len(payload) - at != len(tail):
            raise CodecError(f"{len(payload) - at} bytes behind the numbers instead of {len(tail)}")
        tail[:] = payload[at:]


def _pieces(numbers: int) -> list[slice]:
    return [slice(first, first + _CACHED_NUMBERS) for first in range(0, numbers, _CACHED_NUMBERS)]


def _planes(kind: _Kind, rest: Bytes, numbers: int) -> list[Words]:
    """The planes of a block that are stored as they are, where they lie."""
    planes, at = [], 0
    for dtype in kind.rest:
        nbytes = np.dtype(dtype).itemsize * numbers
        planes.append(rest[at : at + nbytes].view(dtype))
        at += nbytes
    return planes


def _likeliest(chunk: memoryview) -> _Kind | None:
    """What its numbers are: as what they would get smallest, by a sample. None: they would not, whatever they are."""
    best, most = None, _WORTH_BITS / 32
    for kind in _KINDS.values():
        words = np.frombuffer(chunk, kind.word, len(chunk) // kind.itemsize)
        if not words.size:
            continue
        places, run = _SAMPLE
        starts = range(0, max(1, words.size - run), max(1, words.size // places))
        sample = np.concatenate([words[start : start + run] for start in starts])
        coded = np.empty(sample.size, np.uint8)
        planes = _planes(kind, np.empty(kind.plane_bytes(sample.size), np.uint8), sample.size)
        kind.split(sample, coded, planes)
        counts = np.bincount(coded)
        share = counts[counts > 0] / sample.size
        saved = (8 + float((share * np.log2(share)).sum())) / (8 * kind.itemsize)
        if saved > most:
            best, most = kind, saved
    return best
