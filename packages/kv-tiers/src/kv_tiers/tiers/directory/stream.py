"""The directory in Valkey or Redis: one stream for each chunk format, which all servers append to and read.

    XADD   <prefix>:directory:<namespace>  MAXLEN ~ <n>  *  e <entry>
    XREAD  COUNT <n>  STREAMS  <prefix>:directory:<namespace>  <the last that was read>

It holds only the last entries. A reader that has missed some notices by their numbers, so nothing depends on what is
retained there, and a flushed or restarted server is as good as any. A user needs XADD, XREAD and XREVRANGE on
<prefix>:directory:*, SELECT where the url names a database, CLUSTER SLOTS in a cluster.
"""

from collections.abc import Sequence
from typing import Final

from kv_core.errors import TierDown

from kv_tiers.tiers.directory.entries import MAX_ENTRY_BYTES
from kv_tiers.tiers.redis_servers import RedisAccess, Servers
from kv_tiers.tiers.resp import Connection, ErrorReply, Reply, command

AT_ONCE: Final = 256
"""Entries in one answer."""
KEPT: Final = 1 << 14
"""Entries that the stream retains, more or less."""
_MAX_ANSWER_BYTES: Final = AT_ONCE * (MAX_ENTRY_BYTES + 256)
_FIELD: Final = b"e"
_MAX_ID: Final = (1 << 64) - 1

Position = tuple[int, int]
"""Of an entry in the stream: milliseconds, and a number within that millisecond."""
BEGINNING: Final = (0, 0)


class Stream:
    """For one thread. Every call may raise `TierDown`."""

    def __init__(self, access: RedisAccess, namespace: str, where: str) -> None:
        """Connects to no server yet. Raises `ConfigError`."""
        self._name = f"{access.prefix}:directory:{namespace}".encode()
        self._servers = Servers(access, where)
        self._is_cluster = access.mode == "cluster"

    def append(self, entries: Sequence[bytes]) -> str:
        """Write these; returns why they were refused, else "". After a refusal or an exception some may have been
        written."""
        words = (b"XADD", self._name, b"MAXLEN", b"~", b"%d" % KEPT, b"*", _FIELD)
        commands = [command(*words, entry) for entry in entries]
        refusals = [answer for answer in self._talk(commands, 1 << 10) if isinstance(answer, ErrorReply)]
        return self._servers.explained(refusals[0]) if refusals else ""

    def read(self, after: Position) -> list[tuple[Position, bytes]]:
        """The next entries, at most `AT_ONCE`."""
        question = command(b"XREAD", b"COUNT", b"%d" % AT_ONCE, b"STREAMS", self._name, b"%d-%d" % after)
        answer = self._ask(question)
        match answer:
            case None:
                return []
            case [[bytes(), list(entries)]] if len(entries) <= AT_ONCE:
                return [_entry(entry) for entry in entries]
        raise TierDown(f"the directory answers {str(answer)[:100]}")

    def last(self) -> Position:
        """The position of the last entry; `BEGINNING` if there is none."""
        answer = self._ask(command(b"XREVRANGE", self._name, b"+", b"-", b"COUNT", b"1"))
        match answer:
            case []:
                return BEGINNING
            case [entry]:
                return _entry(entry)[0]
        raise TierDown(f"the directory answers {str(answer)[:100]}")

    def close(self) -> None:
        self._servers.close()

    def _ask(self, question: bytes) -> Reply:
        (answer,) = self._talk([question], _MAX_ANSWER_BYTES)
        if isinstance(answer, ErrorReply):
            raise TierDown(f"the directory: {self._servers.explained(answer)}")
        return answer

    def _talk(self, commands: Sequence[bytes], max_bytes: int) -> list[Reply]:
        def work(connection: Connection) -> list[Reply]:
            connection.send(commands)
            return [connection.read_reply(max_bytes) for _ in commands]

        address = self._servers.addresses_of([self._name])[0] if self._is_cluster else self._servers.masters()[0]
        answers = self._servers.talk(address, work)
        if any(isinstance(answer, ErrorReply) and answer.code in ("MOVED", "ASK", "READONLY") for answer in answers):
            self._servers.forget()
        return answers


def _entry(reply: Reply) -> tuple[Position, bytes]:
    """
    Raises:
        TierDown: it is not an entry.
    """
    match reply:
        case [bytes(position), [bytes(), bytes(value), *_]]:
            first, dash, second = position.partition(b"-")
            if dash and first.isdigit() and second.isdigit() and len(position) <= 41:
                return (min(int(first), _MAX_ID), min(int(second), _MAX_ID)), value
    raise TierDown(f"the directory answers {str(reply)[:100]} instead of an entry")
