"""The pools of a copier that runs on streams: registered, and released when nothing uses them any more."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from kv_core.transfer import HostExtent

from kv_cuda.copy.memory import AttachedPool, device_pool, host_pool


class AttachesPools(ABC):
    """The part of a `kv_core.device.DeviceCopier` that knows its pools."""

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
