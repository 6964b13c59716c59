"""A transfer plan checked against a layout, and cut into few pieces that move whole blocks at once. Pure arithmetic."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kv_core.errors import InputError
from kv_core.extent import HostExtent
from kv_core.format import ChunkFormat
from kv_core.transfer import Copy, TransferPlan

from kv_cuda.layout import PagedLayout


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
    """All that happens to one chunk."""

    extent: HostExtent
    whole: tuple[WholeBlocks, ...]
    parts: tuple[PartOfBlock, ...]


def check_and_cut(
    plan: TransferPlan, layout: PagedLayout, chunk_format: ChunkFormat, pools: Mapping[str, int]
) -> list[ChunkWork]:
    """The plan's work, chunk by chunk.

    pools: bytes of each known pool.

    Raises:
        InputError: a slot, a token of a chunk or a byte of a pool that does not exist; or the plan cuts a block in two
            and the format keeps blocks whole.
    """
    if plan.chunk_tokens != chunk_format.chunk_tokens:
        raise InputError(f"the plan's chunks have {plan.chunk_tokens} tokens, the format's {chunk_format.chunk_tokens}")
    slots = layout.blocks * layout.block_tokens
    work: dict[HostExtent, tuple[list[WholeBlocks], list[PartOfBlock]]] = {}
    for copy in plan.copies:
        _check(copy, slots, chunk_format, pools)
        whole, parts = work.setdefault(copy.extent, ([], []))
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
    return [ChunkWork(extent, tuple(whole), tuple(parts)) for extent, (whole, parts) in work.items()]


def _check(copy: Copy, slots: int, chunk_format: ChunkFormat, pools: Mapping[str, int]) -> None:
    extent = copy.extent
    if copy.tokens < 1 or copy.first_slot < 0 or copy.first_slot + copy.tokens > slots:
        raise InputError(f"slots {copy.first_slot} to {copy.first_slot + copy.tokens} of a cache with {slots} slots")
    if copy.first_token < 0 or copy.first_token + copy.tokens > chunk_format.chunk_tokens:
        raise InputError(
            f"tokens {copy.first_token} to {copy.first_token + copy.tokens} of a chunk of {chunk_format.chunk_tokens}"
        )
    if extent.pool not in pools:
        raise InputError(f"host pool {extent.pool!r} is not attached")
    if extent.nbytes != chunk_format.nbytes:
        raise InputError(f"an extent of {extent.nbytes} bytes for chunks of {chunk_format.nbytes}")
    if extent.offset < 0 or extent.offset + extent.nbytes > pools[extent.pool]:
        raise InputError(f"an extent at {extent.offset} of a pool of {pools[extent.pool]} bytes")
    if extent.offset % chunk_format.itemsize:
        raise InputError(f"an extent at {extent.offset} is not aligned to elements of {chunk_format.itemsize} bytes")


def _pieces(copy: Copy, block_tokens: int) -> Iterator[WholeBlocks | PartOfBlock]:
    token, slot, left = copy.first_token, copy.first_slot, copy.tokens
    while left:
        block, offset = divmod(slot, block_tokens)
        if offset == 0 and left >= block_tokens:
            blocks = left // block_tokens
            yield WholeBlocks(token, block, blocks)
            moved = blocks * block_tokens
        else:
            moved = min(block_tokens - offset, left)
            yield PartOfBlock(token, block, offset, moved)
        token, slot, left = token + moved, slot + moved, left - moved
