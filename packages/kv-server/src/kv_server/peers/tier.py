"""The peers tier: finds chunks in other hosts' servers and reads them over the network.

All peers are queried at once for the chunks they have, or a directory lists them (`directory`), and a chunk is read
from a peer that has it. The protocol is in `peers.wire`, connections and failing peers in `peers.hosts`. This side only
reads: nothing is stored at a peer, and chunks discarded or cleared here are hidden from us but stay there. After a
clear, a peer is not used until it has been cleared more recently, because its chunks might be older than our clear.

With `stores` there is one host, the server of an engine that has none on its own: chunks are stored there too, and
discarded and cleared there as well as hidden here.
"""

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from math import inf
from typing import Final, Literal, TypeVar

import msgspec
from kv_core.errors import ConfigError, InputError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger, on_one_line
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, Refused, Stored, StoreOutcome, Unstorable
from kv_remote.factories import factory_of
from kv_remote.host_port import HostPort, read_host_port
from kv_remote.messages import by_length, pack_keys
from kv_remote.staging import ReaderProcesses, StagedReader, next_place
from kv_tiers.cache.extension import CacheParts
from kv_tiers.config import PeerSecurity, SomeSeconds, Timeout
from kv_tiers.options import read_options
from kv_tiers.tier import Read, Removed, TierContext, TierUsage, Write, why_full

from kv_server.directory.contents import Contents
from kv_server.directory.directory import Directory, DirectoryConfig
from kv_server.peers import wire
from kv_server.peers.hosts import Peer, PeerHosts
from kv_server.peers.security import check_protected, nixl_starter, read_token, signatures_of, tls_files
from kv_server.report import DirectoryState

T = TypeVar("T")

_log = limited_logger(__name__)

_WAIT_S: Final = 1.0
"""How long one long poll may wait, which is also how long closing may take."""
_POLL_S: Final = 0.5
"""How often the list of peers is checked."""
_RETRY_S: Final = 0.1
_SURELY_EARLIER_S: Final = 0.1
"""How old a host's word of when it was cleared may be. One that is doubted hears so at once; one that is believed, and
then not when we ask it ourselves, waits for a fetch that does not come."""
_MIN_INTERVAL_S: Final = 0.01
"""Between two queries of one peer, so that one which always answers at once keeps no core busy; `_RETRY_S` after an
answer that reports nothing, for which it should have waited."""
_MAX_UNSENT: Final = 256

OnAnswer = Callable[[Peer, float, wire.Followed], bool]
"""Arguments: the peer that answered, when the query was sent (`time.monotonic`), and the answer. False: what it
announces cannot be fetched for now, and is to be announced again."""


class Following:
    """Follows the hand-overs of other hosts' engines while they compute, and notifies those hosts of chunks no longer
    needed. Thread-safe.

    Each peer is queried by long polling on its own thread: its server answers as soon as there is an announcement, or
    after `_WAIT_S`. Chunks are fetched as soon as they can be read there, so that only the last chunk is still to come
    when the prompt is computed (docs/adr/0011). A peer that fails is queried again after its back-off, from where it
    left off.
    """

    def __init__(self, hosts: PeerHosts, namespace: str, *, answer_s: float, on_answer: OnAnswer) -> None:
        """Sends no query yet.

        answer_s: how long an answer may take beyond the time of the long poll.
        on_answer: called on the peer's thread; it raises `InputError` if an answer is malformed.
        """
        self._hosts = hosts
        self._namespace = namespace
        self._answer_s = answer_s
        self._on_answer = on_answer
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._unsent: queue.Queue[Sequence[ChunkKey] | None] = queue.Queue(_MAX_UNSENT)
        self._is_sending = False

    def start(self) -> None:
        """Follow all peers from now on."""
        self._run(self._follow_all, "kv-peers-follow")

    def received(self, keys: Sequence[ChunkKey]) -> None:
        """Notify all peers that are up. If too many messages are waiting, this one is dropped, and the holds there
        expire.
        """
        with self._lock:
            if not self._is_sending and not self._closed.is_set():
                try:
                    self._run(self._send_all, "kv-peers-taken")
                    self._is_sending = True
                except RuntimeError as error:
                    _log.warning("peers are not told for now which chunks they need no longer hold: %s", error)
        for start in range(0, len(keys), wire.MAX_ASKED):
            try:
                self._unsent.put_nowait(keys[start : start + wire.MAX_ASKED])
            except queue.Full:
                return

    def close(self) -> None:
        """Stop. Threads that wait for an answer end within their deadline."""
        self._closed.set()
        with suppress(queue.Full):  # if it is full, the thread checks `_closed` before the next message
            self._unsent.put_nowait(None)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(2 * (_WAIT_S + self._answer_s))

    def _run(self, work: Callable[[], None], name: str) -> None:
        """Raises `RuntimeError`: the system has no more threads for us."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            thread.start()
            self._threads = [*(running for running in self._threads if running.is_alive()), thread]

    def _follow_all(self) -> None:
        """Run a thread for each peer."""
        followed: set[Peer] = set()
        while not self._closed.is_set():
            peers = set(self._hosts.peers())
            for peer in peers - followed:
                try:
                    self._run(partial(self._follow, peer), "kv-peer-follow")
                except RuntimeError as error:
                    _log.warning("peer %s is not followed for now: %s", peer, error)
                    peers.remove(peer)  # try again the next time
            followed = peers
            self._closed.wait(_POLL_S)

    def _follow(self, peer: Peer) -> None:
        feed, after = b"", 0
        while not self._closed.is_set() and peer in self._hosts.peers():
            if not peer.is_up():
                self._closed.wait(_POLL_S)
                continue
            sent_s = time.monotonic()
            try:
                question = wire.Follow(self._namespace, feed, after, _WAIT_S)
                answer = peer.ask(question, wire.Followed, _WAIT_S + self._answer_s, max_bytes=wire.MAX_FOLLOWED_BYTES)
                before, (feed, after) = (feed, after), (answer.feed, answer.upto)
                if self._on_answer(peer, sent_s, answer):
                    interval_s = _MIN_INTERVAL_S if answer.given else _RETRY_S
                else:
                    (feed, after), interval_s = before, _RETRY_S
                self._closed.wait(max(0.0, sent_s + interval_s - time.monotonic()))
            except (OSError, InputError) as error:
                _log.debug("peer %s is not followed for now: %s", peer, error)
                self._closed.wait(_RETRY_S)
            except Exception:  # noqa: BLE001  # a bug costs only this hand-over, and a lookup may still find its chunks
                _log.exception("following peer %s hit a bug", peer)
                self._closed.wait(_RETRY_S)

    def _send_all(self) -> None:
        while not self._closed.is_set():
            keys = self._unsent.get()
            if keys is None:
                return
            peers = [peer for peer in self._hosts.peers() if peer.is_up()]
            message = wire.PeerReceived(self._namespace, pack_keys(keys))

            def send(peer: Peer, message: wire.PeerReceived = message) -> None:
                peer.ask(message, wire.PeerHeld, self._answer_s)

            self._hosts.each(peers, send, in_background=True)


_OWN: Final = "the host that is to keep the chunks is this server itself: name another one, or leave the tier out"
_REMEMBERED: Final = 1 << 16
"""Limit of keys whose holders are cached, and of hidden keys."""


class PeersTierConfig(PeerSecurity, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The peers, how they are authenticated, and how long they may take."""

    hosts: list[str] = msgspec.field(default_factory=list)
    """A host and a port of each, such as 10.0.0.2:9500. A name may have several addresses, as a headless service of
    Kubernetes has; this server's own is left out. Or:"""
    directory: dict[str, object] | None = None
    """Where hosts publish what they hold, and discover each other: `DirectoryConfig`. Then `hosts` stays empty."""
    resolve_s: SomeSeconds = 30.0
    """How often names are looked up again."""
    connect_timeout_s: Timeout = 1.0
    """For a connection, and for the handshake."""
    answer_timeout_s: Timeout = 0.5
    """For a peer's answer to which chunks it holds."""
    timeout_s: Timeout = 5.0
    """For a chunk, plus a second for each megabyte of it."""
    follow: bool = False
    """Fetch chunks that engines there hand over (docs/disaggregated.md) as soon as they can be read, before a request
    needs them. For hosts that decode prompts that these peers compute."""
    stores: bool = False
    """Store chunks at the host, too, the only one: it is the server of an engine whose own host has none. There
    `peers.take_stores` allows it."""


class PeerTaker:
    """Another host, which fetches what it is offered like any hit: an offer carries no chunk bytes."""

    def __init__(self, peer: Peer, namespace: str, answer_s: float, cleared_for_s: Callable[[], float | None]) -> None:
        """cleared_for_s: of this host, as `LocalCache` has it."""
        self.name = str(peer)
        self._peer, self._namespace, self._answer_s = peer, namespace, answer_s
        self._cleared_for_s = cleared_for_s

    def offer(self, chain: Sequence[ChunkKey], first: int) -> wire.Offered:
        """Have it fetch the chunks of this chain from index `first` on, unless it has them; at most `MAX_OFFERED`. It
        returns at once; offering the same chunks again reports the progress. Raises `OSError` and `InputError`: it does
        not answer, or not as a peer does."""
        return self._peer.talk(partial(self._offer, chain, first), self._answer_s)

    def _offer(self, chain: Sequence[ChunkKey], first: int, stream: wire.PeerStream, deadline: float) -> wire.Offered:
        stream.send_message(wire.Offer(self._namespace, pack_keys(chain), first, self._cleared_for_s()), deadline)
        answer = stream.answer(wire.Offered, deadline)
        if len(answer.fates) != len(chain) - first:
            raise ConnectionError(f"{len(answer.fates)} answers to an offer of {len(chain) - first} chunks")
        if not set(answer.fates) <= set(wire.OfferFate):
            raise InputError(f"no answer to an offer: {max(answer.fates)} is no fate")
        return answer


OnHandedOver = Callable[[Sequence[ChunkKey], int, float], bool]
"""Called with a chain of keys, the index of the first one that is handed over, and the number of seconds for which the
other host holds them. It returns at once. False: nothing can be fetched from this tier for now."""


class PeersTier:
    """Safe to call from any thread. A hidden chunk stays hidden until this process ends, or until `_REMEMBERED` others
    have been hidden since."""

    name = "peers"
    is_read_only: Literal[True]
    """Without `stores`."""

    def __init__(self, config: PeersTierConfig, context: TierContext) -> None:
        """Does not connect yet. Raises `ConfigError`."""
        addresses = [read_host_port(host, "peers: hosts") for host in config.hosts]
        if not addresses and config.directory is None:
            raise ConfigError(
                "peers: hosts is empty; write a host and a port of each peer, or a directory, or leave the tier out"
            )
        if addresses and config.directory is not None:
            raise ConfigError("peers: the directory says which hosts there are; leave out hosts")
        if config.stores and len(addresses) != 1:
            raise ConfigError(
                "peers: stores needs hosts with one host, the server that keeps the chunks; without stores there may "
                "be several, or a directory"
            )
        check_protected(config, self.name)
        self._stores = config.stores
        if not config.stores:
            self.is_read_only = True
        self._group_bytes = context.group_bytes or (context.chunk_bytes,)
        self._fingerprint = context.fingerprint
        self._full = ""
        self.holds_is_local = self.lists_holders = config.directory is not None
        self._namespace = context.namespace
        self._answer_s, self._chunk_s = config.answer_timeout_s, config.timeout_s
        self._hosts = PeerHosts(
            addresses,
            token=read_token(config, self.name),
            tls=tls_files(config, self.name, is_server=False),
            resolve_s=config.resolve_s,
            connect_s=config.connect_timeout_s,
        )
        start_nixl = nixl_starter(config, self.name)
        self._staged = None if start_nixl is None else ReaderProcesses(start_nixl)
        self._directory: Directory | None = None
        if config.directory is not None:
            self._directory = Directory(
                read_options(DirectoryConfig, config.directory, "peers: directory"),
                context.namespace,
                self._hosts,
                answer_s=config.answer_timeout_s,
                signatures=signatures_of(config, context.namespace, self.name),
                where="peers: directory",
            )
        self._follows = config.follow
        self._following = Following(
            self._hosts, context.namespace, answer_s=config.answer_timeout_s, on_answer=self._handed_over
        )
        self._on_handed_over: OnHandedOver | None = None
        self._own_cleared_for_s: Callable[[], float | None] = lambda: None
        self.on_progress: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._holders: OrderedDict[ChunkKey, tuple[Peer, ...]] = OrderedDict()
        self._hidden: OrderedDict[ChunkKey, None] = OrderedDict()
        self._hidden_tenants: set[bytes] = set()
        self._cleared_s: float | None = None
        self._is_clear_from_s = inf
        """From when on the server that keeps the chunks has done our clear, too."""

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Answers from memory if there is a directory."""
        holders = self._ask(keys)
        return [bool(holders.get(key)) for key in keys]

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        with self._lock:
            holders = {read.key: self._holders[read.key] for read in reads if read.key in self._holders}
        if self._directory is not None:
            # The directory as it is now: a host that handed a chunk over need not have it any more, or list it yet.
            holders |= {key: listed for key, listed in self._ask([read.key for read in reads]).items() if listed}
        elif unknown := [read.key for read in reads if read.key not in holders]:
            holders |= self._ask(unknown)
        parts: dict[Peer, list[int]] = {}
        for number, read in enumerate(reads):
            if peers := [peer for peer in holders.get(read.key, ()) if peer.is_up()]:
                # The least busy peer, so that holders of copies share the work.
                peer = min(peers, key=lambda peer: peer.conversations + len(parts.get(peer, ())))
                parts.setdefault(peer, []).append(number)
        outcomes: list[LoadOutcome] = [Absent() for _ in reads]

        def fetch(peer: Peer) -> None:
            numbers = parts[peer]
            for start in range(0, len(numbers), wire.MAX_FETCHED):
                batch = numbers[start : start + wire.MAX_FETCHED]
                peer.talk(partial(self._fetch, reads, batch, outcomes, peer=peer), self._chunk_s)
                if self._directory is not None:
                    absent = [reads[number].key for number in batch if isinstance(outcomes[number], Absent)]
                    self._directory.not_here(peer.host, absent)

        self._hosts.each(list(parts), fetch)
        return outcomes

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        if not self._stores:
            return [Refused("peers store for themselves")] * len(writes)
        host = next((peer for peer in self._hosts.peers() if peer.is_up()), None)
        if host is None:
            return self._not_stored("the server that keeps the chunks does not answer", len(writes))
        outcomes: dict[ChunkKey, StoreOutcome] = {}
        write_of = {write.key: write for write in writes}
        try:
            for keys in by_length(list(write_of), wire.MAX_FETCHED):
                outcomes |= host.talk(partial(self._store, [write_of[key] for key in keys]), self._chunk_s)
        except (OSError, InputError) as error:
            return self._not_stored(f"{host}: {error}", len(writes))
        with self._lock:
            for key in [key for key, outcome in outcomes.items() if isinstance(outcome, Stored)]:
                _remember(self._holders, key, (host,))
        in_order = [outcomes[write.key] for write in writes]
        self._full = why_full(in_order)
        return in_order

    def _not_stored(self, why: str, chunks: int) -> list[StoreOutcome]:
        """Raises `TierDown`: unless the host is this very server, which will never do."""
        if not self._hosts.has_self:
            raise TierDown(why)
        self._full = _OWN
        return [Refused(_OWN)] * chunks

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            for key in keys:
                self._holders.pop(key, None)
                _remember(self._hidden, key, None)
        forgets = [wire.PeerForget(self._namespace, pack_keys(some)) for some in by_length(keys, wire.MAX_ASKED)]
        if all(self._removed_at_host(forget) for forget in forgets):
            with self._lock:
                for key in keys:
                    self._hidden.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._cleared_s = cleared_s = time.monotonic()
            self._is_clear_from_s = inf
            self._holders.clear()
        if self._directory is not None:
            self._directory.cleared(cleared_s)
        if self._removed_at_host(wire.PeerClear(self._namespace, b"")):
            with self._lock:
                if self._cleared_s == cleared_s:
                    self._is_clear_from_s = time.monotonic()

    def clear_tenant(self, tenant: bytes) -> None:
        with self._lock:
            self._hidden_tenants.add(tenant)
            for key in [key for key in self._holders if key.tenant == tenant]:
                del self._holders[key]
        if self._removed_at_host(wire.PeerClear(self._namespace, tenant)):
            with self._lock:
                self._hidden_tenants.discard(tenant)

    def removed(self) -> Removed:
        with self._lock:
            cleared_s = self._cleared_s if self._is_clear_from_s == inf else None
            return cleared_s, list(self._hidden_tenants), list(self._hidden)

    def remove(self, removed: Removed) -> None:
        self._cleared_s, tenants, keys = removed
        self._hidden_tenants.update(tenants)
        self._hidden.update(dict.fromkeys(keys))
        if self._directory is not None and self._cleared_s is not None:
            self._directory.cleared(self._cleared_s)

    def doubted(self, keys: Sequence[ChunkKey], cleared_for_s: float | None) -> set[ChunkKey]:
        """Those of the keys that are not read at a host that was cleared so long ago, as far as that decides."""
        with self._lock:
            is_believed = self._is_believed(time.monotonic() - _SURELY_EARLIER_S, cleared_for_s)
            return {key for key in keys if not is_believed or self._is_hidden(key)}

    def all_cleared(self, tenants: set[bytes], keys: Sequence[ChunkKey]) -> None:
        """Every host has been cleared of these, or of everything: what they hold now is read again, that of hosts too
        which have been restarted since and were never cleared."""
        with self._lock:
            self._hidden_tenants -= tenants
            for key in keys:
                self._hidden.pop(key, None)
            if not tenants and not keys:
                self._cleared_s = None
        if self._directory is not None:
            self._directory.cleared(self._cleared_s)

    def probe(self) -> None:
        if self._directory is None:
            self._ask((), anybody=True)

    def usage(self) -> TierUsage:
        return TierUsage(None if self._directory is None else self._directory.state().names, full=self._full)

    def close(self) -> None:
        self._following.close()
        if self._directory is not None:
            self._directory.close()
        self._hosts.close()
        if self._staged is not None:
            self._staged.close()

    def publish(self, contents: Contents, address: HostPort) -> None:
        """List these contents in the directory from now on, until `close`. address: where peers read from this host."""
        if self._directory is not None:
            self._directory.publish(contents, address)

    def directory_state(self) -> DirectoryState | None:
        """None: there is no directory."""
        return None if self._directory is None else self._directory.state()

    def attach(self, parts: CacheParts) -> None:
        (number,) = (number for number, tier in parts.lower.tiers_that(PeersTier) if tier is self)
        self._own_cleared_for_s = parts.cleared_for_s
        self.follow(partial(parts.fetch_held, number))

    def held(self, chain: Sequence[ChunkKey], first: int, until_s: float) -> None:
        """Nothing to do: the other hosts read of it from this host's server, if it has one (`PeerSide`)."""

    def detach(self) -> None:
        """Nothing to do: `close` ends what `attach` began."""

    def follow(self, on_handed_over: OnHandedOver) -> None:
        """Call `on_handed_over`, on one of this tier's threads, for each hand-over until `close`. Called once."""
        if self._directory is not None:
            self._directory.start()
        if self._follows:
            self._on_handed_over = on_handed_over
            self._following.start()

    def received(self, keys: Sequence[ChunkKey]) -> None:
        """Other hosts need no longer hold these chunks."""
        self._following.received(keys)

    def takers(self) -> list[PeerTaker]:
        """The hosts that are up. It may block."""
        if self._directory is not None:
            self._directory.start()
        return [self._taker(peer) for peer in self._hosts.peers() if peer.is_up()]

    def holders(self, keys: Sequence[ChunkKey]) -> list[list[PeerTaker]]:
        """For each of these, the hosts that are up and hold it. It may block. Raises `TierDown`: no host answers."""
        peers_of = self._ask(keys)
        takers = {peer: self._taker(peer) for peers in peers_of.values() for peer in peers}
        return [[takers[peer] for peer in peers_of.get(key, ())] for key in keys]

    def _taker(self, peer: Peer) -> PeerTaker:
        return PeerTaker(peer, self._namespace, self._answer_s, self._own_cleared_for_s)

    def _handed_over(self, peer: Peer, sent_s: float, answer: wire.Followed) -> bool:
        """Called on a thread of `Following`. Chunks that may predate our clear, or are hidden here, are not fetched."""
        assert self._on_handed_over is not None
        for handed_over in answer.given:
            chain = wire.unpack_keys(handed_over)
            with self._lock:
                if not self._is_believed(sent_s, answer.cleared_s):  # we may be cleared at any time
                    break
                if any(map(self._is_hidden, chain)):
                    continue
                for key in chain[handed_over.first :]:
                    _remember(self._holders, key, tuple(dict.fromkeys((*self._holders.get(key, ()), peer))))
            if not self._on_handed_over(chain, handed_over.first, handed_over.hold_s):
                return False
        return True

    def _ask(self, keys: Sequence[ChunkKey], *, anybody: bool = False) -> dict[ChunkKey, tuple[Peer, ...]]:
        """Which peers hold these: according to the directory, or by querying all peers that are up at once. Raises
        `TierDown`: no peer answers.

        anybody: query those that are backing off as well.
        """
        with self._lock:
            wanted = [key for key in keys if not self._is_hidden(key)]
        if not wanted and not anybody:
            return {}
        if self._directory is not None:
            self._directory.start()
            return dict(zip(wanted, map(tuple, self._directory.holders(wanted)), strict=True))
        began_s = time.monotonic()
        questions = by_length(wanted, wire.MAX_ASKED) or [[]]

        def ask(peer: Peer) -> set[ChunkKey]:
            held: set[ChunkKey] = set()
            for question in questions:
                held |= peer.talk(partial(self._held, question), self._answer_s)
            return held

        peers = self._hosts.peers()
        answers = self._hosts.each([peer for peer in peers if anybody or peer.is_up()], ask)
        if not answers and (failed_peers := [peer for peer in peers if not peer.is_self]):
            raise TierDown("; ".join(f"{peer}: {peer.last_failure}" for peer in failed_peers))
        found: dict[ChunkKey, tuple[Peer, ...]] = {}
        with self._lock:
            if self._cleared_s is not None and self._cleared_s >= began_s:
                return {}
            for peer, held in answers.items():
                for key in held:
                    if not self._is_hidden(key):  # it may have been discarded meanwhile
                        found[key] = (*found.get(key, ()), peer)
            for key, holders in found.items():
                _remember(self._holders, key, holders)
        return found

    def _is_believed(self, sent_s: float, cleared_for_s: float | None) -> bool:
        """Whether a peer queried at `sent_s` was cleared later than we were, if we were. Under the lock.

        cleared_for_s: from its answer; a server that has been restarted since says that it never was.
        """
        cleared_s = self._cleared_s
        if cleared_s is None or sent_s > self._is_clear_from_s:
            return True
        return cleared_for_s is not None and sent_s - cleared_for_s > cleared_s

    def _is_hidden(self, key: ChunkKey) -> bool:
        """Under the lock."""
        return key in self._hidden or key.tenant in self._hidden_tenants

    def _held(self, keys: Sequence[ChunkKey], stream: wire.PeerStream, deadline: float) -> set[ChunkKey]:
        sent_s = time.monotonic()
        if self._stores:  # the server may have been restarted, and opens a cache only for those who name its format
            stream.send_message(wire.PeerStore(self._group_bytes, self._fingerprint, pack_keys(())), deadline)
        stream.send_message(wire.PeerHolds(self._namespace, pack_keys(keys)), deadline)
        if self._stores:
            stream.answer(wire.PeerWanted, deadline)
        answer = stream.answer(wire.PeerHeld, deadline)
        if len(answer.held) != len(keys):
            raise ConnectionError(f"{len(answer.held)} answers to {len(keys)} questions")
        with self._lock:
            is_believed = self._is_believed(sent_s, answer.cleared_s)
        if not is_believed:
            return set()
        return {key for key, is_held in zip(keys, answer.held, strict=True) if is_held}

    def _removed_at_host(self, request: wire.PeerForget | wire.PeerClear) -> bool:
        """Whether the server that keeps the chunks has removed these too. If it cannot, they stay hidden here."""
        hosts = self._hosts.peers() if self._stores else []
        answers = self._hosts.each(hosts, lambda host: host.ask(request, wire.PeerHeld, self._answer_s))
        return bool(hosts) and len(answers) == len(hosts)

    def _store(self, writes: Sequence[Write], stream: wire.PeerStream, deadline: float) -> dict[ChunkKey, StoreOutcome]:
        """Have the server receive those of these chunks that it lacks."""
        keys = [write.key for write in writes]
        stream.send_message(wire.PeerStore(self._group_bytes, self._fingerprint, pack_keys(keys)), deadline)
        answer = stream.answer(wire.PeerWanted, deadline)
        if len(answer.wanted) != len(keys):
            raise ConnectionError(f"{len(answer.wanted)} answers to {len(keys)} chunks")
        if answer.refused:
            return dict.fromkeys(keys, Refused(on_one_line(answer.refused)))
        outcomes: dict[ChunkKey, StoreOutcome] = dict.fromkeys(keys, Stored())
        wanted = list(compress(writes, answer.wanted))
        if not wanted:
            return outcomes
        for write in wanted:
            stream.send_stored(write, self._chunk_s, self.on_progress)
        stored = stream.answer(wire.PeerStored, wire.deadline_for(0, self._chunk_s))
        if len(stored.fates) != len(wanted):
            raise ConnectionError(f"{len(stored.fates)} answers to {len(wanted)} chunks")
        reason = on_one_line(stored.reason)
        for write, fate in zip(wanted, stored.fates, strict=True):
            if fate == wire.StoreFate.STORED:
                with self._lock:
                    self._hidden.pop(write.key, None)
            else:
                outcomes[write.key] = (Unstorable if fate == wire.StoreFate.UNSTORABLE else Refused)(reason)
        return outcomes

    def _fetch(
        self,
        reads: Sequence[Read],
        numbers: Sequence[int],
        outcomes: list[LoadOutcome],
        stream: wire.PeerStream,
        deadline: float,
        *,
        peer: Peer,
    ) -> None:
        """Fetch the reads with these numbers, in order. Those that do not arrive stay `Absent`."""
        if self._staged is not None:
            with self._staged.reader(peer) as reader:
                if reader is not None:
                    numbers = self._fetch_staged(reader, reads, numbers, outcomes, stream)
            deadline = wire.deadline_for(0, self._chunk_s)
        # Without keys it ends the staging.
        stream.send_message(self._fetch_of(reads, numbers, staged=False), deadline)
        for number in numbers:
            read = reads[number]
            nbytes = self._size(stream, read, number, outcomes)
            if nbytes == wire.NOT_HERE:
                continue
            checksum = stream.receive_chunk(read.pages[:nbytes], self._chunk_s, self.on_progress)
            stream.fill(memoryview(read.header), wire.deadline_for(0, self._chunk_s))
            outcomes[number] = Loaded(nbytes, checksum)

    def _fetch_staged(
        self,
        reader: StagedReader,
        reads: Sequence[Read],
        numbers: Sequence[int],
        outcomes: list[LoadOutcome],
        stream: wire.PeerStream,
    ) -> Sequence[int]:
        """As `_fetch`, by NIXL. Returns those of the numbers that it cannot read."""
        while numbers:
            stream.send_message(self._fetch_of(reads, numbers, staged=True), wire.deadline_for(0, self._chunk_s))
            staging = stream.answer(wire.Staging, wire.deadline_for(0, self._chunk_s))
            if not staging.metadata:
                reader.is_refused = True
                break
            unread, at = [], 0
            for number in numbers:
                read = reads[number]
                nbytes = self._size(stream, read, number, outcomes)
                if nbytes == wire.NOT_HERE:
                    continue
                if nbytes == wire.NOT_STAGED:
                    unread.append(number)
                    continue
                stream.fill(memoryview(read.header), wire.deadline_for(0, self._chunk_s))
                where = staging.metadata, staging.address + at
                checksum = reader.read(where, read.pages[:nbytes], self._chunk_s, self.on_progress)
                outcomes[number] = Loaded(nbytes, checksum)
                at = next_place(at, nbytes)
            numbers = unread
            if not at:  # they are too large for it
                break
        return numbers

    def _fetch_of(self, reads: Sequence[Read], numbers: Sequence[int], *, staged: bool) -> wire.Fetch:
        return wire.Fetch(self._namespace, pack_keys([reads[number].key for number in numbers]), staged)

    def _size(self, stream: wire.PeerStream, read: Read, number: int, outcomes: list[LoadOutcome]) -> int:
        """Of the next chunk, or `NOT_HERE` or `NOT_STAGED`. It is not verified beyond having room."""
        size = bytearray(wire.SIZE.size)
        stream.fill(memoryview(size), wire.deadline_for(0, self._chunk_s))
        (nbytes,) = wire.SIZE.unpack(size)
        if nbytes > len(read.room) and nbytes not in (wire.NOT_HERE, wire.NOT_STAGED):
            outcomes[number] = Damaged(f"a payload of {nbytes} bytes where {len(read.room)} have room")
            # It is unknown where the next chunk begins.
            raise ConnectionError("a peer that reports a wrong size")
        return int(nbytes)


make_peers_tier = factory_of(PeersTier, PeersTierConfig, "peers")
"""The factory of the tier type `peers`."""


def _remember(known: OrderedDict[ChunkKey, T], key: ChunkKey, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
