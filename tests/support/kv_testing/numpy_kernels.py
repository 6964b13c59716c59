"""The kernels of the codecs in numpy: the definition of what C computes, to which tests compare it.

They use only integers and exact conversions, so the bytes are the same on every processor.
"""

from typing import Final

import numpy as np
from kv_codecs.kernels import (
    ALL_MISSING,
    ESCAPED,
    ESCAPED_CODE,
    LEAST_EXPONENT,
    LONG_CODE,
    MOST_EXPONENT,
    SCALED_NUMBERS,
    SECTION_NUMBERS,
    TOO_FEW,
    Bytes,
    CompiledKernels,
    Cut,
    Known,
    NumpyFloats,
    Transform,
    Used,
    Words,
    check_exponents,
    installed_kernels,
    pieces_of,
)
from kv_codecs.rotation import Numbers
from kv_codecs.row_codes import RowCodes
from kv_core.errors import MisuseError
from kv_tiers.codec import CodecError
from numpy.typing import NDArray

from kv_testing.numpy_rows import decode_rows, encode_rows
from kv_testing.numpy_transform import project, project_back

_RUN: Final = 8
"""Numbers whose missing bits, 56 at most, are moved together in 64."""
_ONE: Final = np.uint64(1)


class NumpyKernels(NumpyFloats, CompiledKernels):
    """`CompiledKernels` in numpy instead, without a library."""

    def __init__(self) -> None:
        """Nothing is loaded."""

    def cut(self, words: Words, offset: int, into: Cut) -> tuple[int, int, int]:
        exponents, signs, codes, long_codes, nibbles, missing = into
        _check(words, exponents, signs, codes, nibbles)
        number_exponents = (words >> 7).astype(np.uint8).reshape(-1, SCALED_NUMBERS)
        sums = number_exponents.sum(1, dtype=np.uint32) + np.uint32(offset)
        exponents[...] = np.clip(sums // SCALED_NUMBERS, LEAST_EXPONENT, MOST_EXPONENT)
        wide_codes, wide_nibbles = np.empty(words.size, np.uint8), np.empty(words.size, np.uint8)
        for piece in pieces_of(words.size):
            steps = exponents[piece.start // SCALED_NUMBERS : piece.stop // SCALED_NUMBERS]
            _cut(words[piece], steps, wide_codes[piece], wide_nibbles[piece], missing[piece])
        signs[...] = np.packbits(words >> 15, bitorder="little")
        longs = wide_codes[wide_codes >= LONG_CODE]
        long_codes[: longs.size] = longs
        codes[...] = _halves_together(np.minimum(wide_codes, LONG_CODE))
        nibbles[...] = _halves_together(wide_nibbles)
        return longs.size, int(np.count_nonzero(missing == ESCAPED)), int(np.count_nonzero(missing == ALL_MISSING))

    def restore(self, parts: int, known: Known, words: Words) -> Used:
        exponents, signs, codes, long_codes, escaped, nibbles, whole, packed = known
        _check(words, exponents, signs, codes, nibbles if parts > 1 else codes)
        check_exponents(exponents)
        used = Used(0, 0, 0, 0)
        for start in range(0, words.size, SECTION_NUMBERS):
            section = words[start : start + SECTION_NUMBERS]
            end = start + section.size
            wide_codes = _halves_apart(codes[start // 2 : end // 2])
            is_long = wide_codes == LONG_CODE
            longs = int(np.count_nonzero(is_long))
            if longs > long_codes.size - used.long_codes:
                raise CodecError(TOO_FEW)
            wide_codes[is_long] = long_codes[used.long_codes :][:longs]
            wide_nibbles = np.full(section.size, 8, np.uint8)  # the middle of a step
            if parts > 1:
                wide_nibbles = _halves_apart(nibbles[start // 2 : end // 2])
            missing = np.empty(section.size, np.uint8)
            for piece in pieces_of(section.size):
                steps = exponents[(start + piece.start) // SCALED_NUMBERS : (start + piece.stop) // SCALED_NUMBERS]
                of_piece = (wide_codes[piece], wide_nibbles[piece], steps, section[piece], missing[piece])
                _restore(*of_piece, to_middle=parts == 2)
            section |= np.unpackbits(signs[start // 8 : end // 8], bitorder="little").astype("<u2") << 15
            bits = _unpack(packed[used.packed :], missing, section) if parts == 3 else 0
            wholes = _place(whole[used.whole :], missing == ALL_MISSING, section) if parts == 3 else 0
            escapes = _place(escaped[used.escaped :], wide_codes == ESCAPED_CODE, section)
            used = Used(
                used.long_codes + longs, used.escaped + escapes, used.whole + wholes, used.packed + (bits + 7) // 8
            )
        return used

    def pack(self, words: Words, missing: Bytes, room: Bytes) -> Bytes:
        bits, starts, sizes = _runs(missing)
        low = (words & 0xFF).astype(np.uint64).reshape(-1, _RUN) & ((_ONE << bits) - _ONE)
        runs, filled = np.zeros(len(bits), np.uint64), np.zeros(len(bits), np.uint64)
        for index in range(_RUN):
            runs |= low[:, index] << filled
            filled += bits[:, index]
        runs <<= starts & np.uint64(7)
        # Adjacent runs may share a byte, but no bit of it, so sums, exact in float64, combine them.
        first_bytes, bytes_of_runs = (starts >> np.uint64(3)).astype(np.intp), runs.astype("<u8").view(np.uint8)
        packed = np.zeros((sizes + 7) // 8 + _RUN)
        for index in range(_RUN):
            packed += np.bincount(first_bytes + index, bytes_of_runs[index::_RUN], len(packed))
        result = room[: packed.size - _RUN]
        result[...] = packed[:-_RUN]
        return result

    def select(self, words: Words, marks: Bytes, mark: int, count: int) -> Words:
        selected: Words = words[marks == mark]
        if selected.size != count:
            raise MisuseError(f"{selected.size} words of mark {mark} instead of {count}")
        return selected

    project = staticmethod(project)
    encode_rows = staticmethod(encode_rows)

    def decode(self, transform: Transform, payload: Bytes, codes: RowCodes, turns: Numbers, words: Words) -> None:
        shape = transform.shape
        channels = shape.heads * shape.head_dim
        rows = np.empty((2 * shape.layers * channels, words.nbytes // shape.token_bytes), np.int16)
        decode_rows(payload, shape.block_channels, codes, rows)
        project_back(transform, rows, turns, words)


def kernels_here() -> list[CompiledKernels]:
    """All implementations on this machine, the compiled one first."""
    compiled = installed_kernels()
    return [*([] if compiled is None else [compiled]), NumpyKernels()]


def _check(words: Words, exponents: Bytes, signs: Bytes, *halves: Bytes) -> None:
    sizes = (words.size, exponents.size * SCALED_NUMBERS, signs.size * 8, *(2 * half.size for half in halves))
    if len(set(sizes)) > 1:
        raise MisuseError(f"sizes that do not match: {sizes}")


def _halves_together(fours: Bytes) -> Bytes:
    """Four bits of each number, those of the second half in the upper bits."""
    half = fours.size // 2
    together: Bytes = fours[:half] | fours[half:] << np.uint8(4)
    return together


def _halves_apart(together: Bytes) -> Bytes:
    """The reverse."""
    return np.concatenate((together & np.uint8(15), together >> np.uint8(4)))


def _place(stored: Words, is_stored: NDArray[np.bool_], words: Words) -> int:
    """Set these words. Returns how many there are."""
    count = int(np.count_nonzero(is_stored))
    if count > stored.size:
        raise CodecError(TOO_FEW)
    words[is_stored] = stored[:count]
    return count


def _runs(missing: Bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint64], int]:
    """[n / 8, 8]: how many bits each number misses, where `ALL_MISSING` and `ESCAPED` count as none; [n / 8]: where the
    bits of eight numbers begin; and the number of all bits."""
    bits = (missing & 7).astype(np.uint64).reshape(-1, _RUN)
    ends = bits.sum(1, dtype=np.uint64).cumsum(dtype=np.uint64)
    return bits, np.append(np.uint64(0), ends[:-1]), int(ends[-1])


def _unpack(packed: Bytes, missing: Bytes, words: Words) -> int:
    """Set the missing bits in words that have zeros in their place. Returns the number of these bits."""
    bits, starts, sizes = _runs(missing)
    padded = np.zeros(max(packed.size, sizes // 8) + 9, np.uint8)
    padded[: packed.size] = packed
    from_each_byte = np.ndarray(padded.size - 7, "<u8", padded.data, strides=(1,))
    runs = from_each_byte[(starts >> np.uint64(3)).astype(np.intp)] >> (starts & np.uint64(7))
    low = np.empty(bits.shape, np.uint64)
    for index in range(_RUN):
        low[:, index] = runs & ((_ONE << bits[:, index]) - _ONE)
        runs >>= bits[:, index]
    np.bitwise_or(words, low.reshape(-1).astype("<u2"), out=words)
    return sizes


def _cut(words: Words, exponents: Bytes, codes: Bytes, nibbles: Bytes, missing: Bytes) -> None:
    # A number is its significand (its leading one and seven bits) times 2 ** (its exponent - 134), and a step
    # 2 ** (the step's exponent - 127): the whole steps are the significand, moved by so many bits.
    number_exponents = np.bitwise_and(words >> 7, 0xFF).view(np.int16).reshape(-1, SCALED_NUMBERS)
    moved = ((exponents.astype(np.int16) + 7)[:, None] - number_exponents).reshape(-1)
    # At most five bits of the significand are in the code; the distance that they were moved up by is added to them.
    clipped = np.clip(moved, 3, ALL_MISSING + 4)
    sixteenths = np.right_shift((words & 0x7F | 0x80) << 4, clipped.view(np.uint16))
    steps = (sixteenths >> 4) + (np.maximum(3 - moved, 0) << 4).view(np.uint16)
    np.minimum(steps, ESCAPED_CODE, out=codes, casting="unsafe")
    np.bitwise_and(sixteenths, 15, out=nibbles, casting="unsafe")
    np.maximum(clipped - 4, 0, out=missing, casting="unsafe")
    missing[codes == ESCAPED_CODE] = ESCAPED


def _restore(codes: Bytes, nibbles: Bytes, exponents: Bytes, words: Words, missing: Bytes, *, to_middle: bool) -> None:
    """All but signs."""
    steps = codes.astype(np.uint16)
    moved_up = np.maximum(steps >> 4, 1) - 1
    steps -= moved_up << 4
    sixteenths = (steps << 4 | nibbles).astype(np.float32)  # exact, and brings the leading one to its place
    if to_middle:
        sixteenths += np.float32(0.5)
    np.maximum(sixteenths, np.float32(0.25), out=sixteenths)  # for zeros, whose bits are stored unchanged
    high = (sixteenths.view(np.uint32) >> 16).astype(np.uint16)
    np.clip(np.int16(ALL_MISSING + 126) - (high >> 7).view(np.int16), 0, ALL_MISSING, out=missing, casting="unsafe")
    high += moved_up << 7
    blocks = high.reshape(-1, SCALED_NUMBERS)
    blocks += ((exponents.astype(np.uint16) - 131) << 7)[:, None]
    words[...] = high
