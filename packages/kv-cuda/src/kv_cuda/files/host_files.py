"""The file interface of the direct path, and its implementation by ordinary system calls.

Reading bytes of a file into memory is an interface of few calls, so that cuFile (`kv_cuda.files.cufile`, device
memory) and system calls (host memory) are interchangeable. A transfer starts at once and is waited for later. Any
failure is an `OSError`; a transfer that ends early returns a short count.
"""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Final, Protocol

import torch

PAGE_BYTES: Final = 4096
"""Offsets, lengths and addresses must be multiples of this to bypass the page cache."""
_MEMORY_ALIGNED: Final = 64 << 10
"""The page size of GPU memory as cuFile registers it."""
_THREADS: Final = 4
"""Enough to keep a disk busy; each makes one system call at a time."""
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned_zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory for transfers, uint8 in one axis, that begins at a page of the device or the host."""
    memory = torch.zeros(nbytes + _MEMORY_ALIGNED, dtype=torch.uint8, device=device)
    skipped = -memory.data_ptr() % _MEMORY_ALIGNED
    return memory[skipped : skipped + nbytes]


class Transfer(Protocol):
    """A read that has begun."""

    def wait(self) -> int:
        """The number of bytes moved: fewer than requested if the file ends.

        Raises:
            OSError: it is unknown which bytes were moved.
        """


class OpenFile(Protocol):
    """memory: a run of bytes (uint8 in one axis), not to be used otherwise until the transfer has been waited for."""

    def read(self, memory: torch.Tensor, offset: int) -> Transfer: ...

    def close(self) -> None: ...


class Files(Protocol):
    """Every call may raise `OSError`."""

    def open(self, path: str) -> OpenFile: ...

    def register(self, memory: torch.Tensor) -> None:
        """Prepare this memory for many transfers."""

    def unregister(self, memory: torch.Tensor) -> None: ...

    def close(self) -> None:
        """Release everything except open files."""


class HostFiles:
    """`Files` for host memory, bypassing the page cache where file, offset and memory allow it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-files")

    def open(self, path: str) -> OpenFile:
        return _HostFile(path, self._threads)

    def register(self, memory: torch.Tensor) -> None:
        return None

    def unregister(self, memory: torch.Tensor) -> None:
        return None

    def close(self) -> None:
        self._threads.shutdown()


class _HostFile:
    def __init__(self, path: str, threads: ThreadPoolExecutor) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._threads = threads
        self._plain = os.open(path, flags)
        try:
            self._direct = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                os.close(self._plain)
                raise
            self._direct = -1

    def read(self, memory: torch.Tensor, offset: int) -> Transfer:
        return _ThreadTransfer(self._threads, partial(_read, self._file(memory, offset), memory.numpy().data, offset))

    def close(self) -> None:
        for file in (self._plain, self._direct):
            if file >= 0:
                os.close(file)
        self._plain = self._direct = -1

    def _file(self, memory: torch.Tensor, offset: int) -> int:
        is_aligned = not (offset | memory.numel() | memory.data_ptr()) % PAGE_BYTES
        return self._direct if is_aligned and self._direct >= 0 else self._plain


class _ThreadTransfer:
    """A transfer that a thread makes, or a caller that waits before the thread has begun it; it is made once."""

    def __init__(self, threads: ThreadPoolExecutor, move: Callable[[], int]) -> None:
        self._lock = Lock()
        self._move: Callable[[], int] | None = move  # None once it has ended
        self._result: int | Exception = 0
        # The system may have no more threads for this process. The executor keeps the transfer nevertheless, and a
        # thread that takes it later must find it done: by then the file's extent and the memory belong to others.
        with suppress(RuntimeError):
            threads.submit(self._run)

    def wait(self) -> int:
        self._run()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _run(self) -> None:
        with self._lock:
            if self._move is None:
                return
            try:
                self._result = self._move()
            except Exception as error:  # noqa: BLE001  # raised again by `wait`
                self._result = error
            self._move = None


def _read(file: int, memory: memoryview, offset: int) -> int:
    done = 0
    while done < len(memory) and (nbytes := os.preadv(file, [memory[done:]], offset + done)):
        done += nbytes
        if nbytes % PAGE_BYTES:  # only the file's end has such a length, and no uncached read may start there
            break
    return done
