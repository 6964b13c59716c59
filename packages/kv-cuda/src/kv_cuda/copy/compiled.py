"""Whole blocks in C, on a CPU: what `CpuCopier` does with torch's strided copies, in one call for all chunks of a plan.

A strided copy in torch costs tens of microseconds before it moves a byte, and a small model's block is moved in two.
Where a part is transposed, the C function works in squares with sides of one cache line and needs no scratch.
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from kv_cuda.kernels import CopyKernels, Place, place_of


class CopyWay(IntEnum):
    """The directions of a copy, numbered as in the C function."""

    TO_CHUNKS = 0
    TO_ENGINE = 1
    TO_ENGINE_STREAMED = 2
    """Around the processor's caches, which saves reading the lines that are overwritten: for more than they hold."""


class CompiledBlocks:
    """One part of a layout. It keeps the engine's memory alive."""

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
            address, numbers = blocks_array.buffer_info()
            place = address, numbers * blocks_array.itemsize
            self._kernels.call("copy_blocks", way, shape, place, engine, pool)
