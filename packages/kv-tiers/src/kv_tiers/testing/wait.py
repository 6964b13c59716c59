"""How a test waits for what another thread, process or server does: asking again, up to a deadline."""

import time
from collections.abc import Callable


def until(reached: Callable[[], object], within_s: float = 10.0) -> None:
    """Ask until the answer is true.

    Raises:
        AssertionError: it never was.
    """
    end = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end, f"it never came to that, within {within_s:g} s"
        time.sleep(0.002)  # so that whoever is waited for has the processor
