"""The Redis tier: chunks in Redis or Valkey, on one server, a cluster, or a master watched by sentinels.

A payload is cut into pieces, all of one size except the last. Each piece is one value:

    <prefix>:<namespace>:<piece_bytes>:{<key in base64>}        header, first piece, a zero for each other piece
    <prefix>:<namespace>:<piece_bytes>:{<key in base64>}:1      the second piece, and so on

The braces put all pieces of a chunk on the same server of a cluster and spread chunks over all of them. Base64 keeps
braces and glob characters out of names. The head's length gives the number of pieces, because its zeros make it longer
than a head alone can be. `holds` queries that length (STRLEN) and counts the other pieces (EXISTS of all possible
names), so a chunk that lost a piece to the server's eviction or to expiry is absent.

All pieces of a chunk are written in one transaction (MULTI), so nothing is left of a writer that is killed while it
writes. A user without that permission, and a server without it, gets them one by one, the first piece last: then pieces
without a head may stay behind, until they expire, are evicted, or the chunk is stored again. Two such writers of one
chunk may mix pieces if their bytes differ; the header's checksum detects that, like all other damage. A chunk found
incomplete is discarded.

A value that is too large for the server makes it close the connection, usually without a word that arrives. So a chunk
whose store loses the connection is stored again by itself, and if that fails as well while the server answers, the
chunk is what it does not take. Chunks with values of that size are then refused for a while.

A user needs GET, GETRANGE, STRLEN (GETEX and EXPIRE to refresh times), SET, EXISTS, UNLINK, SCAN and PING on
<prefix>:*, SELECT where the url names a database, CLUSTER SLOTS in a cluster, and should have MULTI and EXEC. Without
SET and UNLINK the tier reads what others store.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from kv_core.clock import Clock
from kv_core.errors import InputError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, Refused, Stored, StoreOutcome, Unstorable
from kv_tiers.chunk_header import HEADER_BYTES, stored_bytes_in
from kv_tiers.clock import MonotonicClock
from kv_tiers.pool.machine import spelled
from kv_tiers.tier import Read, RemovalRefusedError, TierContext, TierUsage, Write, why_full

from kv_remote.factories import factory_of
from kv_remote.redis_servers import Address, ConnectionLostError, RedisConfig, Servers
from kv_remote.resp import ErrorReply, ProtocolError, TooLarge, command, set_command
from kv_remote.timed_socket import Buffer
from kv_remote.together import run_all

if TYPE_CHECKING:  # redis-py is imported when a tier is made
    from kv_remote.redis_connection import Connection

_COMMANDS_AT_ONCE: Final = 1000
"""Small commands per round trip."""

_AHEAD_BYTES: Final = 8 << 20
"""How far ahead of the arriving value further ones are requested; the server buffers that much for us. Over a unix
socket 16 MiB made Valkey 9.1 ten times slower in some runs, and faster in none."""

_LOOKS: Final = 8
"""Requests to a server when the names of a few values are wanted. Each request scans a thousand of the server's
values."""

_TOO_LARGE_REST_S: Final = 60.0
"""How long values as large as one that the server did not take are not sent: each costs a connection, and the server's
limit may be raised meanwhile."""

_TRANSACTION_BYTES: Final = 256 << 20
"""Larger chunks are written without a transaction: the server would hold all of one in a buffer that it limits."""

_MAX_EXEC_BYTES: Final = 1 << 20

_ASKING: Final = command(b"ASKING")
_MULTI: Final = command(b"MULTI")
_EXEC: Final = command(b"EXEC")

_log = limited_logger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")
Work: TypeAlias = "Callable[[Connection, Sequence[Item], bool], list[T | ErrorReply]]"
"""A conversation with one server about those of a call's chunks that it stores. The flag: the server is about to take
them over, and wants ASKING before every command."""


class RedisTier:
    """Safe to call from any thread; concurrent calls use separate connections."""

    name = "redis"
    holds_is_local = False

    def __init__(self, config: RedisConfig, context: TierContext, *, clock: Clock | None = None) -> None:
        """Connects to no server yet. Raises `ConfigError`."""
        self._config = config
        self._chunk_bytes = context.chunk_bytes
        self._piece_bytes = config.piece_bytes
        self._max_pieces = -(-context.chunk_bytes // config.piece_bytes)
        self._prefix = f"{config.prefix}:{context.namespace}:{config.piece_bytes}:".encode()
        self._everything = f"{config.prefix}:{context.namespace}:*".encode()  # of any size of pieces
        self._expiry = (b"EX", b"%d" % config.ttl_s) if config.ttl_s else ()
        self._refresh = self._expiry if config.refresh_ttl else ()
        self._ahead = min(_COMMANDS_AT_ONCE, max(2, _AHEAD_BYTES // min(config.piece_bytes, context.chunk_bytes)))
        self.name = context.name or self.name
        self._servers = Servers(config, self.name)
        self._full = ""
        self._clock: Clock = clock or MonotonicClock()
        self._transactions = True
        self._too_large: tuple[int, float] | None = None  # the size of a value, and until when it is not sent
        self.on_progress: Callable[[], object] = lambda: None
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="kv-redis")

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._spread(keys, keys, self._are_whole)

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        def work(connection: Connection, server_reads: Sequence[Read], asking: bool) -> list[LoadOutcome | ErrorReply]:
            outcomes = self._fetch(connection, server_reads, asking)
            wrong = [
                read.key
                for read, outcome in zip(server_reads, outcomes, strict=True)
                if isinstance(outcome, Damaged | _Incomplete)
            ]
            if wrong and not asking:  # a read-only user gets an error here, which does not matter
                self._unlink(connection, wrong, asking)
            return [Absent() if isinstance(outcome, _Incomplete) else outcome for outcome in outcomes]

        return self._spread([read.key for read in reads], reads, work)

    load_prefixes = load

    def some_keys(self, count: int) -> list[ChunkKey]:
        names: list[bytes] = []
        for address in self._servers.masters() if count else ():
            self._servers.find(address, self._prefix + b"{*}", names.extend, looks=_LOOKS)
        keys = (_key_in(name[len(self._prefix) :]) for name in dict.fromkeys(names))
        return list(islice((key for key in keys if key is not None), count))

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        outcomes: list[StoreOutcome]
        try:
            outcomes = self._spread([write.key for write in writes], writes, self._store)
        except ConnectionLostError:
            outcomes = [self._store_alone(write) for write in writes]
        if outcomes:
            self._full = why_full(outcomes)
            if self._full.startswith("READONLY"):  # if it was the master, another server is by now
                self._servers.forget()
        return outcomes

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        def work(connection: Connection, server_keys: Sequence[ChunkKey], asking: bool) -> list[int | ErrorReply]:
            answers = self._unlink(connection, server_keys, asking)
            self._raise_if_forbidden(answers)
            return answers

        self._spread(keys, keys, work)

    def clear(self) -> None:
        for address in self._servers.masters():
            self._servers.find(address, self._everything, partial(self._unlink_names, address))

    def clear_tenant(self, tenant: bytes) -> None:
        pattern = self._everything + b"{" + _pattern_of(tenant)
        for address in self._servers.masters():
            self._servers.find(address, pattern, partial(self._unlink_names, address))

    def probe(self) -> None:
        # Which server serves what may have changed.
        self._servers.forget()
        for address in self._servers.masters():
            refusal = self._servers.talk(address, _ping)
            if refusal is not None:
                raise TierDown(f"{address}: {refusal.text}")

    def usage(self) -> TierUsage:
        return TierUsage(full=self._full)

    def close(self) -> None:
        self._threads.shutdown()
        self._servers.close()

    # Names.

    def _head(self, key: ChunkKey) -> bytes:
        return b"%b{%b}" % (self._prefix, urlsafe_b64encode(key))

    def _names(self, key: ChunkKey) -> list[bytes]:
        head = self._head(key)
        return [head, *(b"%b:%d" % (head, piece) for piece in range(1, self._max_pieces))]

    def _for_each(self, keys: Sequence[ChunkKey], verb: bytes, pieces: slice = slice(None)) -> list[bytes]:
        """For each key, the command on these of its pieces. Made from one pattern, because there may be thousands."""
        patterns: dict[int, bytes] = {}
        commands = []
        for key in keys:
            pattern = patterns.get(len(key))
            if pattern is None:
                # The placeholder is not a base64 character.
                pattern = command(verb, *self._names(key)[pieces]).replace(urlsafe_b64encode(key), b"?")
                patterns[len(key)] = pattern
            commands.append(pattern.replace(b"?", urlsafe_b64encode(key)))
        return commands

    def _pieces_of(self, head_bytes: int) -> int:
        """How many pieces go with a head of this length; 0: it is not a head."""
        max_single_bytes = HEADER_BYTES + min(self._piece_bytes, self._chunk_bytes)
        if head_bytes <= max_single_bytes:
            return int(head_bytes > HEADER_BYTES)
        pieces = head_bytes - max_single_bytes + 1
        return pieces if pieces <= self._max_pieces else 0

    def _pieces_for(self, stored_bytes: int) -> int:
        return max(1, -(-stored_bytes // self._piece_bytes))

    # Which servers.

    def _spread(self, keys: Sequence[ChunkKey], items: Sequence[Item], work: Work[Item, T]) -> list[T]:
        """The answer for every item, from the server that stores its key; one redirection is followed. Raises
        `TierDown`: a server cannot be reached or answers with an error that is not about a chunk."""

        def work_by_number(connection: Connection, numbers: Sequence[int], asking: bool) -> list[T | ErrorReply]:
            return work(connection, [items[number] for number in numbers], asking)

        answers: dict[int, T] = {}
        groups: dict[tuple[Address, bool], list[int]] = {}
        for number, address in enumerate(self._addresses(keys)):
            groups.setdefault((address, False), []).append(number)
        for may_redirect in (True, False):
            redirected: dict[tuple[Address, bool], list[int]] = {}
            moved = []
            for (address, _), numbers, replies in self._converse(groups, work_by_number):
                for number, reply in zip(numbers, replies, strict=True):
                    if not isinstance(reply, ErrorReply):
                        answers[number] = reply
                    elif not may_redirect or self._config.mode == "single":
                        raise TierDown(f"{address}: {self._servers.explained(reply)}")
                    elif reply.code == "ASK":
                        redirected.setdefault((_address_in(reply, address), True), []).append(number)
                    elif reply.code in ("MOVED", "READONLY", "TRYAGAIN"):
                        moved.append(number)
                    else:
                        raise TierDown(f"{address}: {reply.text}")
            if moved:
                self._servers.forget()
                addresses = self._addresses([keys[number] for number in moved])
                for number, address in zip(moved, addresses, strict=True):
                    redirected.setdefault((address, False), []).append(number)
            if not redirected:
                break
            groups = redirected
        return [answers[number] for number in range(len(keys))]

    def _converse(
        self, groups: Mapping[tuple[Address, bool], list[int]], work: Work[int, T]
    ) -> list[tuple[tuple[Address, bool], list[int], list[T | ErrorReply]]]:
        """Talk to these servers, concurrently if there are several."""

        def talk(target: tuple[Address, bool], numbers: list[int]) -> list[T | ErrorReply]:
            return self._servers.talk(target[0], lambda connection: work(connection, numbers, target[1]))

        parts = [partial(talk, target, numbers) for target, numbers in groups.items()]
        answers = run_all(self._threads, parts) if len(parts) > 1 else [part() for part in parts]
        return [(target, numbers, answer) for (target, numbers), answer in zip(groups.items(), answers, strict=True)]

    def _addresses(self, keys: Sequence[ChunkKey]) -> list[Address]:
        if self._config.mode == "cluster":
            return self._servers.addresses_of([self._head(key) for key in keys])
        return self._servers.masters()[:1] * len(keys)

    def _is_forbidden(self, reply: ErrorReply) -> bool:
        """Whether we may only read. (If it is a replica among several servers, `_spread` turns to its master.)"""
        return reply.code == "NOPERM" or (reply.code == "READONLY" and self._config.mode == "single")

    def _refusal(self, reply: ErrorReply, write: Write) -> Refused | ErrorReply:
        """The outcome of a chunk that the server does not store, unless something else than the chunk is the reason."""
        if self._is_forbidden(reply) or reply.code in ("OOM", "MISCONF", "NOREPLICAS"):
            return Refused(reply.text)  # it accepts no more values, but keeps those that it has
        # A server or proxy that speaks the protocol and refuses just this value says so in words of its own.
        return Unstorable(f"{reply.text} ({self._size_and_remedy(write)})") if reply.code == "ERR" else reply

    # Values that a server does not take.

    def _store_alone(self, write: Write) -> StoreOutcome:
        """Store a chunk with which, or with a neighbour of which, a connection was lost. Raises `TierDown`: the server
        does not answer either without it."""
        try:  # on two connections, so it is not the server's restart that lost them
            outcomes: list[StoreOutcome] = self._spread([write.key], [write], self._store)
        except ConnectionLostError as error:
            why = str(error)
        else:
            return outcomes[0]
        self._spread([write.key], [write.key], self._are_whole)
        self._too_large = self._largest_value(write), self._clock.now_s() + _TOO_LARGE_REST_S
        return Unstorable(f"{why}, though it answers otherwise ({self._size_and_remedy(write)})")

    def _is_too_large(self, write: Write) -> bool:
        limit = self._too_large  # another thread may change it meanwhile
        if limit is None or self._clock.now_s() >= limit[1]:
            return False
        return self._largest_value(write) >= limit[0]

    def _largest_value(self, write: Write) -> int:
        pieces = self._pieces_for(write.stored_bytes)
        return HEADER_BYTES + min(write.stored_bytes, self._piece_bytes) + pieces - 1

    def _size_and_remedy(self, write: Write) -> str:
        return (
            f"a value of {spelled(self._largest_value(write))}: raise proto-max-bulk-len and client-query-buffer-limit "
            "of the server, and limits of proxies before it, or lower piece_bytes of every cache that shares its chunks"
        )

    def _raise_if_forbidden(self, answers: Sequence[int | ErrorReply]) -> None:
        for answer in answers:
            if isinstance(answer, ErrorReply) and self._is_forbidden(answer):
                self._servers.forget()
                raise RemovalRefusedError(answer.text)

    # Conversations with one server.

    def _are_whole(
        self, connection: Connection, keys: Sequence[ChunkKey], asking: bool, incomplete: list[ChunkKey] | None = None
    ) -> list[bool | ErrorReply]:
        """Which chunks are there with all their pieces. incomplete: receives those that are there only in part."""
        heads = _numbers(connection, self._for_each(keys, b"STRLEN", slice(1)), asking)
        other_pieces: list[int | ErrorReply] = [0] * len(keys)
        if self._max_pieces > 1:
            other_pieces = _numbers(connection, self._for_each(keys, b"EXISTS", slice(1, None)), asking)
        answers: list[bool | ErrorReply] = []
        for key, head, count in zip(keys, heads, other_pieces, strict=True):
            if isinstance(head, int) and isinstance(count, int):
                answers.append(head > 0 and self._pieces_of(head) == count + 1)
                if incomplete is not None and not answers[-1] and head + count:
                    incomplete.append(key)
                continue
            refusal = head if isinstance(head, ErrorReply) else count
            assert isinstance(refusal, ErrorReply)
            # The pieces are being moved, and are on two servers now; or the value is of another type.
            answers.append(False if refusal.code in ("TRYAGAIN", "WRONGTYPE") else refusal)
        return answers

    def _unlink(self, connection: Connection, keys: Sequence[ChunkKey], asking: bool) -> list[int | ErrorReply]:
        return _numbers(connection, self._for_each(keys, b"UNLINK"), asking)

    def _unlink_names(self, address: Address, names: Sequence[bytes]) -> None:
        commands = [command(b"UNLINK", name) for name in names]  # one command each, because they are in many slots
        answers = self._servers.talk(address, lambda connection: _numbers(connection, commands, False))
        self._raise_if_forbidden(answers)
        for answer in answers:
            if isinstance(answer, ErrorReply):
                raise TierDown(f"{address}: {answer.text}")

    def _fetch(
        self, connection: Connection, reads: Sequence[Read], asking: bool
    ) -> list[LoadOutcome | _Incomplete | ErrorReply]:
        commands = [get for read in reads for get in self._get_commands(read)]
        sent = arriving = 0
        outcomes: list[LoadOutcome | _Incomplete | ErrorReply] = []
        for read in reads:
            answers: list[int | TooLarge | ErrorReply | None] = []
            for piece in range(self._pieces_for(read.wanted_bytes)):
                if sent - arriving <= self._ahead // 2:
                    upto = min(arriving + self._ahead, len(commands))
                    connection.send([(_ASKING if asking else b"") + get for get in commands[sent:upto]])
                    sent = upto
                if asking:
                    connection.read_ok()
                arriving += 1
                answers.append(connection.read_value(self._buffers(read, piece)))
                self.on_progress()
            outcomes.append(self._outcome(read, answers))
        if self._refresh:  # GETRANGE restarts no time, and without the pieces that were not read the chunk is lost
            names = [
                name
                for read, outcome in zip(reads, outcomes, strict=True)
                if isinstance(outcome, Loaded) and read.wanted_bytes < self._chunk_bytes
                for name in self._names(read.key)[: self._pieces_for(stored_bytes_in(read.header))]
            ]
            _numbers(connection, [command(b"EXPIRE", name, *self._refresh[1:]) for name in names], asking)
        return outcomes

    def _get_commands(self, read: Read) -> list[bytes]:
        """The commands for all pieces that the wanted bytes may be in."""
        if read.wanted_bytes == self._chunk_bytes:
            verb = b"GETEX" if self._refresh else b"GET"
            return [command(verb, name, *self._refresh) for name in self._names(read.key)]
        lengths = self._lengths(read.wanted_bytes)
        names = self._names(read.key)[: len(lengths)]
        return [command(b"GETRANGE", name, b"0", b"%d" % (n - 1)) for name, n in zip(names, lengths, strict=True)]

    def _lengths(self, nbytes: int) -> list[int]:
        """The lengths of the values of a payload of this size, without a head's zeros."""
        lengths = [min(self._piece_bytes, nbytes - offset) for offset in range(0, nbytes, self._piece_bytes)]
        lengths[0] += HEADER_BYTES
        return lengths

    def _buffers(self, read: Read, piece: int) -> list[memoryview]:
        part = read.room[piece * self._piece_bytes : (piece + 1) * self._piece_bytes]
        return [part] if piece else [memoryview(read.header), part, memoryview(bytearray(self._max_pieces - 1))]

    def _outcome(
        self, read: Read, answers: Sequence[int | TooLarge | ErrorReply | None]
    ) -> LoadOutcome | _Incomplete | ErrorReply:
        for answer in answers:
            if isinstance(answer, ErrorReply):
                return Damaged("the name holds a value of another type") if answer.code == "WRONGTYPE" else answer
            if isinstance(answer, TooLarge):
                return Damaged(f"a piece of {answer.nbytes} bytes")
        if not any(answers):  # a range of a missing value is empty
            return Absent()
        if not answers[0]:
            return _Incomplete()
        stored_bytes = stored_bytes_in(read.header)
        if not 0 < stored_bytes <= self._chunk_bytes:
            return Damaged(f"a head that names a payload of {stored_bytes} bytes")
        loaded_bytes = min(read.wanted_bytes, stored_bytes)
        lengths = self._lengths(loaded_bytes)
        if read.wanted_bytes == self._chunk_bytes:
            lengths[0] += len(lengths) - 1
        for length, answer in zip(lengths, answers, strict=False):
            if not answer:
                return _Incomplete()
            if answer != length:
                return Damaged(f"a piece of {answer} bytes instead of {length}")
        return Loaded(loaded_bytes)

    def _store(self, connection: Connection, writes: Sequence[Write], asking: bool) -> list[StoreOutcome | ErrorReply]:
        incomplete: list[ChunkKey] = []
        held = self._are_whole(connection, [write.key for write in writes], asking, incomplete)
        if incomplete:  # or a reader might find old and new pieces of one chunk
            self._unlink(connection, incomplete, asking)
        outcomes: list[StoreOutcome | ErrorReply] = []
        sent: list[tuple[int, bool]] = []  # not yet answered: the chunk's number, and whether it is a transaction

        def settle() -> None:
            number, as_transaction = sent.pop()
            refusal = self._answer(connection, self._pieces_for(writes[number].stored_bytes), asking, as_transaction)
            if refusal is not None:
                outcomes[number] = self._refusal(refusal, writes[number])

        for write, is_held in zip(writes, held, strict=True):
            if isinstance(is_held, ErrorReply):
                outcomes.append(is_held)
            elif is_held:
                outcomes.append(Stored())
            elif self._is_too_large(write):
                outcomes.append(Unstorable(f"the server has refused {self._size_and_remedy(write)}"))
            elif why_full([outcome for outcome in outcomes[-2:] if not isinstance(outcome, ErrorReply)]):
                # Later chunks of the prompt are worth less than the one that was refused.
                outcomes.append(Refused("the server took no earlier chunk"))
            else:
                as_transaction = self._send_pieces(connection, write, asking)
                outcomes.append(Stored())
                if sent:  # while the server is busy with this one
                    settle()
                sent.append((len(outcomes) - 1, as_transaction))
        if sent:
            settle()
        refused = [write.key for write, outcome in zip(writes, outcomes, strict=True) if isinstance(outcome, Refused)]
        if refused:
            self._unlink(connection, refused, asking)
        return outcomes

    def _send_pieces(self, connection: Connection, write: Write, asking: bool) -> bool:
        """Whether they are sent as a transaction."""
        pieces = self._pieces_for(write.stored_bytes)
        as_transaction = self._transactions and pieces > 1 and not asking and write.stored_bytes <= _TRANSACTION_BYTES
        if as_transaction:
            connection.send([_MULTI])
        for piece, name in reversed(list(enumerate(self._names(write.key)[:pieces]))):
            part = write.payload[piece * self._piece_bytes : (piece + 1) * self._piece_bytes]
            value: list[Buffer] = [part] if piece else [write.header, part, bytes(pieces - 1)]
            connection.send([_ASKING if asking else b"", *set_command(name, value, self._expiry)])
        if as_transaction:
            connection.send([_EXEC])
        return as_transaction

    def _answer(self, connection: Connection, pieces: int, asking: bool, as_transaction: bool) -> ErrorReply | None:
        """The first error in the replies to a chunk's pieces, if there is one."""
        no_transaction = connection.read_ok() if as_transaction else None
        refusals = []
        for _ in range(pieces):
            if asking:
                connection.read_ok()
            refusals.append(connection.read_ok())
            self.on_progress()
        if as_transaction:
            executed = connection.read_reply(_MAX_EXEC_BYTES)
            if no_transaction is not None:  # then each piece was stored by itself
                self._do_without_transactions(no_transaction)
            elif isinstance(executed, list):
                refusals += [reply for reply in executed if isinstance(reply, ErrorReply)]
            elif isinstance(executed, ErrorReply) and "NOPERM" in executed.text and not any(refusals):
                self._do_without_transactions(executed)
                raise ConnectionResetError("a transaction was begun that may not be ended")  # `store` tries again
            elif isinstance(executed, ErrorReply) and executed.code == "EXECABORT":
                if not any(refusals):  # refused as a whole, for a limit that was reached in between
                    why = executed.text.rpartition("because of: ")[2]
                    refusals.append(ErrorReply(why.partition(" ")[0], why))
            else:
                raise ProtocolError(f"an unexpected reply to EXEC: {str(executed)[:100]}")
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _do_without_transactions(self, refusal: ErrorReply) -> None:
        if self._transactions:
            self._transactions = False
            _log.warning(
                "%s: chunks are stored without a transaction (%s), so a writer that is killed leaves pieces behind, "
                "until they expire or are evicted; give its user +multi and +exec, or set ttl_s",
                self.name,
                refusal.text,
            )


make_redis_tier = factory_of(RedisTier, RedisConfig, "redis")
"""The factory of the tier types `redis` and `valkey`."""


class _Incomplete:
    """Some pieces are gone."""


def _numbers(connection: Connection, commands: Sequence[bytes], asking: bool) -> list[int | ErrorReply]:
    answers: list[int | ErrorReply] = []
    for start in range(0, len(commands), _COMMANDS_AT_ONCE):
        batch = commands[start : start + _COMMANDS_AT_ONCE]
        if not asking:
            connection.send([b"".join(batch)])
            answers += connection.read_numbers(len(batch))
            continue
        for small_command in batch:
            connection.send([_ASKING + small_command])
            connection.read_ok()
            answers += connection.read_numbers(1)
    return answers


def _pattern_of(tenant: bytes) -> bytes:
    """A glob that matches the base64 of this tenant's keys in any key space.

    Version and space are 17 bytes: 22 characters, and 4 bits of the next one, whose other 2 are the tenant's first.
    """
    encoded = [urlsafe_b64encode(bytes(16) + bytes([last]) + tenant)[22:] for last in range(16)]
    letters = b"".join(text[:1] for text in encoded)
    # In a class a minus between two letters means a range.
    return b"?" * 22 + b"[" + letters.replace(b"-", b"\\-") + b"]" + encoded[0][1:] + b"*"


def _ping(connection: Connection) -> ErrorReply | None:
    connection.send([command(b"PING")])
    return connection.read_ok()


def _address_in(reply: ErrorReply, sender: Address) -> Address:
    """The address in a reply such as ASK 3999 127.0.0.1:6381; an empty host is the sender's."""
    host, _, port = reply.text.rpartition(" ")[2].rpartition(":")
    if not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise TierDown(f"{sender}: {reply.text}")
    return Address(host or sender.host, int(port))


def _key_in(braced: bytes) -> ChunkKey | None:
    """The key in the name of a chunk's head, after the prefix; None: it is not the name of a head."""
    try:
        return ChunkKey.from_bytes(urlsafe_b64decode(braced[1:-1]))
    except (ValueError, InputError):
        return None
