"""The directory in Valkey or Redis: one stream for each chunk format, which all servers append to and read.

    XADD   <prefix>:directory:<namespace>  MAXLEN ~ <n>  *  e <entry>
    XREAD  COUNT <n>  STREAMS  <prefix>:directory:<namespace>  <the last that was read>

It holds only the last entries. A reader that has missed some notices by their numbers, so nothing depends on what is
retained there, and a flushed or restarted server is as good as any. A user needs XADD, XREAD and XREVRANGE on
<prefix>:directory:*, SELECT where the url names a database, CLUSTER SLOTS in a cluster.

Any client may have left anything there. What is no entry is skipped, however large; what nobody can append to is
reported, with what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kv_core.errors import TierDown
from kv_core.log import limited_logger
from kv_remote.redis_servers import RedisAccess, Servers
from kv_remote.resp import ErrorReply, OversizedReplyError, Reply, command

from kv_server.directory.entries import MAX_CHAIN_BYTES, MAX_ENTRY_BYTES

if TYPE_CHECKING:  # redis-py is imported when a directory is made
    from kv_remote.redis_connection import Connection


_log = limited_logger(__name__)

AT_ONCE: Final = 256
"""Entries in one answer."""
KEPT: Final = 1 << 14
"""Entries that the stream retains, more or less."""
_AROUND_BYTES: Final = 64 << 10
"""In an answer, besides entries and their positions, and beyond it."""
_POSITION: Final = re.compile(rb"\r\n([0-9]+-[0-9]+)\r\n")
_FIELD: Final = b"e"
_MAX_ID: Final = (1 << 64) - 1

Position = tuple[int, int]
"""Of an entry in the stream: milliseconds, and a number within that millisecond."""
BEGINNING: Final = (0, 0)
END: Final = (_MAX_ID, _MAX_ID)
"""Nothing can be appended after this one."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The next entries. upto: where to continue. is_all: there were no more."""

    written: list[bytes]
    upto: Position
    is_all: bool


class Stream:
    """For one thread. Every call may raise `TierDown`."""

    def __init__(self, access: RedisAccess, namespace: str, where: str) -> None:
        """Connects to no server yet. Raises `ConfigError`."""
        self._name = f"{access.prefix}:directory:{namespace}".encode()
        self._servers = Servers(access, where)
        self._is_cluster = access.mode == "cluster"
        self._remedy = f"remove it (DEL {self._name.decode()}); every host writes again within a lease"
        self._at_once = AT_ONCE

    def append(self, entries: Sequence[bytes]) -> str:
        """Write these; returns why they were refused, else "". After a refusal or an exception some may have been
        written."""
        words = (b"XADD", self._name, b"MAXLEN", b"~", b"%d" % KEPT, b"*", _FIELD)
        answers = self._talk([command(*words, entry) for entry in entries], _AROUND_BYTES)
        refusals = [answer for answer in answers if isinstance(answer, ErrorReply)]
        return self._explained(refusals[0]) if refusals else ""

    def read(self, after: Position) -> Entries:
        """The next entries, at most `AT_ONCE`."""
        # Until the answer is here as a whole. If it has something too large, or takes too long, the server should not
        # put hundreds of entries into the next one.
        at_once, self._at_once = self._at_once, 1
        try:
            words = (b"XREAD", b"COUNT", b"%d" % at_once, b"STREAMS", self._name, b"%d-%d" % after)
            answer = self._ask(*words, entries=at_once)
        except TierDown as error:
            if not isinstance(error.__cause__, OversizedReplyError):
                raise
            return self._skipped(error.__cause__.received, after) if at_once == 1 else Entries([], after, is_all=False)
        match list(answer.items()) if isinstance(answer, dict) else answer:  # RESP3's or RESP2's
            case None:
                self._at_once = AT_ONCE
                return Entries([], after, is_all=True)
            case [[bytes(), list(found)]] if len(found) <= at_once:
                pass
            case _:
                raise self._unexpected(answer)
        written, upto = [], after
        for entry in found:
            position, value = self._entry(entry)
            if position > upto:  # else it has been read
                upto = position
                written += [] if value is None else [value]
        if upto == after:
            raise TierDown(f"the directory answers again with entries up to {after[0]}-{after[1]}")
        self._at_once = min(AT_ONCE, 2 * at_once)
        return Entries(written, upto, is_all=len(found) < at_once)

    def _skipped(self, received: bytes, after: Position) -> Entries:
        """Where to continue after an entry that is too large. received: the beginning of the answer."""
        found = _POSITION.search(received)
        position, _ = self._entry([found[1]] if found is not None else [])
        if position <= after:
            raise TierDown(f"the directory answers again with an entry at {after[0]}-{after[1]}")
        _log.warning(
            "%s has something too large for an entry of a directory at %d-%d, which is skipped",
            self._name.decode(),
            *position,
        )
        return Entries([], position, is_all=False)

    def last(self) -> Position:
        """The position of the last entry; `BEGINNING` if there is none."""
        answer = self._ask(b"XREVRANGE", self._name, b"+", b"-", b"COUNT", b"1")
        match answer:
            case []:
                return BEGINNING
            case [entry]:
                return self._entry(entry)[0]
        raise self._unexpected(answer)

    def exhausted(self) -> str:
        """Why nothing can be appended after `END`, and what to do."""
        return f"the directory's stream has the last possible entry, so nothing can be written: {self._remedy}"

    def close(self) -> None:
        self._servers.close()

    def _ask(self, *words: bytes, entries: int = 1) -> Reply:
        (answer,) = self._talk([command(*words)], _AROUND_BYTES + entries * (MAX_ENTRY_BYTES + MAX_CHAIN_BYTES + 256))
        if isinstance(answer, ErrorReply):
            raise TierDown(f"the directory: {self._explained(answer)}")
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

    def _explained(self, refusal: ErrorReply) -> str:
        is_unusable = refusal.code == "WRONGTYPE" or "last possible ID" in refusal.text
        return f"{refusal.text}: {self._remedy}" if is_unusable else self._servers.explained(refusal)

    def _entry(self, reply: Reply) -> tuple[Position, bytes | None]:
        """The position and value of an entry; None: it has no such value.

        Raises:
            TierDown: it is not an entry.
        """
        match reply:
            case [bytes(position), *fields]:
                first, dash, second = position.partition(b"-")
                if dash and first.isdigit() and second.isdigit() and len(position) <= 41:
                    place = (min(int(first), _MAX_ID), min(int(second), _MAX_ID))
                    match fields:
                        case [[bytes(), bytes(value), *_]]:
                            return place, value
                    return place, None
        raise self._unexpected(reply)

    def _unexpected(self, answer: Reply) -> TierDown:
        return TierDown(f"the directory answers {str(answer)[:100]}")
