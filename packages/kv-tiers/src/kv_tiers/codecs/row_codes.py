"""The codes of the codec `kvtc`: a fixed family of prefix codes, one for each of many widths of a distribution.

Components of keys and values, in whole steps, follow a logistic distribution, to within 0.005 bits per number on two
models. So a payload holds no tables: for each group of numbers it names the code that fits. Where numbers are small,
two to five of them make a byte, so that prefix codes' whole bits cost little.

All codes are made with integers alone, so they are the same on every machine; docs/formats/kvtc.md specifies them.
"""

import heapq
import math
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise, product
from typing import Final

import numpy as np
from numpy.typing import NDArray

LONGEST_BITS: Final = 12
"""The longest code."""
ESCAPED: Final = 255
"""The byte of numbers that have no code of their own."""
LOW_BITS: Final = 4
"""Bits of a number's symbol that are stored uncoded where numbers are largest."""
_SINGLE: Final = 32
COSTED_CLASSES: Final = _SINGLE + 4 * 11
"""Symbols of a class cost about the same: each symbol below 32 is one, then each quarter of a power of two."""
MOST_TOGETHER: Final = 8
SAMPLED: Final = 16
"""One of every so many symbols decides which code a group has."""
_COST_UNIT: Final = 64
"""Costs are in this fraction of a bit."""
_ONE: Final = 1 << 48
_LEAST_SCALE, _SCALE_UNIT, _GROWTH = 200, 4096, (23, 20)
"""The scale of the first distribution, the parts of a step that it is counted in, and its growth to the next one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How numbers become bytes. base: a byte holds symbols below this. together: the number of symbols in a byte.
    low_bits: the bits of a symbol that are stored uncoded."""

    base: int
    together: int
    low_bits: int = 0


KINDS: Final = (Kind(3, 5), Kind(5, 3), Kind(15, 2), Kind(ESCAPED, 1), Kind(ESCAPED, 1, LOW_BITS))
_CODES_OF_KINDS: Final = (9, 3, 10, 15, 13)
"""How many widths each kind serves, from the smallest on: those for which its codes are the shortest."""


@dataclass(frozen=True)
class RowCodes:
    """kinds: base, together and low bits of each code, uint8 [codes, 3].

    costs: the cost of a symbol, in 64ths of a bit, uint32 [codes, `COSTED_CLASSES`].
    words: for each byte its code, from bit 0 up, and from bit 16 on its length, uint32 [codes, 256].
    coded: the same, with the code of `ESCAPED` for bytes that have none: from bit 0 on its length, bit 7 if the byte is
        escaped, and from bit 8 on the code, uint32 [codes, 256].
    lookup: for each of the next 12 bits its code's length, and from bit 8 on the byte, uint16 [codes, 4096].
    pairs: the same for the bytes whose codes are complete in these bits, one or two: from bit 0 on the sum of their
        codes' lengths, from bit 8 on how many they are, from bit 16 on the bytes, uint32 [codes, 4096].
    unpacking: the numbers of each byte, int16 [codes, 256, `MOST_TOGETHER`].
    """

    kinds: NDArray[np.uint8]
    costs: NDArray[np.uint32]
    words: NDArray[np.uint32]
    coded: NDArray[np.uint32]
    lookup: NDArray[np.uint16]
    pairs: NDArray[np.uint32]
    unpacking: NDArray[np.int16]


@cache
def row_codes() -> RowCodes:
    """All codes, created when they are first needed, in some 0.1 s."""
    kinds = [kind for kind, count in zip(KINDS, _CODES_OF_KINDS, strict=True) for _ in range(count)]
    codes = RowCodes(
        np.array([(kind.base, kind.together, kind.low_bits) for kind in kinds], np.uint8),
        np.empty((len(kinds), COSTED_CLASSES), np.uint32),
        np.zeros((len(kinds), 256), np.uint32),
        np.empty((len(kinds), 256), np.uint32),
        np.zeros((len(kinds), 1 << LONGEST_BITS), np.uint16),
        np.zeros((len(kinds), 1 << LONGEST_BITS), np.uint32),
        np.stack([_unpacking(kind) for kind in kinds]),
    )
    scale = _LEAST_SCALE
    for number, kind in enumerate(kinds):
        weights = _symbol_weights(scale, kind)
        lengths = code_lengths(_byte_weights(weights, kind))
        codes.costs[number] = _costs(weights, kind, lengths)
        _assign(lengths, codes.words[number], codes.lookup[number])
        codes.pairs[number] = _pairs(codes.lookup[number])
        codes.coded[number] = _coded(codes.words[number])
        scale = scale * _GROWTH[0] // _GROWTH[1]
    for field in fields(codes):
        getattr(codes, field.name).flags.writeable = False
    return codes


def _symbol_weights(scale: int, kind: Kind) -> list[int]:
    """Shares of `_ONE` of the symbols below the kind's base, in a logistic distribution whose scale is this many parts
    of a step. A symbol is 2n for n, or 2|n| - 1 for -|n|; with low bits, 16 of these.
    """
    # Near e ** (-half a step / the scale), by whole numbers alone.
    ratio = _ONE * (64 * scale) ** 32 // (64 * scale + _SCALE_UNIT) ** 32
    squared = ratio * ratio // _ONE
    upper, shares, power = [], [], ratio
    count = (kind.base + 1 << kind.low_bits) // 2 + 2
    for _ in range(count):
        upper.append(_ONE * _ONE // (_ONE + power))
        power = power * squared // _ONE
    shares.append(2 * upper[0] - _ONE)
    for below, above in pairwise(upper):
        shares += [above - below, above - below]
    step = 1 << kind.low_bits
    return [max(1, sum(shares[symbol * step : (symbol + 1) * step])) for symbol in range(kind.base)]


def _byte_weights(weights: list[int], kind: Kind) -> dict[int, int]:
    """The weights of the bytes that have codes, and of `ESCAPED`."""
    byte_weights = {}
    for symbols in product(range(kind.base), repeat=kind.together):
        weight = _ONE
        for symbol in symbols:
            weight = weight * weights[symbol] // _ONE
        # A rarer byte is escaped: otherwise the minimal shares of rare bytes would make all codes longer.
        if weight << (LONGEST_BITS + 3 if kind.together > 1 else LONGEST_BITS + 1) >= _ONE:
            byte_weights[sum(symbol * kind.base**place for place, symbol in enumerate(symbols))] = weight
    byte_weights[ESCAPED] = max(1, _ONE - sum(byte_weights.values()))
    return byte_weights


def code_lengths(weights: dict[int, int]) -> dict[int, int]:
    """Lengths of a Huffman code, none longer than `LONGEST_BITS`; the code is complete."""
    heap: list[tuple[int, int, tuple[int, ...]]] = [(weight, byte, (byte,)) for byte, weight in sorted(weights.items())]
    heapq.heapify(heap)
    lengths = dict.fromkeys(weights, 0)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        joined = first[2] + second[2]
        for byte in joined:
            lengths[byte] += 1
        heapq.heappush(heap, (first[0] + second[0], min(first[1], second[1]), joined))
    used_codes = 0
    for byte, length in lengths.items():
        lengths[byte] = min(length, LONGEST_BITS)
        used_codes += 1 << LONGEST_BITS - lengths[byte]
    rarest = sorted(weights, key=lambda byte: (weights[byte], byte))
    while used_codes > 1 << LONGEST_BITS:
        byte = next(byte for byte in rarest if lengths[byte] < LONGEST_BITS)
        lengths[byte] += 1
        used_codes -= 1 << LONGEST_BITS - lengths[byte]
    for byte in reversed(rarest):
        while lengths[byte] > 1 and used_codes + (1 << LONGEST_BITS - lengths[byte]) <= 1 << LONGEST_BITS:
            used_codes += 1 << LONGEST_BITS - lengths[byte]
            lengths[byte] -= 1
    assert used_codes == 1 << LONGEST_BITS
    return lengths


def _assign(lengths: dict[int, int], words: NDArray[np.uint32], lookup: NDArray[np.uint16]) -> None:
    """Canonical codes: by length, then by byte. Their first bit is bit 0."""
    code, previous_length = 0, 0
    for byte in sorted(lengths, key=lambda byte: (lengths[byte], byte)):
        length = lengths[byte]
        code <<= length - previous_length
        previous_length = length
        reverse = int(format(code, f"0{length}b")[::-1], 2)
        words[byte] = length << 16 | reverse
        lookup[reverse :: 1 << length] = byte << 8 | length
        code += 1


def _pairs(lookup: NDArray[np.uint16]) -> NDArray[np.uint32]:
    first = lookup.astype(np.uint32)
    second = first[np.arange(lookup.size, dtype=np.uint32) >> (first & 0xFF)]
    total_bits = (first & 0xFF) + (second & 0xFF)
    one_byte = first & 0xFF | 1 << 8 | (first >> 8) << 16
    two_bytes = total_bits | 2 << 8 | (first >> 8) << 16 | (second >> 8) << 24
    pairs: NDArray[np.uint32] = np.where(total_bits <= LONGEST_BITS, two_bytes, one_byte)
    return pairs


def _costs(weights: list[int], kind: Kind, lengths: dict[int, int]) -> NDArray[np.uint32]:
    """Costs by the distribution. An encoder may choose any code, so a difference in the last place does no harm."""
    escape = (lengths[ESCAPED] + 16 * kind.together + kind.low_bits) * _COST_UNIT
    costs = np.full(COSTED_CLASSES, escape, np.uint32)
    for number in range(COSTED_CLASSES):
        power, quarter = divmod(number - _SINGLE, 4)
        symbol = number if number < _SINGLE else (9 + 2 * quarter) << power + 2  # the middle of its class
        if symbol >> kind.low_bits < kind.base:
            bits = -math.log2(weights[symbol >> kind.low_bits] / _ONE) + kind.low_bits
            costs[number] = min(escape, round(bits * _COST_UNIT))
    return costs


def class_of(symbols: NDArray[np.uint16]) -> NDArray[np.int64]:
    """The class of each symbol, as in `RowCodes.costs`."""
    wide = symbols.astype(np.int64)
    powers = np.frexp(wide)[1] - 1
    return np.where(wide < _SINGLE, wide, _SINGLE + 4 * (powers - 5) + (wide >> np.maximum(powers - 2, 0) & 3))


def _coded(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    is_escaped = (words == 0) | (np.arange(words.size) == ESCAPED)
    codes = np.where(is_escaped, words[ESCAPED], words)
    coded: NDArray[np.uint32] = codes >> 16 | is_escaped.astype(np.uint32) << 7 | (codes & 0xFFFF) << 8
    return coded


def _unpacking(kind: Kind) -> NDArray[np.int16]:
    symbols = np.arange(256)[:, None] // kind.base ** np.arange(MOST_TOGETHER, dtype=np.int64).clip(0, 7) % kind.base
    symbols[:, kind.together :] = 0
    numbers: NDArray[np.int16] = ((symbols >> 1) ^ -(symbols & 1)).astype(np.int16)
    return numbers
