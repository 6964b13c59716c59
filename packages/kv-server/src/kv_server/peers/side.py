"""A cache's side towards other hosts: what they read, what they are told, and what they take."""

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from kv_core.clock import Clock
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded
from kv_remote.host_port import HostPort
from kv_tiers.cache.extension import CacheParts
from kv_tiers.cache.host import AT_ONCE, TIER
from kv_tiers.cache.local import LocalCache
from kv_tiers.chunk_header import HEADER_BYTES, format_id, pack_header
from kv_tiers.index.journal import Journal
from kv_tiers.lanes.jobs import Arrival
from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.tier import Read, TracksKeys

from kv_server.directory.contents import Contents, KeySource
from kv_server.peers.drain import CacheDrain, Offers
from kv_server.peers.tier import PeersTier
from kv_server.report import DirectoryState

LEAVING: Final = "this host is being drained, and takes no new chunks"
_STAGED: Final = 4
"""Chunks of lower tiers that all peers together may have in memory outside the pool."""
LOWER_S: Final = 4.0
"""How long a chunk may take to come from a lower tier, including the wait for that memory, which peers on slow lines
may have for long. A peer waits for five seconds (its `timeout_s`): if it is answered in time that a chunk cannot be
had, it misses this chunk only, and does not take the whole host to be down."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk's payload (from the pool the chunk's bytes, from a lower tier as stored there), and its header, given the
    payload's checksum (`kv_core.hashing`), which need not be known earlier."""

    payload: memoryview
    header: Callable[[bytes], bytes | bytearray]


class PeerReads:
    """Reads of one cache by other hosts' servers: of the pool, and of tiers that answer from memory. On any thread but
    an engine's, because it waits for lower tiers.

    Remote tiers are excluded, so a lookup is never forwarded, and two servers that ask each other cannot form a loop. A
    peer's read does not count as a use of the chunk, because the copy is used on the other host. Nothing here changes
    the cache's content, except that a hold on a chunk ends once the chunk has been read.
    """

    def __init__(self, parts: CacheParts, format_id: bytes) -> None:
        """format_id: of the chunks."""
        self._host, self._index, self._holds = parts.host, parts.index, parts.holds
        self._lower = parts.lower
        self._lanes = parts.lower.local_lanes()
        """Of the tiers that answer from memory, hottest first."""
        self._verify = parts.verify
        self._format_id = format_id
        self.contents: Contents | None = None
        """What the directory lists for this cache; None: it is in no directory."""
        self._staging: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for _ in range(_STAGED):
            self._staging.put(None)  # memory is allocated when it is needed

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of these `read` would find."""
        places: list[str] = []
        for start in range(0, len(keys), AT_ONCE):  # others get the lock in between
            with self._host.lock:
                self._host.check_open()
                places += ["" if self._index.find(key) is None else TIER for key in keys[start : start + AT_ONCE]]
        return list(map(bool, self._lower.locate(keys, places, only_here=True)))

    def track(self) -> Contents:
        """Maintain `contents` from now on."""
        if self.contents is None:
            sources = [KeySource(journal := Journal(), self._all_keys)]
            with self._host.lock:
                self._index.journal = journal
            for lane in self._lanes:
                if isinstance(lane.tier, TracksKeys):
                    lane.tier.track(journal := Journal())
                    sources.append(KeySource(journal, lane.tier.all_keys))
            self.contents = Contents(self.holds, sources)
        return self.contents

    def received(self, keys: Sequence[ChunkKey]) -> None:
        """These need no longer be held for another engine."""
        with self._host.lock:
            self._host.check_open()
            self._holds.read([slot for key in keys if (slot := self._index.find(key)) is not None])

    def _all_keys(self) -> list[ChunkKey]:
        with self._host.lock:
            return self._index.keys()

    @contextmanager
    def read(self, key: ChunkKey, timeout_s: float) -> Iterator[StoredChunk | None]:
        """The chunk, for as long as the context lasts. None: it is not here, or a lower tier did not deliver it in
        time, which is at most `LOWER_S`.

        The header names no parent: the peer that requests chunks knows their order.
        """
        while True:
            with self._host.lock:
                self._host.check_open()
                slot = self._index.find(key)
                doubtful = self._host.lease_doubtful([] if slot is None else [slot])
                if slot is not None and not doubtful:
                    since = self._index.lease_bytes([slot])
                    leased = self._host.pool.chunk(slot, self._host.pool.sizes.of(key))
            if not doubtful:
                break
            self._verify(doubtful)  # or the checksum that is sent would vouch for bytes that nobody has verified
        if slot is None:
            with self._read_lower(key, timeout_s) as stored:
                yield stored
            return
        try:
            with leased as chunk:
                yield StoredChunk(chunk, partial(pack_header, key, None, chunk, self._format_id))
            with self._host.lock:  # after the context: the chunk has been sent
                self._holds.read(self._index.still_of([slot], self._index.bytes_at([slot], since)))
        finally:
            with self._host.lock:
                self._host.unlease(self._index.bytes_at([slot], since), of_bytes=True)

    @contextmanager
    def _read_lower(self, key: ChunkKey, timeout_s: float) -> Iterator[StoredChunk | None]:
        lane = next((lane for lane in self._lanes if lane.holds([key])[0]), None)
        if lane is None or timeout_s <= 0:
            yield None
            return
        until_s = time.monotonic() + min(timeout_s, LOWER_S)
        try:
            pages = self._staging.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            yield None
            return
        pool = self._host.pool
        is_lent = False
        try:
            if pages is None:
                pages = chunk_memory(pool.slot_bytes)
            read = Read(key, bytearray(HEADER_BYTES), pages, pool.chunk_bytes, pool.sizes.of(key), as_stored=True)
            arrived: Future[list[Arrival]] = Future()
            if lane.load([read], arrived.set_result):
                is_lent = bool(wait([arrived], max(0.0, until_s - time.monotonic())).not_done)
            outcome = arrived.result()[0].outcome if arrived.done() else None
            header = read.header
            yield StoredChunk(pages[: outcome.nbytes], lambda _: header) if isinstance(outcome, Loaded) else None
        finally:
            # Memory that a tier has not returned may be written at any time, so others get new memory.
            self._staging.put(None if is_lent else pages)


FoundCache = tuple[LocalCache, PeerReads] | None
FindCache = Callable[[str], FoundCache]
"""The cache of a namespace, on any thread."""

_MAX_KEYS: Final = 1 << 20
"""Limit of keys in all announcements together: about 100 MB."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Chunks that can be read from now on.

    number: of the announcement, from 1.
    chain: the prompt's keys of one group and shard, up to the last of these chunks.
    first: the position of the first one in the chain. Not all from there on need be held.
    until_s: until when they are held, by the cache's clock.
    """

    number: int
    chain: Sequence[ChunkKey]
    first: int
    until_s: float


class HandOverFeed:
    """The feed of one cache's handed-over chunks, announced to other hosts while the prompt is still being computed.
    Thread-safe.

    Announcements are numbered. A follower names the last one that it has seen and waits for those after it, so it
    misses none, whatever happens to a connection. Announcements whose hold has expired are dropped, and the list is
    bounded; a follower that misses some finds the chunks by its next lookup.
    """

    def __init__(self, clock: Clock) -> None:
        self.name = secrets.token_bytes(16)
        """Unique to this feed for ever, because the numbers of another feed mean nothing here."""
        self._clock = clock
        self._changed = threading.Condition()
        self._announced: deque[HandedOver] = deque()
        self._keys = 0
        self._number = 0

    def announce(self, chain: Sequence[ChunkKey], first: int, until_s: float) -> None:
        with self._changed:
            self._number += 1
            self._announced.append(HandedOver(self._number, chain, first, until_s))
            self._keys += len(chain)
            now_s = self._clock.now_s()
            while self._announced and (self._keys > _MAX_KEYS or self._announced[0].until_s <= now_s):
                self._keys -= len(self._announced.popleft().chain)
            self._changed.notify_all()

    def seconds_left(self, announced: HandedOver) -> float:
        """How much longer these chunks are held."""
        return max(0.0, announced.until_s - self._clock.now_s())

    def after(self, number: int, timeout_s: float, max_keys: int) -> tuple[int, list[HandedOver]]:
        """The valid announcements after this number, oldest first, with at most `max_keys` keys; and the number up to
        which they are complete. Waits until there is one, or the time is up.
        """
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while self._number <= number and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            announcements: list[HandedOver] = []
            keys, now_s = 0, self._clock.now_s()
            for announcement in self._announced:
                if announcement.number <= number or announcement.until_s <= now_s or len(announcement.chain) > max_keys:
                    continue
                keys += len(announcement.chain)
                if keys > max_keys:
                    return announcements[-1].number, announcements
                announcements.append(announcement)
            return self._number, announcements


class PeerSide:
    """An extension of one cache. Safe to use from any thread once the cache is made."""

    drain: CacheDrain
    """Passes this host's chunks on before it leaves."""
    offers: Offers
    """Takes what other hosts offer before they leave."""
    handed_over: HandOverFeed
    """The chunks that engines of this cache hand over, for servers of other hosts."""

    def attach(self, parts: CacheParts) -> None:
        self._parts = parts
        self.handed_over = HandOverFeed(parts.clock)
        self.offers = Offers(parts)
        self.drain = CacheDrain(parts, on_change=self._set_leaving)

    def held(self, chain: Sequence[ChunkKey], first: int, until_s: float) -> None:
        self.handed_over.announce(chain, first, until_s)

    def received(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing to do: the tier of the other hosts tells them."""

    def detach(self) -> None:
        self.drain.close()

    def reads(self, fingerprint: str) -> PeerReads:
        """What other hosts may read of the cache. fingerprint: of its chunks' format."""
        return PeerReads(self._parts, format_id(fingerprint))

    def publish(self, reads: PeerReads, address: HostPort) -> None:
        """Announce these chunks to other hosts, through tiers that are configured for it. address: where peers read
        from this host."""
        for _, tier in self._parts.lower.tiers_that(PeersTier):
            if tier.lists_holders:
                tier.publish(reads.track(), address)

    def _set_leaving(self, is_leaving: bool) -> None:
        self._parts.refuse_new(LEAVING if is_leaving else "")
        self.offers.is_refused = is_leaving


def peer_side(cache: LocalCache) -> PeerSide:
    """The extension of this cache that is its side towards other hosts. Every cache of a server has one."""
    return next(extension for extension in cache.extensions if isinstance(extension, PeerSide))


def directories_of(cache: LocalCache) -> dict[str, DirectoryState]:
    """What tiers with a directory know of other hosts, by the tier's name."""
    tiers = [tier for _, tier in cache.lower.tiers_that(PeersTier)]
    return {tier.name: state for tier in tiers if (state := tier.directory_state()) is not None}
