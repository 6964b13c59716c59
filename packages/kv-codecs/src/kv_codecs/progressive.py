"""The codec `progressive`: bfloat16 in three parts, of which the first quarter alone is an approximation.

A number is split by a step, a power of two chosen for each block of 256 numbers: into the number of whole steps, the
next four bits, and the remaining bits. The first part contains signs and the whole steps, the latter entropy coded, two
numbers at a time; steps are chosen coarse enough for it to end within a quarter of the chunk's size. Each further part
upgrades all numbers, and all parts together are exact. docs/formats/progressive.md specifies the bytes, docs/quality.md
what the first part costs.

The step of each block follows the mean of its exponents, so that a channel that is far larger than its neighbours does
not degrade them, and the first tokens, whose values are small, keep their precision (see the judge's table).

The inner loops are in `kernels`; this module lays out the parts, and validates what it reads.
"""

import struct
import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

import numpy as np
import xxhash
from kv_tiers.chunk_header import SEAL_BYTES, seal, unseal
from kv_tiers.codec import APPROXIMATE_SHARE, Codec, CodecError
from kv_tiers.options import read_options
from kv_tiers.tier import TierContext
from numpy.typing import NDArray

from kv_codecs.kernels import (
    ALL_MISSING,
    ESCAPED,
    ESCAPED_CODE,
    FLOAT16,
    LONG_CODE,
    SCALED_NUMBERS,
    Bytes,
    CompiledKernels,
    Cut,
    Known,
    Words,
    compiled_kernels,
    packed_room,
)
from kv_codecs.zstd import FRAME_SYMBOLS, ByteCoder, NoOptions

PARTS: Final = 3

HEAD: Final = struct.Struct("<B3xQ3I3Q")
VERSION: Final = 3
HEAD_BYTES: Final = HEAD.size + SEAL_BYTES
_COUNT: Final = struct.Struct("<I")
_NOTHING: Final[Bytes] = np.empty(0, np.uint8)
_NO_WORDS: Final[Words] = np.empty(0, "<u2")
_SECTION: Final = FRAME_SYMBOLS
"""Numbers that are coded together; the last section has what remains."""
_SAMPLED: Final = 64
"""How many blocks of 256 numbers the step is chosen from, each with the one that shares its bytes."""
_CODER_BITS: Final = 0.045
"""Bits that the coder spends on a number beyond its entropy, because Huffman codes have whole bits."""
_OFFSETS: Final = range(0, 4 * SCALED_NUMBERS, SCALED_NUMBERS // 32)
"""How far a step may lie above the mean exponent of its numbers, in 256ths of a bit."""


def make_progressive_codec(options: Mapping[str, object], context: TierContext | None = None) -> Codec:
    """The factory of the codec `progressive`, which has no options.

    Raises:
        ConfigError: there are options, or the package zstandard is not installed.
    """
    read_options(NoOptions, options, "codec progressive")
    return ProgressiveCodec()


class ProgressiveCodec:
    """A chunk that is not bfloat16 is restored exactly too, if it gets smaller at all; only its approximation is
    meaningless.
    """

    name = "progressive"
    is_lossless = True

    def __init__(self, kernels: CompiledKernels | None = None) -> None:
        """kernels: None for those that were compiled. Raises `ConfigError`."""
        self._coder = ByteCoder(self.name)
        self.kernels = kernels or compiled_kernels(self.name)
        self._local = threading.local()

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        words = np.frombuffer(chunk, "<u2", len(chunk) // (2 * SCALED_NUMBERS) * SCALED_NUMBERS)
        tail = bytes(chunk[words.nbytes :])
        room = len(chunk) // APPROXIMATE_SHARE - HEAD_BYTES - len(tail)
        offset = self._likeliest_offset(words, room)
        while offset in _OFFSETS:
            parts = self._parts(words, offset, tail, self._scratch())
            sizes = [sum(map(len, part)) for part in parts]
            excess = sizes[0] - room - len(tail)
            if excess <= 0:
                break
            # A step that is twice as coarse saves about a bit of each number.
            offset += _OFFSETS.step * -(-8 * SCALED_NUMBERS * excess // (_OFFSETS.step * words.size))
        else:
            return None
        if HEAD_BYTES + sum(sizes) > len(out):
            return None
        end, sums, written = HEAD_BYTES, [], np.frombuffer(out, np.uint8)
        for part in parts:
            start = end
            for piece in filter(len, part):
                written[end : end + len(piece)] = np.frombuffer(piece, np.uint8)  # without the interpreter's lock
                end += len(piece)
            sums.append(xxhash.xxh3_64_intdigest(out[start:end]))
        out[:HEAD_BYTES] = seal(HEAD.pack(VERSION, len(chunk), *sizes, *sums))
        return end

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if self.decode_prefix(payload, out) < PARTS:
            raise CodecError(f"it ends after {len(payload)} bytes, within its parts")

    def decode_prefix(self, prefix: memoryview, out: memoryview) -> int:
        """Like `decode`, from the parts that are complete in the first bytes of a payload. Returns their number."""
        parts, is_longer = _parts_in(prefix, len(out))
        words = np.frombuffer(out, "<u2", len(out) // (2 * SCALED_NUMBERS) * SCALED_NUMBERS)
        first, *later = cursors = [_Cursor(part) for part in parts]
        self._decode_numbers(words, first, *later)
        out[words.nbytes :] = first.take(len(out) - words.nbytes).data
        if is_longer or any(cursor.rest.size for cursor in cursors):
            raise CodecError("there are bytes after its numbers")
        return len(parts)

    def _scratch(self) -> "_Scratch":
        try:
            scratch: _Scratch = self._local.scratch
        except AttributeError:
            scratch = self._local.scratch = _Scratch()
        return scratch

    def _parts(self, words: Words, offset: int, tail: bytes, scratch: "_Scratch") -> tuple[list[bytes | Bytes], ...]:
        """The three parts, each in pieces; some of them in the scratch."""
        frames: list[bytes | Bytes] = []
        packed: list[bytes | Bytes] = []
        long_codes, escaped, whole = [_NOTHING], [_NO_WORDS], [_NO_WORDS]
        scratch.grow_to_cut(words.size)
        for start in range(0, words.size, _SECTION):
            section = words[start : start + _SECTION]
            cut, room = scratch.section(start, section.size)
            long_count, escaped_count, whole_count = self.kernels.cut(section, offset, cut)
            frames += self._framed(cut.codes)
            long_codes.append(cut.long_codes[:long_count].copy())
            if escaped_count:
                escaped.append(self.kernels.select(section, cut.missing, ESCAPED, escaped_count))
            if whole_count:
                whole.append(self.kernels.select(section, cut.missing, ALL_MISSING, whole_count))
            packed.append(self.kernels.pack(section, cut.missing, room))
        exponents, signs = scratch.exponents[: words.size // SCALED_NUMBERS], scratch.signs[: words.size // 8]
        coded = self._coded(np.concatenate(long_codes))
        first = [exponents, signs, *coded, *self._unchanged(escaped), *frames, tail]
        return first, [scratch.nibbles[: words.size // 2]], [*self._unchanged(whole), *packed]

    def _framed(self, symbols: Bytes) -> tuple[bytes, bytes]:
        frame = self._coder.encode(symbols)
        return _COUNT.pack(len(frame)), frame

    def _coded(self, symbols: Bytes) -> list[bytes | Bytes]:
        """How many there are, and frames of them."""
        pieces: list[bytes | Bytes] = [_COUNT.pack(symbols.size)]
        for start in range(0, symbols.size, FRAME_SYMBOLS):
            pieces += self._framed(symbols[start : start + FRAME_SYMBOLS])
        return pieces

    def _unchanged(self, numbers: list[Words]) -> list[bytes | Bytes]:
        """All bits of these numbers, of which the upper bytes have few different values and are coded."""
        words = np.concatenate(numbers)
        lower, upper = np.empty(words.size, np.uint8), np.empty(words.size, np.uint8)
        self.kernels.split(FLOAT16, words, upper, lower)
        return [*self._coded(upper), lower]

    def _decode_numbers(
        self, words: Words, first: "_Cursor", second: "_Cursor | None" = None, third: "_Cursor | None" = None
    ) -> None:
        """Decode from the parts that are complete."""
        exponents, signs = first.take(words.size // SCALED_NUMBERS), first.take(words.size // 8)
        long_codes = self._take_coded(first, words.size)
        if long_codes.size and not (long_codes.min() >= LONG_CODE and long_codes.max() <= ESCAPED_CODE):
            raise CodecError("a long code is out of range")
        escaped = self._take_unchanged(first, words.size)
        nibbles = second.take(words.size // 2) if second else _NOTHING
        whole = self._take_unchanged(third, words.size) if third else _NO_WORDS
        scratch = self._scratch()
        scratch.grow_to_restore(words.size)
        codes = scratch.codes[: words.size // 2]
        for start in range(0, codes.size, _SECTION // 2):
            of_section = codes[start : start + _SECTION // 2]
            of_section[...] = self._coder.decode(first.take_frame(), of_section.size)
        packed = third.rest if third else _NOTHING
        known = Known(exponents, signs, codes, long_codes, escaped, nibbles, whole, packed)
        used = self.kernels.restore(1 + bool(second) + bool(third), known, words)
        if third:
            third.take(used.packed)
        if (used.long_codes, used.escaped, used.whole) != (long_codes.size, escaped.size, whole.size):
            raise CodecError("there are more numbers than its codes say")

    def _take_coded(self, cursor: "_Cursor", most: int) -> Bytes:
        """Raises `CodecError`: there are more than this, or they are damaged."""
        count = cursor.take_count()
        if count > most:
            raise CodecError(f"{count} numbers of {most}")
        sizes = [min(FRAME_SYMBOLS, count - start) for start in range(0, count, FRAME_SYMBOLS)]
        return np.concatenate([self._coder.decode(cursor.take_frame(), size) for size in sizes] or [_NOTHING])

    def _take_unchanged(self, cursor: "_Cursor", most: int) -> Words:
        """The reverse of `_unchanged`. Raises `CodecError`."""
        upper = self._take_coded(cursor, most)
        words = np.empty(upper.size, "<u2")
        self.kernels.join(FLOAT16, upper, cursor.take(upper.size), words)
        return words

    def _likeliest_offset(self, words: Words, room: int) -> int:
        """How far the steps should be above the mean exponents for the first part to fit just into this many bytes,
        judged by a sample. None of `_OFFSETS`: the numbers cannot become that small.
        """
        sample = _sample(words)
        if not sample.size:
            return _OFFSETS.stop
        n, cut = sample.size, Cut.empty(sample.size)

        def fits(offset: int) -> bool:
            longs, escaped, _ = self.kernels.cut(sample, offset, cut)
            bits = 8 * cut.exponents.size + n * (1 + _CODER_BITS) + 12 * escaped
            bits += _entropy(self.kernels.histogram(cut.codes))
            bits += _entropy(self.kernels.histogram(cut.long_codes[:longs]))
            return bool(bits / n * words.size < 8 * room)

        return _OFFSETS.step * bisect_left(_OFFSETS, True, key=fits)


def _sample(words: Words) -> Words:
    """Some blocks of 256 numbers, and behind them those of which it shares bytes with each."""
    blocks = words.reshape(-1, SCALED_NUMBERS)
    half = min(len(blocks), _SECTION // SCALED_NUMBERS) // 2
    if not half:
        return words
    places = np.arange(len(blocks) // (2 * half) * half)
    chosen = places[:: max(1, places.size // _SAMPLED)]
    chosen += chosen // half * half
    return np.concatenate((blocks[chosen], blocks[chosen + half])).reshape(-1)


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits of all symbols that occur so often."""
    occurring = counts[counts > 0]
    return float((occurring * np.log2(occurring.sum() / occurring)).sum())


def _parts_in(prefix: memoryview, chunk_bytes: int) -> tuple[list[memoryview], bool]:
    """The parts that are complete in a prefix, verified, and whether it continues behind the last part.

    Raises:
        CodecError: the head or a part is damaged, or not even the first part is complete.
    """
    fields = unseal(prefix[:HEAD_BYTES]) if len(prefix) >= HEAD_BYTES else None
    if fields is None:
        raise CodecError("it does not begin as a payload of this codec does")
    version, stated_bytes, *sizes_and_checksums = HEAD.unpack(fields)
    if version != VERSION or stated_bytes != chunk_bytes:
        raise CodecError(f"version {version}, of a chunk of {stated_bytes} bytes instead of {chunk_bytes}")
    parts: list[memoryview] = []
    offset = HEAD_BYTES
    for size, checksum in zip(sizes_and_checksums[:PARTS], sizes_and_checksums[PARTS:], strict=True):
        part = prefix[offset : offset + size]
        if len(part) < size:
            break
        if xxhash.xxh3_64_intdigest(part) != checksum:
            raise CodecError(f"part {len(parts) + 1} has a wrong checksum")
        parts.append(part)
        offset += size
    if not parts:
        raise CodecError(f"it ends after {len(prefix)} bytes, within its first part")
    return parts, len(parts) == PARTS and offset < len(prefix)


class _Cursor:
    """Reads one part of a payload from its start, a piece at a time.

    The part is one array: making an array of each piece would take a twentieth of the time of decoding.
    """

    def __init__(self, part: memoryview) -> None:
        self._part, self._offset = np.frombuffer(part, np.uint8), 0

    @property
    def rest(self) -> Bytes:
        """The bytes that were not taken yet."""
        return self._part[self._offset :]

    def take(self, nbytes: int) -> Bytes:
        """
        Raises:
            CodecError: there are fewer bytes left.
        """
        start = self._offset
        self._offset = end = start + nbytes
        if end > self._part.size:
            raise CodecError(f"a part ends {end - self._part.size} bytes too early")
        return self._part[start:end]

    def take_count(self) -> int:
        """Raises `CodecError`."""
        count: int = _COUNT.unpack(self.take(_COUNT.size).data)[0]
        return count

    def take_frame(self) -> Bytes:
        """A frame, behind its size. Raises `CodecError`."""
        return self.take(self.take_count())


class _Scratch:
    """One thread's memory, reused because fresh pages cost more than the work done in them.

    exponents, signs, codes, nibbles: as in `Cut`, of a chunk.
    """

    def __init__(self) -> None:
        self.exponents = self.signs = self.codes = self.nibbles = self._packed = np.empty(0, np.uint8)
        self._long_codes, self._missing = np.empty(_SECTION, np.uint8), np.empty(_SECTION, np.uint8)

    def grow_to_cut(self, numbers: int) -> None:
        """Make room for a chunk of this many numbers."""
        self.grow_to_restore(numbers)
        if self.nibbles.size < numbers // 2:
            self.exponents, self.signs = np.empty(numbers // SCALED_NUMBERS, np.uint8), np.empty(numbers // 8, np.uint8)
            self.nibbles = np.empty(numbers // 2, np.uint8)
            self._packed = np.empty(-(-numbers // _SECTION) * packed_room(_SECTION), np.uint8)

    def grow_to_restore(self, numbers: int) -> None:
        """Make room for the codes of a chunk of this many numbers."""
        if self.codes.size < numbers // 2:
            self.codes = np.empty(numbers // 2, np.uint8)

    def section(self, start: int, n: int) -> tuple[Cut, Bytes]:
        """What n numbers are cut into, and room for their packed bits. start: the first one's place in the chunk."""
        end = start + n
        cut = Cut(
            self.exponents[start // SCALED_NUMBERS : end // SCALED_NUMBERS],
            self.signs[start // 8 : end // 8],
            self.codes[start // 2 : end // 2],
            self._long_codes[:n],
            self.nibbles[start // 2 : end // 2],
            self._missing[:n],
        )
        return cut, self._packed[start // _SECTION * packed_room(_SECTION) :][: packed_room(n)]
