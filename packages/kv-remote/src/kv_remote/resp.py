"""Commands and replies of Redis and Valkey, as the tier and the directory use them.

Connections are redis-py's (`redis_connection`), which is imported only where one of them is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_remote.timed_socket import Buffer


class ProtocolError(Exception):
    """The other side does not speak RESP, or its answer does not fit the command."""


class OversizedReplyError(ProtocolError):
    """A reply has more than there is room for. received: its beginning, as it came."""

    received = b""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server refuses a command. code: the first word, such as OOM or MOVED; text: all of it, shortened."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class TooLarge:
    """There is a value, but it is larger than its buffers. It was skipped."""

    nbytes: int


Reply = bytes | int | None | ErrorReply | list["Reply"] | dict[bytes, "Reply"]
"""Those that our commands have. Only RESP3 has dictionaries."""


def command(*words: bytes) -> bytes:
    """One command whose arguments are all small."""
    return b"*%d\r\n%b" % (len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]))


def set_command(name: bytes, value: Sequence[Buffer], options: Sequence[bytes]) -> list[Buffer]:
    """SET of a value that lies in several buffers, for `Connection.send`. redis-py packs values that lie in one."""
    nbytes = sum(len(part) for part in value)
    start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(name), name, nbytes)
    end = b"\r\n" + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in options])
    return [start, *value, end]
