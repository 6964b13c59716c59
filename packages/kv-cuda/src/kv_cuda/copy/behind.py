"""Copies on a CPU that a thread makes layer by layer while the engine computes: loads, before it needs a layer, and
stores, once it has computed one.

One thread copies the layers in their order. A caller that waits for a layer that has not begun copies it itself, so a
thread that gets no processor delays a caller by no more than the layer it is copying.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import Final

_MIN_BYTES: Final = 2 << 20
"""Waking a thread takes longer than copying a few hundred kilobytes."""


def pays_behind(nbytes: int) -> bool:
    """Whether a thread may have these bytes copied before the engine needs them. It runs on its creator's
    processors: an engine that is bound to a single one would wait for it."""
    if hasattr(os, "sched_getaffinity"):
        return nbytes >= _MIN_BYTES and len(os.sched_getaffinity(0)) > 1
    return nbytes >= _MIN_BYTES and (os.cpu_count() or 1) > 1


class LayerCopy:
    """The copy of one layer. A `kv_core.connect.device.CopyEvent`, for any number of threads."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._lock = Lock()
        self._copy: Callable[[], None] | None = copy  # until it has ended: it keeps the memory on both sides alive
        self._failure: Exception | None = None

    def done(self) -> bool:
        has_ended = self._copy is None  # before its failure, which is noted first: it may end between the two
        if self._failure is not None:
            raise self._failure
        return has_ended

    def wait(self) -> None:
        with self._lock:
            if self._copy is not None:
                try:
                    self._copy()
                except Exception as error:  # noqa: BLE001  # every caller that waits for this layer gets it
                    self._failure = error
                self._copy = None
        if self._failure is not None:
            raise self._failure

    def hold_engine(self) -> None:
        self.wait()


def copy_behind(layers: Sequence[Callable[[], None]]) -> list[LayerCopy]:
    """Start copying these layers, in their order; or copy them, if the system has no more threads for this process."""
    copies = [LayerCopy(copy) for copy in layers]
    try:
        copying_thread().submit(_copy_all, copies)
    except RuntimeError:
        # The executor keeps them nevertheless. A thread that it can start later must find nothing left to copy: by then
        # the memory on both sides may belong to others.
        _copy_all(copies)
    return copies


@cache
def copying_thread() -> ThreadPoolExecutor:
    """The only one in this process."""
    return ThreadPoolExecutor(1, thread_name_prefix="kv-copy")


os.register_at_fork(after_in_child=copying_thread.cache_clear)  # a child inherits the executor without its thread


def _copy_all(copies: Sequence[LayerCopy]) -> None:
    for copy in copies:
        with suppress(Exception):  # raised again for callers that wait
            copy.wait()
