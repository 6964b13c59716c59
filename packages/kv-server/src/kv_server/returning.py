"""Reconnects a client that lost its connection during a store, so that its slots do not stay reserved while it lives.

The server cannot know whether a client that lost its connection is in the middle of a copy, so it keeps those slots
reserved until the client reports which leases it still has. An engine that is idle for an hour makes no call that would
report them. This class does, on a thread that exists only while a connection with open stores is lost.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Final

from kv_core.log import limited_logger

_log = limited_logger(__name__)

_FIRST_S: Final = 0.2
_MAX_S: Final = 2.0


class Returning(threading.Thread):
    """Tries until an attempt reports that no more are needed, its owner is gone, or `stop` is called."""

    def __init__(self, attempt: Callable[[], bool]) -> None:
        """attempt: a bound method, whose object is not kept alive here. It returns True if no more attempts are
        needed."""
        super().__init__(name="kv-return", daemon=True)
        self._attempt = weakref.WeakMethod(attempt)
        self._stopped = threading.Event()
        self.start()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        wait_s = _FIRST_S
        while not self._stopped.wait(wait_s):
            attempt = self._attempt()
            try:
                if attempt is None or attempt():
                    return
            except Exception:  # noqa: BLE001  # whatever it is, the engine's own calls reconnect too
                _log.exception("reconnecting to the cache server hit a bug")
                return
            del attempt
            wait_s = min(2 * wait_s, _MAX_S)
