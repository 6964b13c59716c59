"""The codec `progressive`: bfloat16 in three parts, of which the first quarter alone is an approximation.

A number is split by a step, a power of two chosen for each block of 256 numbers: into the number of whole steps, the
next four bits, and the remaining bits. The first part contains the whole steps and signs, entropy coded; steps are
chosen coarse enough for it to end within a quarter of the chunk's size. Each further part refines all numbers, and all
parts together are exact. docs/formats/progressive.md specifies the bytes, docs/quality.md what the first part costs.

The step of each block follows the mean of its exponents, so that a channel that is far larger than its neighbours does
not degrade them, and the first tokens, whose values are small, keep their precision (see the judge's table).

The inner loops are in `kernels`; this module lays out the parts, and validates what it reads.
"""

import struct
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import xxhash

from kv_tiers.codec import APPROXIMATE_SHARE, Codec, CodecError
from kv_tiers.codecs.byte_coder import FRAME_SYMBOLS, ByteCoder, NoOptions
from kv_tiers.codecs.kernels import (
    ALL_MISSING,
    ESCAPED,
    SCALED_NUMBERS,
    Bytes,
    Kernels,
    Words,
    best_kernels,
    packed_room,
)
from kv_tiers.options import read_options
from kv_tiers.sealed import SEAL_BYTES, seal, unseal
from kv_tiers.tier import TierContext

PARTS: Final = 3

HEAD: Final = struct.Struct("<B3xQ3I3Q")
VERSION: Final = 2
HEAD_BYTES: Final = HEAD.size + SEAL_BYTES
_FRAME_BYTES: Final = struct.Struct("<I")
_NO_FRAME: Final = bytes(_FRAME_BYTES.size)
_NOTHING: Final[Bytes] = np.empty(0, np.uint8)
_SECTION: Final = FRAME_SYMBOLS
"""Numbers that are coded together; the last section has what remains."""
_SAMPLED: Final = 128
"""How many blocks of 256 numbers the step is chosen from."""
_CODER_BITS: Final = 0.06
"""Bits that the coder spends on a symbol beyond its entropy, because Huffman codes have whole bits."""
_OFFSETS: Final = range(0, 4 * SCALED_NUMBERS, SCALED_NUMBERS // 8)
"""How far a step may lie above the mean exponent of its numbers, in 256ths of a bit."""


def make_progressive_codec(options: Mapping[str, object], context: TierContext) -> Codec:
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

    def __init__(self, kernels: Kernels | None = None) -> None:
        """kernels: None for the fastest available; all produce the same bytes. Raises `ConfigError`."""
        self._coder = ByteCoder(self.name)
        self.kernels = kernels or best_kernels()
        self._local = threading.local()

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        words = np.frombuffer(chunk, "<u2", len(chunk) // (2 * SCALED_NUMBERS) * SCALED_NUMBERS)
        tail = bytes(chunk[words.nbytes :])
        room = len(chunk) // APPROXIMATE_SHARE - HEAD_BYTES - len(tail)
        for offset in self._offsets_that_may_fit(words, room):
            parts = self._parts(words, offset, tail, self._scratch())
            sizes = [sum(map(len, part)) for part in parts]
            if sizes[0] <= room + len(tail):
                break
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
        missing = self._scratch().missing
        words = np.frombuffer(out, "<u2", len(out) // (2 * SCALED_NUMBERS) * SCALED_NUMBERS)
        first, *later = map(_Cursor, parts)
        for start in range(0, words.size, _SECTION):
            self._decode_section(words[start : start + _SECTION], first, later, missing)
        out[words.nbytes :] = first.take(len(out) - words.nbytes).data
        if is_longer or any(cursor.rest.size for cursor in (first, *later)):
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
        first: list[bytes | Bytes] = []
        second: list[bytes | Bytes] = []
        third: list[bytes | Bytes] = []
        scratch.grow(words.size)
        for start in range(0, words.size, _SECTION):
            section = words[start : start + _SECTION]
            n = section.size
            exponents = np.empty(n // SCALED_NUMBERS, np.uint8)
            symbols, missing = scratch.symbols[:n], scratch.missing[:n]
            nibbles = scratch.nibbles[start // 2 : (start + n) // 2]
            escaped, whole = self.kernels.cut(
                section, offset, exponents=exponents, symbols=symbols, nibbles=nibbles, missing=missing
            )
            first += exponents, *self._framed(symbols)
            first += self._unchanged(section, symbols, ESCAPED, escaped)
            second.append(nibbles)
            room = scratch.packed[start // _SECTION * packed_room(_SECTION) :][: packed_room(n)]
            third.append(self.kernels.pack(section, missing, room))
            third += self._unchanged(section, missing, ALL_MISSING, whole)
        first.append(tail)
        return first, second, third

    def _framed(self, symbols: Bytes) -> tuple[bytes, bytes]:
        frame = self._coder.encode(symbols) if symbols.size else b""
        return _FRAME_BYTES.pack(len(frame)), frame

    def _unchanged(self, words: Words, marks: Bytes, mark: int, count: int) -> tuple[bytes | Bytes, ...]:
        """The numbers with this mark, of the given count, unchanged, except that their upper bytes, which have few
        different values, are coded.
        """
        if not count:
            return (_NO_FRAME,)
        lower, upper = self.kernels.select(words, marks, mark, count)
        return *self._framed(upper), lower

    def _decode_section(self, words: Words, first: "_Cursor", later: Sequence["_Cursor"], scratch: Bytes) -> None:
        """Decode some numbers from the parts that are complete: the first, and later ones."""
        exponents = first.take(words.size // SCALED_NUMBERS)
        symbols = self._coder.decode(first.take_frame(), words.size)
        nibbles = later[0].take(words.size // 2) if later else None
        missing = scratch[: words.size]
        packed = later[1].rest if len(later) == 2 else _NOTHING
        escaped, whole, bits = self.kernels.restore(
            symbols, nibbles, exponents, packed, words=words, missing=missing, to_middle=len(later) == 1
        )
        if len(later) == 2:
            later[1].take((bits + 7) // 8)
            self._place(later[1], whole, missing, ALL_MISSING, words)
        self._place(first, escaped, symbols, ESCAPED, words)

    def _place(self, cursor: "_Cursor", count: int, marks: Bytes, mark: int, words: Words) -> None:
        """Set the numbers with this mark, of the given count, as the part stores them."""
        frame = cursor.take_frame()
        if count:
            self.kernels.place(cursor.take(count), self._coder.decode(frame, count), marks, mark, words)

    def _offsets_that_may_fit(self, words: Words, room: int) -> range:
        """How far the steps may be above the mean exponents for the first part to fit into this many bytes, judged by a
        sample: the likeliest offset, and coarser ones. Empty: the numbers cannot become that small.
        """
        blocks = words.reshape(-1, SCALED_NUMBERS)
        sample = np.ascontiguousarray(blocks[:: max(1, len(blocks) // _SAMPLED)]).reshape(-1)
        if not sample.size:
            return range(0)
        exponents, nibbles = np.empty(sample.size // SCALED_NUMBERS, np.uint8), np.empty(sample.size // 2, np.uint8)
        symbols, missing = np.empty(sample.size, np.uint8), np.empty(sample.size, np.uint8)

        def fits(offset: int) -> bool:
            self.kernels.cut(sample, offset, exponents=exponents, symbols=symbols, nibbles=nibbles, missing=missing)
            shares = self.kernels.histogram(symbols) / sample.size
            nonzero = shares[shares > 0]
            bits = 8 / SCALED_NUMBERS + _CODER_BITS + 12 * shares[ESCAPED] - float((nonzero * np.log2(nonzero)).sum())
            return bool(bits * words.size < 8 * room)

        return _OFFSETS[bisect_left(_OFFSETS, True, key=fits) :]


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

    def take_frame(self) -> Bytes:
        """A frame, behind its size. Raises `CodecError`."""
        (frame_bytes,) = _FRAME_BYTES.unpack(self.take(_FRAME_BYTES.size).data)
        return self.take(frame_bytes)


class _Scratch:
    """One thread's memory, reused because fresh pages cost more than the work done in them.

    symbols, missing: those of a section. nibbles, packed: those of a chunk, section after section.
    """

    def __init__(self) -> None:
        self.symbols, self.missing = np.empty(_SECTION, np.uint8), np.empty(_SECTION, np.uint8)
        self.nibbles = self.packed = np.empty(0, np.uint8)

    def grow(self, numbers: int) -> None:
        """Make room for a chunk of this many numbers."""
        if self.nibbles.size < numbers // 2:
            self.nibbles = np.empty(numbers // 2, np.uint8)
            self.packed = np.empty(-(-numbers // _SECTION) * packed_room(_SECTION), np.uint8)
