"""Converts rows of whole numbers to prefix codes and back, in numpy: does what `rows.c` does, if nothing was compiled.

docs/formats/kvtc.md specifies the bytes.
"""

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_tiers.codec import CodecError
from kv_tiers.codecs.kernels import Bytes, Rows
from kv_tiers.codecs.row_codes import COSTED_CLASSES, ESCAPED, LONGEST_BITS, LOW_BITS, SAMPLED, RowCodes, class_of

LANES: Final = 8
_HEAD: Final = struct.Struct(f"<Bx{LANES}HI")
_GROUP_NUMBERS: Final = 1 << 14
_ALL_ZERO: Final = 255
_LOW: Final = (1 << LOW_BITS) - 1
DAMAGED: Final = "its numbers are damaged"


def group_numbers(tokens: int) -> int:
    """How many numbers share a code: whole rows of this many tokens."""
    return max(1, _GROUP_NUMBERS // tokens) * tokens


def encode_rows(rows: Rows, codes: RowCodes, out: Bytes) -> int | None:
    """Like `Kernels.encode_rows`."""
    flat, group, offset = rows.reshape(-1), group_numbers(rows.shape[1]), 0
    for start in range(0, flat.size, group):
        piece = _encoded_group(_zigzag(flat[start : start + group]), codes, out.size - offset)
        if piece is None:
            return None
        out[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)
        offset += len(piece)
    return offset


def decode_rows(payload: Bytes, codes: RowCodes, rows: Rows) -> None:
    """Like `Kernels.decode_rows`."""
    groups = _groups(payload, codes, rows)
    flat = rows.reshape(-1)
    packed = _unpacked_lanes(payload, codes, groups)
    for group, group_bytes in zip(groups, packed, strict=True):
        numbers = flat[group.start : group.start + group.numbers]
        if group.code == _ALL_ZERO:
            numbers[:] = 0
        else:
            _fill(group, group_bytes, payload, codes, numbers)


def _zigzag(whole: NDArray[np.int16]) -> NDArray[np.uint16]:
    """0, -1, 1, -2, … as 0, 1, 2, 3, …"""
    return ((whole << 1) ^ (whole >> 15)).view(np.uint16)


def _unzigzag(symbols: NDArray[np.uint16]) -> NDArray[np.int16]:
    return ((symbols >> 1) ^ -(symbols & 1)).view(np.int16)


def _encoded_group(symbols: NDArray[np.uint16], codes: RowCodes, room: int) -> bytes | None:
    if not symbols.any():
        return _HEAD.pack(_ALL_ZERO, *[0] * LANES, 0) if room >= _HEAD.size else None
    counts = np.bincount(class_of(symbols[_sampled(symbols.size)]), minlength=COSTED_CLASSES)
    code = int(np.argmin(codes.costs.astype(np.int64) @ counts))
    base, together, low_bits = map(int, codes.kinds[code])
    low = b""
    if low_bits:
        nibbles = np.append(symbols & _LOW, np.zeros(symbols.size % 2, np.uint16)).astype(np.uint8)
        low = (nibbles[::2] | nibbles[1::2] << LOW_BITS).tobytes()
        symbols >>= LOW_BITS
    padded = np.append(symbols, np.zeros(-symbols.size % together, np.uint16)).reshape(-1, together)
    packed = np.where((padded < base).all(1), (padded * base ** np.arange(together)).sum(1), ESCAPED)
    packed[codes.words[code][packed] == 0] = ESCAPED
    per_lane = -(-len(packed) // LANES)
    lanes = [_stream(packed[number * per_lane : (number + 1) * per_lane], codes.words[code]) for number in range(LANES)]
    escaped = padded[packed == ESCAPED]
    head = _HEAD.pack(code, *map(len, lanes), len(escaped))
    # As in C, which needs to be sure of room before it writes a lane.
    needed = len(head) + len(low)
    for number, lane in enumerate(lanes):
        count = min(per_lane, max(0, len(packed) - number * per_lane))
        if room < needed + count * LONGEST_BITS // 8 + 16:
            return None
        needed += len(lane)
    if room < needed + escaped.nbytes:
        return None
    return b"".join((head, low, *lanes, escaped.astype("<u2").tobytes()))


def _sampled(count: int) -> NDArray[np.int64]:
    """Which of this many numbers decide on the code, as in C: one of every sixteen, at a different place in each."""
    number = np.arange(-(-count // SAMPLED))
    places = number * SAMPLED + number * 5 % SAMPLED
    return places[places < count]


def _stream(packed: NDArray[np.int64], words: NDArray[np.uint32]) -> bytes:
    selected = words[packed].astype(np.int64)
    ends = (selected >> 16).cumsum()
    starts = ends - (selected >> 16)
    moved = (selected & 0xFFFF) << (starts & 7)
    total = int(ends[-1]) if ends.size else 0
    # Adjacent codes may share a byte, but no bit of it, so sums, exact in float64, combine them.
    sums = np.zeros((total + 7) // 8 + 3)
    for index in range(3):
        sums += np.bincount((starts >> 3) + index, moved >> 8 * index & 0xFF, len(sums))
    return sums[: (total + 7) // 8].astype(np.uint8).tobytes()


@dataclass(slots=True)
class _Group:
    """A group of numbers with one code.

    start, numbers: where in the rows it begins, and how many numbers it has.
    count: its number of bytes.
    The other fields: where in the payload its low bits, lanes and escaped symbols begin, and how large they are.
    """

    start: int
    numbers: int
    code: int
    count: int = 0
    low_at: int = 0
    lanes_at: tuple[int, ...] = ()
    lane_bytes: tuple[int, ...] = ()
    escapes_at: int = 0
    escapes: int = 0


def _groups(payload: Bytes, codes: RowCodes, rows: Rows) -> list[_Group]:
    groups, offset, size = [], 0, group_numbers(rows.shape[1])
    for start in range(0, rows.size, size):
        if payload.size - offset < _HEAD.size:
            raise CodecError(DAMAGED)
        code, *lane_bytes, escapes = _HEAD.unpack_from(payload.data, offset)
        offset += _HEAD.size
        group = _Group(start, min(size, rows.size - start), code)
        groups.append(group)
        if code == _ALL_ZERO:
            continue
        if code >= len(codes.kinds):
            raise CodecError(DAMAGED)
        _, together, low_bits = map(int, codes.kinds[code])
        group.count, group.low_at = -(-group.numbers // together), offset
        offset += (group.numbers + 1) // 2 if low_bits else 0
        group.lanes_at = tuple(offset + sum(lane_bytes[:lane]) for lane in range(LANES))
        group.lane_bytes = tuple(lane_bytes)
        offset += sum(lane_bytes)
        group.escapes_at, group.escapes = offset, escapes
        offset += 2 * together * escapes
        if offset > payload.size or escapes > group.count:
            raise CodecError(DAMAGED)
    if offset != payload.size:
        raise CodecError(DAMAGED)
    return groups


def _unpacked_lanes(payload: Bytes, codes: RowCodes, groups: list[_Group]) -> list[Bytes]:
    """The bytes of each group. All lanes of all groups of equal size are decoded side by side."""
    padded = np.append(payload, np.zeros(8, np.uint8))
    from_each_byte = np.ndarray(payload.size + 5, "<u4", padded.data, strides=(1,))
    unpacked: list[Bytes] = [np.empty(0, np.uint8)] * len(groups)
    for count in {group.count for group in groups if group.count}:
        members = [number for number, group in enumerate(groups) if group.count == count]
        lookup = np.array([groups[number].code for number in members], np.int64) << LONGEST_BITS
        bits = 8 * np.array([groups[number].lanes_at for number in members], np.int64).T
        ends = bits // 8 + np.array([groups[number].lane_bytes for number in members], np.int64).T
        per_lane = -(-count // LANES)
        packed = np.zeros((LANES, per_lane, len(members)), np.uint8)
        for step in range(per_lane):
            lanes = sum(lane * per_lane + step < count for lane in range(LANES))
            positions = bits[:lanes]
            window = from_each_byte[np.minimum(positions >> 3, payload.size)] >> (positions & 7).astype(np.uint32)
            word = codes.lookup.reshape(-1)[lookup + (window & (1 << LONGEST_BITS) - 1)]
            packed[:lanes, step] = word >> 8
            bits[:lanes] += word & 0xFF
        if ((bits + 7) // 8 != ends).any():
            raise CodecError(DAMAGED)
        for index, number in enumerate(members):
            unpacked[number] = packed[:, :, index].reshape(-1)[:count]
    return unpacked


def _fill(group: _Group, packed: Bytes, payload: Bytes, codes: RowCodes, numbers: NDArray[np.int16]) -> None:
    _, together, low_bits = map(int, codes.kinds[group.code])
    escaped = np.flatnonzero(packed == ESCAPED)
    if len(escaped) != group.escapes:
        raise CodecError(DAMAGED)
    symbols = packed.astype(np.uint16)
    if together > 1:
        unpacked = codes.unpacking[group.code][packed][:, :together].reshape(-1)
        symbols = _zigzag(unpacked)
    values = payload[group.escapes_at : group.escapes_at + 2 * together * group.escapes].view("<u2")
    places = (escaped[:, None] * together + np.arange(together)).reshape(-1)
    symbols[places[places < symbols.size]] = values[places < symbols.size]
    symbols = symbols[: group.numbers]
    if low_bits:
        low = payload[group.low_at : group.low_at + (group.numbers + 1) // 2]
        nibbles = np.stack((low & _LOW, low >> LOW_BITS), 1).reshape(-1)[: group.numbers]
        symbols <<= LOW_BITS
        symbols |= nibbles
    numbers[:] = _unzigzag(symbols)
