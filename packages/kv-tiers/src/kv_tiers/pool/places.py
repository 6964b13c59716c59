"""Where chunks are in a pool: slots of one size, in whole pages, with room for the largest chunk.

A slot's number names a chunk while it is there. Slots lie in the order of their numbers until two change places, which
is how better bytes of a chunk replace its present ones (`kv_tiers.cache.upgrade`).
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final

from kv_core.keys import ChunkKey
from kv_core.transfer import HostExtent

from kv_tiers.payload_sizes import PayloadSizes

PAGE_BYTES: Final = 4096


def slot_bytes_for(chunk_bytes: int) -> int:
    """A chunk's size in whole pages, so that every slot is aligned for the disk and the device."""
    return -(-chunk_bytes // PAGE_BYTES) * PAGE_BYTES


class Places:
    """The extents of one pool. A slot's object is reused while its chunks have the same size, because creating one
    costs more than everything else here."""

    def __init__(self, pool: str, sizes: PayloadSizes, slot_bytes: int, slots: int) -> None:
        self._pool = pool
        self._sizes = sizes
        self._slot_bytes = slot_bytes
        self._extents: list[HostExtent | None] = [None] * slots
        self.moved: dict[int, int] = {}
        """The places of slots that are not where they were initially."""

    def at(self, slot: int) -> int:
        """The place of this slot, counted in slots."""
        return self.moved.get(slot, slot)

    def swap(self, first: int, second: int) -> None:
        """Have two slots change places."""
        for slot, place in ((first, self.at(second)), (second, self.at(first))):
            if slot == place:
                self.moved.pop(slot, None)
            else:
                self.moved[slot] = place
        self._extents[first], self._extents[second] = self._extents[second], self._extents[first]

    def extent(self, slot: int, nbytes: int) -> HostExtent:
        extent = self._extents[slot]
        if extent is None or extent.nbytes != nbytes:
            extent = self._extents[slot] = HostExtent(self._pool, self.at(slot) * self._slot_bytes, nbytes)
        return extent

    def extents(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> tuple[HostExtent, ...]:
        """The extents of these chunks, each of its own size."""
        sizes = self._sizes
        payload_bytes: Iterable[int] = repeat(sizes.largest) if sizes.are_equal else map(sizes.of, keys)
        return tuple(map(self.extent, slots, payload_bytes))
