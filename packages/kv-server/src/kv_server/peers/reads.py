"""Reads of a cache by other hosts' servers: of the pool, and of tiers that answer from memory.

Remote tiers are excluded, so a lookup is never forwarded, and two servers that ask each other cannot form a loop. A
peer's read does not count as a use of the chunk, because the copy is used on the other host. Nothing here changes the
cache's content, except that a hold on a chunk ends once the chunk has been read.
"""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded
from kv_tiers.cache.host import AT_ONCE, Doubtful, HostTier
from kv_tiers.cache.leases import Holds
from kv_tiers.chunk_header import HEADER_BYTES, pack_header
from kv_tiers.index.journal import Journal
from kv_tiers.index.residency import Residency
from kv_tiers.lanes.jobs import Arrival
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.tier import Read, TracksKeys

from kv_server.directory.contents import Contents, KeySource

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
    """Reads of one cache by peers, on any thread but an engine's, because it waits for lower tiers."""

    def __init__(
        self,
        host: HostTier,
        index: Residency,
        lanes: Sequence[Lane],
        format_id: bytes,
        holds: Holds,
        *,
        verify: Callable[[Doubtful], None],
    ) -> None:
        """lanes: of the tiers that answer from memory, hottest first. format_id: of the chunks. verify: called without
        the lock with adopted chunks that a peer wants."""
        self._holds = holds
        self._verify = verify
        self._host = host
        self._index = index
        self._lanes = lanes
        self._format_id = format_id
        self.contents: Contents | None = None
        """What the directory lists for this cache; None: it is in no directory."""
        self._staging: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for _ in range(_STAGED):
            self._staging.put(None)  # memory is allocated when it is needed

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of these `read` would find."""
        held: list[bool] = []
        for start in range(0, len(keys), AT_ONCE):  # others get the lock in between
            with self._host.lock:
                self._host.check_open()
                held += [self._index.find(key) is not None for key in keys[start : start + AT_ONCE]]
        for lane in self._lanes:
            missing = [position for position, is_held in enumerate(held) if not is_held]
            for position, is_held in zip(missing, lane.holds([keys[n] for n in missing]), strict=True):
                held[position] = is_held
        return held

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

    def taken(self, keys: Sequence[ChunkKey]) -> None:
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
