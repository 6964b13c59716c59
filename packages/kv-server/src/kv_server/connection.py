"""A client's connection to a server that may come and go.

`ServerConnection` is one connection: greetings and requests. One that has failed in any way is not used again: a late
answer would be taken for the next request's. `Link` uses a server while it is there, and never waits for one that is
not. `Reconnector` is the thread that notices its end though no call is made.
"""

import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

from kv_core.clock import Clock
from kv_core.errors import ConfigError, InputError, MisuseError, TierDown
from kv_core.log import limited_logger

from kv_server import wire

A = TypeVar("A", bound=wire.Answer)
_log = limited_logger(__name__)

_SO_PEERPIDFD: Final = 77  # of Linux 6.5; Python has no name for it
_PEER: Final = struct.Struct("3i")


def open_pidfd(connection: socket.socket, pid: int) -> int:
    """Of the process at the other end; -1 if none is available, as for another container's before Linux 6.5.

    pid: its number; 0 if it is not visible here.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def credentials(connection: socket.socket) -> tuple[int, int]:
    """The number of the process at the other end (0 if it is not visible here), and its user."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def close_descriptor(descriptor: int) -> None:
    """-1: there is none."""
    if descriptor >= 0:
        os.close(descriptor)


def is_gone(pidfd: int, *, within_s: float = 0.0) -> bool:
    """within_s: wait until then: a process that ends closes what it has open a moment before."""
    if pidfd < 0:
        return False
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(within_s * 1000))


_READ_BYTES: Final = 1 << 16
_CLEARS: Final = 10
"""How many times as long as another call a clear may take."""
PACKAGE: Final = version("kv-tiers")


class NobodyListens(TierDown):
    """There is no server at that socket: its process has ended, or it has stopped listening and is about to end."""


class ServerConnection:
    """Not safe to use from several threads at once."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Connect, which a local socket does at once or not at all, and send a hello.

        timeout_s: how long each operation may take; 0 does not wait.

        Raises:
            TierDown: no server answers there, or we have no descriptor for it; `NobodyListens`: there is no server.
            ConfigError: the server there is another user's.
        """
        self.timeout_s = timeout_s
        self._frames = wire.Frames(wire.MAX_ANSWER_BYTES)
        self._descriptors: list[int] = []
        try:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # this process may open no more descriptors
            raise TierDown(f"the server at {path} cannot be connected to: {error.strerror}") from None
        try:
            self.socket.setblocking(False)
            try:
                self.socket.connect(os.fspath(path))
            except (ConnectionRefusedError, FileNotFoundError) as error:
                raise NobodyListens(f"no server answers at {path}: {error.strerror}") from None
            except OSError as error:
                raise TierDown(f"no server answers at {path}: {error.strerror or error}") from None
            _, uid = credentials(self.socket)
            if uid != os.geteuid():
                raise ConfigError(f"the server at {path} belongs to user {uid}, not to us; join one of your own")
            self.send(wire.Hello(PACKAGE))
        except BaseException:
            self.close()
            raise

    def send(self, request: wire.Request) -> None:
        """Raises `TierDown`: the server did not accept it in time."""
        try:
            self.socket.settimeout(self.timeout_s)
            self.socket.sendall(wire.frame(request))
        except OSError as error:
            # The server may have sent the reason before it closed the connection.
            answer = self.receive(0)
            why = answer.text if isinstance(answer, wire.Failed) else error
            raise TierDown(f"the server takes no requests: {why}") from None

    def receive(self, timeout_s: float) -> wire.Answer | None:
        """The next answer; None: it did not arrive in time. 0 does not wait. Raises `TierDown`: there will be none."""
        until_s = time.monotonic() + timeout_s
        try:
            while (body := self._frames.next()) is None:
                # Without time left too, what has arrived is read: this thread may have been delayed.
                self.socket.settimeout(max(0.0, until_s - time.monotonic()))
                data = self._read()
                if not data:
                    raise TierDown("the server has closed the connection")
                self._frames.feed(data)
            return wire.read_answer(body)
        except (BlockingIOError, TimeoutError):
            return None
        except (OSError, InputError) as error:
            raise TierDown(f"no answer from the server: {error}") from None

    def ask(self, request: wire.Request) -> wire.Answer:
        """Raises `TierDown`: there was no answer in time; the connection can no longer be used."""
        self.send(request)
        # Clearing a hundred thousand chunks takes seconds; given up, it would be done once more.
        timeout_s = self.timeout_s * (_CLEARS if isinstance(request, wire.Clear) else 1)
        answer = self.receive(timeout_s)
        if answer is None:
            raise TierDown(f"the server did not answer within {timeout_s} s")
        return answer

    def take_descriptor(self) -> int:
        """The pool's descriptor, which came with `Pool`. The caller closes it. Raises `TierDown`: none came."""
        if not self._descriptors:
            raise TierDown("the server sent no pool")
        return self._descriptors.pop()

    def drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def pidfd(self) -> int:
        """Of the server's process; -1: the kernel cannot say."""
        return open_pidfd(self.socket, credentials(self.socket)[0])

    def has_ended(self) -> bool:
        """Whether the server has closed the connection. Sends nothing and does not wait."""
        return wait_for_end(self.socket, timeout_s=0)

    def close(self) -> None:
        self.drop_descriptors()
        with suppress(OSError):  # it may never have been connected
            self.socket.shutdown(socket.SHUT_RDWR)  # ends `wait_for_end`, whose descriptor keeps it open
        self.socket.close()

    def _read(self) -> bytes:
        data, descriptors, _, _ = socket.recv_fds(self.socket, _READ_BYTES, 2)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        return data


def wait_for_end(connection: socket.socket, *, timeout_s: float | None = None) -> bool:
    """Wait until this connection is closed by either side; None: however long. Costs nothing while it is in use."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class Opening(ServerConnection):
    """A connection during its greeting and registration, which can be polled without waiting."""

    def __init__(self, path: Path, timeout_s: float, register: wire.Register) -> None:
        """Raises `TierDown` and `ConfigError`: as for `ServerConnection`."""
        super().__init__(path, timeout_s)
        self.register = register
        self.is_greeted = False
        """The server answers: if there is no pool yet, it is opening its tiers."""
        try:
            self.send(register)
        except BaseException:
            self.close()
            raise

    def finish(self, timeout_s: float) -> wire.Pool | None:
        """The pool, once the server has answered; None: not yet.

        Raises:
            TierDown: it will not answer.
            ConfigError: it refuses, and says why.
        """
        until = time.monotonic() + timeout_s
        while True:
            match self.receive(max(0.0, until - time.monotonic())):
                case None:
                    return None
                case wire.Welcome():
                    self.is_greeted = True
                case wire.Pool() as pool:
                    return pool
                case wire.Failed(_, text):
                    raise ConfigError(f"the cache server refuses us: {text}")
                case other:
                    raise TierDown(f"the server answers a greeting with {type(other).__name__}")


def ask_server(path: Path, request: wire.Request, *, timeout_s: float = 1.0) -> wire.Answer:
    """One request about a server (`Ping`, `Status`, `Registered`) from a process that has no cache there.

    timeout_s: how long all of it may take.

    Raises:
        TierDown: it cannot be reached, or does not answer in time.
        ConfigError: it refuses, or belongs to another user.
    """
    until_s = time.monotonic() + timeout_s
    connection = ServerConnection(path, timeout_s)
    try:
        greeting = connection.receive(max(0.0, until_s - time.monotonic()))
        if isinstance(greeting, wire.Failed):
            raise ConfigError(f"the cache server refuses us: {greeting.text}")
        if isinstance(greeting, wire.Welcome):
            connection.timeout_s = max(0.0, until_s - time.monotonic())
            connection.send(request)
            answer = connection.receive(max(0.0, until_s - time.monotonic()))
            if answer is not None:
                return answer
        raise TierDown(f"the server at {path} did not answer within {timeout_s:g} s")
    finally:
        connection.close()


def ask_server_for(path: Path, request: wire.Request, wanted: type[A], *, timeout_s: float = 1.0) -> A:
    """The answer of this kind to `ask_server`. Raises `TierDown` and `ConfigError`: as for `ask_server`. TierDown also
    for any other answer, such as that it hit a bug."""
    answer = ask_server(path, request, timeout_s=timeout_s)
    if not isinstance(answer, wanted):
        reason = answer.text if isinstance(answer, wire.Failed) else type(answer).__name__
        raise TierDown(f"the server at {path} answers: {reason}")
    return answer


FIRST_BACK_OFF_S: Final = 0.02
MAX_BACK_OFF_S: Final = 0.4
"""Short enough for an idle engine to be back within a second (`Reconnector`); connecting in vain takes microseconds."""
OPENING_S: Final = 600.0
"""How much longer to wait at first for a server that opens its tiers: a disk with millions of chunks takes minutes."""


class NoServerError(ConfigError):
    """No server listens at the socket: one may be starting."""


class Link:
    """A request that is not answered in time closes the connection. Later calls try to reconnect, at once at first and
    then ever less often, and never wait longer than connecting to a local socket takes; the greeting is read by later
    calls, once it has arrived. Those calls are requests, and those of a thread that has nothing to request
    (`Reconnector`).

    Not safe to use from several threads at once.
    """

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
        """Connect for the first time, which waits. Raises `ConfigError`: no server can be used there; the text says
        why. `NoServerError`: because there is none."""
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
        connection = self._opening or self.connection
        try:
            return connection.socket.dup() if connection is not None and self.is_registered else None
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
        elif self._opening is not None and self._answer is not None and self._opening.has_ended():
            self._give_up_opening()

    def ask(self, request: wire.Request, answer: type[A]) -> A | None:
        """The answer; None: the server is away. Raises `MisuseError`: the server reports that the request breaks the
        service's contract."""
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
        opening.drop_descriptors()
        opening.timeout_s = self._timeout_s
        self.connection, self._opening, self._answer = opening, None, None
        self._back_off_s = FIRST_BACK_OFF_S
        self._why_refused = ""

    def _give_up_opening(self) -> None:
        if self._opening is not None:
            self._opening.close()
            self._opening = self._answer = None


LOOK_S: Final = 0.2
"""How often it tries."""


class Reconnector(threading.Thread):
    """Watches a client's connection, and reconnects it when it is lost, until `stop` is called or its owner is gone.

    An engine that is idle for an hour makes no call that would find out. Two things must not wait for one: a server
    cannot know whether a client that lost its connection is in the middle of a copy, so it keeps the slots of its open
    stores reserved until the client reports which leases it still has; and the first request after a restart of the
    server should find what its tiers have. While there is a connection, this waits for its end; without one, it tries
    to connect.
    """

    def __init__(self, look: Callable[[], socket.socket | None]) -> None:
        """look: a bound method, whose object is not kept alive here. It notices that the connection has ended, tries to
        reconnect, and returns a descriptor of the connection, which is closed here; None: there is none."""
        super().__init__(name="kv-reconnect", daemon=True)
        self._look = weakref.WeakMethod(look, lambda _: self.stop())
        self._stopped = threading.Event()
        self._watched: socket.socket | None = None

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
