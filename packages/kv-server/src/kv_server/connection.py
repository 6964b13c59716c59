"""One connection to a server: it connects, exchanges greetings, and sends requests. Its owner decides what a failure
means.

A connection that has failed in any way is not used again: a late answer would be taken for the next request's.
"""

import os
import select
import socket
import struct
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

from kv_core.errors import ConfigError, InputError, TierDown

from kv_server import wire
from kv_server.pidfds import open_pidfd

_READ_BYTES: Final = 1 << 16
_PEER: Final = struct.Struct("3i")
PACKAGE: Final = version("kv-tiers")

A = TypeVar("A", bound=wire.Answer)


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
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # this process may open no more descriptors
            raise TierDown(f"the server at {path} cannot be connected to: {error.strerror}") from None
        try:
            self._socket.setblocking(False)
            try:
                self._socket.connect(os.fspath(path))
            except (ConnectionRefusedError, FileNotFoundError) as error:
                raise NobodyListens(f"no server answers at {path}: {error.strerror}") from None
            except OSError as error:
                raise TierDown(f"no server answers at {path}: {error.strerror or error}") from None
            _, uid, _ = _PEER.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid != os.geteuid():
                raise ConfigError(f"the server at {path} belongs to user {uid}, not to us; join one of your own")
            self.send(wire.Hello(PACKAGE))
        except BaseException:
            self.close()
            raise

    def send(self, request: wire.Request) -> None:
        """
        Raises:
            TierDown: the server did not accept it in time.
        """
        try:
            self._socket.settimeout(self.timeout_s)
            self._socket.sendall(wire.frame(request))
        except OSError as error:
            # The server may have sent the reason before it closed the connection.
            answer = self.receive(0)
            why = answer.text if isinstance(answer, wire.Failed) else error
            raise TierDown(f"the server takes no requests: {why}") from None

    def receive(self, timeout_s: float) -> wire.Answer | None:
        """The next answer; None: it did not arrive in time. 0 does not wait.

        Raises:
            TierDown: there will be none.
        """
        until_s = time.monotonic() + timeout_s
        try:
            while (body := self._frames.next()) is None:
                # Without time left too, what has arrived is read: this thread may have been delayed.
                self._socket.settimeout(max(0.0, until_s - time.monotonic()))
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
        """
        Raises:
            TierDown: there was no answer in time; the connection can no longer be used.
        """
        self.send(request)
        answer = self.receive(self.timeout_s)
        if answer is None:
            raise TierDown(f"the server did not answer within {self.timeout_s} s")
        return answer

    def take_descriptor(self) -> int:
        """The pool's descriptor, which came with `Pool`. The caller closes it.

        Raises:
            TierDown: none came.
        """
        if not self._descriptors:
            raise TierDown("the server sent no pool")
        return self._descriptors.pop()

    def drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def watch(self) -> socket.socket:
        """A second descriptor of this connection, for `wait_for_end`. The caller closes it.

        Raises:
            OSError: this process may open no more descriptors.
        """
        return self._socket.dup()

    def pidfd(self) -> int:
        """Of the server's process; -1: the kernel cannot say."""
        pid, _, _ = _PEER.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return open_pidfd(self._socket, pid)

    def release(self) -> socket.socket:
        """The socket, on which the caller goes on instead."""
        return self._socket

    def has_ended(self) -> bool:
        """Whether the server has closed the connection. Sends nothing and does not wait."""
        return wait_for_end(self._socket, timeout_s=0)

    def close(self) -> None:
        self.drop_descriptors()
        with suppress(OSError):  # it may never have been connected
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `wait_for_end`, whose descriptor keeps it open
        self._socket.close()

    def _read(self) -> bytes:
        data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 2)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        return data


def wait_for_end(connection: socket.socket, *, timeout_s: float | None = None) -> bool:
    """Wait until this connection is closed by either side; None: however long. Costs nothing while it is in use."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class Opening:
    """A connection during its greeting and registration, which can be polled without waiting."""

    def __init__(self, path: Path, timeout_s: float, register: wire.Register) -> None:
        """
        Raises:
            TierDown, ConfigError: as for `ServerConnection`.
        """
        self.connection = ServerConnection(path, timeout_s)
        self.register = register
        self.is_greeted = False
        """The server answers: if there is no pool yet, it is opening its tiers."""
        try:
            self.connection.send(register)
        except BaseException:
            self.connection.close()
            raise

    def finish(self, timeout_s: float) -> wire.Pool | None:
        """The pool, once the server has answered; None: not yet.

        Raises:
            TierDown: it will not answer.
            ConfigError: it refuses, and says why.
        """
        until = time.monotonic() + timeout_s
        while True:
            match self.connection.receive(max(0.0, until - time.monotonic())):
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
    """The answer of this kind to `ask_server`.

    Raises:
        TierDown, ConfigError: as for `ask_server`. TierDown also for any other answer, such as that it hit a bug.
    """
    answer = ask_server(path, request, timeout_s=timeout_s)
    if not isinstance(answer, wanted):
        reason = answer.text if isinstance(answer, wire.Failed) else type(answer).__name__
        raise TierDown(f"the server at {path} answers: {reason}")
    return answer
