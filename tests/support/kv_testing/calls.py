"""Counts calls: what a thing costs, on any machine, however busy it is."""

import gc
import sys
from collections.abc import Callable


def calls_of(work: Callable[[], object]) -> int:
    """How many functions of Python and of C it calls. Without the garbage collector, whose callbacks are others'."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
