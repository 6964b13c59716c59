"""What the file system of a directory offers. What it does not offer is done without from then on, which is said once.

File systems answer differently to the same calls: ext2, ext3, older NFS and FUSE have no fallocate, tmpfs and FUSE may
have no direct I/O, or only for writing, and some refuse fsync. Only the call itself shows it, so nothing here asks for
the kind of a file system. `disk_directory.try_out` makes all these calls on a small file before any chunk depends on
them.
"""

import ctypes
import errno
import os
from pathlib import Path
from typing import Final, Literal

from kv_core.log import limited_logger

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
