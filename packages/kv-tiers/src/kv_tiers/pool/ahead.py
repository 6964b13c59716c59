"""Populates pages of a pool before a store needs them.

Writing to memory for the first time waits for the system to find and clear each page: 0.5 GB/s where a virtual
machine's host has to find it too, and ten times that afterwards. A store is part of the engine's step, so a thread
populates what will be handed out next (`MADV_POPULATE_WRITE`), in slices, at most half of the time, and at a lower
priority than the engine. It stays a bounded distance ahead of what has been handed out, so a pool that is hardly used
takes hardly any memory.

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
from contextlib import suppress
from typing import Final

from kv_core.log import limited_logger

from kv_tiers.pool.places import PAGE_BYTES
from kv_tiers.threads import start_thread

_log = limited_logger(__name__)

LEAST_AHEAD: Final = 64 << 20
"""The distance at the start, in bytes: a prompt of 1,500 tokens of a model of 135 million parameters takes 35 MB."""
MOST_AHEAD: Final = 1 << 30
SLICE_BYTES: Final = 512 << 10
"""Bytes per call: about a millisecond, for which `stop` and any mapping or unmapping of memory in this process wait."""
WORTH_BYTES: Final = 2 << 20
_NICENESS: Final = 5
"""Not higher: a thread that hardly ever runs would hold the lock of the process's mappings for long."""
_MADV_POPULATE_WRITE: Final = 23  # Python has no name for it


def distance(reached: int) -> int:
    """How many bytes are kept populated beyond the first `reached`."""
    return min(MOST_AHEAD, max(LEAST_AHEAD, reached // 4))


class PopulatedAhead:
    """Keeps the pages of one mapping populated ahead of `reached`. It writes nothing into them.

    `reached` and `stop` are called by one thread at a time; `stop` before the mapping is closed.
    """

    def __init__(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """The mapping's `nbytes` from `start`, a multiple of the page size. Nothing happens before `reached` is called.

        A mapping of 2 MiB or less is left alone: a thread costs more.
        """
        self._mapping: mmap.mmap | None = mapping
        self._start, self._bytes = start, nbytes
        self._populated = 0  # written by the thread alone, the next two by the caller alone
        self._used = 0
        self._target = 0
        self._thread: threading.Thread | None = None
        self._is_over = nbytes <= WORTH_BYTES or sys.platform != "linux"

    def reached(self, used: int) -> None:
        """The first `used` bytes have been handed out. Returns at once."""
        if self._is_over:
            return
        ahead = distance(used)
        if self._populated >= min(self._bytes, used + ahead // 2):
            return  # enough for now: a thread is worth half a distance
        self._used = used
        self._target = min(self._bytes, used + ahead)
        # A thread that is about to end may miss the new target: the next slot's call starts another.
        if self._thread is None or not self._thread.is_alive():
            assert self._mapping is not None
            thread = threading.Thread(target=self._populate, args=(self._mapping,), name="kv-populate", daemon=True)
            if why := start_thread(thread):  # the next slot's call tries again
                _log.debug("the host pool is not populated ahead for now: %s", why)
                return
            self._thread = thread

    def stop(self) -> None:
        """Stop touching pages. It waits for one slice at most; calling it again does nothing."""
        self._is_over = True
        self._mapping = None
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _populate(self, mapping: mmap.mmap) -> None:
        """mapping: stays alive as long as this thread does, whatever happens to the pool."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux a thread's own
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + self._start
        madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap's own would hold the GIL meanwhile
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # Used slots are populated already, or will be before this thread reaches them.
        while not self._is_over:
            offset = max(self._populated, self._used // PAGE_BYTES * PAGE_BYTES)
            if offset >= self._target:
                break
            began_s = time.monotonic()
            # Up to a multiple of the slice's size in memory, so that no slice crosses the end of a huge page.
            nbytes = min(SLICE_BYTES - (address + offset) % SLICE_BYTES, self._bytes - offset)
            if madvise(address + offset, nbytes, _MADV_POPULATE_WRITE) == 0:
                self._populated = offset + nbytes
            elif ctypes.get_errno() != errno.EINTR:
                _log.debug("the host pool is not populated ahead: %s", os.strerror(ctypes.get_errno()))
                self._is_over = True
            time.sleep(time.monotonic() - began_s)
