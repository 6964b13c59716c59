"""Work that other threads submit to the serving thread, which does it between two requests."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kv_core.errors import TierDown

T = TypeVar("T")


class ServerMailbox:
    """Filled by `submit` on any thread, emptied by `drain` on the server's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called on the submitting thread when there is something to do."""
        self._wake = wake
        self._lock = threading.Lock()
        self._submitted: deque[Callable[[], None]] = deque()
        self._closed = False

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """The future holds what `work` returns or raises, or `TierDown` if the server ends first."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._closed:
                future.set_exception(TierDown("the server is stopping"))
                return
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001  # the future's owner gets it
                future.set_exception(error)

        with self._lock:
            closed = self._closed
            if not closed:
                self._submitted.append(run)
        if closed:
            run()
        else:
            self._wake()
        return future

    def drain(self) -> None:
        """Do what was submitted until now."""
        for _ in range(len(self._submitted)):
            self._submitted.popleft()()

    def close(self) -> None:
        """Do no more work: every future, pending or later, gets `TierDown`."""
        with self._lock:
            self._closed = True
        self.drain()
