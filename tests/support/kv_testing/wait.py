"""How a test waits for another thread, process or server: always up to a deadline."""

import socket
import threading
import time
from collections.abc import Callable
from typing import IO, AnyStr


def until(reached: Callable[[], object], within_s: float = 10.0, rest_s: float = 0.002) -> None:
    """Ask until the answer is true.

    rest_s: between two times, so that what is waited for can run; more where asking is work.

    Raises:
        AssertionError: it never was.
    """
    end = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end, f"it never came to that, within {within_s:g} s"
        time.sleep(rest_s)


def line(stream: IO[AnyStr] | None, within_s: float = 60.0) -> AnyStr:
    """The next line of a process's output; empty at its end. End the process before you close a stream that said none.

    Raises:
        AssertionError: none came.
    """
    assert stream is not None
    found: list[AnyStr] = []
    # What is read ahead is in the stream, where select does not see it.
    reader = threading.Thread(target=lambda: found.append(stream.readline()), daemon=True)
    reader.start()
    reader.join(within_s)
    assert found, f"no line came within {within_s:g} s"
    return found[0]


def joined(*threads: threading.Thread, within_s: float = 60.0) -> None:
    """Wait until these have ended.

    Raises:
        AssertionError: one has not.
    """
    end = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} has not ended within {within_s:g} s"


def accepted(listener: socket.socket, within_s: float = 10.0) -> socket.socket:
    """The next connection.

    Raises:
        TimeoutError: none came.
    """
    listener.settimeout(within_s)
    connection, _ = listener.accept()
    return connection
