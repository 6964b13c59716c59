"""Connections to Redis and Valkey: redis-py's, with values that move between the socket and borrowed memory.

redis-py connects, logs in, selects the database, parses RESP2 and RESP3, retains connections, notices dead ones before
their use, and tries again on another. It gets a socket of ours, because its time-outs begin anew with every byte, and
it allocates whatever a reply says: ours has a deadline and a size limit for each reply. Values (`read_value`) and the
answers to thousands of small commands (`read_numbers`) bypass its parser, which makes objects of them.

After any exception the state of a conversation is unknown, and its connection is closed.
"""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kv_core.errors import TierDown
from kv_core.log import on_one_line
from redis._parsers import _RESP2Parser, _RESP3Parser
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, ConnectionPool, UnixDomainSocketConnection
from redis.connection import Connection as RedisConnection
from redis.credentials import CredentialProvider
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.retry import Retry

from kv_remote.redis_servers import ConnectionLostError
from kv_remote.resp import ErrorReply, OversizedReplyError, ProtocolError, Reply, TooLarge, command
from kv_remote.timed_socket import Buffer, TimedSocket
from kv_remote.tls_files import TlsFiles

T = TypeVar("T")

_DRAIN_BYTES: Final = 64 << 20  # a value that does not fit is skipped up to this size; beyond, the connection fails
_DISCARDED: Final = memoryview(bytearray(16 << 10))
_MAX_SMALL_BYTES: Final = 64 << 10
"""For replies that are a number or a word, and a value's first line."""
_RECEIVED_BYTES: Final = 16 << 10
"""At once, which may be beyond the reply that is being read."""
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 60}
"""How often an idle connection is shown to be alive. Load balancers and firewalls forget one that is idle for some
minutes, and tell neither side: the next request then waits for its time-out."""
_ONCE_MORE: Final = Retry(NoBackoff(), 1, (ConnectionError,))
"""A connection that is lost may have been dead before, although nothing showed it."""


class _Socket(TimedSocket):
    """What redis-py takes for a socket. deadline, room: of the reply that is being read."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        super().__init__(sock, timeout_s)
        self._timeout_s, self._waits = timeout_s, True
        self.begin(_MAX_SMALL_BYTES)  # all of the login

    def begin(self, max_bytes: int) -> None:
        self.deadline, self.room = time.monotonic() + self._timeout_s, max_bytes

    def recv(self, nbytes: int) -> bytes | bytearray:
        if not self._waits:
            if self._encrypted:
                self._sock.settimeout(0)
            return self._sock.recv(nbytes, 0 if self._encrypted else socket.MSG_DONTWAIT)
        data = bytearray(nbytes)
        del data[self.receive(memoryview(data), self.deadline) :]
        self.room -= len(data)
        if self.room < 0:
            raise OversizedReplyError("a reply that is larger than there is room for")
        return data

    def sendall(self, data: Buffer) -> None:
        self.send([data], time.monotonic() + self._timeout_s)

    def settimeout(self, timeout_s: float | None) -> None:
        """redis-py sets 0 to find out whether anything is here, and otherwise the limit that we have."""
        self._waits = timeout_s != 0

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)


class _AnsweredError(ResponseError):
    def __init__(self, text: str) -> None:
        text = "".join(char if char.isascii() and char.isprintable() else "?" for char in text[:200])
        super().__init__(text)
        self.reply = ErrorReply(text.split(" ", 1)[0], text)


class _Resp2Parser(_RESP2Parser):
    @classmethod
    def parse_error(cls, response: str) -> _AnsweredError:
        return _AnsweredError(response)


class _Resp3Parser(_RESP3Parser):
    @classmethod
    def parse_error(cls, response: str) -> _AnsweredError:
        return _AnsweredError(response)


class Connection(AbstractConnection):
    """For one thread at a time. Calls may raise `OSError` (including `TimeoutError`), `RedisError` and
    `ProtocolError`."""

    _parser: Any
    _sock: Any

    def __init__(self, *, timeout_s: float, tls: TlsFiles | None, protocol: int, **options: Any) -> None:
        """timeout_s: for one `send`, or one reply; up to twice that if it arrives slowly."""
        parser = _Resp3Parser if protocol == 3 else _Resp2Parser
        options |= {"socket_timeout": timeout_s, "socket_read_size": _RECEIVED_BYTES}
        super().__init__(parser_class=parser, protocol=protocol, **options)
        self._tls, self._timeout_s = tls, timeout_s
        self.driver_info = self.lib_name = self.lib_version = None  # telling them needs a right, and two round trips

    def _connect(self) -> _Socket:
        sock: socket.socket = super()._connect()  # type: ignore[no-untyped-call,safe-super]
        if self._tls is not None:  # redis-py's own would trust the system's authorities as well as ours
            sock = self._tls.current().wrap_socket(sock, server_hostname=self.host)
        return _Socket(sock, self._timeout_s)

    def connect(self) -> None:
        """
        Raises:
            TierDown: the server does not let us in.
            RedisError: it cannot be reached.
        """
        try:
            super().connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            # redis-py does so after its own errors only, and would take the connection for one that has logged in.
            self.disconnect()  # type: ignore[no-untyped-call]
            if isinstance(error, _AnsweredError):
                name = on_one_line(self._host_error())  # type: ignore[no-untyped-call]
                raise TierDown(f"{name} does not allow us to log in: {self._reason(error.reply)}") from None
            if isinstance(error, UnicodeError):  # a server's answer may name what is no host's name
                raise TierDown(f"{self.host!r} is no name of a host: {error}") from error
            if isinstance(error, _NO_REPLY):
                raise ProtocolError(f"an unexpected answer to the login: {error}") from error
            raise

    def _reason(self, refusal: ErrorReply) -> str:
        reason = refusal.text.partition(", with args")[0]  # a server without AUTH repeats what was sent
        password = self.credential_provider.get_credentials()[-1] if self.credential_provider is not None else ""
        return refusal.code if password and str(password) in reason else reason

    def send(self, buffers: Sequence[Buffer]) -> None:
        self._sock.send(buffers, time.monotonic() + self._timeout_s)

    def ask(self, *words: bytes, max_bytes: int) -> Reply:
        self.send([command(*words)])
        return self.read_reply(max_bytes)

    def read_reply(self, max_bytes: int = _MAX_SMALL_BYTES) -> Reply:
        """Any one reply. Raises `OversizedReplyError`: it has more than `max_bytes`."""
        self._sock.begin(max_bytes)
        try:
            reply = self._parser.read_response(disable_decoding=True)
        except OversizedReplyError as error:
            error.received = self._parser._buffer._buffer.read(_MAX_SMALL_BYTES)
            raise
        except _NO_REPLY as error:
            raise ProtocolError(f"an unexpected reply: {str(error)[:100]}") from error
        parts = reply if isinstance(reply, list) else [reply]
        replies: list[Reply] = [part.reply if isinstance(part, _AnsweredError) else part for part in parts]
        return replies if isinstance(reply, list) else replies[0]

    def read_ok(self) -> ErrorReply | None:
        """The reply to SET, PING and the like; None: done."""
        reply = self.read_reply()
        if not isinstance(reply, bytes | ErrorReply):
            raise ProtocolError(f"an unexpected reply: {reply!r:.40}")
        return None if isinstance(reply, bytes) else reply

    def read_value(self, into: Sequence[memoryview]) -> int | TooLarge | ErrorReply | None:
        """Read the reply to GET and the like into the start of `into`; returns its size in bytes.

        None: there is no such value. `into` may have been written to in any case.
        """
        self._sock.begin(_MAX_SMALL_BYTES)
        buffer = self._parser._buffer
        start = buffer.get_pos()
        line: bytes = buffer.readline()
        if line[:1] != b"$" or line == b"$-1":
            buffer.rewind(start)
            reply = self.read_reply()
            if reply is None or isinstance(reply, ErrorReply):
                return reply
            raise ProtocolError(f"an unexpected reply: {reply!r:.40}")
        nbytes, room, parts = _number(line), sum(len(part) for part in into), into
        fits = 0 <= nbytes <= room
        if not fits:
            if not 0 <= nbytes <= _DRAIN_BYTES:
                raise ProtocolError(f"a value of {nbytes} bytes where {room} have room")
            parts = [_DISCARDED] * -(-nbytes // len(_DISCARDED))
        remaining = nbytes
        for part in parts:
            filling = part[:remaining]
            self._sock.fill(filling[buffer._buffer.readinto(filling) :], self._sock.deadline)
            remaining -= len(filling)
        buffer.purge()  # of what comes next nothing is here, unless the value was small
        if buffer.readline():
            raise ProtocolError("a value that is longer than announced")
        return nbytes if fits else TooLarge(nbytes)

    def read_numbers(self, count: int) -> list[int | ErrorReply]:
        """Read this many replies to EXISTS, UNLINK and the like, which are all that is awaited."""
        self._sock.begin(_MAX_SMALL_BYTES + 256 * count)
        received: bytes = self._parser._buffer._buffer.read()
        answers: list[int | ErrorReply] = []
        while True:  # read what is here while the server makes the next ones
            *lines, received = received.split(b"\r\n")
            answers += [_number(line) if line[:1] == b":" else _refusal(line) for line in lines]
            if len(answers) >= count:
                break
            received += self._sock.recv(_RECEIVED_BYTES)
        if len(answers) > count or received:
            raise ProtocolError("more replies than there were commands")
        return answers


_NO_REPLY: Final = (ValueError, TypeError, LookupError, OverflowError, AttributeError, RecursionError, InvalidResponse)
"""What redis-py raises when a server sends something else than RESP, or than was asked for."""


class _TcpConnection(Connection, RedisConnection):
    pass


class _UnixConnection(Connection, UnixDomainSocketConnection):
    pass


class RedisPool(ConnectionPool):
    """The connections to one server. Safe to use from any thread; further ones are opened when all are in use."""

    def __init__(self, host: str, port: int, *, keep: int, **options: Any) -> None:
        """host, port: as in `Address`. keep: the most connections that stay open between uses.

        options: of `Connection`.
        """
        self._name, self.keep = f"{host}:{port}" if port else host, keep
        tcp = {"host": host, "port": port, "socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
        kind = _TcpConnection if port else _UnixConnection
        options |= _without_notifications() | (tcp if port else {"path": host})
        super().__init__(connection_class=kind, max_connections=1 << 30, **options)

    def talk(self, work: Callable[[Connection], T]) -> T:
        """The result of a conversation; it is restarted on another connection if the first one is lost. Raises
        `TierDown`: the server cannot be reached, is too slow, or does not speak the protocol; `ConnectionLostError` if
        the other connection was lost as well."""
        try:
            result: T = _ONCE_MORE.call_with_retry(lambda: self._converse(work), lambda _: None)
        except (RedisError, OSError, ProtocolError) as error:
            kind = ConnectionLostError if isinstance(error, ConnectionError) else TierDown
            raise kind(on_one_line(f"{self._name}: {str(error) or type(error).__name__}")) from error
        return result

    def _converse(self, work: Callable[[Connection], T]) -> T:
        connection: Any = self.get_connection()
        try:
            return work(connection)
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self.release(connection)

    def release(self, connection: Any) -> None:
        super().release(connection)
        with self._lock:
            surplus = max(0, len(self._available_connections) - self.keep)
            closing = self._available_connections[:surplus]  # the longest idle ones
            del self._available_connections[:surplus]
        for idle in closing:
            idle.disconnect()


class Credentials(CredentialProvider):
    """Reads them at every connection."""

    def __init__(self, read: Callable[[], tuple[str] | tuple[str, str]]) -> None:
        self._read = read

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        return self._read()


def _without_notifications() -> dict[str, Any]:
    """redis-py 7 and later subscribe to a server's maintenance by themselves, and then change time-outs."""
    try:
        from redis.maint_notifications import MaintNotificationsConfig
    except ImportError:
        return {}
    return {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}


def _refusal(line: bytes) -> ErrorReply:
    if line[:1] != b"-":
        raise ProtocolError(f"an unexpected reply: {line[:40]!r}")
    return _AnsweredError(line[1:].decode("ascii", "replace")).reply


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise ProtocolError(f"a reply that is not a number: {line[:40]!r}") from None
