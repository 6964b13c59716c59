"""Moves headers and payloads between memory and the files of a disk tier, adjacent ones in one call.

One call for adjacent chunks keeps a device busy and is an eighth faster than one call per chunk.
"""

import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.tiers.disk_files import File

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
