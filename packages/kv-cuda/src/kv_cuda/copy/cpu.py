"""The CPU copier: gather and scatter between the engine's blocks and host extents.

A copy runs in the calling thread and its event is complete when the call returns (docs/adr/0007 says why), but a thread
copies large stores and layerwise loads (`behind`). Whole blocks are moved in C where that is installed
(`CompiledBlocks`). The rest is moved by a few large torch calls that release the GIL and use torch's threads: one call
per part and run of adjacent blocks, over all layers. Where the engine stores a part transposed (its dim axis is not the
innermost), one strided copy would jump a row of memory per element. The block then goes through a scratch buffer in the
engine's own axis order, which stays in the processor's cache, so that each of the two passes is regular on one side.
Measured on two cores for a 16 MiB chunk of vLLM's CPU layout, K alone: 1.6 → 1.25 ms gathered in float32, 4.1 → 1.4 ms
scattered in bfloat16, where memmove takes 0.65 ms. The size of the scratch buffer hardly matters between 0.5 and 16
MiB.

Tiled parts (`Tile`) are copied as they are, in the widest words: two adjacent elements of dim that a matrix unit needs
together are one word of twice the size, about three times as fast as element by element on one thread. Where it needs
two adjacent tokens together there is no such word, and a scatter makes one call for each of them, so that torch's
innermost loop is not two elements long (one thread, bfloat16: 1.6 → 2.6 GB/s where memmove reaches 7.4).

Everything uses device-neutral torch calls, so tensors on a GPU work too, synchronously and slowly.
"""

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from kv_core.device import CopyEvent, LayerwiseCopier
from kv_core.errors import InputError
from kv_core.format import ChunkFormat
from kv_core.transfer import HostExtent, TransferPlan

from kv_cuda.copy.behind import LayerInPieces, copy_behind, pays_behind
from kv_cuda.copy.memory import device_pool
from kv_cuda.copy.plan import ChunkWork, CopyShape, copy_shape, validate_and_split
from kv_cuda.copy.streams import DoneEvent, GatheredLayers
from kv_cuda.kernels import CopyKernels, Place, installed_kernels, place_of, place_of_packed
from kv_cuda.layout import PagedLayout, PartLayout, view_shape


class CopyWay(IntEnum):
    """The directions of a copy, numbered as in the C function."""

    TO_CHUNKS = 0
    TO_ENGINE = 1
    TO_ENGINE_STREAMED = 2
    """Around the processor's caches, which saves reading the lines that are overwritten: for more than they hold."""


class CompiledBlocks:
    """Whole blocks of one part of a layout in C: what `CpuCopier` does with torch's strided copies, in one call for all
    chunks of a plan. It keeps the engine's memory alive.

    A strided copy in torch takes tens of microseconds before it moves a byte, and a small model's block moves in two.
    Where a part is transposed, the C function works in squares with sides of one cache line and needs no scratch.
    """

    def __init__(self, kernels: CopyKernels, runs: Sequence[torch.Tensor], chunk_layer: int) -> None:
        """
        runs: runs of layers, [layers, blocks, token // tile, token % tile, heads, dim // tile, dim % tile] each.
        chunk_layer: distance from one layer to the next in a chunk, in words.
        """
        self._kernels = kernels
        self._runs: list[tuple[int, Place, Place]] = []
        self._memory: list[object] = []  # the memory that these places point into
        first = 0
        for run in runs:
            (layers, _, *sizes), (layer, block, *strides) = run.shape, run.stride()
            axes = [number for axis in zip(sizes, strides, strict=True) for number in axis]
            shape = np.array(
                [run.element_size(), run.storage_offset(), layers, layer, chunk_layer, block, *axes], np.int64
            )
            engine = torch.empty(0, dtype=torch.uint8).set_(run.untyped_storage()).numpy()
            self._memory += shape, engine
            self._runs.append((first, place_of(shape), place_of(engine)))
            first += layers * chunk_layer

    def copy(self, blocks: Sequence[tuple[int, int, int]], pool: Place, way: CopyWay, layers: slice) -> None:
        """blocks: runs of blocks: the pool's word at which a run's first token lies in the first layer, the first
        block, and the number of blocks. layers: which of the runs of layers to copy.

        Raises:
            MisuseError: a part lies beyond the pool or the engine's memory. Nothing was copied.
        """
        for first, shape, engine in self._runs[layers]:
            blocks_array = array(
                "q", [number for word, block, count in blocks for number in (word + first, block, count)]
            )
            self._kernels.call("copy_blocks", way, shape, place_of_packed(blocks_array), engine, pool)


# A chunk's bytes are moved, never computed with, so each element is a whole number of its size: no NaN is touched.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_SCRATCH_BYTES = 4 << 20
_MAX_WORD_BYTES = 8
_MAX_SHORT_TILE = 4
"""Largest tile, in adjacent tokens, that a scatter copies token by token."""

_MAX_THREADS_AS_QUICK = 4
_MAX_BYTES_OF_ONE_THREAD = 4 << 20
"""The C code uses one thread, two to three times as fast as one of torch's: for larger copies, with more threads of
torch's than that, torch is faster."""

_MIN_STREAMED_BYTES = 16 << 20
"""The most that a processor's caches hold for one core: the attention that follows would find no more in them."""

_FIRST_LAYER_PIECES = 4
"""The engine waits for a load's first layer at once, and so copies as much of it as the thread."""

_DONE = DoneEvent()


@dataclass(frozen=True, slots=True)
class _CpuPart:
    """One part over runs of layers, counted in words.

    runs: [layers, blocks, token // tile, token % tile, heads, dim // tile, dim % tile] each, of the engine's memory.
    word: the unit that is moved, one element or a few neighbours in dim.
    tile: tokens of a tile.
    heads: number of heads in a token's row.
    dims: words in a head's row, as (tiles, words per tile).
    transposed: whether dim is not the innermost axis.
    interleaved: whether tokens are interleaved, in tiles of a few adjacent tokens.
    """

    runs: list[torch.Tensor]
    word: torch.dtype
    tile: int
    heads: int
    dims: tuple[int, int]
    transposed: bool
    interleaved: bool


class CpuCopier(LayerwiseCopier):
    """A `kv_core.device.DeviceCopier` for one group of layers. Not thread-safe: it has one scratch buffer."""

    is_queued = False

    def __init__(
        self,
        layout: PagedLayout,
        tensors: Sequence[torch.Tensor],
        chunk_format: ChunkFormat,
        *,
        compiled: bool = True,
        stores_behind: bool = False,
        pays_behind: Callable[[int], bool] = pays_behind,
    ) -> None:
        """
        tensors: in the layout's order, on one device; the copier keeps them, and so the engine's cache, alive.
        compiled: whether functions in C may be used, which copy the same bytes.
        stores_behind: whether `store` may return before a thread has copied many bytes.
        pays_behind: whether a copy of this many bytes is made by a thread.

        Raises:
            InputError: layout and tensors disagree, or the format is not one of this layout's.
        """
        self._shape = copy_shape(layout, len(tensors), chunk_format)
        check_dtype(layout)
        self._layout = layout
        self._device = tensors[0].device
        self._format = chunk_format
        self._parts = [
            _over_layers(layout, part, layout.of_part(tensors, number), self._shape)
            for number, part in enumerate(self._shape.parts)
        ]
        self._kernels = installed_kernels() if compiled and self._device.type == "cpu" else None
        self._compiled = self._in_c([part.runs for part in self._parts])
        self._compiled_layers: list[CompiledBlocks] = []  # the same layer by layer, made on first use
        self._pays_behind = pays_behind
        self._stores_behind = stores_behind and bool(self._compiled) and pays_behind(sys.maxsize)
        self._aligned = max(part.word.itemsize for part in self._parts)
        self._pools: dict[str, Place] = {}  # for functions in C; `_words` keep the memory alive
        self._pool_bytes: dict[str, int] = {}
        self._words: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._scratch: torch.Tensor | None = None

    def attach(self, pool: str, view: memoryview) -> None:
        """Register a pool. Bytes at its end that do not fill an element are left alone.

        Raises:
            InputError: the view is read-only, or shorter than one element.
        """
        nbytes = view.nbytes // self._aligned * self._aligned
        if view.readonly or not nbytes:
            raise InputError(f"pool {pool!r} is read-only or too small: {view.nbytes} bytes")
        self._register(pool, torch.frombuffer(view, dtype=torch.uint8, count=nbytes))

    def attach_tensor(self, pool: str, memory: torch.Tensor) -> None:
        """Register a pool that is a tensor, uint8 in one axis, on the engine's device. The copier keeps it alive.

        Raises:
            InputError: it is not such a tensor, or does not begin at an element.
        """
        data = device_pool(pool, memory, self._device).bytes
        if data.storage_offset() % self._aligned or data.numel() < self._aligned:
            raise InputError(f"pool {pool!r} does not begin at an element of {self._aligned} bytes, or is empty")
        self._register(pool, data[: data.numel() // self._aligned * self._aligned])

    def _register(self, pool: str, memory: torch.Tensor) -> None:
        self._pool_bytes[pool] = memory.numel()
        if self._compiled:
            self._pools[pool] = memory.data_ptr(), memory.numel()
        for part in self._parts:
            self._words[pool, part.word] = memory.view(part.word)

    def detach(self, pool: str) -> None:
        """Release a pool, so that it can be closed."""
        self._pools.pop(pool, None)
        self._pool_bytes.pop(pool, None)
        for part in self._parts:
            self._words.pop((pool, part.word), None)

    @property
    def stores_behind(self) -> bool:
        return self._stores_behind

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        return None

    def load(self, plan: TransferPlan) -> DoneEvent:
        self._copy_all(self._checked(plan, to_engine=True), to_engine=True)
        return _DONE

    def load_layers(self, plan: TransferPlan) -> Sequence[CopyEvent]:
        """Like `load`, with an event for each layer. Large loads are copied after the call, by a thread or by callers
        that wait (`behind`); their pools are kept alive until then."""
        chunks = self._checked(plan, to_engine=True)
        if not self._in_thread(chunks):
            self._copy_all(chunks, to_engine=True)
            return [_DONE] * self._layout.layers
        way = self._copy_way(chunks, to_engine=True)
        copy = self._copy_of_layer(chunks, way)
        size = -(-len(chunks) // _FIRST_LAYER_PIECES)
        pieces = [chunks[first : first + size] for first in range(0, len(chunks), size)]
        first_layer = [partial(self._copy_of_layer(piece, way), 0) for piece in pieces]
        copies = copy_behind(first_layer + [partial(copy, layer) for layer in range(1, self._layout.layers)])
        return [LayerInPieces(copies[: len(pieces)]), *copies[len(pieces) :]]

    def store_layers(self, plan: TransferPlan) -> GatheredLayers | None:
        """A thread, or a caller that waits, gathers large stores. None: small ones are quicker in one piece."""
        chunks = self._checked(plan, to_engine=False)
        if not self._in_thread(chunks):
            return None
        copy = self._copy_of_layer(chunks, CopyWay.TO_CHUNKS)

        def copy_all(layers: Sequence[int]) -> None:
            for layer in layers:
                copy(layer)

        def gather(layers: Sequence[int]) -> CopyEvent:
            (event,) = copy_behind([partial(copy_all, layers)])
            return event

        return GatheredLayers(self._layout.layers, gather)

    def _copy_of_layer(self, chunks: Sequence[ChunkWork], way: CopyWay) -> Callable[[int], None]:
        """Copies one layer, on any thread; it keeps the pools alive."""
        if not self._compiled_layers:
            self._compiled_layers = self._in_c(
                [[run[layer : layer + 1] for run in part.runs for layer in range(len(run))] for part in self._parts]
            )
        copy = self._copy_of(self._compiled_layers, chunks, way)
        return lambda layer: copy(slice(layer, layer + 1))

    def _in_thread(self, chunks: Sequence[ChunkWork]) -> bool:
        """Whether a thread can make this copy, and whether that pays."""
        is_whole = bool(self._compiled) and not any(work.parts for work in chunks)
        return is_whole and self._pays_behind(len(chunks) * self._format.nbytes)

    def _copy_of(
        self, compiled: Sequence[CompiledBlocks], chunks: Sequence[ChunkWork], way: CopyWay
    ) -> Callable[[slice], None]:
        """Copies the given runs of layers, on any thread; it keeps the pools alive."""
        pools, alive = dict(self._pools), list(self._words.values())

        def copy(layers: slice) -> None:
            assert alive
            self._copy_compiled(compiled, chunks, pools, way, layers)

        return copy

    def store(self, plan: TransferPlan) -> CopyEvent:
        """Where stores may end after the call, a thread, or a caller that waits, gathers large ones."""
        chunks = self._checked(plan, to_engine=False)
        if not self._stores_behind or not self._in_thread(chunks):
            self._copy_all(chunks, to_engine=False)
            return _DONE
        copy = self._copy_of(self._compiled, chunks, CopyWay.TO_CHUNKS)
        (event,) = copy_behind([partial(copy, slice(None))])
        return event

    def _copy_all(self, chunks: Sequence[ChunkWork], *, to_engine: bool) -> None:
        few_bytes = len(chunks) * self._format.nbytes <= _MAX_BYTES_OF_ONE_THREAD
        in_c = bool(self._compiled) and (few_bytes or torch.get_num_threads() <= _MAX_THREADS_AS_QUICK)
        if in_c:
            self._copy_compiled(self._compiled, chunks, self._pools, self._copy_way(chunks, to_engine=to_engine))
        for work in chunks:
            if not in_c:
                self._move_whole(work, to_engine=to_engine)
            if work.parts:
                self._move_parts(work, to_engine=to_engine)

    def _copy_way(self, chunks: Sequence[ChunkWork], *, to_engine: bool) -> CopyWay:
        if to_engine and len(chunks) * self._format.nbytes >= _MIN_STREAMED_BYTES:
            return CopyWay.TO_ENGINE_STREAMED
        return CopyWay(to_engine)

    def _in_c(self, runs: Sequence[Sequence[torch.Tensor]]) -> list[CompiledBlocks]:
        """The functions in C for each part's runs of layers; empty: there are none."""
        return [
            CompiledBlocks(self._kernels, part_runs, self._format.layer_bytes // part.word.itemsize)
            for part, part_runs in zip(self._parts, runs, strict=True)
            if self._kernels is not None
        ]

    def _copy_compiled(
        self,
        compiled: Sequence[CompiledBlocks],
        chunks: Sequence[ChunkWork],
        pools: Mapping[str, Place],
        way: CopyWay,
        layers: slice = slice(None),
    ) -> None:
        """The whole blocks of all chunks, pool by pool. layers: which of the runs of layers."""
        for pool, memory in pools.items():
            runs = [(work.extent.offset, run) for work in chunks if work.extent.pool == pool for run in work.whole]
            for number, part in enumerate(self._parts) if runs else ():
                row, nbytes = part.heads * part.dims[0] * part.dims[1], part.word.itemsize
                start = self._format.layer_offset(number, 0)
                blocks = [
                    ((offset + start) // nbytes + run.first_token * row, run.first_block, run.blocks)
                    for offset, run in runs
                ]
                compiled[number].copy(blocks, memory, way, layers)

    def _checked(self, plan: TransferPlan, *, to_engine: bool) -> list[ChunkWork]:
        checked = validate_and_split(plan, self._layout, self._format, self._pool_bytes, to_engine=to_engine)
        for work in checked:
            if work.extent.offset % self._aligned:
                raise InputError(
                    f"an extent at {work.extent.offset} is not aligned to words of {self._aligned} bytes, in which "
                    f"layout {self._layout.name} is copied"
                )
        return checked

    def _move_whole(self, work: ChunkWork, *, to_engine: bool) -> None:
        block_tokens = self._layout.block_tokens
        for number, part in enumerate(self._parts):
            for run in work.whole:
                if part.transposed:
                    for block in range(run.blocks):
                        first = run.first_token + block * block_tokens
                        chunk_part = self._chunk_part(work, number, range(first, first + block_tokens), block_tokens)
                        engine_parts = [layers[:, run.first_block + block] for layers in part.runs]
                        self._copy_transposed(chunk_part[:, 0], engine_parts, part.word, to_engine=to_engine)
                else:
                    whole = range(run.first_token, run.first_token + run.blocks * block_tokens)
                    chunk_part = self._chunk_part(work, number, whole, block_tokens)
                    blocks = slice(run.first_block, run.first_block + run.blocks)
                    engine_parts = [layers[:, blocks] for layers in part.runs]
                    self._copy(chunk_part, engine_parts, interleaved=part.interleaved, to_engine=to_engine)

    def _move_parts(self, work: ChunkWork, *, to_engine: bool) -> None:
        for number, part in enumerate(self._parts):
            for piece in work.parts:
                for first, count, tiles, in_tile in _tile_pieces(piece.offset, piece.tokens, part.tile):
                    start = piece.first_token + first
                    tile = count // (tiles.stop - tiles.start)
                    chunk_part = self._chunk_part(work, number, range(start, start + count), count, tile=tile)
                    engine_parts = [layers[:, piece.block, tiles, in_tile] for layers in part.runs]
                    self._copy(chunk_part[:, 0], engine_parts, interleaved=False, to_engine=to_engine)

    def _chunk_part(
        self, work: ChunkWork, number: int, tokens: range, block_tokens: int, *, tile: int | None = None
    ) -> torch.Tensor:
        """[layers, blocks, tiles, tokens of a tile, heads, dim // tile, dim % tile] of these tokens in the pool, in the
        part's words."""
        chunk_format, part = self._format, self._parts[number]
        dims = part.dims[0] * part.dims[1]
        row, tile = part.heads * dims, tile or part.tile
        shape = (chunk_format.layers, len(tokens) // block_tokens, block_tokens // tile, tile, part.heads, *part.dims)
        stride = (chunk_format.chunk_tokens * row, block_tokens * row, tile * row, row, dims, part.dims[1], 1)
        pool = self._words[work.extent.pool, part.word]
        offset = (work.extent.offset + chunk_format.layer_offset(number, 0)) // part.word.itemsize
        return pool.as_strided(shape, stride, pool.storage_offset() + offset + tokens.start * row)

    @staticmethod
    def _copy(chunk: torch.Tensor, engine: list[torch.Tensor], *, interleaved: bool, to_engine: bool) -> None:
        """chunk: [layers, …, tiles, tokens of a tile, heads, …]. engine: the same over one or more runs of layers."""
        first = 0
        for run in engine:
            chunk_run = chunk[first : first + run.shape[0]]
            first += run.shape[0]
            if not to_engine:
                chunk_run.copy_(run)
            elif interleaved:
                for token in range(run.shape[-4]):
                    run.select(-4, token).copy_(chunk_run.select(-4, token))
            else:
                run.copy_(chunk_run)

    def _copy_transposed(
        self, chunk: torch.Tensor, engine: list[torch.Tensor], word: torch.dtype, *, to_engine: bool
    ) -> None:
        """One whole block, [layers, tiles, tokens, heads, …], by way of a scratch with heads before tokens."""
        first = 0
        for run in engine:
            chunk_run = chunk[first : first + run.shape[0]].transpose(2, 3)
            engine_run = run.transpose(2, 3)
            layers = run.shape[0]
            step = max(1, _SCRATCH_BYTES * layers // (engine_run.numel() * word.itemsize))
            for layer in range(0, layers, step):
                chunk_part, engine_part = chunk_run, engine_run
                if step < layers:
                    chunk_part, engine_part = chunk_run[layer : layer + step], engine_run[layer : layer + step]
                scratch = self._scratch_like(engine_part, word)
                if to_engine:
                    scratch.copy_(chunk_part)
                    engine_part.copy_(scratch)
                else:
                    scratch.copy_(engine_part)
                    chunk_part.copy_(scratch)
            first += run.shape[0]

    def _scratch_like(self, part: torch.Tensor, word: torch.dtype) -> torch.Tensor:
        if self._scratch is None or self._scratch.shape[1:] != part.shape[1:] or len(self._scratch) < len(part):
            self._scratch = torch.empty(part.shape, dtype=word, device=part.device)
        return self._scratch[: len(part)]


def _tile_pieces(offset: int, tokens: int, tile: int) -> Iterator[tuple[int, int, slice, slice]]:
    """Tokens `offset … offset + tokens` of a block, in pieces that cover the same tokens of one or more tiles.

    Yields (first of them, how many, tiles, tokens inside each tile).
    """
    done = 0
    while done < tokens:
        index, in_tile = divmod(offset + done, tile)
        whole = (tokens - done) // tile if not in_tile else 0
        count = whole * tile if whole else min(tile - in_tile, tokens - done)
        yield done, count, slice(index, index + max(1, whole)), slice(in_tile, tile if whole else in_tile + count)
        done += count


def check_dtype(layout: PagedLayout) -> None:
    """
    Raises:
        InputError: elements of the layout's dtype have another size, or a size that no word has.
    """
    if layout.itemsize not in _WORDS or getattr(torch, layout.dtype).itemsize != layout.itemsize:
        raise InputError(f"layout {layout.name}: an element of {layout.dtype} does not have {layout.itemsize} bytes")


def _over_layers(layout: PagedLayout, part: PartLayout, tensors: Sequence[torch.Tensor], shape: CopyShape) -> _CpuPart:
    """One run where the engine cut all layers from one storage at equal distances, as vLLM does; else one for each."""
    part, heads, dims, word = _widest_words(part, tensors, shape)
    size, stride = view_shape(part, layout.block_tokens, heads, dims)
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    if any(start % word.itemsize for start in starts):
        raise InputError(f"a tensor of layout {layout.name} starts inside an element of {word.itemsize} bytes")
    bases = [start // word.itemsize for start in starts]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    distances = {next_base - base for base, next_base in pairwise(bases)}
    # Layers that share one tensor are at a distance of 0: correct one by one, but torch refuses them as one view.
    if len(storages) == 1 and len(distances) == 1 and min(distances) > 0:
        runs = [(tensors[0], bases[0], len(tensors), min(distances))]
    else:
        runs = [(tensor, base, 1, 0) for tensor, base in zip(tensors, bases, strict=True)]
    views = []
    for tensor, base, layers, distance in runs:
        storage = torch.empty(0, dtype=word, device=tensor.device).set_(tensor.untyped_storage())
        try:
            views.append(
                storage.as_strided((layers, layout.blocks, *size), (distance, part.block, *stride), base + part.offset)
            )
        except RuntimeError:
            raise InputError(
                f"layout {layout.name} reaches beyond the tensor's storage of {tensor.untyped_storage().nbytes()} bytes"
            ) from None
    tile = size[1]
    return _CpuPart(
        runs=views,
        word=word,
        tile=tile,
        heads=heads,
        dims=(size[3], size[4]),
        transposed=part.dim != 1 and not part.is_tiled,
        interleaved=part.token == 1 and 1 < tile <= _MAX_SHORT_TILE,
    )


def _widest_words(
    part: PartLayout, tensors: Sequence[torch.Tensor], shape: CopyShape
) -> tuple[PartLayout, int, int, torch.dtype]:
    """The part, its heads and dims in the widest words that on both sides are whole neighbours in dim."""
    neighbours = part.dim_tile.size if part.dim_tile is not None and part.dim == 1 else 1
    nbytes = neighbours * shape.itemsize
    if neighbours > 1 and nbytes in _WORDS and nbytes <= _MAX_WORD_BYTES:
        starts_apart = any(tensor.storage_offset() * tensor.element_size() % nbytes for tensor in tensors)
        if not starts_apart and part.is_in_words(neighbours):
            return part.in_words(neighbours), shape.heads, shape.head_dim // neighbours, _WORDS[nbytes]
    return part, shape.heads, shape.head_dim, _WORDS[shape.itemsize]
