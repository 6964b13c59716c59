"""Starts a private server again when it ends unexpectedly, as when the system runs out of memory and kills it.

What only its pool held is lost and computed again; what tiers below it hold is found there. Clients
reconnect by themselves (`RemoteCache`).
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.threads import start_thread

from kv_server.process import ServerProcess, is_readable

_log = limited_logger(__name__)

FIRST_REST_S: Final = 1.0
_MAX_REST_S: Final = 300.0
_STEADY_S: Final = 60.0
"""After a server that ran at least this long, the rest before the next is the first again."""


class SupervisedServer:
    """A private server, one after another at the same socket. `stop` it, or let it end with this process."""

    def __init__(self, start: Callable[[], ServerProcess], *, first_rest_s: float = FIRST_REST_S) -> None:
        """start: starts a server, always at the same socket, or raises `ConfigError`.

        first_rest_s: how long to wait before the next server; twice as long each time when servers end at once.

        Raises:
            ConfigError: the first one could not be started.
        """
        self._start = start
        self._first_rest_s = first_rest_s
        self._server = start()
        self._stopped, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-server-watch", daemon=True)
        if error := start_thread(self._thread):
            _log.warning("if the private cache server ends, nothing starts another: %s", error)

    @property
    def pid(self) -> int:
        """Of the server that runs, or ran last."""
        return self._server.pid

    @property
    def socket(self) -> Path:
        return self._server.socket

    def stop(self) -> None:
        """Have the server complete pending spills and end (`ServerProcess.stop`), and start no other."""
        with suppress(OSError):  # stopped before
            self._stop.shutdown(socket.SHUT_RDWR)  # closing does not suffice: a forked child has it open too
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join()
            self._stopped.close()
        self._server.stop()

    def _run(self) -> None:
        rest_s = self._first_rest_s
        while True:
            began_s = time.monotonic()
            if self._is_stopped_before(self._server):
                return
            pid = self._server.pid
            self._server.stop()  # closes what is left of it
            if time.monotonic() - began_s >= _STEADY_S:
                rest_s = self._first_rest_s
            _log.warning(
                "the private cache server (process %d) has ended unexpectedly, perhaps because memory ran out; "
                "another is started in %g s, and what only the host pool held is computed again", pid, rest_s,
            )  # fmt: skip
            while True:
                if is_readable(self._stopped.fileno(), rest_s):
                    return
                rest_s = min(2 * rest_s, _MAX_REST_S)
                try:
                    self._server = self._start()
                except (ConfigError, OSError) as error:
                    _log.warning("the private cache server was not started, next try in %g s: %s", rest_s, error)
                else:
                    _log.warning("a new private cache server runs (process %d)", self._server.pid)
                    break

    def _is_stopped_before(self, server: ServerProcess) -> bool:
        """Waits for either: that we are stopped, or that the server ends (False)."""
        poller = select.poll()
        poller.register(self._stopped, select.POLLIN)
        poller.register(server.output, select.POLLIN)
        ready = [descriptor for descriptor, _ in poller.poll()]
        return self._stopped.fileno() in ready
