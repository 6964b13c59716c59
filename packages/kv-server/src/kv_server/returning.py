"""Watches a client's connection, and reconnects it when it is lost, whether or not its engine makes any call.

An engine that is idle for an hour makes no call that would find out. Two things must not wait for one: a server cannot
know whether a client that lost its connection is in the middle of a copy, so it keeps the slots of its open stores
reserved until the client reports which leases it still has; and the first request after a restart of the server should
find what its tiers have. While there is a connection, this waits for its end; without one, it tries to connect.
"""

import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kv_core.log import limited_logger

from kv_server.connection import wait_for_end

_log = limited_logger(__name__)

LOOK_S: Final = 0.2
"""How often it tries."""

Watched = socket.socket


class Returning(threading.Thread):
    """Goes on until `stop` is called or its owner is gone."""

    def __init__(self, look: Callable[[], Watched | None]) -> None:
        """look: a bound method, whose object is not kept alive here. It notices that the connection has ended, tries to
        reconnect, and returns a descriptor of the connection, which is closed here; None: there is none."""
        super().__init__(name="kv-return", daemon=True)
        self._look = weakref.WeakMethod(look, lambda _: self.stop())
        self._stopped = threading.Event()
        self._watched: Watched | None = None

    def stop(self) -> None:
        """End soon. If the owner is gone, what is watched is the last descriptor of its connection, which ends too."""
        self._stopped.set()
        if (watched := self._watched) is not None:
            with suppress(OSError):  # closed meanwhile
                watched.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        while not self._stopped.is_set():
            look = self._look()
            try:
                self._watched = None if look is None else look()
            except Exception:  # noqa: BLE001  # whatever it is, the engine's own calls reconnect too
                _log.exception("reconnecting to the cache server hit a bug")
                return
            del look
            if self._watched is None:
                self._stopped.wait(LOOK_S)
                continue
            with self._watched as watched:
                wait_for_end(watched)
                self._watched = None
