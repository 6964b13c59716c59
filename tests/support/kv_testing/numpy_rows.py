"""Converts rows of whole numbers to codes of asymmetric numeral systems and back, in numpy: does what `rows.c` does.

docs/formats/kvtc.md specifies the bytes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from kv_codecs.kernels import Bytes, Rows
from kv_codecs.row_codes import (
    DAMAGED,
    ESCAPED,
    LANES,
    MEAN_UNIT,
    ROW_LANES,
    UNIT_TOKENS,
    ZERO_SYMBOL,
    RowCodes,
)
from kv_tiers.codec import CodecError
from numpy.typing import NDArray

_SETS: Final = 4
"""Sets of lanes that take turns."""
_TOGETHER: Final = LANES // ROW_LANES
"""Rows that are coded together."""
_ALL_ZERO: Final = 255
_LEAST: Final = 256
"""The least state of a lane, and its last one."""
_LOW_BYTES: Final = LANES // 8
"""Of one bit of each lane."""
_ORDER: Final = np.concatenate((np.arange(0, LANES, 2), np.arange(1, LANES, 2)))
"""The order in which the lanes of a set read a byte of the stream each."""


def encode_rows(rows: Rows, channels: int, codes: RowCodes, out: Bytes) -> int | None:
    """Like `Kernels.encode_rows`."""
    layout = _Layout(rows.shape[0], rows.shape[1], channels)
    numbers = layout.vectors(rows)
    unit_codes = _chosen(layout, numbers, codes)
    its_codes, active = layout.coded(unit_codes)
    low_bits = codes.low_bits[its_codes] * active.any(1)
    symbols = (numbers >> low_bits[:, None]) + ZERO_SYMBOL
    symbols[(symbols < 0) | (symbols > ESCAPED)] = ESCAPED
    symbols[codes.shares[its_codes[:, None], symbols] == 0] = ESCAPED
    is_escaped = (symbols == ESCAPED) & active
    states, written, written_bytes = _encoded(symbols, active, its_codes, codes)
    # Of each vector: its low bits, what its lanes write, and its escaped numbers.
    low_sizes = _LOW_BYTES * low_bits.astype(np.int64)
    sizes = low_sizes + written.sum(1) + 2 * is_escaped.sum(1)
    starts = np.cumsum(sizes) - sizes
    stream = np.zeros(int(sizes.sum()), np.uint8)
    _put_low_bits(stream, starts, low_bits, np.where(is_escaped | ~active, 0, numbers))
    places = (starts + low_sizes)[:, None] + written.cumsum(1) - 1
    stream[places[written]] = written_bytes[written]
    places = (starts + low_sizes + written.sum(1))[:, None] + 2 * (is_escaped.cumsum(1) - 1)
    for byte in range(2):
        stream[places[is_escaped] + byte] = numbers[is_escaped] >> 8 * byte & 0xFF
    pieces = (unit_codes, states, stream)
    size = sum(piece.size for piece in pieces)
    if size > out.size:
        return None
    np.concatenate(pieces, out=out[:size])
    return size


def decode_rows(payload: Bytes, channels: int, codes: RowCodes, rows: Rows) -> None:
    """Like `Kernels.decode`, as far as to rows.

    Raises:
        CodecError: these are not the bytes of this many rows.
    """
    layout = _Layout(rows.shape[0], rows.shape[1], channels)
    stream_at = layout.units + 2 * _SETS * LANES
    if payload.size < stream_at:
        raise CodecError(DAMAGED)
    unit_codes, states, stream = np.split(payload, (layout.units, stream_at))
    if ((unit_codes >= codes.low_bits.size) & (unit_codes != _ALL_ZERO)).any():
        raise CodecError(DAMAGED)
    its_codes, active = layout.coded(unit_codes)
    low_bits = codes.low_bits[its_codes] * active.any(1)
    symbols, starts, escapes_at = _decoded((states, stream), active, its_codes, low_bits, codes)
    numbers = (symbols.astype(np.int32) - ZERO_SYMBOL << low_bits[:, None]) + _low_bits_at(stream, starts, low_bits)
    is_escaped = (symbols == ESCAPED) & active
    places = (escapes_at[:, None] + 2 * (is_escaped.cumsum(1) - 1))[is_escaped]
    numbers[is_escaped] = (stream[places] | stream[places + 1].astype(np.uint16) << 8).view(np.int16)
    numbers[~active] = 0
    layout.fill(numbers, rows)


@dataclass(frozen=True)
class _Layout:
    """How rows are divided: into blocks of so many, of which a unit shares a code; and into vectors of numbers."""

    rows: int
    tokens: int
    channels: int

    @property
    def blocks(self) -> int:
        return self.rows // self.channels

    @property
    def fours(self) -> int:
        """Of a block, how often four rows are coded together."""
        return -(-self.channels // _TOGETHER)

    @property
    def of_fours(self) -> int:
        """Vectors of four rows."""
        return -(-self.tokens // ROW_LANES)

    @property
    def unit_fours(self) -> int:
        return max(1, UNIT_TOKENS // self.tokens)

    @property
    def units(self) -> int:
        return self.blocks * -(-self.fours // self.unit_fours)

    @cached_property
    def active(self) -> NDArray[np.bool_]:
        """Which lanes of each vector have a number, [vectors, lanes]."""
        return self.vectors(np.ones((self.rows, self.tokens), np.int8)).astype(np.bool_)

    def vectors(self, rows: NDArray[Any]) -> NDArray[np.int32]:
        """[vectors, lanes]: four rows' numbers of a token side by side."""
        shape = (self.blocks, _TOGETHER * self.fours, ROW_LANES * self.of_fours)
        padded = np.zeros(shape, np.int32)
        padded[:, : self.channels, : self.tokens] = rows.reshape(self.blocks, self.channels, self.tokens)
        apart = padded.reshape(-1, _TOGETHER, self.of_fours, ROW_LANES)
        return apart.transpose(0, 2, 3, 1).reshape(-1, LANES)

    def fill(self, vectors: NDArray[np.int32], rows: Rows) -> None:
        """The reverse of `vectors`."""
        together = vectors.reshape(-1, self.of_fours, ROW_LANES, _TOGETHER).transpose(0, 3, 1, 2)
        padded = together.reshape(self.blocks, _TOGETHER * self.fours, -1)
        rows.reshape(self.blocks, self.channels, self.tokens)[:] = padded[:, : self.channels, : self.tokens]

    def coded(self, unit_codes: Bytes) -> tuple[Bytes, NDArray[np.bool_]]:
        """The code of each vector, and which of its lanes have a coded number; where all are 0, none have, and the code
        is any."""
        of_block = unit_codes.reshape(self.blocks, -1).repeat(self.unit_fours, 1)[:, : self.fours]
        of_vectors = of_block.reshape(-1).repeat(self.of_fours)
        is_coded = of_vectors != _ALL_ZERO
        return np.where(is_coded, of_vectors, 0).astype(np.uint8), self.active & is_coded[:, None]

    def of_units(self, vector_sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sums of each unit."""
        of_fours = vector_sums.reshape(self.blocks, self.fours, -1).sum(2)
        padded = np.zeros((self.blocks, self.units // self.blocks * self.unit_fours), np.int64)
        padded[:, : self.fours] = of_fours
        sums: NDArray[np.int64] = padded.reshape(self.units, -1).sum(1)
        return sums


def _chosen(layout: _Layout, numbers: NDArray[np.int32], codes: RowCodes) -> Bytes:
    """The code of each unit, by its numbers' mean distance from 0."""
    sums = layout.of_units(np.abs(numbers).sum(1, dtype=np.int64))
    counts = layout.of_units(layout.active.sum(1, dtype=np.int64))
    chosen = np.searchsorted(codes.limits, -(-sums * MEAN_UNIT // counts))
    return np.where(sums == 0, _ALL_ZERO, chosen).astype(np.uint8)


def _put_low_bits(stream: Bytes, starts: NDArray[np.int64], low_bits: Bytes, numbers: NDArray[np.int32]) -> None:
    """The lower bits of each vector's numbers: first all lanes' bit 0, and so on."""
    for bit in range(int(low_bits.max(initial=0))):
        has = np.flatnonzero(low_bits > bit)
        packed = np.packbits((numbers[has] >> bit & 1).astype(np.bool_), axis=1, bitorder="little")
        stream[(starts[has] + _LOW_BYTES * bit)[:, None] + np.arange(_LOW_BYTES)] = packed


def _low_bits_at(stream: Bytes, starts: NDArray[np.int64], low_bits: Bytes) -> NDArray[np.int32]:
    numbers = np.zeros((low_bits.size, LANES), np.int32)
    for bit in range(int(low_bits.max(initial=0))):
        has = np.flatnonzero(low_bits > bit)
        packed = stream[(starts[has] + _LOW_BYTES * bit)[:, None] + np.arange(_LOW_BYTES)]
        numbers[has] |= np.unpackbits(packed, axis=1, bitorder="little").astype(np.int32) << bit
    return numbers


def _turns(values: NDArray[Any]) -> NDArray[Any]:
    """[turns, sets, lanes in the order in which they read]: a vector for each set, and none for the last ones."""
    padded = np.zeros((-len(values) % _SETS + len(values), LANES), values.dtype)
    padded[: len(values)] = values[:, _ORDER]
    return padded.reshape(-1, _SETS, LANES)


def _encoded(
    symbols: NDArray[np.int32], active: NDArray[np.bool_], vector_codes: Bytes, codes: RowCodes
) -> tuple[Bytes, NDArray[np.bool_], Bytes]:
    """The states that lanes begin decoding with; and of each vector which of its lanes write a byte, and the bytes,
    both in the order in which lanes read.
    """
    shares = _turns(codes.shares[vector_codes[:, None], symbols].astype(np.int32))
    starts = _turns(codes.starts[vector_codes[:, None], symbols].astype(np.int32))
    has_number = _turns(active)
    states = np.full((_SETS, LANES), _LEAST, np.int32)
    written, written_bytes = np.zeros(has_number.shape, np.bool_), np.zeros(has_number.shape, np.uint8)
    for turn in reversed(range(len(has_number))):
        has = has_number[turn]
        share = np.where(has, shares[turn], 1)
        written[turn] = writes = has & (states >= share << 8)
        written_bytes[turn] = states & 0xFF
        states = np.where(writes, states >> 8, states)
        whole, rest = np.divmod(states, share)
        states = np.where(has, (whole << 8) + rest + starts[turn], states)
    count = len(symbols)
    first = states.astype("<u2").reshape(-1).view(np.uint8)
    return first, written.reshape(-1, LANES)[:count], written_bytes.reshape(-1, LANES)[:count]


def _decoded(
    coded: tuple[Bytes, Bytes], active: NDArray[np.bool_], vector_codes: Bytes, low_bits: Bytes, codes: RowCodes
) -> tuple[Bytes, NDArray[np.int64], NDArray[np.int64]]:
    """[vectors, lanes]: the symbols; where in the stream each vector begins; and where its escaped numbers do.

    coded: the states that lanes begin with, and the stream. low_bits: of each vector.
    """
    (first, stream), at = coded, 0
    states = first.view("<u2").astype(np.int32).reshape(_SETS, LANES)
    has_number = _turns(active)
    its_codes = _turns(np.broadcast_to(vector_codes[:, None], active.shape).astype(np.intp))
    low_sizes = np.zeros((len(has_number), _SETS), np.int64)
    low_sizes.reshape(-1)[: low_bits.size] = _LOW_BYTES * low_bits
    symbols = np.zeros(has_number.shape, np.uint8)
    starts, escapes_at = np.zeros(low_sizes.shape, np.int64), np.zeros(low_sizes.shape, np.int64)
    for turn, (has, code, low_size) in enumerate(zip(has_number, its_codes, low_sizes, strict=True)):
        low = states & 0xFF
        symbols[turn] = symbol = codes.symbols[code, low]
        after = codes.shares[code, symbol] * (states >> 8) + low - codes.starts[code, symbol]
        states = np.where(has, after, states)
        reads = has & (states < _LEAST)
        read_before = reads.cumsum(1)
        before_escapes = low_size + read_before[:, -1]
        sizes = before_escapes + 2 * (has & (symbol == ESCAPED)).sum(1)
        starts[turn] = at + sizes.cumsum() - sizes
        escapes_at[turn] = starts[turn] + before_escapes
        at += int(sizes.sum())
        if at > stream.size:
            raise CodecError(DAMAGED)
        places = ((starts[turn] + low_size - 1)[:, None] + read_before)[reads]
        states[reads] = states[reads] << 8 | stream[places]
    if at != stream.size or (states != _LEAST).any():
        raise CodecError(DAMAGED)
    count, back = len(active), np.empty((len(symbols) * _SETS, LANES), np.uint8)
    back[:, _ORDER] = symbols.reshape(-1, LANES)
    return back[:count], starts.reshape(-1)[:count], escapes_at.reshape(-1)[:count]
