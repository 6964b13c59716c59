"""One private file of the disk tier. Reads and writes that the system does in part are completed here, and what the
file system does not offer is done without (`FileSystem`)."""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.private_files import open_own_file
from kv_tiers.tiers.file_system import UNSUPPORTED, FileSystem, fallocate

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a medium without space."""
_ZERO_BYTES: Final = 1 << 20
_ZEROS_AT_ONCE: Final = 64 << 20
"""How much room is made at a time where that takes writing: a store waits for it."""


class File:
    """Safe to call from any thread."""

    def __init__(self, directory: int, path: Path, file_system: FileSystem, *, direct: bool = False) -> None:
        """directory: open descriptor of the directory of `path`. The file is created if it does not exist.
        direct: bypass the page cache, unless the file system turns out not to offer that.

        Raises:
            ConfigError: it is a link, belongs to another user, or is open to others.
        """
        self.path = path
        self.direct = direct
        self.in_doubt = False
        """A sync failed: it is unknown which of the last writes have reached the medium."""
        self._syncing = threading.Lock()
        self._file_system = file_system
        self.fd = -1

        def open_file() -> None:
            flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
            self.fd = open_own_file(path, flags, "remove it or choose another directory", directory=directory)

        self._direct_or_not(open_file)

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        remaining = sum(map(len, buffers))
        while (done := self._direct_or_not(os.pwritev, self.fd, buffers, offset)) < remaining:
            if not done:
                raise OSError(errno.EIO, "none of a write was accepted")
            buffers, offset, remaining = after(buffers, done), offset + done, remaining - done

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Number of bytes read: fewer than requested if the file ends."""
        remaining, start = sum(map(len, buffers)), offset
        while remaining and (done := self._direct_or_not(os.preadv, self.fd, buffers, offset)):
            offset, remaining = offset + done, remaining - done
            if done % PAGE_BYTES:  # only at the end of the file, and direct I/O may not start there
                break
            buffers = after(buffers, done)
        return offset - start

    def sync(self) -> None:
        """Return once the writes are durable.

        After a failure the system may drop what it could not write and report success to the next caller
        (https://lwn.net/Articles/752063/), so every sync fails until `trust_again`.
        """
        with self._syncing:
            if self.in_doubt:
                raise OSError(errno.EIO, "an earlier write did not reach the medium")
            if self._file_system.lacks("fsync"):
                return
            try:
                os.fdatasync(self.fd)
            except OSError as error:
                if not self._file_system.is_lacking("fsync", error):
                    self.in_doubt = True
                    raise

    def trust_again(self) -> None:
        """What was in doubt has been rewritten, or nothing depends on it."""
        self.in_doubt = False

    def allocate(self, start: int, least: int, end: int) -> int:
        """Allocate space on the medium from `start` to `least` or beyond it, at most to `end`. Returns where the space
        ends. A failed attempt leaves nothing behind."""
        nbytes = self.nbytes
        try:
            if not self._file_system.lacks("fallocate"):
                try:
                    fallocate(self.fd, start, end - start)
                    return end
                except OSError as error:
                    if not self._file_system.is_lacking("fallocate", error):
                        raise
            end = max(least, min(end, start + _ZEROS_AT_ONCE))
            zeros = memoryview(mmap.mmap(-1, _ZERO_BYTES))
            for offset in range(start, end, _ZERO_BYTES):
                self.write([zeros[: end - offset]], offset)
            return end
        except OSError:
            os.ftruncate(self.fd, nbytes)
            raise

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self.fd, nbytes)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        """Drop these bytes from the page cache: the host pool is their cache."""
        with suppress(OSError):  # it is only advice, and not every system takes any
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def leave_direct(self, why: str) -> None:
        """From now on, use the page cache."""
        self._file_system.note("O_DIRECT", why)
        self.direct = False
        if self.fd >= 0:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def _direct_or_not(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a call that is repeated through the page cache if the file system has no direct I/O for it."""
        was_direct = self.direct  # another thread may be the first to notice
        try:
            return call(*arguments)
        except OSError as error:
            if not was_direct or error.errno not in UNSUPPORTED or self._file_system.needs_direct:
                raise
            self.leave_direct(error.strerror or str(error))
        return call(*arguments)

    def close(self) -> None:
        """Closing again does nothing."""
        descriptor, self.fd = self.fd, -1
        if descriptor >= 0:
            os.close(descriptor)


def after(buffers: Sequence[bytes | memoryview], nbytes: int) -> list[memoryview]:
    """The buffers without their first `nbytes`."""
    remaining = []
    for buffer in buffers:
        if nbytes < len(buffer):
            remaining.append(memoryview(buffer)[nbytes:])
        nbytes = max(0, nbytes - len(buffer))
    return remaining


def free_bytes(path: Path) -> int:
    """How many bytes this user may still write to the file system of this path."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def size_of_file_system(path: Path) -> int:
    """The size of the file system of this path; 0: it does not say."""
    space = os.statvfs(path)
    return space.f_blocks * space.f_frsize


def allocated_bytes(directory: Path) -> int:
    """How many bytes the files in a directory take up on their medium."""
    with os.scandir(directory) as files:
        return sum(file.stat(follow_symlinks=False).st_blocks * 512 for file in files)
