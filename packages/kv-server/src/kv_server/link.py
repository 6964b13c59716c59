"""A client's link to a server that may come and go: uses it while it is there, and never waits for one that is not.

A request that is not answered in time closes the connection. Later calls try to reconnect, at once at first and then
ever less often, and never wait longer than connecting to a local socket takes; the greeting is read by later calls,
once it has arrived. Those calls are requests, and those of a thread that has nothing to request (`returning`).
"""

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from kv_core.clock import Clock
from kv_core.errors import ConfigError, MisuseError, TierDown
from kv_core.log import limited_logger

from kv_server import wire
from kv_server.connection import NobodyListens, Opening, ServerConnection

_log = limited_logger(__name__)

FIRST_BACK_OFF_S: Final = 0.02
MAX_BACK_OFF_S: Final = 0.4
"""Short enough for an idle engine to be back within a second (`returning`); connecting in vain takes microseconds."""
OPENING_S: Final = 600.0
"""How much longer to wait at first for a server that opens its tiers: a disk with millions of chunks takes minutes."""

A = TypeVar("A", bound=wire.Answer)


class NoServerError(ConfigError):
    """No server listens at the socket: one may be starting."""


class Link:
    """Not safe to use from several threads at once."""

    def __init__(
        self,
        path: Path,
        timeout_s: float,
        clock: Clock,
        *,
        on_connect: Callable[[], wire.Register],
        on_connected: Callable[[Opening, wire.Pool], None],
        on_reconnected: Callable[[], None],
        on_disconnected: Callable[[], None],
    ) -> None:
        """timeout_s: how long an answer may take.

        on_connect: what to register with a server.
        on_connected: called when a server has answered that. If it raises `TierDown`, the server counts as away.
        on_reconnected: called after that if the server was away before: it can be queried again.
        on_disconnected: called when it can no longer be queried, and requests in flight have failed.
        """
        self._path = path
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_connect = on_connect
        self._on_connected = on_connected
        self._on_reconnected = on_reconnected
        self._on_disconnected = on_disconnected
        self.connection: ServerConnection | None = None
        self.nobody_listens = False
        """The last attempt found no server at the socket."""
        self._why_refused = ""
        """Why the server there could not be used at the last attempt: it has another version, for example."""
        self._opening: Opening | None = None
        self._answer: wire.Pool | None = None  # of the server that was not connected to yet (`may_connect`)
        self._opened_s = self._retry_s = 0.0
        self._back_off_s = FIRST_BACK_OFF_S

    def open(self, timeout_s: float) -> None:
        """Connect for the first time, which waits.

        Raises:
            ConfigError: no server can be used there; the text says why. `NoServerError`: because there is none.
        """
        try:
            self._opening = Opening(self._path, timeout_s, self._on_connect())
            answer = self._opening.finish(timeout_s)
            if answer is None and self._opening.is_greeted:
                _log.warning(
                    "the cache server at %s is opening its tiers; waiting for it, up to %d s", self._path, OPENING_S
                )
                timeout_s = OPENING_S
                answer = self._opening.finish(timeout_s)
            if answer is None:
                raise TierDown(f"no answer within {timeout_s} s")
            self._connected(self._opening, answer)
        except TierDown as why:
            error = NoServerError if isinstance(why, NobodyListens) else ConfigError
            raise error(f"no cache server can be used at {self._path}: {why}") from None
        finally:
            self._give_up_opening()

    def is_up(self, *, may_connect: Callable[[wire.Pool], bool] | None = None) -> bool:
        """Whether the server can be queried. If it was away, this tries to reconnect.

        may_connect: whether the server that gave this answer may be connected to now; None: any may. One that may not
            stays registered with, so that a later call connects to it at once.
        """
        if self.connection is not None:
            return True
        now_s = self._clock.now_s()
        try:
            if self._opening is None:
                if now_s < self._retry_s:
                    return False
                self._opening = Opening(self._path, 0, self._on_connect())
                self._opened_s = now_s
            if self._answer is None:
                answer = self._opening.finish(0)
                if answer is None:
                    if now_s - self._opened_s > self._timeout_s:
                        raise TierDown("it accepts connections but does not answer")
                    return False
                self._answer = answer
            if may_connect is not None and not may_connect(self._answer):
                return False
            self._connected(self._opening, self._answer)
        except (TierDown, ConfigError) as why:
            self.nobody_listens = isinstance(why, NobodyListens)
            is_news = not self.nobody_listens and str(why) != self._why_refused
            self._why_refused = str(why)
            level = logging.WARNING if is_news else logging.DEBUG
            _log.log(level, "the cache server at %s still cannot be used: %s", self._path, why)
            self._give_up_opening()
            self.back_off(self._back_off_s)
            self._back_off_s = min(2 * self._back_off_s, MAX_BACK_OFF_S)
            return False
        _log.warning("the cache server at %s is back", self._path)
        self._on_reconnected()
        return self.connection is not None

    @property
    def is_registered(self) -> bool:
        """Whether there is a server that the next call can query, connected to already or not."""
        return self.connection is not None or self._answer is not None

    def watch(self) -> socket.socket | None:
        """A descriptor of the connection to that server, for `wait_for_end`; None: there is no such server, or no
        descriptor for it. The caller closes it."""
        connection = self._opening.connection if self._opening is not None else self.connection
        try:
            return connection.watch() if connection is not None and self.is_registered else None
        except OSError:
            return None

    def notice_end(self) -> None:
        """Give up the connection if the server has closed it, which otherwise the next request finds out."""
        if self.connection is not None and self.connection.has_ended():
            try:
                answer = self.connection.receive(0)  # the reason may be there
                self.lose(answer.text if isinstance(answer, wire.Failed) else "it has closed the connection")
            except TierDown as why:
                self.lose(str(why))
        elif self._opening is not None and self._answer is not None and self._opening.connection.has_ended():
            self._give_up_opening()

    def ask(self, request: wire.Request, answer: type[A]) -> A | None:
        """The answer; None: the server is away.

        Raises:
            MisuseError: the server reports that the request breaks the service's contract.
        """
        if not self.is_up():
            return None
        assert self.connection is not None
        try:
            got = self.connection.ask(request)
        except TierDown as why:
            self.lose(str(why))
            return None
        except BaseException:
            # Interrupted between question and answer: that answer must not be taken for the next question's.
            self.lose("a call was interrupted")
            raise
        if isinstance(got, answer):
            return got
        if isinstance(got, wire.Failed) and got.kind == "misuse":
            raise MisuseError(got.text)
        self.lose(got.text if isinstance(got, wire.Failed) else f"its answer is a {type(got).__name__}")
        return None

    def tell(self, request: wire.Request) -> None:
        """Send a message that has no answer. Does nothing while the server is away."""
        if self.connection is None:
            return
        try:
            self.connection.send(request)
        except TierDown as why:
            self.lose(str(why))
        except BaseException:
            self.lose("a call was interrupted")  # half a message may be sent
            raise

    def back_off(self, seconds: float) -> None:
        """Do not try again before this time has passed."""
        self._retry_s = self._clock.now_s() + seconds

    def lose(self, why: str) -> None:
        """Give up the connection."""
        _log.warning("the connection to the cache server at %s is lost, so nothing is found there: %s", self._path, why)
        self.close()
        self._on_disconnected()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self._give_up_opening()

    def _connected(self, opening: Opening, answer: wire.Pool) -> None:
        self._on_connected(opening, answer)
        opening.connection.drop_descriptors()
        opening.connection.timeout_s = self._timeout_s
        self.connection, self._opening, self._answer = opening.connection, None, None
        self._back_off_s = FIRST_BACK_OFF_S
        self._why_refused = ""

    def _give_up_opening(self) -> None:
        if self._opening is not None:
            self._opening.connection.close()
            self._opening = self._answer = None
