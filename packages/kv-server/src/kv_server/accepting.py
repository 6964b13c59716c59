"""Accepts connections from a listening socket, even when this process is out of file descriptors.

A listener whose queue cannot be drained stays readable, so a loop that only retries would spin. One descriptor is
therefore kept in reserve: it is closed, and the new connection is accepted in its place, sent the reason why it is not
served, and closed.
"""

import errno
import os
import resource
import socket
from collections.abc import Callable
from typing import Final

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.host_port import HostPort

_log = limited_logger(__name__)

ACCEPTED_A_TURN: Final = 8
REST_S: Final = 0.5
"""How long to ignore a listener from which nothing can be accepted at all."""
_BACKLOG: Final = 64
_SHORTAGES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def allow_descriptors(wanted: int) -> int:
    """Raise this process's limit of open descriptors to this many, or to its hard limit; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def listen_at(address: HostPort, where: str) -> socket.socket:
    """A listening socket. where: the name of this address in errors.

    Raises:
        ConfigError: it is not possible to listen there.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"{where}: cannot listen at {address}: {error.strerror or error}") from None


class Acceptor:
    """For one thread. `close` closes the descriptor in reserve, but not the listener."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        greet: Callable[[socket.socket], None],
        turn_away: Callable[[socket.socket], None],
    ) -> None:
        """listener: non-blocking.

        greet: takes over each connection. turn_away: sends the reason, without waiting, to one for which there are no
            descriptors; it is closed here.
        """
        self._listener = listener
        self._greet = greet
        self._turn_away = turn_away
        self._spare = _spare()

    def accept(self) -> float:
        """Accept waiting connections, a turn's worth. Returns for how many seconds to ignore the listener then: 0 or
        `REST_S`."""
        for _ in range(ACCEPTED_A_TURN):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return 0.0
            except (ConnectionAbortedError, InterruptedError):
                continue
            except OSError as error:
                if error.errno in _SHORTAGES and self._let_one_in():
                    continue
                _log.warning(
                    "connections cannot be accepted; trying again in %g s: %s", REST_S, error.strerror or error
                )
                return REST_S
            accepted.setblocking(False)
            self._greet(accepted)
        return 0.0

    def close(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _let_one_in(self) -> bool:
        """Accept a connection for long enough to send why it is not served. False: it could not be accepted at all."""
        if self._spare < 0:
            self._spare = _spare()
            return self._spare >= 0
        self.close()
        try:
            accepted, _ = self._listener.accept()
            with accepted:
                accepted.setblocking(False)
                self._turn_away(accepted)
        except BlockingIOError:
            return True  # the next attempt finds no connection
        except OSError:
            return False
        finally:
            self._spare = _spare()
        _log.warning(
            "a connection is refused: this process may open no more descriptors; raise its limit (ulimit -n, or "
            "LimitNOFILE= of its unit)"
        )
        return True


def _spare() -> int:
    """A descriptor in reserve; -1: not even that is available."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
