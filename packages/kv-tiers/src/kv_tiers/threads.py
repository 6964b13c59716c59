"""Starts threads on a system that may have no more of them for this process, and waits for them."""

import threading
import time
from collections.abc import Iterable


class OutOfThreadsError(RuntimeError):
    """The system has no more threads for this process; later it may have some."""


def must_start(thread: threading.Thread) -> None:
    """Start it. Raises `OutOfThreadsError`: the system refuses that; the text says what an operator can do."""
    if why := start_thread(thread):
        raise OutOfThreadsError(
            f"no more threads can be started ({why}): raise the limit of this process's user (ulimit -u) or of its "
            "container (pids.max of the cgroup), or run fewer processes there"
        )


def start_thread(thread: threading.Thread) -> str:
    """Start it. Returns why the system refuses that, which may be different later; empty: it runs."""
    try:
        thread.start()
    except RuntimeError as error:
        return str(error)
    return ""


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Wait until all have ended, for at most this time in all."""
    until_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
