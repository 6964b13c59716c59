"""Populates pages of a pool before a store or a load needs them.

Writing to memory for the first time waits for the system to find and clear each page: 0.5 GB/s where a virtual
machine's host has to find it too, and ten times that afterwards. A store is part of the engine's step, so a thread
populates what will be handed out next (`MADV_POPULATE_WRITE`), in slices, at most half of the time, and at a lower
priority than the engine. It stays a bounded distance ahead of what has been handed out, so a pool that is hardly used
takes hardly any memory.

A process that maps a pool which others have written finds the memory there, but not in its own page table: its first
load of each page takes twice as long (94 MiB 17 ms instead of 8.5). So the same thread then maps what others have
written (`MADV_POPULATE_READ`), from the pool's start, a moment later: it is mostly a load that says how far that is.

The thread exists only while there is something to populate. If the system lacks the call (Linux before 5.14) or has no
memory or no thread left, nothing is populated, and stores wait.
"""

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Final

from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.transfer import HostExtent

from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.threads import start_thread

# Where chunks are in a pool: slots of one size, in whole pages, with room for the largest chunk.
#
# A slot's number names a chunk while it is there. Slots lie in the order of their numbers until two change places,
# which is how better bytes of a chunk replace its present ones (`kv_tiers.cache.upgrade`).

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
        if (sizes := self._sizes).are_equal and all(known := [self._extents[slot] for slot in slots]):
            return tuple(filter(None, known))
        payload_bytes: Iterable[int] = repeat(sizes.largest) if sizes.are_equal else map(sizes.of, keys)
        return tuple(map(self.extent, slots, payload_bytes))


_log = limited_logger(__name__)

LEAST_AHEAD: Final = 64 << 20
"""The distance at the start, in bytes: a prompt of 1,500 tokens of a model of 135 million parameters takes 35 MB."""
MOST_AHEAD: Final = 1 << 30
SLICE_BYTES: Final = 512 << 10
"""Bytes per call: about a millisecond, for which `stop` and any mapping or unmapping of memory in this process wait."""
WORTH_BYTES: Final = 2 << 20
PAUSE_S: Final = 0.25
"""Before what others have written is mapped. The load that is under way needs the processors and the memory itself."""
_NICENESS: Final = 5
"""Not higher: a thread that hardly ever runs would hold the lock of the process's mappings for long."""
_MADV_POPULATE_READ: Final = 22  # Python has names for neither
_MADV_POPULATE_WRITE: Final = 23


def distance(reached: int) -> int:
    """How many bytes are kept populated beyond the first `reached`."""
    return min(MOST_AHEAD, max(LEAST_AHEAD, reached // 4))


class PopulatedPages:
    """Keeps the pages of one mapping populated: ahead of `reached`, and all of `written`. It writes nothing into them.

    `reached`, `written` and `stop` are called by one thread at a time; `stop` before the mapping is closed.
    """

    def __init__(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """The mapping's `nbytes` from `start`, a multiple of the page size. Nothing happens before the first call.

        A mapping of 2 MiB or less is left alone: a thread costs more.
        """
        self._mapping: mmap.mmap | None = mapping
        self._start, self._bytes = start, nbytes
        # Written by the thread alone: `_populated` is the end of what is ahead, `_gap_end` the start of its last part
        # without a gap, and what lies before `_mapped` was written by others and is in this process's page table.
        self._populated = self._gap_end = self._mapped = 0
        # Written by the caller alone.
        self._used = self._target = self._written = 0
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_over = nbytes <= WORTH_BYTES or sys.platform != "linux"

    def reached(self, used: int) -> None:
        """The first `used` bytes have been handed out. Returns at once."""
        ahead = distance(used)
        if self._populated >= min(self._bytes, used + ahead // 2):
            return  # enough for now: a thread is worth half a distance
        self._used = used
        self._target = min(self._bytes, used + ahead)
        if not self._wake.is_set():  # once a slot, while the thread has not come round
            self._wake.set()
        self._start_thread()

    def written(self, nbytes: int) -> None:
        """Other processes have written the first `nbytes`, or most of them. Returns at once."""
        self._written = max(self._written, min(self._bytes, nbytes))
        if self._written - self._mapped_end() >= WORTH_BYTES:
            self._start_thread()

    def stop(self) -> None:
        """Stop touching pages. It waits for one slice at most; calling it again does nothing."""
        self._is_over = True
        self._wake.set()
        self._mapping = None
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _mapped_end(self) -> int:
        """Up to where every page is in this process's page table."""
        return self._mapped if self._mapped < self._gap_end else max(self._mapped, self._populated)

    def _start_thread(self) -> None:
        # A thread that is about to end may miss the new target: the next slot's call starts another.
        if self._is_over or (self._thread is not None and self._thread.is_alive()):
            return
        assert self._mapping is not None
        thread = threading.Thread(target=self._populate, args=(self._mapping,), name="kv-populate", daemon=True)
        if why := start_thread(thread):  # the next slot's call tries again
            _log.debug("the host pool is not populated for now: %s", why)
            return
        self._thread = thread

    def _populate(self, mapping: mmap.mmap) -> None:
        """mapping: stays alive as long as this thread does, whatever happens to the pool."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux a thread's own
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + self._start
        madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap's own would hold the GIL meanwhile
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        has_paused = False
        while True:
            self._wake.clear()
            if self._is_over:
                break
            # What has been handed out is populated already, or will be before this thread reaches it.
            ahead = max(self._populated, self._used // PAGE_BYTES * PAGE_BYTES)
            is_ahead = ahead < self._target  # goes first: a store needs it next
            offset = ahead if is_ahead else self._mapped_end()
            if not is_ahead and offset >= self._written:
                break
            if not is_ahead and not has_paused:
                has_paused = not self._wake.wait(PAUSE_S)
                continue
            began_s = time.monotonic()
            # Up to a multiple of the slice's size in memory, so that no slice crosses the end of a huge page.
            nbytes = min(SLICE_BYTES - (address + offset) % SLICE_BYTES, self._bytes - offset)
            advice = _MADV_POPULATE_WRITE if is_ahead else _MADV_POPULATE_READ
            if madvise(address + offset, nbytes, advice) == 0:
                if is_ahead:
                    if ahead != self._populated:
                        self._gap_end = ahead
                    self._populated = offset + nbytes
                else:
                    self._mapped = offset + nbytes
            elif ctypes.get_errno() != errno.EINTR:
                _log.debug("the host pool is not populated: %s", os.strerror(ctypes.get_errno()))
                self._is_over = True
            time.sleep(time.monotonic() - began_s)
