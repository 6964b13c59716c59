"""A validated transfer plan as columns of numbers, for a device: it must not cost a Python call a block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from kv_core.extent import HostExtent
from kv_core.format import ChunkFormat
from kv_core.transfer import Move, TransferPlan
from numpy.typing import NDArray

from kv_cuda.copy.plan import check_extent, validate_and_split
from kv_cuda.kernels import OTHER, installed_kernels
from kv_cuda.layout import PagedLayout


@dataclass(frozen=True, slots=True)
class CopyTable:
    """The copies of a plan, chunk by chunk.

    extents: the chunks' extents.
    offsets: [chunks], where they are in their pools.
    starts: [chunks + 1], where each chunk's copies begin, and where the last one's end.
    copies: [copies, 4]: the number of each one's chunk, and its first token, first slot and tokens, as in
        `kv_core.transfer.Copy`.
    """

    extents: Sequence[HostExtent]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    copies: NDArray[np.int64]

    @property
    def first_token(self) -> NDArray[np.int64]:
        return self.copies[:, 1]

    @property
    def first_slot(self) -> NDArray[np.int64]:
        return self.copies[:, 2]

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self.copies[:, 3]


def copy_table(
    plan: TransferPlan, layout: PagedLayout, chunk_format: ChunkFormat, pools: Mapping[str, int], *, to_engine: bool
) -> CopyTable:
    """
    pools: bytes of each known pool.

    Raises:
        InputError: as `validate_and_split`.
    """
    table = _moves_table(plan, layout, chunk_format, pools, to_engine=to_engine)
    if table is not None:
        return table
    copies = plan.copies
    numbers = {extent: number for number, extent in enumerate(dict.fromkeys(copy.extent for copy in copies))}
    rows = [(numbers[copy.extent], copy.first_token, copy.first_slot, copy.tokens) for copy in copies]
    columns = np.array(rows, np.int64).reshape(-1, 4)
    columns = columns[np.argsort(columns[:, 0], kind="stable")]
    starts = np.searchsorted(columns[:, 0], np.arange(len(numbers) + 1))
    table = CopyTable(tuple(numbers), np.array([extent.offset for extent in numbers], np.int64), starts, columns)
    is_valid = _is_valid(table, layout, chunk_format, to_engine=to_engine)
    if plan.chunk_tokens != chunk_format.chunk_tokens or not is_valid:
        validate_and_split(plan, layout, chunk_format, pools, to_engine=to_engine)
        raise AssertionError("a plan that one check refuses and the other does not")
    for extent in table.extents:
        check_extent(extent, chunk_format, pools)
    return table


def _moves_table(
    plan: TransferPlan, layout: PagedLayout, chunk_format: ChunkFormat, pools: Mapping[str, int], *, to_engine: bool
) -> CopyTable | None:
    """The table of a plan that is made of moves between one pool and different blocks, by a function in C. None: it is
    another plan, or has to be looked at more closely."""
    kernels, size, step = installed_kernels(), chunk_format.chunk_tokens, layout.block_tokens
    blocks, moves = layout.blocks, plan.parts
    if kernels is None or not moves or plan.chunk_tokens != size:
        return None
    if isinstance(moves[0], Move) and moves[0].block_tokens != step and chunk_format.kind != "blocks":
        step = moves[0].block_tokens  # the manager's blocks, which are some of the layout's
        blocks = 0 if layout.blocks * layout.block_tokens % step else layout.blocks * layout.block_tokens // step
    extents: list[HostExtent] = []
    most_copies = 0
    for move in moves:
        if not isinstance(move, Move) or move.block_tokens != step:
            return None
        first, last = move.first_token, move.last_token
        if chunk_format.kind == "blocks" and (first % step or last % step):
            return None
        first_extent, end = first // size - move.first_chunk, -(-last // size) - move.first_chunk
        if not 0 <= first_extent < end <= len(move.extents):
            return None
        extents += move.extents[first_extent:end]
        most_copies += -(-last // step) - first // step
    offsets = np.array([extent.offset for extent in extents], np.int64)
    lengths = {(extent.pool, extent.nbytes) for extent in extents}
    pool, nbytes = lengths.pop()
    is_apart = not lengths and len(set(offsets.tolist())) == len(extents)
    if not is_apart or nbytes != chunk_format.nbytes or (offsets % chunk_format.itemsize).any():
        return None
    if offsets.min() < 0 or offsets.max() + nbytes > pools.get(pool, 0):
        return None
    written = np.zeros((blocks + 7) // 8 if to_engine else 0, np.uint8)
    copies = np.empty((most_copies, 4), np.int64)
    starts = np.empty(len(extents) + 1, np.int64)
    made = chunk = 0
    for move in moves:
        assert isinstance(move, Move)
        first, last = move.first_token, move.last_token
        address, entries = move.table.buffer_info()
        table = address, entries * move.table.itemsize
        arrays = table, written, copies, starts
        made = kernels.call("split_move", first, last, size, step, blocks, chunk, made, *arrays)
        if made == OTHER:
            return None
        chunk += -(-last // size) - first // size
    starts[chunk] = made
    return CopyTable(extents, offsets, starts, copies[:made])


def _is_valid(table: CopyTable, layout: PagedLayout, chunk_format: ChunkFormat, *, to_engine: bool) -> bool:
    """Whether all tokens and slots exist, none is written twice, and opaque blocks are whole."""
    chunk_of, first_token, first_slot, tokens = table.copies.T
    size = layout.block_tokens
    exist = (
        (tokens >= 1)
        & (first_slot >= 0)
        & (first_slot + tokens <= layout.blocks * size)
        & (first_token >= 0)
        & (first_token + tokens <= chunk_format.chunk_tokens)
    )
    if not exist.all():
        return False
    if chunk_format.kind == "blocks" and ((first_token % size) | (first_slot % size) | (tokens % size)).any():
        return False
    written = first_slot if to_engine else chunk_of * chunk_format.chunk_tokens + first_token
    order = np.argsort(written)
    return not (written[order][1:] < (written + tokens)[order][:-1]).any()
