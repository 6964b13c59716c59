"""A validated transfer plan as columns of numbers, for a device: it must not cost a Python call a block."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from kv_core.format import ChunkFormat
from kv_core.transfer import HostExtent, TransferPlan
from numpy.typing import NDArray

from kv_cuda.copy.plan import check_extent, validate_and_split
from kv_cuda.layout import PagedLayout


@dataclass(frozen=True, slots=True)
class CopyTable:
    """The copies of a plan, chunk by chunk.

    extents: the chunks' extents.
    starts: [chunks + 1], where each chunk's copies begin in the columns, and where the last one's end.
    first_token, first_slot, tokens: [copies], as in `kv_core.transfer.Copy`.
    """

    extents: tuple[HostExtent, ...]
    starts: NDArray[np.int64]
    first_token: NDArray[np.int64]
    first_slot: NDArray[np.int64]
    tokens: NDArray[np.int64]


def copy_table(
    plan: TransferPlan, layout: PagedLayout, chunk_format: ChunkFormat, pools: Mapping[str, int], *, to_engine: bool
) -> CopyTable:
    """
    pools: bytes of each known pool.

    Raises:
        InputError: as `validate_and_split`.
    """
    numbers: dict[HostExtent, int] = {}
    copies = plan.copies
    chunk_of = np.empty(len(copies), np.int64)
    previous, number = None, -1
    for index, copy in enumerate(copies):
        if copy.extent is not previous:
            previous = copy.extent
            number = numbers.setdefault(previous, len(numbers))
        chunk_of[index] = number
    rows = [(copy.first_token, copy.first_slot, copy.tokens) for copy in copies]
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    if (np.diff(chunk_of) < 0).any():
        order = np.argsort(chunk_of, kind="stable")
        chunk_of, columns = chunk_of[order], columns[:, order]
    starts = np.searchsorted(chunk_of, np.arange(len(numbers) + 1))
    table = CopyTable(tuple(numbers), starts, *columns)
    is_valid = _is_valid(table, chunk_of, layout, chunk_format, to_engine=to_engine)
    if plan.chunk_tokens != chunk_format.chunk_tokens or not is_valid:
        validate_and_split(plan, layout, chunk_format, pools, to_engine=to_engine)
        raise AssertionError("a plan that one check refuses and the other does not")
    for extent in table.extents:
        check_extent(extent, chunk_format, pools)
    return table


def _is_valid(
    table: CopyTable, chunk_of: NDArray[np.int64], layout: PagedLayout, chunk_format: ChunkFormat, *, to_engine: bool
) -> bool:
    """Whether all tokens and slots exist, none is written twice, and opaque blocks are whole.

    chunk_of: [copies], the number of each one's chunk.
    """
    first_token, first_slot, tokens, size = table.first_token, table.first_slot, table.tokens, layout.block_tokens
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
