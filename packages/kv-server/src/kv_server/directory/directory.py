"""A server's part in a directory: it writes what it holds, reads what others write, and repairs what it has missed.

There are two threads. One writes and reads every `interval_s`; it never queries a peer, so a peer that hangs delays no
entry. The other repairs the mirror, for several hosts at once, by querying the hosts themselves: they know what they
hold now, they are needed for the chunks in any case, and Valkey need not store every server's names.

While Valkey cannot be reached, or what is there cannot be used, the mirror stays as it is. A chunk added since is not
found, one that has left costs a read that finds nothing, and a dead host is noticed by the first request to it. Entries
that could not be written are written later, up to `_MAX_UNSENT`; beyond that, readers notice the gap. Other hosts'
silence means something only while our own entries arrive: whatever loses those may lose theirs.
"""

import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from kv_core.errors import ConfigError, InputError, MisuseError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_remote.host_port import HostPort, read_host_port
from kv_remote.redis_servers import RedisAccess, Servers
from kv_remote.resp import ErrorReply, OversizedReplyError, Reply, command
from kv_tiers.config import MAX_SECONDS, SomeSeconds, Timeout
from kv_tiers.threads import start_thread

from kv_server.directory.contents import Contents
from kv_server.directory.entries import (
    MAX_CHAIN_BYTES,
    MAX_ENTRY_BYTES,
    SUMS_BYTES,
    Entry,
    decode,
    encode,
    names_of,
    unpack,
)
from kv_server.directory.mirror import Host, Mirror
from kv_server.peers.hosts import Peer, PeerHosts
from kv_server.peers.wire import MAX_LISTED_BYTES, SUMMED_BYTES, List, Listed, Sum, Summed
from kv_server.report import DirectoryState

if TYPE_CHECKING:  # these need redis-py and `cryptography`, as only directories do
    from kv_remote.redis_connection import Connection

    from kv_server.directory.signatures import Signatures

_log = limited_logger(__name__)

AT_ONCE: Final = 256
"""Entries in one answer."""
MAX_ENTRIES: Final = 1 << 14
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
    """Of a directory, the next ones. upto: where to continue. is_all: there were no more."""

    written: list[bytes]
    upto: Position
    is_all: bool


class Stream:
    """The directory in Valkey or Redis: one stream for each chunk format, which all servers append to and read.

        XADD   <prefix>:directory:<namespace>  MAXLEN ~ <n>  *  e <entry>
        XREAD  COUNT <n>  STREAMS  <prefix>:directory:<namespace>  <the last that was read>

    It holds only the last entries. A reader that has missed some notices by their numbers, so nothing depends on what
    is retained there, and a flushed or restarted server is as good as any. A user needs XADD, XREAD and XREVRANGE on
    <prefix>:directory:*, SELECT where the url names a database, CLUSTER SLOTS in a cluster.

    Any client may have left anything there. What is no entry is skipped, however large; what nobody can append to is
    reported, with what to do about it. For one thread. Every call may raise `TierDown`.
    """

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
        words = (b"XADD", self._name, b"MAXLEN", b"~", b"%d" % MAX_ENTRIES, b"*", _FIELD)
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
        def work(connection: "Connection") -> list[Reply]:
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
        """The position and value of an entry; None: it has no such value. Raises `TierDown`: it is not an entry."""
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


_MAX_UNSENT: Final = 64
_MAX_NOT_HERE: Final = 1 << 16
_MAX_HOLDERS: Final = 8
"""Holders of a chunk that a lookup considers."""
_REPAIRS_AT_ONCE: Final = 16
_REPAIR_S: Final = 30.0
"""How long a host may take to list its names, because the next repairs wait for it. Names that have come are kept, so a
later repair continues from there."""
_HEARTBEATS: Final = 5
"""Heartbeats per lease."""


class DirectoryConfig(RedisAccess, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The directory of what each host holds, for many hosts (docs/scale.md)."""

    connections: int = 1
    timeout_s: Timeout = 1.0
    """For sending, and for one reply; up to twice that if it arrives slowly."""
    address: str = ""
    """A host and a port where other hosts reach this server. Empty: `peers.listen`."""
    interval_s: Annotated[float, msgspec.Meta(ge=0.01, le=MAX_SECONDS)] = 1.0
    """How often changes are written and read. A chunk is known elsewhere after at most twice that."""
    lease_s: SomeSeconds = 15.0
    """A host that has written nothing for this time is no longer queried."""
    max_chunks: int = 50_000_000
    """How many chunks of all other hosts together are tracked, at 18 to 28 bytes each. A host whose chunks have no room
    is not queried."""
    max_hosts: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address:
            read_host_port(self.address, "address")
        if self.lease_s < 3 * self.interval_s:
            raise ValueError("write a lease_s at least three times as long as interval_s")
        if self.max_chunks < 1 or self.max_hosts < 1:
            raise ValueError("max_chunks and max_hosts must be positive")


class Directory:
    """The directory of one tier. Safe to call from any thread."""

    def __init__(
        self,
        config: DirectoryConfig,
        namespace: str,
        peers: PeerHosts,
        *,
        answer_s: float,
        signatures: "Signatures | None",
        where: str,
    ) -> None:
        """Does not connect yet. Raises `ConfigError`: the settings cannot be honoured.

        peers: the connections; from now on their hosts come from the directory.
        answer_s: the time limit of one answer of a peer.
        signatures: of all entries; None: entries have none.
        """
        self._config = config
        self._namespace = namespace
        self._peers = peers
        self._answer_s = answer_s
        self._stream = Stream(config, namespace, where)
        self._signatures = signatures
        self._mirror = Mirror(lease_s=config.lease_s, max_names=config.max_chunks, max_hosts=config.max_hosts)
        self._closing = threading.Event()
        self._repair_due = threading.Event()
        self._lock = threading.Lock()  # guards what follows, except what only the stream's thread uses
        self._threads: list[threading.Thread] = []
        self._to_start = [(self._run, "kv-directory"), (self._repair_all, "kv-directory-repair")]
        self._contents: Contents | None = None
        self._address = config.address
        self._not_here: OrderedDict[tuple[HostPort, ChunkKey], float] = OrderedDict()
        self._counts_not_here = 0
        self._why = ""
        # Used only by the stream's thread.
        self._position: Position | None = None
        self._unsent: deque[bytes] = deque(maxlen=_MAX_UNSENT)
        self._last_written = (-1, -_HEARTBEATS * config.lease_s)  # the last entry's number, and its time
        self._caught_up_s = time.monotonic()
        self._any_read_s = time.monotonic()
        self._own_read_s = time.monotonic()

    def start(self) -> None:
        """Take part from now on. Calling it again does nothing, unless the system had no threads left for us."""
        with self._lock:
            while self._to_start and not self._closing.is_set():
                work, name = self._to_start[0]
                thread = threading.Thread(target=work, name=name, daemon=True)
                if why := start_thread(thread):
                    _log.warning("this server takes no part in the directory for now: %s", why)
                    return
                self._threads.append(thread)
                del self._to_start[0]

    def publish(self, contents: Contents, address: HostPort) -> None:
        """List this server's contents. address: where peers read from it, unless the settings name another."""
        self._mirror.own_id = contents.id
        with self._lock:
            self._address = self._address or str(address)
            self._contents = contents
        self.start()

    def holders(self, keys: Sequence[ChunkKey]) -> list[list[Peer]]:
        """The peers that hold each of these and may be queried now. Answers from memory."""
        listed_hosts = self._mirror.holders(names_of(keys), _MAX_HOLDERS)
        answers: list[list[Peer]] = []
        up_peers: dict[HostPort, list[Peer]] = {}
        now_s = time.monotonic()
        for key, hosts in zip(keys, listed_hosts, strict=True):
            peers: list[Peer] = []
            for host in hosts:
                if self._not_here and now_s < self._not_here.get((host.address, key), 0.0):
                    continue
                if host.address not in up_peers:
                    up_peers[host.address] = self._up_at(host.address)
                peers += up_peers[host.address]
            answers.append(peers)
        return answers

    def not_here(self, host: HostPort, keys: Sequence[ChunkKey]) -> None:
        """This host does not have these, although it lists them. Our request has made it check, so its entries will say
        so; in any case it is not queried for them again within a lease."""
        until_s = time.monotonic() + self._config.lease_s
        with self._lock:
            self._counts_not_here += len(keys)
            for key in keys:
                self._not_here[host, key] = until_s
                self._not_here.move_to_end((host, key))
            while len(self._not_here) > _MAX_NOT_HERE:
                self._not_here.popitem(last=False)

    def cleared(self, cleared_s: float | None) -> None:
        self._mirror.cleared(cleared_s)
        self._repair_due.set()

    def state(self) -> DirectoryState:
        counts, used_bytes = self._mirror.counts(), self._mirror.nbytes
        with self._lock:
            contents = self._contents
            return DirectoryState(
                why=self._why,
                lag_s=time.monotonic() - self._caught_up_s,
                used_bytes=used_bytes,
                listed=None if contents is None else contents.count,
                not_here=self._counts_not_here,
                **asdict(counts),
            )

    def close(self) -> None:
        """Leave the directory. Threads that wait for an answer end within their deadline."""
        self._closing.set()
        self._repair_due.set()
        with self._lock:
            threads = self._threads
        for thread in threads:
            thread.join(2 * (self._config.timeout_s + self._config.connect_timeout_s + self._answer_s))
        self._stream.close()

    def _up_at(self, address: HostPort) -> list[Peer]:
        return [peer for peer in self._peers.at(address) if peer.is_up()]

    # The stream's thread.

    def _run(self) -> None:
        while not self._closing.is_set():
            began_s = time.monotonic()
            try:
                refusal = self._write()
                why = self._read(began_s + self._config.interval_s) or refusal
            except TierDown as error:
                why = str(error)
            except MisuseError:  # the cache is closed, and this will be soon
                break
            except Exception:  # noqa: BLE001  # a bug costs misses, and must not end the thread that repairs them
                _log.exception("a directory hit a bug")
                why = "a bug, which is in the log"
            if why and not self._why:
                _log.warning("the directory fails, and what is known is retained: %s", why)
            self._why = why
            self._closing.wait(max(0.0, began_s + self._config.interval_s - time.monotonic()))
        self._leave()

    def _write(self) -> str:
        """Write what has changed, and from time to time a heartbeat. Returns why that was refused, else ""."""
        with self._lock:
            contents, address = self._contents, self._address
        if contents is None:
            return ""
        entry = contents.update(address)
        now_s = time.monotonic()
        sequence, written_s = self._last_written
        if entry.sequence != sequence or now_s - written_s >= self._config.lease_s / _HEARTBEATS:
            try:
                self._unsent.append(self._written(entry))
            except ConfigError as error:
                return str(error)
            self._last_written = entry.sequence, now_s
        if not self._unsent:
            return ""
        refusal = self._stream.append(list(self._unsent))
        if not refusal:
            self._unsent.clear()
        return refusal

    def _read(self, until_s: float) -> str:
        """Read to the end of the stream, or until the time is over: our own entries must not wait for what others
        write. Returns why nothing can be written there, else "".
        """
        with self._lock:
            own_id = None if self._contents is None else self._contents.id
        if self._position is None:
            self._position = self._stream.last()  # every live host writes an entry within a lease
        while True:
            entries = self._stream.read(self._position)
            now_s = time.monotonic()
            if now_s - self._caught_up_s > self._config.lease_s / 2:
                self._mirror.resumed(now_s)
            if entries.upto > self._position:
                self._any_read_s = now_s
            elif now_s - self._any_read_s > self._config.lease_s / 2:
                self._any_read_s = now_s
                if self._stream.last() < self._position:  # the server has lost its entries, and its clock was set back
                    self._position = BEGINNING
                    continue
            self._position = entries.upto
            for written in entries.written:
                try:
                    entry = decode(written) if self._signatures is None else self._signatures.verified(written)
                except InputError as error:
                    _log.warning("the directory has an invalid entry: %s", error)
                    continue
                self._mirror.take(entry, now_s)
                if entry.host == own_id:
                    self._own_read_s = now_s
            if entries.is_all or self._closing.is_set() or time.monotonic() >= until_s:
                break
        is_at_end = self._position == END
        if own_id is None and not is_at_end:
            self._own_read_s = now_s
        if entries.is_all:
            self._caught_up_s = now_s
            if now_s - self._own_read_s > self._config.lease_s / 2:
                self._mirror.resumed(now_s)
            self._mirror.expire(now_s)
        self._peers.set_hosts(self._mirror.addresses())
        self._repair_due.set()
        return self._stream.exhausted() if is_at_end else ""

    def _leave(self) -> None:
        with self._lock:
            contents, address = self._contents, self._address
        if contents is not None:
            try:
                self._stream.append([self._written(contents.goodbye(address))])
            except (ConfigError, TierDown) as error:
                _log.debug("the directory still lists this host, which leaves: %s", error)

    def _written(self, entry: Entry) -> bytes:
        return encode(entry) if self._signatures is None else self._signatures.signed(entry)

    # The repairing thread.

    def _repair_all(self) -> None:
        while not self._closing.is_set():
            self._repair_due.wait()
            self._repair_due.clear()
            try:
                while not self._closing.is_set() and self._repair_some():
                    pass
            except Exception:  # noqa: BLE001  # as in `_run`: hosts would stay doubtful for good, and nobody know why
                _log.exception("a directory hit a bug")

    def _repair_some(self) -> bool:
        """Whether there were any to repair."""
        queried: dict[HostPort, Peer] = {}

        def can_query(address: HostPort) -> bool:
            queried.update((address, peer) for peer in self._up_at(address)[:1])
            return address in queried

        hosts = self._mirror.begin_repairs(_REPAIRS_AT_ONCE, time.monotonic(), can_query)
        host_of = {queried[host.address]: host for host in hosts}
        done = self._peers.each(list(host_of), lambda peer: self._repair(peer, host_of[peer]), in_background=True)
        for peer in host_of.keys() - done.keys():
            self._mirror.fail_repair(host_of[peer], time.monotonic())
        return bool(hosts)

    def _repair(self, peer: Peer, host: Host) -> None:
        """Raises `OSError` and `InputError`: it failed."""
        try:
            self._fetch(peer, host)
        except (OSError, InputError):
            raise
        except Exception as error:
            _log.exception("a repair hit a bug")
            raise InputError("a bug") from error

    def _fetch(self, peer: Peer, host: Host) -> None:
        began_s = time.monotonic()
        summed = peer.ask(Sum(self._namespace), Summed, self._answer_s, max_bytes=SUMMED_BYTES)
        if summed.host != host.id:
            self._mirror.drop(host)
            return
        if len(summed.sums) != SUMS_BYTES:
            raise InputError(f"{len(summed.sums)} bytes of sums")
        cleared_s = None if summed.cleared_s is None else began_s - summed.cleared_s
        nbytes = len(summed.sums)
        shards = self._mirror.differing(host, summed.sequence, unpack(summed.sums))
        while shards:
            if self._closing.is_set():
                raise InputError("the directory is closed")
            if time.monotonic() - began_s > _REPAIR_S:
                raise InputError(f"it has not listed its names within {_REPAIR_S:g} s")
            question = List(self._namespace, shards)
            listed = peer.ask(question, Listed, self._answer_s, max_bytes=MAX_LISTED_BYTES)
            if listed.host != host.id or not 1 <= listed.shards <= len(shards) or len(listed.names) % 8:
                raise InputError("an answer to another question")
            self._mirror.replace(host, listed.sequence, shards[: listed.shards], unpack(listed.names))
            nbytes += len(listed.names)
            shards = shards[listed.shards :]
        self._mirror.end_repair(host, time.monotonic(), cleared_s=cleared_s, nbytes=nbytes)
