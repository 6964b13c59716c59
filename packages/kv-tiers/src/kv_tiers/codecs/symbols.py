"""Symbols of the codec `kvtc` to bytes and back: rows of like width share a frame, small ones share a byte.

A row is one component over a chunk's tokens. Rows are in the order of their calibrated widths, so those of a group
have nearly one distribution, and one Huffman table serves them. Where a group's symbols are few, two to five of them
make a byte, or Huffman's whole bits would cost more than the symbols.
"""

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_tiers.codec import CodecError
from kv_tiers.codecs.byte_coder import FRAME_SYMBOLS, ByteCoder
from kv_tiers.codecs.cursor import Cursor
from kv_tiers.codecs.kernels import Bytes

_GROUP_SYMBOLS: Final = 1 << 14
_FRAME: Final = struct.Struct("<BI")
_PACKED: Final = ((1, 0), (3, 5), (5, 3), (6, 3), (16, 2), (256, 1))
"""By the kind of a group: one more than its largest symbol, and how many make a byte."""
_WIDE: Final = len(_PACKED)
"""The kind of a group of symbols of two bytes, whose lower and upper bytes are a frame each."""


def _unpacking(base: int, count: int) -> NDArray[np.uint8]:
    """[256, count]: the symbols of each byte."""
    return (np.arange(256)[:, None] // base ** np.arange(count) % base).astype(np.uint8)


_UNPACKING: Final = [_unpacking(base, count) for base, count in _PACKED]


def rows_together(tokens: int) -> int:
    """How many rows of this many tokens make a group."""
    return max(1, _GROUP_SYMBOLS // tokens)


def zigzag(whole: NDArray[np.int32]) -> NDArray[np.uint16]:
    """0, -1, 1, -2, … as 0, 1, 2, 3, … of integers of 16 bits."""
    return ((whole << 1) ^ (whole >> 31)).astype(np.uint16)


def straight(symbols: NDArray[np.uint16]) -> NDArray[np.int32]:
    """The reverse of `zigzag`."""
    whole = symbols.astype(np.int32)
    return (whole >> 1) ^ -(whole & 1)


def encode_group(coder: ByteCoder, symbols: NDArray[np.uint16]) -> list[bytes]:
    """A group's bytes, in pieces. symbols: flat."""
    largest = int(symbols.max())
    if largest > 255:
        frames = [coder.encode(symbols.view(np.uint8)[half::2].copy()) for half in (0, 1)]
        return [_FRAME.pack(_WIDE, len(frames[0])), frames[0], _FRAME.pack(_WIDE, len(frames[1])), frames[1]]
    kind = next(kind for kind, (base, _) in enumerate(_PACKED) if largest < base)
    base, count = _PACKED[kind]
    if not count:
        return [_FRAME.pack(kind, 0)]
    packed = symbols.astype(np.uint8)
    if count > 1:
        short = -len(packed) % count
        columns = (np.concatenate((packed, np.zeros(short, np.uint8))) if short else packed).reshape(-1, count)
        packed = columns[:, count - 1].copy()
        for at in range(count - 2, -1, -1):
            packed *= np.uint8(base)
            packed += columns[:, at]
    frame = coder.encode(packed)
    return [_FRAME.pack(kind, len(frame)), frame]


def decode_group(coder: ByteCoder, cursor: Cursor, symbols: NDArray[np.uint16]) -> None:
    """Fill a group.

    Raises:
        CodecError: there is none of this size.
    """
    kind, frame_bytes = _FRAME.unpack(cursor.take(_FRAME.size))
    if kind == _WIDE:
        for half in (0, 1):
            if half:
                kind, frame_bytes = _FRAME.unpack(cursor.take(_FRAME.size))
            symbols.view(np.uint8)[half::2] = _frame(coder, cursor, frame_bytes, len(symbols))
        return
    if kind > _WIDE:
        raise CodecError(f"symbols of kind {kind}")
    _, count = _PACKED[kind]
    if not count:
        symbols[:] = 0
        return
    packed = _frame(coder, cursor, frame_bytes, -(-len(symbols) // count))
    symbols[:] = packed if count == 1 else _UNPACKING[kind].take(packed, 0).reshape(-1)[: len(symbols)]


def _frame(coder: ByteCoder, cursor: Cursor, frame_bytes: int, symbols: int) -> Bytes:
    if symbols > FRAME_SYMBOLS:
        raise CodecError(f"a frame of {symbols} symbols")
    return coder.decode(cursor.take(frame_bytes), symbols)
