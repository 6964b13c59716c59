"""The server's host pool as mapped by a client, from the descriptor that the server sent."""

import mmap
import os
from collections.abc import Sequence

from kv_core.errors import TierDown
from kv_core.extent import HostExtent
from kv_core.keys import ChunkKey

from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.pool.ahead import PopulatedAhead
from kv_tiers.pool.places import Places, slot_bytes_for


class MappedPool:
    """The part of `HostPool` that copiers need. Only the server allocates slots."""

    def __init__(self, name: str, group_bytes: Sequence[int], slots: int, descriptor: int) -> None:
        """group_bytes: as for `PayloadSizes`.
        descriptor: closed here in any case.

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
            if os.fstat(descriptor).st_size != nbytes:  # accessing a page beyond the file's end kills a process
                raise TierDown(f"the server's pool {name} does not have the {nbytes} bytes that it should")
            mapping = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise TierDown(f"the server's pool {name} cannot be mapped: {error}") from None
        finally:
            os.close(descriptor)
        self.view = memoryview(mapping)
        """The slots' bytes, writable. The mapping lives as long as this pool or anything derived from the view."""
        # The server's pages are ready, but this process has its own page table.
        self._ahead = PopulatedAhead(mapping, 0, nbytes)
        self._ahead.reached(0)

    def extents(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> tuple[HostExtent, ...]:
        """The extents of these chunks in these slots, each of its own size."""
        return self._places.extents(keys, slots)

    def will_write(self, slots: Sequence[int]) -> None:
        """These slots are about to be written. Servers hand out unused ones in ascending order."""
        if slots:
            self._ahead.reached((max(slots) + 1) * self.slot_bytes)

    def close(self) -> None:
        """Stop touching pages. The mapping remains, as described at `view`."""
        self._ahead.stop()
