"""Bytes that go from host to host by NIXL (`kv_remote.nixl`): staging buffers for others to read, and reads of theirs.

What others are to read is copied into a buffer, and what was read is copied from where it arrives, because a pool is
never registered: whoever holds the metadata may write there, and deregistering does not end that. The reader's checksum
is of its own copy.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import xxhash
from kv_core.log import limited_logger

from kv_remote.nixl import NixlProcess

_log = limited_logger(__name__)

BUFFER_BYTES: Final = 32 << 20
_BUFFERS: Final = 8
"""Connections that have one at a time."""
_PIECE_BYTES: Final = 4 << 20
"""Of one transfer, so that a host that is gone is noticed within seconds, and bytes are copied while cached."""
_SLOWEST_BYTES_PER_S: Final = 1e6
_READERS: Final = 4
"""Processes of a tier; each thread of its lane uses one."""
_REFUSED_S: Final = 5.0
_FAILED_S: Final = 60.0
"""How long NIXL is then not tried."""
_PAGE_BYTES: Final = 1 << 12

Start = Callable[[int], NixlProcess]
"""Starts a process with this many bytes. Raises `OSError`."""


def next_place(at: int, nbytes: int) -> int:
    """Where the next payload begins after one of this size, from the start of a buffer."""
    return at + -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


class StagingBuffer:
    """address, metadata: by which another host reads the payloads that are `put` here."""

    def __init__(self, memory: memoryview, address: int, metadata: bytes) -> None:
        self._memory = memory
        self._used_bytes = 0
        self.address, self.metadata = address, metadata

    def put(self, payload: memoryview) -> bytes | None:
        """Copy it behind those before. Returns its checksum; None: it does not fit."""
        end = self._used_bytes + payload.nbytes
        if end > len(self._memory):
            return None
        _copy(payload, self._memory[self._used_bytes : end])
        self._used_bytes = next_place(self._used_bytes, payload.nbytes)
        return xxhash.xxh3_128(payload).digest()  # not of the buffer: others may write there


class StagingBuffers:
    """For the connections of a server, each of which has a thread of its own: there it takes a buffer and gives it
    back."""

    def __init__(self, start: Start) -> None:
        """The process starts when the first buffer is wanted."""
        self._start = start
        self._lock = threading.Lock()
        self._process: NixlProcess | None = None
        self._start_at_s = 0.0
        self._lent: dict[int, int] = {}
        """Places of buffers by thread."""

    def take(self) -> StagingBuffer | None:
        """None: there is none now."""
        with self._lock:
            free = set(range(_BUFFERS)) - set(self._lent.values())
            if not free:
                return None
            try:
                if self._process is None and time.monotonic() >= self._start_at_s:
                    self._start_at_s = time.monotonic() + _FAILED_S
                    self._process = self._start(_BUFFERS * BUFFER_BYTES)
                if self._process is None or not self._process.is_ready():
                    return None
                self._process.serve(True)
            except OSError as error:
                self._failed(error)
                return None
            place = self._lent[threading.get_ident()] = min(free)
            start, process = place * BUFFER_BYTES, self._process
            return StagingBuffer(
                process.memory[start : start + BUFFER_BYTES], process.address + start, process.metadata
            )

    def give_back(self) -> None:
        """This thread's buffer, if it has one."""
        with self._lock:
            if self._lent.pop(threading.get_ident(), None) is not None and not self._lent and self._process:
                try:
                    self._process.serve(False)
                except OSError as error:
                    self._failed(error)

    def close(self) -> None:
        with self._lock:
            self._start_at_s = inf
            self._drop()

    def _failed(self, error: OSError) -> None:
        _log.warning("other hosts cannot read by NIXL for a while: %s", error)
        self._drop()

    def _drop(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None
        self._lent.clear()


class StagedReader:
    """Reads from one host's buffers, on one thread.

    is_refused: to be set if the host has no buffer free, or no NIXL.
    """

    def __init__(self, process: NixlProcess) -> None:
        self.process = process
        self.is_refused = False

    def read(
        self, where: tuple[bytes, int], into: memoryview, timeout_s: float, on_progress: Callable[[], object]
    ) -> bytes:
        """Fill `into`. Returns its checksum. Raises `OSError`: the host is gone, slow or no such host.

        where: the metadata and the address there, neither of which need be true.
        timeout_s: for each piece of some megabytes, besides a second a megabyte. on_progress: called after each.
        """
        metadata, address = where
        running = xxhash.xxh3_128()
        for offset in range(0, into.nbytes, _PIECE_BYTES):
            piece = into[offset : offset + _PIECE_BYTES]
            limit_s = timeout_s + piece.nbytes / _SLOWEST_BYTES_PER_S
            self.process.read(metadata, address + offset, piece.nbytes, limit_s)
            _copy(self.process.memory[: piece.nbytes], piece)
            running.update(piece)
            on_progress()
        return running.digest()


class ReaderProcesses:
    """NIXL's, of one tier. Thread-safe."""

    def __init__(self, start: Start) -> None:
        """Processes start when they are wanted."""
        self._start = start
        self._lock = threading.Lock()
        self._idle: list[NixlProcess] = []
        self._processes = 0
        self._start_at_s = 0.0
        self._use_at_s: WeakKeyDictionary[object, float] = WeakKeyDictionary()

    @contextmanager
    def reader(self, host: object) -> Iterator[StagedReader | None]:
        """For this host. None: NIXL is not to be used now, because it failed with this host or was refused a short time
        ago, or all processes are busy or only starting."""
        with self._lock:
            process = self._ready() if time.monotonic() >= self._use_at_s.get(host, 0.0) else None
        if process is None:
            yield None
            return
        reader = StagedReader(process)
        try:
            yield reader
        finally:
            if process.is_broken:
                process.close()  # which may take a while
            with self._lock:
                if process.is_broken:
                    self._use_at_s[host] = time.monotonic() + _FAILED_S
                    self._processes -= 1
                else:
                    self._idle.append(process)
                    if reader.is_refused:
                        self._use_at_s[host] = time.monotonic() + _REFUSED_S

    def close(self) -> None:
        """Nothing is being read."""
        with self._lock:
            self._start_at_s = inf
            while self._idle:
                self._drop(self._idle.pop())

    def _ready(self) -> NixlProcess | None:
        for process in tuple(self._idle):
            try:
                if process.is_ready():
                    self._idle.remove(process)
                    return process
            except OSError as error:
                self._idle.remove(process)
                self._drop(process)
                self._failed(error)
        if not self._idle and self._processes < _READERS and time.monotonic() >= self._start_at_s:
            try:
                self._idle.append(self._start(_PIECE_BYTES))
                self._processes += 1
            except OSError as error:
                self._failed(error)
        return None

    def _failed(self, error: OSError) -> None:
        _log.warning("no further process reads by NIXL for a while: %s", error)
        self._start_at_s = time.monotonic() + _FAILED_S

    def _drop(self, process: NixlProcess) -> None:
        process.close()
        self._processes -= 1


def _copy(source: memoryview, into: memoryview) -> None:
    """Without the interpreter's lock."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
