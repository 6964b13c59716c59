"""Validates a transfer plan against a layout and divides it into few moves of blocks and parts. Pure arithmetic."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from kv_core.errors import InputError
from kv_core.format import ChunkFormat
from kv_core.transfer import Copy, HostExtent, TransferPlan
from numpy.typing import NDArray

from kv_cuda.layout import PagedLayout, PartLayout


@dataclass(frozen=True, slots=True)
class WholeBlocks:
    """`blocks` engine blocks from `first_block` on ↔ chunk tokens from `first_token` on."""

    first_token: int
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True)
class PartOfBlock:
    """`tokens` tokens of one block, from `offset` on ↔ chunk tokens from `first_token` on."""

    first_token: int
    block: int
    offset: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """All copies of one chunk."""

    extent: HostExtent
    whole: tuple[WholeBlocks, ...]
    parts: tuple[PartOfBlock, ...]


@dataclass(frozen=True, slots=True)
class CopyShape:
    """A layout as a format needs it: in `blocks` a page is a run of bytes, one head, cut evenly into "tokens".

    parts: where each part lies.
    itemsize: bytes of the unit that `parts` count in.
    heads, head_dim: the shape of a token's row in one layer of one part.
    """

    parts: tuple[PartLayout, ...]
    itemsize: int
    heads: int
    head_dim: int


def copy_shape(layout: PagedLayout, tensors: int, chunk_format: ChunkFormat) -> CopyShape:
    """
    tensors: the number of tensors.

    Raises:
        InputError: layout and tensors disagree, or the format is not one of this layout's.
    """
    if tensors != layout.tensors:
        per_layer = f", {len(layout.parts)} a layer" if layout.own_tensors else ""
        raise InputError(f"{tensors} tensors for a layout of {layout.layers} layers{per_layer}")
    opaque = chunk_format.kind == "blocks"
    tokens = chunk_format.chunk_tokens
    expected = layout.blocks_format(tokens, chunk_format.origin) if opaque else layout.canonical_format(tokens)
    if chunk_format != expected:
        raise InputError(f"the format is not that of layout {layout.name}: {chunk_format} where {expected} fits")
    # A canary may try such a layout; in a copy, its parts' blocks would overlap.
    if len({part.block for part in layout.parts}) > 1:
        raise InputError(f"layout {layout.name}: its parts' blocks are at different distances")
    if opaque:
        row = chunk_format.head_dim
        page = PartLayout("blocks", 0, layout.parts[0].block * layout.itemsize, row, row, 1)
        return CopyShape((page,), 1, 1, row)
    return CopyShape(layout.parts, layout.itemsize, layout.heads, layout.head_dim)


def validate_and_split(
    plan: TransferPlan, layout: PagedLayout, chunk_format: ChunkFormat, pools: Mapping[str, int], *, to_engine: bool
) -> list[ChunkWork]:
    """The plan's work, chunk by chunk.

    pools: bytes of each known pool.

    Raises:
        InputError: a slot, a token of a chunk or a byte of a pool does not exist or would be written twice; or the
            plan splits a block and the format stores only whole blocks.
    """
    if plan.chunk_tokens != chunk_format.chunk_tokens:
        raise InputError(f"the plan's chunks have {plan.chunk_tokens} tokens, the format's {chunk_format.chunk_tokens}")
    slots, copies = layout.blocks * layout.block_tokens, plan.copies
    work: dict[HostExtent, tuple[int, list[WholeBlocks], list[PartOfBlock]]] = {}
    written: list[tuple[int, int, int]] = []  # where: the chunk's number, or 0 for the cache; first place, tokens
    extent = None
    for copy in copies:
        _check(copy, slots, chunk_format.chunk_tokens)
        if copy.extent is not extent:  # to hash one takes as long as all the rest
            extent = copy.extent
            if extent not in work:
                check_extent(extent, chunk_format, pools)
                work[extent] = (len(work), [], [])
            number, whole, parts = work[extent]
        written.append((0, copy.first_slot, copy.tokens) if to_engine else (number, copy.first_token, copy.tokens))
        for piece in _pieces(copy, layout.block_tokens):
            if isinstance(piece, WholeBlocks):
                whole.append(piece)
            elif chunk_format.kind == "blocks":
                raise InputError(
                    f"the plan moves {piece.tokens} tokens of a block of {layout.block_tokens}, "
                    "and opaque blocks move whole or not at all"
                )
            else:
                parts.append(piece)
            if chunk_format.kind == "blocks" and piece.first_token % layout.block_tokens:
                raise InputError(f"chunk token {piece.first_token} is inside an opaque block")
    _refuse_repeats(written, "slot" if to_engine else "token of a chunk")
    return [ChunkWork(extent, tuple(whole), tuple(parts)) for extent, (_, whole, parts) in work.items()]


def _refuse_repeats(written: list[tuple[int, int, int]], what: str) -> None:
    """Two writers of one place would race on a device. One place may be read repeatedly: prompts share blocks."""
    written.sort()
    for (owner, first, tokens), (next_owner, second, _) in pairwise(written):
        if owner == next_owner and second < first + tokens:
            raise InputError(f"the plan writes {what} {second} twice")


def _check(copy: Copy, slots: int, chunk_tokens: int) -> None:
    if copy.tokens < 1 or copy.first_slot < 0 or copy.first_slot + copy.tokens > slots:
        raise InputError(f"slots {copy.first_slot} to {copy.first_slot + copy.tokens} of a cache with {slots} slots")
    if copy.first_token < 0 or copy.first_token + copy.tokens > chunk_tokens:
        raise InputError(f"tokens {copy.first_token} to {copy.first_token + copy.tokens} of a chunk of {chunk_tokens}")


def check_extent(extent: HostExtent, chunk_format: ChunkFormat, pools: Mapping[str, int]) -> None:
    """
    Raises:
        InputError: the extent is not that of a chunk of this format in one of these pools.
    """
    if extent.pool not in pools:
        raise InputError(f"host pool {extent.pool!r} is not attached")
    if extent.nbytes != chunk_format.nbytes:
        raise InputError(f"an extent of {extent.nbytes} bytes for chunks of {chunk_format.nbytes}")
    if extent.offset < 0 or extent.offset + extent.nbytes > pools[extent.pool]:
        raise InputError(f"an extent at {extent.offset} of a pool of {pools[extent.pool]} bytes")
    if extent.offset % chunk_format.itemsize:
        raise InputError(f"an extent at {extent.offset} is not aligned to elements of {chunk_format.itemsize} bytes")


def _pieces(copy: Copy, block_tokens: int) -> Iterable[WholeBlocks | PartOfBlock]:
    block, offset = divmod(copy.first_slot, block_tokens)
    if not offset and not copy.tokens % block_tokens:  # nearly always
        return (WholeBlocks(copy.first_token, block, copy.tokens // block_tokens),)
    return _cut(copy, block_tokens)


def _cut(copy: Copy, block_tokens: int) -> Iterator[WholeBlocks | PartOfBlock]:
    token, slot, remaining = copy.first_token, copy.first_slot, copy.tokens
    while remaining:
        block, offset = divmod(slot, block_tokens)
        if offset == 0 and remaining >= block_tokens:
            blocks = remaining // block_tokens
            yield WholeBlocks(token, block, blocks)
            moved = blocks * block_tokens
        else:
            moved = min(block_tokens - offset, remaining)
            yield PartOfBlock(token, block, offset, moved)
        token, slot, remaining = token + moved, slot + moved, remaining - moved


@dataclass(frozen=True, slots=True)
class CopyTable:
    """The copies of a validated plan, chunk by chunk, as columns of numbers for a device: it must not cost a Python
    call a block.

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
