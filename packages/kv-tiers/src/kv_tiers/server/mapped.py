"""The host pool as a client sees it: the server's memory, mapped here by the descriptor it handed over."""

import mmap
import os

from kv_core.errors import TierDown
from kv_core.extent import HostExtent

from kv_tiers.pool.host_pool import slot_bytes_for


class MappedPool:
    """What `HostPool` shows to whoever copies, without giving slots away: that is the server's."""

    def __init__(self, name: str, chunk_bytes: int, slots: int, descriptor: int) -> None:
        """descriptor: closed here, whatever comes of it.

        Raises:
            TierDown: it cannot be mapped, or is shorter than it should be.
        """
        self.name = name
        self.chunk_bytes = chunk_bytes
        self.slot_bytes = slot_bytes_for(chunk_bytes)
        self.slots = slots
        self._extents: list[HostExtent | None] = [None] * slots
        try:
            nbytes = slots * self.slot_bytes
            if os.fstat(descriptor).st_size != nbytes:  # touching what is beyond a file's end kills a process
                raise TierDown(f"the server's pool {name} has not the {nbytes} bytes it should")
            self._view = memoryview(mmap.mmap(descriptor, nbytes))
        except (OSError, ValueError, OverflowError) as error:
            raise TierDown(f"the server's pool {name} cannot be mapped: {error}") from None
        finally:
            os.close(descriptor)

    @property
    def view(self) -> memoryview:
        """The slots' bytes, writable. The mapping lasts as long as this pool or anything made of the view."""
        return self._view

    def extent(self, slot: int) -> HostExtent:
        """Where the chunk in this slot is. One object a slot for all time."""
        extent = self._extents[slot]
        if extent is None:
            extent = self._extents[slot] = HostExtent(self.name, slot * self.slot_bytes, self.chunk_bytes)
        return extent
