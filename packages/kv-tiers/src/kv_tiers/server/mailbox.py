"""What other threads of the server's process ask of the server's own, which does it between two requests of clients."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kv_core.errors import TierDown

T = TypeVar("T")


class Calls:
    """Handed over by `ask` on any thread, done by `answer` on the server's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called on the asking thread when there is something to do."""
        self._wake = wake
        self._lock = threading.Lock()
        self._asked: deque[Callable[[], None]] = deque()
        self._closed = False

    def ask(self, question: Callable[[], T]) -> "Future[T]":
        """The future holds what `question` returns or raises, or `TierDown` if the server ends before."""
        future: Future[T] = Future()

        def act() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._closed:
                future.set_exception(TierDown("the server is stopping"))
                return
            try:
                future.set_result(question())
            except Exception as error:  # noqa: BLE001  # whoever asked is told
                future.set_exception(error)

        with self._lock:
            closed = self._closed
            if not closed:
                self._asked.append(act)
        if closed:
            act()
        else:
            self._wake()
        return future

    def answer(self) -> None:
        """What was asked until now, on the server's thread."""
        for _ in range(len(self._asked)):
            self._asked.popleft()()

    def close(self) -> None:
        """Nothing is done any more; whoever asked or asks is told so."""
        with self._lock:
            self._closed = True
        self.answer()
