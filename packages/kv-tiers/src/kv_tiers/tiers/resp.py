"""One connection to a Redis or Valkey server that moves large values between its socket and borrowed memory.

It implements the part of RESP2, which every server supports, that commands on bulk strings need. Payloads are neither
copied nor joined (`TimedSocket`). The caller decides which commands to send.

The server is not trusted: a length that it names is never allocated, and an unexpected reply raises `ProtocolError`.
After any exception the state of the conversation is unknown: close the connection.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_tiers.tiers.timed_socket import Buffer, TimedSocket

_BUFFER_BYTES: Final = 16 << 10
_DRAIN_BYTES: Final = 64 << 20  # a value that does not fit is skipped up to this size; beyond, the connection fails
_MAX_DEPTH: Final = 8


class ProtocolError(Exception):
    """The other side does not speak RESP, or its answer does not fit the command."""


class OversizedReplyError(ProtocolError):
    """A reply has more than there is room for. received: what came before that, if it is in a list."""

    received: "Reply" = None


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server refuses a command. code: the first word, such as OOM or MOVED; text: all of it, shortened."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class TooLarge:
    """There is a value, but it is larger than its buffers. It was skipped."""

    nbytes: int


Reply = bytes | int | None | ErrorReply | list["Reply"]


def command(*words: bytes) -> bytes:
    """One command whose arguments are all small."""
    return b"*%d\r\n%b" % (len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]))


def set_command(name: bytes, value: Sequence[Buffer], options: Sequence[bytes]) -> list[Buffer]:
    """SET of a value that lies in several buffers, for `Connection.send`."""
    nbytes = sum(len(part) for part in value)
    start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(name), name, nbytes)
    end = b"\r\n" + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in options])
    return [start, *value, end]


class Connection:
    """For one thread at a time. Every call may raise `OSError` (including `TimeoutError`) and `ProtocolError`."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Takes ownership of `sock`. timeout_s: for one `send`, or one reply; up to twice that if it arrives slowly."""
        self._socket, self._timeout_s = TimedSocket(sock, timeout_s), timeout_s
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._from = self._until = 0

    @property
    def settled(self) -> bool:
        """Whether nothing unexpected has been received."""
        return self._from == self._until

    def close(self) -> None:
        self._socket.close()

    def send(self, buffers: Sequence[Buffer]) -> None:
        self._socket.send(buffers, time.monotonic() + self._timeout_s)

    def read_numbers(self, count: int) -> list[int | ErrorReply]:
        """Read this many replies to EXISTS, UNLINK and the like."""
        deadline = time.monotonic() + self._timeout_s
        answers: list[int | ErrorReply] = []
        while len(answers) < count:
            end = self._bytes.rfind(b"\r\n", self._from, self._until)
            if end < 0:
                self._more(deadline)
                continue
            remaining = count - len(answers)
            lines = bytes(self._bytes[self._from : end]).split(b"\r\n", remaining)[:remaining]
            self._from += sum(map(len, lines)) + 2 * len(lines)
            answers += [_number(line) if line[:1] == b":" else _refusal(line) for line in lines]
        return answers

    def read_ok(self) -> ErrorReply | None:
        """The reply to SET, AUTH and the like; None: done."""
        line = self._line(time.monotonic() + self._timeout_s)
        return None if line[:1] == b"+" else _refusal(line)

    def read_value(self, into: Sequence[memoryview]) -> int | TooLarge | ErrorReply | None:
        """Read the reply to GET and the like into the start of `into`; returns its size in bytes.

        None: there is no such value. `into` may have been written to in any case.
        """
        deadline = time.monotonic() + self._timeout_s
        line = self._line(deadline)
        if line[:1] != b"$":
            return _refusal(line)
        nbytes = _number(line)
        if nbytes == -1:
            return None
        room, parts = sum(len(part) for part in into), into
        fits = 0 <= nbytes <= room
        if not fits:
            if not 0 <= nbytes <= _DRAIN_BYTES:
                raise ProtocolError(f"a value of {nbytes} bytes where {room} have room")
            discarded = memoryview(bytearray(_BUFFER_BYTES))
            parts = [discarded[: nbytes - offset] for offset in range(0, nbytes, _BUFFER_BYTES)]
        remaining = nbytes
        for part in parts:
            self._fill(part[:remaining], deadline)
            remaining -= min(remaining, len(part))
        if self._line(deadline):
            raise ProtocolError("a value that is longer than announced")
        return nbytes if fits else TooLarge(nbytes)

    def read_reply(self, max_bytes: int, *, max_size: int | None = None) -> "Reply":
        """Any one reply, of at most `max_bytes` including everything nested in it.

        max_size: bytes of each value, and parts of each list.

        Raises:
            OversizedReplyError: it has more.
        """
        deadline = time.monotonic() + self._timeout_s
        return self._reply([max_bytes], max_size or max_bytes, deadline, _MAX_DEPTH)

    def _reply(self, room: list[int], max_size: int, deadline: float, depth: int) -> "Reply":
        """room: how many bytes are left."""
        line = self._line(deadline)
        room[0] -= len(line) + 2
        if room[0] < 0:
            raise OversizedReplyError("a reply of more lines than have room")
        kind = line[:1]
        if kind == b"-":
            return _refusal(line)
        if kind == b"+":
            return line[1:]
        size = _number(line)
        if kind == b":":
            return size
        if kind not in (b"$", b"*") or depth == 0:
            raise ProtocolError(f"an unexpected reply: {line[:40]!r}")
        if size == -1:
            return None
        if not 0 <= size <= min(room[0], max_size):
            raise OversizedReplyError(f"a reply of {size} bytes or parts where {min(room[0], max_size)} have room")
        if kind == b"*":
            parts: list[Reply] = []
            try:
                for _ in range(size):
                    parts.append(self._reply(room, max_size, deadline, depth - 1))
            except OversizedReplyError as error:
                error.received = parts if error.received is None else [*parts, error.received]
                raise
            return parts
        room[0] -= size
        value = bytearray(size)
        self._fill(memoryview(value), deadline)
        if self._line(deadline):
            raise ProtocolError("a value that is longer than announced")
        return bytes(value)

    def _line(self, deadline: float) -> bytes:
        """The next line without its end."""
        while (end := self._bytes.find(b"\r\n", self._from, self._until)) < 0:
            self._more(deadline)
        line, self._from = bytes(self._bytes[self._from : end]), end + 2
        return line

    def _more(self, deadline: float) -> None:
        """Receive more bytes, after those that wait in the buffer."""
        waiting = self._bytes[self._from : self._until]
        if len(waiting) == _BUFFER_BYTES:
            raise ProtocolError(f"a line of more than {_BUFFER_BYTES} bytes")
        self._buffer[: len(waiting)] = waiting
        self._from, self._until = 0, len(waiting)
        self._until += self._socket.receive(self._buffer[self._until :], deadline)

    def _fill(self, part: memoryview, deadline: float) -> None:
        buffered = min(self._until - self._from, len(part))
        part[:buffered] = self._buffer[self._from : self._from + buffered]
        self._from += buffered
        self._socket.fill(part[buffered:], deadline)


def _number(line: bytes) -> int:
    digits = line[1:]
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        raise ProtocolError(f"a reply that is not a number: {line[:40]!r}")
    return int(digits)


def _refusal(line: bytes) -> ErrorReply:
    if line[:1] != b"-":
        raise ProtocolError(f"an unexpected reply: {line[:40]!r}")
    text = "".join(char if char.isprintable() else "?" for char in line[1:200].decode("ascii", "replace"))
    return ErrorReply(text.split(" ", 1)[0], text)
