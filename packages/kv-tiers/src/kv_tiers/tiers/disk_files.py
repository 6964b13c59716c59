"""One private file of the disk tier. Reads and writes that the system does in part are completed here, and what the
file system does not offer is done without (`FileSystem`)."""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kv_core.log import limited_logger

from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.private_files import open_own_file

# What the file system of a directory offers. What it does not offer is done without from then on, which is said once.
#
# File systems answer differently to the same calls: ext2, ext3, older NFS and FUSE have no fallocate, tmpfs and FUSE
# may have no direct I/O, or only for writing, and some refuse fsync. Only the call itself shows it, so nothing here
# asks for the kind of a file system. `disk_directory.try_out` makes all these calls on a small file before any chunk
# depends on them.

UNSUPPORTED: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of calls that a file system does not offer."""

Feature = Literal["O_DIRECT", "fallocate", "fsync", "fsync of directories"]

_INSTEAD: Final[dict[Feature, str]] = {
    "O_DIRECT": "files are read and written through the page cache",
    "fallocate": "room is made by writing zeros, so chunks are written twice until the files are complete",
    "fsync": "chunks stored lately may be lost, never wrong, after a loss of power",
    "fsync of directories": "chunks stored lately may be lost, never wrong, after a loss of power",
}

_log = limited_logger(__name__)


class FileSystem:
    """The file system that a directory is on. Safe to call from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.needs_direct = False
        """Without direct I/O, calls fail."""
        self._lacking: dict[Feature, str] = {}

    def lacks(self, feature: Feature) -> bool:
        return feature in self._lacking

    def is_lacking(self, feature: Feature, error: OSError) -> bool:
        """Whether this error of a call says that the file system does not offer it, which is noted; if not, it is a
        fault."""
        if error.errno not in UNSUPPORTED:
            return False
        self.note(feature, error.strerror or str(error))
        return True

    def note(self, feature: Feature, why: str) -> None:
        if feature not in self._lacking:
            self._lacking[feature] = why
            _log.warning("%s", self._remark(feature))

    def remarks(self) -> list[str]:
        """What is lacking, and what is done instead."""
        return [f"no {feature}: {_INSTEAD[feature]}" for feature in self._lacking]

    def sync_directory(self, descriptor: int) -> None:
        """Make the names in an open directory durable."""
        if self.lacks("fsync of directories"):
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            if not self.is_lacking("fsync of directories", error):
                raise

    def _remark(self, feature: Feature) -> str:
        return f"{self._path}: its file system has no {feature} ({self._lacking[feature]}): {_INSTEAD[feature]}"


def fallocate(descriptor: int, start: int, nbytes: int) -> None:
    """Allocate space on the medium. Unlike `os.posix_fallocate` it fails where the file system does not offer that.

    There the C library would write a byte to each block: direct I/O refuses this, and over a network it takes minutes.
    """
    call = ctypes.CDLL(None, use_errno=True).fallocate64
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(descriptor, 0, start, nbytes):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


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
        Raises `ConfigError`: it is a link, belongs to another user, or is open to others."""
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


# Moves headers and payloads between memory and the files of a disk tier, adjacent ones in one call.
#
# One call for adjacent chunks keeps a device busy and is an eighth faster than one call per chunk.

_MAX_BUFFERS: Final = 1000
"""Buffers in one call; every Linux accepts 1024."""

Segment = tuple[File, int, int]
"""File, offset and size."""

Move = tuple[int, list[memoryview], Sequence[Segment]]
"""What a call reads or writes of a chunk: the chunk's number in the call, memory for the bytes in their order, and the
segments of the files that have as many bytes."""


class HeaderPages:
    """Pages for headers, aligned for direct I/O, and reused. Safe to call from any thread."""

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque()

    def take(self, count: int) -> list[memoryview]:
        pages: list[memoryview] = []
        try:
            while len(pages) < count:
                pages.append(self._free.pop())
        except IndexError:
            pages += [chunk_memory(PAGE_BYTES) for _ in range(count - len(pages))]
        return pages

    def give(self, pages: Iterable[memoryview]) -> None:
        self._free.extend(pages)


@dataclass(slots=True)
class Run:
    """Contiguous bytes of a file, and the memory that they go to or come from.

    parts: each chunk's number in the call, and where in the file its part ends.
    """

    file: File
    offset: int
    end: int
    buffers: list[memoryview]
    parts: list[tuple[int, int]] = field(default_factory=list)


def bytes_in_files(stored_bytes: int) -> int:
    """Space of a payload with its header: whole pages."""
    return PAGE_BYTES + -(-stored_bytes // PAGE_BYTES) * PAGE_BYTES


def runs_of(moves: Iterable[Move], filler: memoryview) -> list[Run]:
    """The moves as runs of adjacent bytes. filler: pages of arbitrary bytes, to bridge small gaps."""
    placed: list[tuple[int, int, int, File, int, list[memoryview]]] = []  # no two have the same first three
    for number, buffers, segments in moves:
        if len(segments) == 1:
            file, offset, nbytes = segments[0]
            placed.append((file.fd, offset, number, file, nbytes, buffers))
            continue
        remaining = buffers
        for file, offset, nbytes in segments:
            taken, remaining = _split(remaining, nbytes)
            placed.append((file.fd, offset, number, file, nbytes, taken))
    placed.sort()
    runs: list[Run] = []
    run: Run | None = None
    end, max_gap = 0, len(filler)
    for _, offset, number, file, nbytes, buffers in placed:
        gap = offset - end
        if (
            run is None
            or run.file is not file
            or not 0 <= gap <= max_gap
            or len(run.buffers) + len(buffers) >= _MAX_BUFFERS
        ):
            run = Run(file, offset, offset, [])
            runs.append(run)
        elif gap:
            run.buffers.append(filler[:gap])
        run.buffers += buffers
        run.end = end = offset + nbytes
        run.parts.append((number, end))
    return runs


def behind(segments: Sequence[Segment], nbytes: int) -> list[Segment]:
    """The segments without their first `nbytes` bytes."""
    remaining = []
    for file, offset, length in segments:
        skipped = min(nbytes, length)
        nbytes -= skipped
        if skipped < length:
            remaining.append((file, offset + skipped, length - skipped))
    return remaining


def new_filler(slack_bytes: int) -> memoryview:
    """The filler for `runs_of`. slack_bytes: how much larger a slot is than a whole chunk."""
    return memoryview(mmap.mmap(-1, slack_bytes or PAGE_BYTES))[:slack_bytes]


def _split(buffers: Sequence[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first bytes of the buffers, and the rest."""
    first, remaining = [], []
    for buffer in buffers:
        if nbytes:
            first.append(buffer[:nbytes])
        if len(buffer) > nbytes:
            remaining.append(buffer[nbytes:])
        nbytes = max(0, nbytes - len(buffer))
    return first, remaining
