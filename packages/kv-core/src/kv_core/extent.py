"""Locations of byte ranges in pools and files, without pointers, so that they mean the same in every process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostExtent:
    """`nbytes` bytes that start `offset` bytes into the host pool called `pool`."""

    pool: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileExtent:
    """`nbytes` bytes that start `offset` bytes into the file at `path`; up to the next multiple of 4096
    the file belongs to this chunk, so that whole pages can be read.

    checksum: the checksum of the bytes (`kv_core.checksum`).
    """

    path: str
    offset: int
    nbytes: int
    checksum: bytes
