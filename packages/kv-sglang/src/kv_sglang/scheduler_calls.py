"""Observes calls that SGLang makes, for what it does not report to its storage."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from kv_core.log import limited_logger

_log = limited_logger(__name__)

_LOCK: Final = threading.Lock()
_IS_OBSERVED: Final = "_kv_observed"


def observe(method: str, around: Callable[[Any], Any], *, otherwise: str, of: type | None = None) -> None:
    """Put `around` in the place of this method, once in a process; raises whatever importing SGLang raises.

    around: given the method, returns one that calls it. What it does besides must not raise: that would end the engine.
    otherwise: what is missing where SGLang has no such method, for the log.
    of: the class that has it; None: `Scheduler`.
    """
    if of is None:
        from sglang.srt.managers.scheduler import Scheduler

        of = Scheduler
    call = getattr(of, method, None)
    if call is None:
        _log.warning("this SGLang has no %s.%s: %s", of.__name__, method, otherwise)
        return
    with _LOCK:
        if not hasattr(call, _IS_OBSERVED):
            observed = functools.wraps(call)(around(call))
            setattr(observed, _IS_OBSERVED, True)
            setattr(of, method, observed)
