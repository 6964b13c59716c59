"""Media with real faults: the operating system returns the error, and no function of ours is replaced."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from kv_tiers.tiers.disk import DiskTier
from kv_tiers.tiers.disk_files import File


@contextmanager
def unreadable_device(files: Iterable[File]) -> Iterator[None]:
    """Reads and writes of these files fail with EIO, and syncs with EINVAL.

    Their descriptors are those of this process's memory meanwhile, where nothing is mapped at the low addresses that
    small files have. Linux only.
    """
    with _replaced_by("/proc/self/mem", os.O_RDWR, files):
        yield


@contextmanager
def full_device(files: Iterable[File]) -> Iterator[None]:
    """Writes to these files fail with ENOSPC; reads give zeros."""
    with _replaced_by("/dev/full", os.O_RDWR, files):
        yield


def slabs_of(tier: DiskTier) -> list[File]:
    """The files that a disk tier's chunks are in."""
    return [file for directory in tier._chunks.directories for file in directory.files() if file is not directory.index]


@contextmanager
def _replaced_by(path: str, flags: int, files: Iterable[File]) -> Iterator[None]:
    with ExitStack() as stack:
        device = os.open(path, flags | os.O_CLOEXEC)
        stack.callback(os.close, device)
        for file in files:
            assert file.nbytes < 1 << 20  # beyond, something may be mapped
            kept = os.dup(file.fd)
            stack.callback(os.close, kept)
            os.dup2(device, file.fd, inheritable=False)
            stack.callback(_restore, file, kept)
        yield


def _restore(file: File, kept: int) -> None:
    if file.fd >= 0:  # else it was closed meanwhile
        os.dup2(kept, file.fd, inheritable=False)
