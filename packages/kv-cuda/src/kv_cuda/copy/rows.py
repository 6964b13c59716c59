"""Gather and scatter of token rows in one launch over all layers: the Triton kernel and its arguments.

A *row* is one token's data in one layer of one part, `heads × head_dim` elements. In a chunk the rows of adjacent
tokens are adjacent; in the engine's cache each is at its slot's place, divided into *runs* of adjacent bytes (one per
head, or the whole row if heads are adjacent). A *plane* is one layer of one part. The kernel iterates over tiles of
some tokens × one plane, or of a piece of one token's row where that is longer than a tile (a linear layer's state has
megabytes), and moves 16 bytes per thread if everything is aligned to 16 (Triton makes 128-bit loads and
stores of pairs of 8-byte words; a test finds them in the PTX). It uses as many programs as it is given, so that a copy
over the bus leaves the other multiprocessors to the model.

Host rows are an address like any other: pinned host memory that the device reads over the bus, or a ring buffer in
device memory that the copy engine fills.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from kv_core.errors import InputError

from kv_cuda.copy.plan import CopyShape
from kv_cuda.layout import PagedLayout

PLANE_FIELDS = 4
"""Fields of a plane in the table: address, and bytes between blocks, between tokens, and between runs."""
Span = tuple[int, int, int]
"""Some planes: the first, their number, and the distance from each to the next."""
_TILE_BYTES = 16 << 10
"""Bytes that a program moves at a time: 128 threads with eight words of 16 bytes each."""
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


# No argument value may need another kernel, which would be compiled in the middle of serving: neither a small address,
# which Triton takes for 32 bits unless annotated, nor lists of tokens that begin at an odd position.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        *("base", "tokens", "slots_at", "rows_at", "first", "per_slot", "per_row"),
        *("first_plane", "plane_count", "plane_step", "plane_bytes"),
    ],
    do_not_specialize_on_alignment=["slots", "rows"],
)
def move_rows(  # type: ignore[no-untyped-def]  # a kernel's arguments have no types that mypy knows
    planes,  # *i64 [planes, 4]
    slots,  # *i64, from `slots_at` on: in units of `per_slot` tokens
    rows,  # *i64, from `rows_at` on: where every `per_row`th token's row is in its chunk's first plane, less `base`
    base: tl.int64,
    tokens: tl.int32,
    slots_at: tl.int32,
    rows_at: tl.int32,
    first: tl.int32,  # the position in both lists, in tokens, of the first token
    per_slot: tl.int32,
    per_row: tl.int32,
    first_plane: tl.int32,
    plane_count: tl.int32,
    plane_step: tl.int32,
    plane_bytes: tl.int64,  # between a chunk's planes
    BLOCK_TOKENS: tl.constexpr,
    RUN: tl.constexpr,  # words in a run
    ROW: tl.constexpr,  # words in a row
    WIDTH: tl.constexpr,  # words of a row in a tile, a power of two
    PIECES: tl.constexpr,  # tiles that a row is cut into
    TILE: tl.constexpr,  # tokens in a tile
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,  # every address and distance is a multiple of this, in bytes
    TO_ENGINE: tl.constexpr,
):
    """Scatter rows to their slots, or gather them. Each program takes every `num_programs`th tile."""
    tiles = tl.cdiv(tokens, TILE) * PIECES
    for number in range(tl.program_id(0), tiles * plane_count, tl.num_programs(0)):
        plane = (first_plane + number // tiles * plane_step).to(tl.int64)
        word = (number % PIECES) * WIDTH + tl.arange(0, WIDTH)
        plane_fields = planes + plane * 4
        cache = tl.load(plane_fields)
        block_bytes = tl.load(plane_fields + 1)
        token_bytes = tl.load(plane_fields + 2)
        run_words = tl.multiple_of(tl.load(plane_fields + 3) // WORD_BYTES, ALIGNED // WORD_BYTES)
        token = (number % tiles // PIECES) * TILE + tl.arange(0, TILE)
        is_token = token < tokens
        position = token + first
        slot = tl.load(slots + slots_at + position // per_slot, mask=is_token, other=0) * per_slot + position % per_slot
        row = tl.load(rows + rows_at + position // per_row, mask=is_token, other=0) + base + plane * plane_bytes
        row += (position % per_row).to(tl.int64) * (ROW * WORD_BYTES)
        place = cache + (slot // BLOCK_TOKENS) * block_bytes + (slot % BLOCK_TOKENS) * token_bytes
        in_chunk = tl.multiple_of(row.to(tl.pointer_type(WORD)), ALIGNED)
        in_engine = tl.multiple_of(place.to(tl.pointer_type(WORD)), ALIGNED)
        chunk_words = in_chunk[:, None] + word[None, :]
        if RUN == ROW:
            engine_words = in_engine[:, None] + word[None, :]
        else:
            engine_words = in_engine[:, None] + ((word // RUN) * run_words + word % RUN)[None, :]
        is_word = is_token[:, None] & (word < ROW)[None, :]
        if TO_ENGINE:
            tl.store(engine_words, tl.load(chunk_words, mask=is_word), mask=is_word)
        else:
            tl.store(chunk_words, tl.load(engine_words, mask=is_word), mask=is_word)


class Listing(NamedTuple):
    """How two lists name tokens: an entry of one stands for `per_slot` slots side by side, of the other for `per_row`.

    tokens: number of tokens.
    slots_at, rows_at: where the lists begin.
    first: the position of the first token in both lists, in tokens.
    """

    tokens: int
    slots_at: int = 0
    rows_at: int = 0
    first: int = 0
    per_slot: int = 1
    per_row: int = 1

    def part(self, start: int, end: int) -> "Listing":
        """Of lists with an entry for each token, those of tokens `start` to `end`, the last one excluded."""
        return Listing(end - start, self.slots_at + start, self.rows_at + start)


class Compiled(NamedTuple):
    """A kernel as the driver launches it: its handle, threads of a program, and bytes that they share."""

    kernel: int
    threads: int
    shared: int


_SIGNATURE = (*("*i64",) * 3, "i64", *("i32",) * 9, "i64")
"""The arguments that csrc/plans.c launches the kernel with."""


def is_for_driver(kernel: Any) -> bool:
    """Whether what Triton has compiled can be launched as csrc/plans.c does, with no more than its arguments."""
    needs = getattr(kernel, "metadata", None)  # an interpreter's have none
    if needs is None or needs.target.backend != "cuda":
        return False
    signature = tuple(kind for kind in kernel.src.signature.values() if kind != "constexpr")
    special = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    # What this Triton does not say, it may need.
    return signature == _SIGNATURE and needs.num_ctas == 1 and not any(getattr(needs, name, True) for name in special)


@dataclass(frozen=True)
class RowKernel:
    """`move_rows` for one cache and one chunk format: everything that does not change from call to call."""

    planes: torch.Tensor
    host_planes: np.ndarray
    plane_count: int
    plane_bytes: int
    row_bytes: int
    block_tokens: int
    run_words: int
    row_words: int
    word_bytes: int
    aligned: int

    @cached_property
    def all_planes(self) -> list[Span]:
        return [(0, self.plane_count, 1)]

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time arguments except the direction."""
        # Without the limit a state would be one tile, of more words than a program has registers for.
        width = min(1 << (self.row_words - 1).bit_length(), _TILE_BYTES // self.word_bytes)
        return {
            "BLOCK_TOKENS": self.block_tokens,
            "RUN": self.run_words,
            "ROW": self.row_words,
            "WIDTH": width,
            "PIECES": -(-self.row_words // width),
            "TILE": _TILE_BYTES // (width * self.word_bytes),
            "WORD": _WORDS[self.word_bytes],
            "WORD_BYTES": self.word_bytes,
            "ALIGNED": self.aligned,
        }

    @property
    def for_driver(self) -> tuple[int, ...]:
        """From `planes` on in `Device` in csrc/plans.c."""
        return self.planes.data_ptr(), self.plane_bytes, self.constants["TILE"], self.constants["PIECES"]

    def compile(self) -> dict[bool, Compiled | None]:
        """Compile both directions' kernels now, which takes a second, rather than in the first request. Returns, for
        `to_engine`, what the driver can launch."""
        no_tokens = torch.empty(0, dtype=torch.int64, device=self.planes.device)
        compiled: dict[bool, Compiled | None] = {}
        for to_engine in (True, False):
            named: dict[str, Any] = {"base": 0, "span": (0, self.plane_count, 1), "programs": 1}
            kernel: Any = self.move(no_tokens, no_tokens, to_engine=to_engine, **named)
            compiled[to_engine] = None
            if is_for_driver(kernel):
                needs = kernel.metadata
                compiled[to_engine] = Compiled(kernel.function, needs.num_warps * needs.target.warp_size, needs.shared)
        return compiled

    def move(
        self,
        slots: torch.Tensor,
        rows: torch.Tensor,
        *,
        base: int,
        span: Span,
        to_engine: bool,
        programs: int,
        listing: Listing | None = None,
    ) -> object:
        """Launch on the current stream, with at most the given number of programs. Returns what Triton has compiled.

        slots, rows: int64 on the device. base + rows[i] is the address of a token's row in the chunk's first plane.
        listing: None: both have an entry for each token.
        """
        named = Listing(slots.numel()) if listing is None else listing
        tokens = named.tokens
        constants = self.constants
        first, count, step = span
        tiles = -(-tokens // constants["TILE"]) * constants["PIECES"]
        tokens_of = (tokens, named.slots_at, named.rows_at, named.first, named.per_slot, named.per_row)
        numbers = (base, *tokens_of, first, count, step, self.plane_bytes)
        grid = (max(1, min(programs, tiles * count)),)
        return move_rows[grid](self.planes, slots, rows, *numbers, TO_ENGINE=to_engine, **constants)


def row_kernel(layout: PagedLayout, shape: CopyShape, tensors: Sequence[torch.Tensor], plane_bytes: int) -> RowKernel:
    """The kernel for a cache of this layout, seen as `shape`.

    tensors: in the layout's order. plane_bytes: distance between a chunk's planes. Chunks must begin at multiples of
        `RowKernel.aligned`.

    Raises:
        InputError: a part whose innermost axis is not `dim`: such rows are not runs of bytes, see `CpuCopier`.
    """
    parts, heads, dims, itemsize = shape.parts, shape.heads, shape.head_dim, shape.itemsize
    if any(part.is_tiled or (part.dim != 1 and dims > 1) for part in parts):
        raise InputError(f"layout {layout.name}: the elements of a head do not lie side by side")
    _check_reach(layout, shape, tensors)
    row_bytes = heads * dims * itemsize
    run_bytes = row_bytes if all(part.head == dims or heads == 1 for part in parts) else dims * itemsize
    table = np.empty((len(parts) * layout.layers, PLANE_FIELDS), np.int64)
    for number, part in enumerate(parts):
        for layer, tensor in enumerate(layout.of_part(tensors, number)):
            table[number * layout.layers + layer] = (
                tensor.data_ptr() + part.offset * itemsize,
                part.block * itemsize,
                part.token * itemsize,
                part.head * itemsize,
            )
    # A distance that is never used (one head, one token per block) must not reduce the alignment.
    counts = (2, layout.blocks, layout.block_tokens, heads)
    used = [int(value) for column, count in enumerate(counts) if count > 1 for value in table[:, column]]
    aligned = math.gcd(16, row_bytes, run_bytes, plane_bytes, *used)
    word_bytes = min(8, aligned)
    return RowKernel(
        planes=torch.from_numpy(table).to(tensors[0].device),
        host_planes=table,
        plane_count=len(table),
        plane_bytes=plane_bytes,
        row_bytes=row_bytes,
        block_tokens=layout.block_tokens,
        run_words=run_bytes // word_bytes,
        row_words=row_bytes // word_bytes,
        word_bytes=word_bytes,
        aligned=aligned,
    )


def _check_reach(layout: PagedLayout, shape: CopyShape, tensors: Sequence[torch.Tensor]) -> None:
    """Check that every element lies in its tensor's storage, because the kernel checks no address."""
    for number, part in enumerate(shape.parts):
        for tensor in layout.of_part(tensors, number):
            start = tensor.storage_offset() * tensor.element_size()
            if start % shape.itemsize:
                raise InputError(f"a tensor of layout {layout.name} starts inside an element of {shape.itemsize} bytes")
            last = (
                part.offset
                + (layout.blocks - 1) * part.block
                + (layout.block_tokens - 1) * part.token
                + (shape.heads - 1) * part.head
                + (shape.head_dim - 1) * part.dim
            )
            nbytes = tensor.untyped_storage().nbytes()
            if start + (last + 1) * shape.itemsize > nbytes:
                raise InputError(f"layout {layout.name} reaches beyond the tensor's storage of {nbytes} bytes")
