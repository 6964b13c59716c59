"""A system that has few or no more threads for this process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def threads_left(count: int = 0, *, on_refusal: Callable[[], object] = lambda: None) -> Iterator[None]:
    """From here on this many threads can be started. on_refusal: called whenever one cannot."""
    start, left = threading.Thread.start, [count]

    def start_if_possible(thread: threading.Thread) -> None:
        if not left[0]:
            on_refusal()
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_if_possible)
        yield
