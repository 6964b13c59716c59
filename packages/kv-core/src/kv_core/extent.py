"""Where a run of bytes is, said without pointers so that it means the same in every process that maps the pool."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostExtent:
    """`nbytes` bytes that start `offset` bytes into the host pool called `pool`."""

    pool: str
    offset: int
    nbytes: int
