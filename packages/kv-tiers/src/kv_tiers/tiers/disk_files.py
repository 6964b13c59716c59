"""One private file of the disk tier. Reads and writes that the system does in part are completed here."""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.private_files import open_own_file

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a medium without space."""


class File:
    """Safe to call from any thread."""

    def __init__(self, directory: int, path: Path, *, direct: bool = False) -> None:
        """directory: open descriptor of the directory of `path`. The file is created if it does not exist.

        Raises:
            ConfigError: it is a link, belongs to another user, or is open to others.
        """
        self.path = path
        self.direct = direct
        self.in_doubt = False
        """A sync failed: it is unknown which of the last writes have reached the medium."""
        self._syncing = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self.fd = open_own_file(path, flags, "remove it or choose another directory", directory=directory)

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        remaining = sum(map(len, buffers))
        while (done := os.pwritev(self.fd, buffers, offset)) < remaining:
            if not done:
                raise OSError(errno.EIO, "none of a write was accepted")
            buffers, offset, remaining = after(buffers, done), offset + done, remaining - done

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Number of bytes read: fewer than requested if the file ends."""
        remaining, start = sum(map(len, buffers)), offset
        while remaining and (done := os.preadv(self.fd, buffers, offset)):
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
            try:
                os.fdatasync(self.fd)
            except OSError:
                self.in_doubt = True
                raise

    def trust_again(self) -> None:
        """What was in doubt has been rewritten, or nothing depends on it."""
        self.in_doubt = False

    def allocate(self, start: int, end: int) -> None:
        """Allocate space on the medium from `start` to `end`; a failed attempt leaves nothing behind."""
        nbytes = self.nbytes
        try:
            os.posix_fallocate(self.fd, start, end - start)
        except OSError:
            os.ftruncate(self.fd, nbytes)
            raise

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self.fd, nbytes)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        """Drop these bytes from the page cache: the host pool is their cache."""
        os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

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


def allocated_bytes(directory: Path) -> int:
    """How many bytes the files in a directory take up on their medium."""
    with os.scandir(directory) as files:
        return sum(file.stat(follow_symlinks=False).st_blocks * 512 for file in files)
