"""Chunks of bfloat16 in three parts: the first quarter alone is an approximation, all of it is every bit.

A number is cut at a step, a power of two that each block of 256 numbers has for itself: how many whole steps it is, the
next four bits behind them, and what is left down to its last bit. The first part holds the whole steps and signs,
entropy coded; the steps are chosen so coarse that it ends within the first quarter of the chunk's size. Each further
part refines all numbers. docs/formats/progressive.md has the bytes, docs/quality.md what the first part costs.

Why a step for each 256 numbers, from the mean of their exponents: a channel that is far larger than its neighbours
then does not spoil them, and the first tokens, whose values are small, keep their precision (the judge's table).

Only integers and exact conversions, so what a part decodes to is the same on every processor.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_tiers.codec import APPROXIMATE_SHARE, Codec, CodecError
from kv_tiers.codecs.byte_coder import FRAME_SYMBOLS, ByteCoder, Bytes
from kv_tiers.options import read_options
from kv_tiers.sealed import SEAL_BYTES, seal, unseal
from kv_tiers.tier import TierContext

PARTS: Final = 3

_HEAD: Final = struct.Struct("<B3xQ3I3Q")
_VERSION: Final = 1
_HEAD_BYTES: Final = _HEAD.size + SEAL_BYTES
_FRAME_BYTES: Final = struct.Struct("<I")
_SCALED: Final = 256
"""Numbers that share a step."""
_SECTION: Final = FRAME_SYMBOLS
"""Numbers that are coded together; the last section has what remains."""
_CACHED: Final = 1 << 15
"""How many are worked on at a time, so that numpy's passes over them stay in the processor's cache."""
_LEAST_EXPONENT: Final = 8
"""Of a step. Numbers of exponent 0, which have no leading one, thereby lie far below every step."""
_MOST_EXPONENT: Final = 240
"""Of a step. No approximation is thereby infinite."""
_ESCAPED: Final = 255
"""The symbol of a number of 1984 steps or more, which the first part holds as it is."""
_ALL_MISSING: Final = 8
"""Bits of a number whose leading one is in neither the first part nor the second: it is stored as it is."""
_SAMPLED: Final = 64
"""How many blocks of 256 numbers the step is chosen by."""
_CODER_BITS: Final = 0.04
"""What the coder spends on a symbol beyond its entropy: Huffman's whole bits."""
_OFFSETS: Final = range(0, 4 * _SCALED, _SCALED // 8)
"""How far a step may lie above the mean exponent of its numbers, in 256ths of a bit."""

Words = NDArray[Any]


class ProgressiveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nothing can be chosen."""


def make_progressive_codec(options: Mapping[str, object], context: TierContext) -> Codec:
    """The factory of the codec `progressive`, which has no options.

    Raises:
        ConfigError: there are options, or the package zstandard is not installed.
    """
    read_options(ProgressiveConfig, options, "codec progressive")
    return ProgressiveCodec()


class ProgressiveCodec:
    """What is no bfloat16 comes back as well, if it gets smaller at all; only its approximation means nothing."""

    name = "progressive"
    is_lossless = True

    def __init__(self) -> None:
        """Raises `ConfigError`."""
        self._coder = ByteCoder(self.name)

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        words = np.frombuffer(chunk, "<u2", len(chunk) // (2 * _SCALED) * _SCALED)
        tail = bytes(chunk[words.nbytes :])
        room = len(chunk) // APPROXIMATE_SHARE - _HEAD_BYTES - len(tail)
        for offset in _offsets_that_may_fit(words, room):
            parts = self._parts(words, offset, tail)
            sizes = [sum(map(len, part)) for part in parts]
            if sizes[0] <= room + len(tail):
                break
        else:
            return None
        if _HEAD_BYTES + sum(sizes) > len(out):
            return None
        at, sums = _HEAD_BYTES, []
        for part in parts:
            running = xxhash.xxh3_64()
            for piece in part:
                out[at : at + len(piece)] = piece
                running.update(piece)
                at += len(piece)
            sums.append(running.intdigest())
        out[:_HEAD_BYTES] = seal(_HEAD.pack(_VERSION, len(chunk), *sizes, *sums))
        return at

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if self.decode_prefix(payload, out) < PARTS:
            raise CodecError(f"it ends behind {len(payload)} bytes, within its parts")

    def decode_prefix(self, prefix: memoryview, out: memoryview) -> int:
        """As `decode`, of the first bytes of a payload: from those parts that they hold whole. How many that are."""
        parts, is_longer = _parts_in(prefix, len(out))
        words = np.frombuffer(out, "<u2", len(out) // (2 * _SCALED) * _SCALED)
        first, *more = map(_Cursor, parts)
        for start in range(0, words.size, _SECTION):
            self._decode_section(words[start : start + _SECTION], first, more)
        out[words.nbytes :] = first.take(len(out) - words.nbytes)
        if is_longer or any(cursor.left for cursor in (first, *more)):
            raise CodecError("there are bytes behind its numbers")
        return len(parts)

    def _parts(self, words: Words, offset: int, tail: bytes) -> tuple[list[bytes], ...]:
        """The three parts, each in pieces."""
        first: list[bytes] = []
        second: list[bytes] = []
        third: list[bytes] = []
        for start in range(0, words.size, _SECTION):
            section = words[start : start + _SECTION]
            exponents = _step_exponents(section, offset)
            symbols, nibbles, missing = (np.empty(section.size, np.uint8) for _ in range(3))
            for some in _pieces(section.size):
                steps = exponents[some.start // _SCALED : some.stop // _SCALED]
                _cut(section[some], steps, symbols[some], nibbles[some], missing[some])
            first += exponents.tobytes(), *self._framed(symbols), *self._whole(section[symbols == _ESCAPED])
            half = section.size // 2
            second.append((nibbles[:half] | nibbles[half:] << 4).tobytes())
            # One frame for the numbers of which one bit is missing, one for those of two, …: such bits are as good as
            # random, and the coder then spends just as many on each.
            order, ends = _by_missing_bits(missing)
            low = section.astype(np.uint8)[order]
            for bits in range(1, _ALL_MISSING):
                third += self._framed(low[ends[bits - 1] : ends[bits]] & np.uint8((1 << bits) - 1))
            third += self._whole(section[order[ends[_ALL_MISSING - 1] :]])
        first.append(tail)
        return first, second, third

    def _framed(self, symbols: Bytes) -> tuple[bytes, bytes]:
        frame = self._coder.encode(symbols) if symbols.size else b""
        return _FRAME_BYTES.pack(len(frame)), frame

    def _whole(self, words: Words) -> tuple[bytes, ...]:
        """Numbers as they are, but for their upper bytes, of which there are few."""
        halves = words.view(np.uint8)
        return *self._framed(halves[1::2].copy()), halves[::2].tobytes()

    def _decode_section(self, words: Words, first: "_Cursor", more: Sequence["_Cursor"]) -> None:
        """Some numbers, from the parts that are there: the first, and those behind it."""
        exponents = np.frombuffer(first.take(words.size // _SCALED), np.uint8)
        symbols = self._frame(first, words.size)
        nibbles = np.full(words.size, 8, np.uint8)  # the middle of a step
        if more:
            half = words.size // 2
            packed = np.frombuffer(more[0].take(half), np.uint8)
            nibbles[:half], nibbles[half:] = packed & 15, packed >> 4
        missing = np.empty(words.size, np.uint8)
        for some in _pieces(words.size):
            steps = exponents[some.start // _SCALED : some.stop // _SCALED]
            _join(symbols[some], nibbles[some], steps, words[some], missing[some], to_middle=len(more) == 1)
        if len(more) == 2:
            self._fill_in(words, missing, more[1])
        words[symbols == _ESCAPED] = self._read_whole(first, int(np.count_nonzero(symbols == _ESCAPED)))

    def _fill_in(self, words: Words, missing: Bytes, third: "_Cursor") -> None:
        order, ends = _by_missing_bits(missing)
        low = np.zeros(words.size, np.uint8)
        for bits in range(1, _ALL_MISSING):
            some = order[ends[bits - 1] : ends[bits]]
            low[some] = self._frame(third, some.size)
        np.bitwise_or(words, low, out=words)
        some = order[ends[_ALL_MISSING - 1] :]
        words[some] = self._read_whole(third, some.size)

    def _frame(self, cursor: "_Cursor", symbols: int) -> Bytes:
        (frame_bytes,) = _FRAME_BYTES.unpack(cursor.take(_FRAME_BYTES.size))
        frame = cursor.take(frame_bytes)
        return self._coder.decode(frame, symbols) if symbols else np.empty(0, np.uint8)

    def _read_whole(self, cursor: "_Cursor", count: int) -> Words:
        words = self._frame(cursor, count).astype("<u2") << 8
        words |= np.frombuffer(cursor.take(count), np.uint8)
        return words


def _step_exponents(words: Words, offset: int) -> Bytes:
    """Of each 256 numbers, the exponent of their step, biased as bfloat16's are."""
    own = (words >> 7).astype(np.uint8).reshape(-1, _SCALED)
    sums = own.sum(1, dtype=np.uint32) + np.uint32(offset)
    exponents: Bytes = np.clip(sums // _SCALED, _LEAST_EXPONENT, _MOST_EXPONENT).astype(np.uint8)
    return exponents


def _cut(words: Words, exponents: Bytes, symbols: Bytes, nibbles: Bytes, missing: Bytes) -> None:
    """Numbers into symbols (their whole steps, and the sign), the four bits behind those, and how many of their bits
    are in neither."""
    # A number is its significand (its leading one and seven bits) times 2 ** (its exponent - 134), and a step
    # 2 ** (the step's exponent - 127): the whole steps are the significand, moved by so many bits.
    own = np.bitwise_and(words >> 7, 0xFF).view(np.int16).reshape(-1, _SCALED)
    moved = ((exponents.astype(np.int16) + 7)[:, None] - own).reshape(-1)
    # At most five bits of the significand are in the symbol, and what they were moved up by is added to them.
    kept = np.clip(moved, 3, _ALL_MISSING + 4)
    sixteenths = np.right_shift((words & 0x7F | 0x80) << 4, kept.view(np.uint16))
    steps = (sixteenths >> 4) + (np.maximum(3 - moved, 0) << 4).view(np.uint16)
    symbols[...] = steps << 1 | words >> 15
    symbols[steps >= _ESCAPED >> 1] = _ESCAPED
    np.bitwise_and(sixteenths, 15, out=nibbles, casting="unsafe")
    np.maximum(kept - 4, 0, out=missing, casting="unsafe")


def _join(symbols: Bytes, nibbles: Bytes, exponents: Bytes, words: Words, missing: Bytes, *, to_middle: bool) -> None:
    """The numbers with zeros for the bits that are in neither, and how many those are; they are as many as the encoder
    found. to_middle: halfway to the next nibble instead."""
    wide = symbols.astype(np.uint16)
    steps = wide >> 1
    moved_up = np.maximum(steps >> 4, 1) - 1
    steps -= moved_up << 4
    sixteenths = (steps << 4 | nibbles).astype(np.float32)  # exact, and brings the leading one to its place
    if to_middle:
        sixteenths += np.float32(0.5)
    high = (sixteenths.view(np.uint32) >> 16).astype(np.uint16)
    np.clip(np.int16(_ALL_MISSING + 126) - (high >> 7).view(np.int16), 0, _ALL_MISSING, out=missing, casting="unsafe")
    high += moved_up << 7
    blocks = high.reshape(-1, _SCALED)
    blocks += ((exponents.astype(np.uint16) - 131) << 7)[:, None]
    np.bitwise_or(high, wide << 15, out=words)


def _by_missing_bits(missing: Bytes) -> tuple[NDArray[np.intp], list[int]]:
    """The numbers' places, those of which no bit is missing first, and where those of 0, 1, … bits end."""
    return np.argsort(missing, kind="stable"), np.bincount(missing, minlength=_ALL_MISSING).cumsum().tolist()


def _offsets_that_may_fit(words: Words, room: int) -> range:
    """How far the steps may be above the mean exponents for the first part to take so many bytes, by a sample: the
    likeliest, and those that are coarser. Empty: they are no numbers of which it could become so small."""
    blocks = words.reshape(-1, _SCALED)
    sample = blocks[:: max(1, len(blocks) // _SAMPLED)].reshape(-1)
    symbols, nibbles, missing = (np.empty(sample.size, np.uint8) for _ in range(3))
    for at, offset in enumerate(_OFFSETS):
        if not sample.size:
            break
        _cut(sample, _step_exponents(sample, offset), symbols, nibbles, missing)
        shares = np.bincount(symbols, minlength=256) / sample.size
        seen = shares[shares > 0]
        bits = 8 / _SCALED + _CODER_BITS + 12 * shares[_ESCAPED] - float((seen * np.log2(seen)).sum())
        if bits * words.size < 8 * room:
            return _OFFSETS[at:]
    return range(0)


def _pieces(numbers: int) -> list[slice]:
    return [slice(first, min(first + _CACHED, numbers)) for first in range(0, numbers, _CACHED)]


def _parts_in(prefix: memoryview, chunk_bytes: int) -> tuple[list[memoryview], bool]:
    """The parts that a prefix holds whole, checked, and whether it goes on behind the last of all.

    Raises:
        CodecError: the head or one of them is damaged, or not even the first is there.
    """
    fields = unseal(prefix[:_HEAD_BYTES]) if len(prefix) >= _HEAD_BYTES else None
    if fields is None:
        raise CodecError("it does not begin as a payload of this codec does")
    version, said_bytes, *rest = _HEAD.unpack(fields)
    if version != _VERSION or said_bytes != chunk_bytes:
        raise CodecError(f"version {version}, of a chunk of {said_bytes} bytes instead of {chunk_bytes}")
    parts: list[memoryview] = []
    at = _HEAD_BYTES
    for size, checksum in zip(rest[:PARTS], rest[PARTS:], strict=True):
        part = prefix[at : at + size]
        if len(part) < size:
            break
        if xxhash.xxh3_64_intdigest(part) != checksum:
            raise CodecError(f"part {len(parts) + 1} has another checksum")
        parts.append(part)
        at += size
    if not parts:
        raise CodecError(f"it ends behind {len(prefix)} bytes, within its first part")
    return parts, len(parts) == PARTS and at < len(prefix)


class _Cursor:
    """Reads one part."""

    def __init__(self, part: memoryview) -> None:
        self._part, self._at = part, 0

    @property
    def left(self) -> int:
        return len(self._part) - self._at

    def take(self, nbytes: int) -> memoryview:
        """
        Raises:
            CodecError: there is not so much.
        """
        if nbytes > self.left:
            raise CodecError(f"a part ends {nbytes - self.left} bytes too early")
        taken = self._part[self._at : self._at + nbytes]
        self._at += nbytes
        return taken
