"""Where chunks are in a pool: slots of one size, in whole pages, with room for the largest chunk."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final

from kv_core.extent import HostExtent
from kv_core.keys import ChunkKey

from kv_tiers.payload_sizes import PayloadSizes

PAGE_BYTES: Final = 4096


def slot_bytes_for(chunk_bytes: int) -> int:
    """A chunk's size in whole pages, so that every slot is aligned for the disk and the device."""
    return -(-chunk_bytes // PAGE_BYTES) * PAGE_BYTES


class Places:
    """The extents of one pool. One object a slot for as long as chunks of one size come there, as making one costs more
    than all else."""

    def __init__(self, pool: str, sizes: PayloadSizes, slot_bytes: int, slots: int) -> None:
        self._pool = pool
        self._sizes = sizes
        self._slot_bytes = slot_bytes
        self._extents: list[HostExtent | None] = [None] * slots

    def extent(self, slot: int, nbytes: int) -> HostExtent:
        extent = self._extents[slot]
        if extent is None or extent.nbytes != nbytes:
            extent = self._extents[slot] = HostExtent(self._pool, slot * self._slot_bytes, nbytes)
        return extent

    def extents(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> tuple[HostExtent, ...]:
        """The extents of these chunks, each of its own size."""
        sizes = self._sizes
        each: Iterable[int] = repeat(sizes.largest) if sizes.are_equal else map(sizes.of, keys)
        return tuple(map(self.extent, slots, each))
