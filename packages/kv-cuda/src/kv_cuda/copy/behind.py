"""Copies on a CPU that a thread makes layer by layer while the engine computes: loads, before it needs a layer, and
stores, once it has computed one.

One thread copies the layers in their order. A caller that waits for a layer copies it itself if the thread has not
begun it, and those after it if it has; the first layer of a load, for which the engine always waits, is in pieces that
both copy. So both are busy until the engine can compute, and a thread that gets no processor delays a caller by no more
than the layer it is copying. The thread stays off the processor that its caller computes on: a scheduler that wakes it
there has the two take turns of some milliseconds.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Lock, get_native_id
from typing import Final

from kv_core.errors import CopyFailed

_MIN_BYTES: Final = 2 << 20
"""Waking a thread takes longer than copying a few hundred kilobytes."""


def pays_behind(nbytes: int) -> bool:
    """Whether a thread may have these bytes copied before the engine needs them. It runs on its creator's
    processors: an engine that is bound to a single one would wait for it."""
    if hasattr(os, "sched_getaffinity"):
        return nbytes >= _MIN_BYTES and len(os.sched_getaffinity(0)) > 1
    return nbytes >= _MIN_BYTES and (os.cpu_count() or 1) > 1


class LayerCopy:
    """The copy of one layer. A `kv_core.device.CopyEvent`, for any number of threads."""

    def __init__(self, copy: Callable[[], None], next_layer: "LayerCopy | None" = None) -> None:
        """next_layer: the layer that the thread copies after this one."""
        self._lock = Lock()
        self._copy: Callable[[], None] | None = copy  # None once it has ended: it keeps the memory of both sides alive
        self._failure: CopyFailed | None = None  # for every caller that waits for this layer
        self._next = next_layer

    @property
    def has_ended(self) -> bool:
        return self._copy is None

    def done(self) -> bool:
        has_ended = self.has_ended  # read before the failure, which is set first: the copy may end in between
        if self._failure is not None:
            raise self._failure
        return has_ended

    def wait(self) -> None:
        layer = self._next
        while not self.copy():
            if layer is not None:
                layer.copy()
                layer = layer._next
            else:
                self.copy(wait=True)
                move_thread_away()  # the system wakes a waiter where its waker runs
        if self._failure is not None:
            raise self._failure

    def hold_engine(self) -> None:
        self.wait()

    def copy(self, *, wait: bool = False) -> bool:
        """Copy this layer, unless it is copied. wait: wait for a thread that is copying it. Returns whether the copy
        has ended."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            if self._copy is not None:
                try:
                    self._copy()
                except Exception as error:  # noqa: BLE001  # of any family: this copy has ended
                    self._failure = CopyFailed(f"{type(error).__name__}: {error}")
                    self._failure.__cause__ = error
                self._copy = None
        finally:
            self._lock.release()
        return True


class LayerInPieces:
    """The copy of a layer that the thread and a caller that waits for it share."""

    def __init__(self, pieces: Sequence[LayerCopy]) -> None:
        self._pieces = pieces

    def done(self) -> bool:
        return all(piece.has_ended for piece in self._pieces) and all(piece.done() for piece in self._pieces)

    def wait(self) -> None:
        for piece in self._pieces:
            piece.copy()
        if not all(piece.has_ended for piece in self._pieces):
            for piece in self._pieces:
                piece.copy(wait=True)
            move_thread_away()  # the system wakes a waiter where its waker runs
        self.done()

    def hold_engine(self) -> None:
        self.wait()


def copy_behind(layers: Sequence[Callable[[], None]]) -> list[LayerCopy]:
    """Start copying these layers, or pieces of layers, in their order; or copy them, if the system has no more threads
    for this process."""
    copies: list[LayerCopy] = []
    for copy in reversed(layers):
        copies.append(LayerCopy(copy, copies[-1] if copies else None))
    copies.reverse()
    move_thread_away()
    try:
        copying_thread().submit(_copy_all, copies)
    except RuntimeError:
        # The executor keeps them nevertheless. A thread that it can start later must find nothing left to copy: by then
        # the memory on both sides may belong to others.
        _copy_all(copies)
    return copies


_thread_ids: Final[list[int]] = []
"""The system's number of the copying thread, once it runs."""


@cache
def copying_thread() -> ThreadPoolExecutor:
    """The only copying thread of this process."""
    return ThreadPoolExecutor(1, "kv-copy", initializer=lambda: _thread_ids.append(get_native_id()))


def _forget_thread() -> None:
    copying_thread.cache_clear()
    _thread_ids.clear()


os.register_at_fork(after_in_child=_forget_thread)  # a child inherits the executor without its thread


def move_thread_away() -> None:
    """Have the copying thread run on any of the caller's processors but the one that the caller runs on now."""
    if not _thread_ids or not hasattr(os, "sched_setaffinity"):
        return
    others = os.sched_getaffinity(0) - {ctypes.CDLL(None).sched_getcpu()}
    if others:
        with suppress(OSError):
            os.sched_setaffinity(_thread_ids[0], others)


def _copy_all(copies: Sequence[LayerCopy]) -> None:
    for copy in copies:
        copy.copy()  # unless a caller is copying it
