"""Chunk memory as a copier on a device sees it: host memory, pinned on first use, or device memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from kv_core.errors import CopyFailed, InputError
from kv_core.transfer import HostExtent

from kv_cuda.copy.pinned import SLICE_BYTES, CudaRegistrar, PinnedMapping, give_back_mapping, node_of, share_mapping

_PAGE_BYTES = 4096
"""Chunks begin at multiples of this in every pool."""


@dataclass(frozen=True, slots=True)
class AttachedPool:
    """A pool as a copier uses it.

    bytes: its memory, uint8.
    pinned: its pinned mapping; None where there is nothing to pin.
    is_on_device: whether it is the device's own memory.
    """

    bytes: torch.Tensor
    pinned: PinnedMapping | None = None
    is_on_device: bool = False

    def chunk(self, extent: HostExtent) -> torch.Tensor:
        """The extent's bytes, ready to be copied.

        Raises:
            ConfigError: the system does not let this process lock so much memory.
        """
        if self.pinned is not None:
            self.pinned.pin(extent.offset, nbytes=extent.nbytes)
        return self.bytes[extent.offset : extent.offset + extent.nbytes]

    def prepare(self, offsets: Sequence[int], nbytes: int) -> None:
        """Have the chunks of `nbytes` at these offsets ready to be copied.

        Raises:
            ConfigError: as for `chunk`.
        """
        if self.pinned is not None:
            self.pinned.pin(*offsets, nbytes=nbytes)

    def release(self) -> None:
        """Release the pool: nothing may be copied to or from it any more."""
        if self.pinned is not None:
            give_back_mapping(self.pinned)


def host_pool(name: str, view: memoryview, device: torch.device, chunk_bytes: int) -> AttachedPool:
    """
    chunk_bytes: size of the largest chunk that is stored there, which decides how far apart chunks lie.

    Raises:
        InputError: the view is read-only or empty or, for a GPU, does not begin at a page.
    """
    if view.readonly or not view.nbytes:
        raise InputError(f"pool {name!r} is read-only or empty: {view.nbytes} bytes")
    data = torch.frombuffer(view, dtype=torch.uint8)
    if device.type != "cuda":
        return AttachedPool(data)
    if data.data_ptr() % _PAGE_BYTES:
        # Whole pages are registered, including other data in the first one; the driver then refuses to copy memory
        # that is registered only in part.
        raise InputError(f"pool {name!r} does not begin at a page of {_PAGE_BYTES} bytes: use mapped memory for a GPU")
    # No chunk may lie across two slices: the driver copies within one registration only.
    slot_bytes = -(-chunk_bytes // _PAGE_BYTES) * _PAGE_BYTES
    slice_bytes = max(1, SLICE_BYTES // slot_bytes) * slot_bytes
    node = node_of(device)
    mapping = share_mapping(
        data.data_ptr(), view.nbytes, CudaRegistrar(device), memory=data, slice_bytes=slice_bytes, node=node
    )
    mapping.pin_ahead()
    return AttachedPool(data, mapping)


def device_pool(name: str, memory: torch.Tensor, device: torch.device) -> AttachedPool:
    """
    Raises:
        InputError: `memory` is not a run of bytes on that device.
    """
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or memory.device != device:
        raise InputError(f"pool {name!r} must be a run of uint8 on {device}, as one axis")
    return AttachedPool(memory, is_on_device=True)


def host_buffer(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised host memory between which and this device copies do not stall the caller.

    Raises:
        CopyFailed: the system has too little left. That may change, so only this copy fails.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:  # the driver's own error, not the one for the device's memory
        raise CopyFailed(f"the system has no memory left for a copy's pinned buffers: {error}") from None


@contextmanager
def buffers_for_copies() -> Iterator[None]:
    """Buffers are allocated when a copy first needs them, from what the engine has left of the device's memory.

    Raises:
        CopyFailed: it has left too little. That may change, so only this copy fails.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise no_buffers(error) from None


def no_buffers(error: torch.OutOfMemoryError) -> CopyFailed:
    return CopyFailed(f"the device has no memory left for a copy's buffers: {error}")


class AttachesPools(ABC):
    """The part of a `kv_core.device.DeviceCopier` on streams that knows its pools: they are registered, and released
    when nothing uses them any more."""

    def __init__(self, device: torch.device, largest_chunk_bytes: int) -> None:
        """device: the device of the engine's blocks. largest_chunk_bytes: size of the largest chunk in its pools."""
        self._device, self._largest_chunk_bytes = device, largest_chunk_bytes
        self._pools: dict[str, AttachedPool] = {}

    def attach(self, pool: str, view: memoryview) -> None:
        """Register a pool. Its memory is pinned piece by piece as it is used.

        Raises:
            InputError: the view is read-only or empty, or begins where this copier cannot copy; for a GPU, not at a
                page.
        """
        self._attach(pool, host_pool(pool, view, self._device, self._largest_chunk_bytes))

    def attach_tensor(self, pool: str, memory: torch.Tensor) -> None:
        """Register a pool that is memory of the device itself, uint8 in one axis. The copier keeps it alive.

        Raises:
            InputError: it is not such memory, or begins where this copier cannot copy.
        """
        self._attach(pool, device_pool(pool, memory, self._device))

    def detach(self, pool: str) -> None:
        """Release a pool, so that it can be closed. Waits for the copies that use it."""
        if pool in self._pools:
            self._wait()
            self._pools.pop(pool).release()

    @property
    def is_queued(self) -> bool:
        return self._device.type == "cuda"

    @property
    def stores_behind(self) -> bool:
        return self.is_queued

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        for extent in extents:
            self._pools[extent.pool].chunk(extent)

    def _attach(self, name: str, pool: AttachedPool) -> None:
        self._pools[name] = pool

    @abstractmethod
    def _wait(self) -> None:
        """Wait for all copies."""
