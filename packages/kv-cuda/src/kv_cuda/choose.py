"""Chooses the copier for an engine's tensors."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from kv_core import device as connect_device
from kv_core.format import ChunkFormat
from kv_core.log import limited_logger

from kv_cuda.copy.copy_paths import CopyPaths
from kv_cuda.copy.cpu import CpuCopier
from kv_cuda.layout import PagedLayout
from kv_cuda.quantise import QuantisingCopier

if TYPE_CHECKING:
    from kv_cuda.copy.gpu import GpuCopier

_log = limited_logger(__name__)


class Copier(connect_device.DeviceCopier, Protocol):
    """A copier that can also release a pool."""

    def detach(self, pool: str) -> None: ...


class BoundCopier(connect_device.LayerwiseCopier, Copier, Protocol):
    """The same, layer by layer. Its pool may be memory of the device itself."""

    def attach_tensor(self, pool: str, memory: torch.Tensor) -> None:
        """Register `memory`, uint8 in one axis on the engine's device. The copier keeps it alive."""


def make_copier(
    layout: PagedLayout,
    tensors: Sequence[torch.Tensor],
    chunk_format: ChunkFormat,
    *,
    stores_behind: bool = False,
    largest_chunk_bytes: int = 0,
) -> BoundCopier:
    """The GPU copier where the tensors are on a GPU and its kernel can move them, else the CPU copier; wrapped in a
    `QuantisingCopier` where the format is quantised.

    stores_behind: `store` may return before a CPU thread has copied many bytes: the caller holds the blocks.
    largest_chunk_bytes: size of the largest chunk of all groups that share a pool with this one; 0: none is larger.

    Raises:
        InputError: layout, tensors and format do not fit together.
    """
    device = tensors[0].device
    if chunk_format.is_quantised:
        exact = _exact_copier(layout, tensors, layout.canonical_format(chunk_format.chunk_tokens), stores_behind=False)
        return QuantisingCopier(layout, chunk_format, exact, device, largest_chunk_bytes=largest_chunk_bytes)
    return _exact_copier(
        layout, tensors, chunk_format, stores_behind=stores_behind, largest_chunk_bytes=largest_chunk_bytes
    )


def _exact_copier(
    layout: PagedLayout,
    tensors: Sequence[torch.Tensor],
    chunk_format: ChunkFormat,
    *,
    stores_behind: bool,
    largest_chunk_bytes: int = 0,
) -> "CpuCopier | GpuCopier":
    device = tensors[0].device
    rows_are_runs = chunk_format.kind == "blocks" or all(part.dim == 1 and not part.is_tiled for part in layout.parts)
    if device.type == "cuda" and rows_are_runs:
        if importlib.util.find_spec("triton") is not None:
            from kv_cuda.copy.gpu import GpuCopier

            return GpuCopier(
                layout,
                tensors,
                chunk_format,
                copy_paths=CopyPaths.of_device(device),
                largest_chunk_bytes=largest_chunk_bytes,
            )
        _log.warning("triton is not installed: chunks are copied by torch, which is correct but slow")
    return CpuCopier(layout, tensors, chunk_format, stores_behind=stores_behind)
