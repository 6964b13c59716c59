"""The server's host pool as mapped by a client, from the descriptor that the server sent."""

import mmap
import os
from collections.abc import Sequence

from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.transfer import HostExtent
from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.pool.core_dumps import keep_out
from kv_tiers.pool.populated import Places, PopulatedPages, distance, slot_bytes_for

_BLOCK_BYTES = 512
"""Of `st_blocks`, on every file system."""


class MappedPool:
    """The part of `HostPool` that copiers need. Only the server allocates slots."""

    def __init__(
        self, name: str, group_bytes: Sequence[int], slots: int, descriptor: int, *, core_dump: bool = False
    ) -> None:
        """group_bytes: as for `PayloadSizes`.
        descriptor: closed here in any case.
        core_dump: a core dump of this process has the pool in it.

        Raises:
            TierDown: it cannot be mapped, or is shorter than it should be.
        """
        self.name = name
        self.sizes = PayloadSizes(group_bytes)
        self.chunk_bytes = self.sizes.largest
        self.slot_bytes = slot_bytes_for(self.chunk_bytes)
        self.slots = slots
        self._places = Places(name, self.sizes, self.slot_bytes, slots)
        try:
            nbytes = slots * self.slot_bytes
            status = os.fstat(descriptor)
            if status.st_size != nbytes:  # accessing a page beyond the file's end kills a process
                raise TierDown(f"the server's pool {name} does not have the {nbytes} bytes that it should")
            mapping = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise TierDown(f"the server's pool {name} cannot be mapped: {error}") from None
        finally:
            os.close(descriptor)
        if not core_dump:
            keep_out(mapping)
        self.view = memoryview(mapping)
        """The slots' bytes, writable. The mapping lives as long as this pool or anything derived from the view."""
        # The server's pages are ready, but this process has its own page table.
        self._pages = PopulatedPages(mapping, 0, nbytes)
        self._pages.reached(0)
        self._pages.written(status.st_blocks * _BLOCK_BYTES)  # servers hand out unused slots in ascending order

    def extents(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> tuple[HostExtent, ...]:
        """The extents of these chunks in these slots, each of its own size."""
        return self._places.extents(keys, slots)

    def will_write(self, slots: Sequence[int]) -> None:
        """These slots are about to be written, and the unused ones after them next."""
        if slots:
            self._pages.reached((max(slots) + 1) * self.slot_bytes)

    def will_read(self, slots: Sequence[int]) -> None:
        """These slots are about to be read. Others have written them, and the server has populated some after them."""
        if slots:
            used = (max(slots) + 1) * self.slot_bytes
            self._pages.written(used + distance(used))

    def close(self) -> None:
        """Stop touching pages. The mapping remains, as described at `view`."""
        self._pages.stop()
