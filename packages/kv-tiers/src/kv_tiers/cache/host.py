"""The host tier: a pool, the index of what is in it, and the record that a named pool keeps, as one thing.

It moves chunks through their lives and knows nothing of who asked. `lock` is the one lock of the cache: every method is
called under it unless it says otherwise, and nothing under it waits or reads a chunk's bytes.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Final

from kv_core.checksum import checksum_of
from kv_core.errors import MisuseError
from kv_core.keys import TENANT_AT, ChunkKey
from kv_core.log import limited_logger
from kv_core.service import Holder

from kv_tiers.events import events
from kv_tiers.events.bus import UNWATCHED, Source
from kv_tiers.eviction.policy import EvictionPolicy, policy_name
from kv_tiers.eviction.shares import Share, Shares
from kv_tiers.index.residency import Residency
from kv_tiers.pool.directory import MAX_KEY_BYTES, NO_PARENT, least_worth_first
from kv_tiers.pool.host_pool import HostPool

_log = limited_logger(__name__)

TIER = "host"
AT_ONCE: Final = 256
"""Chunks that a new quota moves or evicts before it lets others have the lock: well under a millisecond's worth."""


@dataclass(slots=True)
class HostTotals:
    """What only grows; each is described by its namesake in `CacheCounts`."""

    chunks_reserved_ever: int = 0
    chunks_committed: int = 0
    chunks_aborted: int = 0
    chunks_evicted: int = 0
    chunks_forgotten: int = 0
    chunks_adopted: int = 0
    chunks_refused: int = 0
    chunks_damaged: int = 0


class HostTier:
    """Owns the pool and closes it."""

    def __init__(
        self,
        pool: HostPool,
        policy: EvictionPolicy,
        make_policy: Callable[[int], EvictionPolicy],
        quotas: Mapping[bytes, int],
        events: Source = UNWATCHED,
    ) -> None:
        """policy: of all tenants without a quota. make_policy: of one with. quotas: slots, by tenant.

        Raises:
            ConfigError: the quotas are more than the pool.
        """
        self.pool = pool
        self.events = events
        self.lock = threading.Lock()
        self.shares = Shares(pool.slots, policy, make_policy)
        for tenant, slots in quotas.items():
            self.shares.set_quota(tenant, slots)
            self.shares.end_move()
        self.residency = Residency(pool.slots, self.shares)
        self.totals = HostTotals()
        self._policy_name = policy_name(policy)
        self._evicted: list[ChunkKey] = []  # not told yet
        self._doubtful: dict[int, bytes] = {}  # slots adopted and not looked at yet → the checksum their record gives
        self._adopt()

    def check_keys(self, keys: Sequence[ChunkKey]) -> None:
        """Without the lock.

        Raises:
            MisuseError: keys too long to be recorded in a named pool.
        """
        if self.pool.directory is not None and any(len(key) > MAX_KEY_BYTES for key in keys):
            raise MisuseError(f"a named pool's keys have at most {MAX_KEY_BYTES} bytes")

    def touch(self, chain: Sequence[ChunkKey]) -> list[int]:
        """Tell the policy that more of this chain is stored, and what of it is resident; the slots of that."""
        slots = self.residency.leading(chain)
        keys = chain
        if len(slots) < len(chain):
            keys, slots = self.residency.resident(chain)
        if slots:
            self.residency.extend(keys, slots)
        return slots

    def reserve(self, keys: Sequence[ChunkKey], protected: Collection[int], skipped: set[int]) -> list[int]:
        """Slots for chunks whose bytes are still to come, emptied where they must be; for those up to the first that
        finds no room.

        The room is that of its tenant's share: other tenants' chunks stay, and slots that others have free are theirs.

        keys: as of `Residency.reserve`. skipped: as of `Residency.victim`.
        """
        slots: list[int] = []
        for tenant, its_keys in groupby(keys, key=itemgetter(TENANT_AT)):
            wanted = sum(1 for _ in its_keys)
            found = self._slots_for(tenant, wanted, protected, skipped)
            self.shares.took(found, tenant)
            slots += found
            if len(found) < wanted:
                break
        self.residency.reserve(keys[: len(slots)], slots)
        self.totals.chunks_reserved_ever += len(slots)
        return slots

    def to_move(self) -> list[int]:
        """The slots of the tenant whose share has changed (`Shares.set_quota`), in the order in which to `move` them.
        Without the lock: it looks at every slot."""
        return self.residency.tails_first(self.shares.to_move())

    def move(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self.shares.move(slot, self.residency.key_at(slot)):
                self.residency.has_moved(slot)

    def trim(self, at_most: int) -> bool:
        """Evict what shares have beyond their size, as far as nobody leases it, but no more than that of each. False:
        there was nothing to evict."""
        has_evicted = False
        for share in list(self.shares.over):
            evicted = self._make_room(share, min(at_most, share.slots_used - share.slots), (), set())
            self.free(evicted)
            has_evicted = has_evicted or bool(evicted)
            if share.slots_used <= share.slots:
                self.shares.over.remove(share)
            self.tell_evicted("quota")
        return has_evicted

    def commit(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        chain: Sequence[ChunkKey],
        checksums: Sequence[bytes],
    ) -> None:
        """Their bytes are in place. What was forgotten while it was written is found by nobody, and its slot is free.

        chain: the prompt up to there. checksums: of each chunk, for a named pool; else none.
        """
        freed = self.residency.commit(keys, slots)
        self.free(freed)
        self.totals.chunks_aborted += len(freed)
        self.totals.chunks_committed += len(slots) - len(freed)
        if self.pool.directory is not None:
            self._record(keys, slots, chain, checksums, freed)
        self.trim(len(slots))

    def checksums(self, slots: Sequence[int]) -> list[bytes]:
        """What `commit` wants: of each chunk if the pool is named. Without the lock: it reads all the bytes."""
        return [] if self.pool.directory is None else [self._checksum(slot) for slot in slots]

    def abort(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Give reserved places back."""
        self.residency.abort(keys, slots)
        self.free(slots)
        self.totals.chunks_aborted += len(slots)

    def evict(self, slot: int) -> None:
        """Empty a slot that nobody leases, and keep it taken for whoever asked. `tell_evicted` once a call's are."""
        self._have_evicted({slot: self.residency.empty(slot)})

    def tell_evicted(self, cause: events.EvictedFor, holder: Holder = "") -> None:
        """Why room was needed, and for whom, of all that was evicted since the last call."""
        if self._evicted:
            keys, self._evicted = self._evicted, []
            self.events.publish(events.Evicted(TIER, keys, cause, holder, self._policy_name))

    def forget(self, key: ChunkKey) -> bool:
        """True if a resident chunk was forgotten."""
        slot = self.residency.forget(key)
        if slot is None:
            return False
        self._disown([slot])
        if self.residency.is_free(slot):
            self.free([slot])
        return True

    def unlease(self, slots: Sequence[int]) -> None:
        self.free(self.residency.unlease(slots))
        self.trim(len(slots))

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.shares.left(slot)
            self.pool.free(slot)

    def lease_doubtful(self, slots: Sequence[int]) -> dict[int, bytes]:
        """Those of the slots that nobody has verified, leased until `verify` is done with them."""
        if not self._doubtful:
            return {}
        doubtful = {slot: self._doubtful[slot] for slot in slots if slot in self._doubtful}
        self.residency.lease(list(doubtful))
        return doubtful

    def verify(self, doubtful: Mapping[int, bytes]) -> None:
        """Believe or discard each. Without the lock: it reads the bytes, and takes the lock itself."""
        wrong = [slot for slot, checksum in doubtful.items() if self._checksum(slot) != checksum]
        with self.lock:
            damaged_keys = []
            for slot in doubtful:
                key = self.residency.key_at(slot)
                if slot in wrong and key is not None and slot in self._doubtful:
                    level = logging.DEBUG if self.events.is_logged else logging.WARNING
                    _log.log(level, "the checksum of %r in pool %s is wrong; it is discarded", key, self.pool.name)
                    self.forget(key)
                    self.totals.chunks_damaged += 1
                    damaged_keys.append(key)
                self._doubtful.pop(slot, None)
            self.unlease(list(doubtful))
            if damaged_keys and self.events.on:
                self.events.publish(events.Damaged(TIER, damaged_keys, "its checksum is wrong"))

    def _slots_for(self, tenant: bytes, wanted: int, protected: Collection[int], skipped: set[int]) -> list[int]:
        share = self.shares.of(tenant)
        if share.slots_used > share.slots:  # a quota was lowered, and what was leased then is not any more
            self.free(self._make_room(share, min(AT_ONCE, share.slots_used - share.slots), protected, skipped))
        room = max(0, share.slots - share.slots_used)
        slots = list(islice(iter(self.pool.allocate, None), min(room, wanted)))
        if share.slots_used <= share.slots:
            slots += self._make_room(share, wanted - len(slots), protected, skipped)
        return slots

    def _make_room(self, share: Share, wanted: int, protected: Collection[int], skipped: set[int]) -> list[int]:
        """Empty so many slots of this share, if there are, and keep them taken. Then `tell_evicted`."""
        evicted = self.residency.evict(wanted, protected, skipped, share.policy)
        self._have_evicted(evicted)
        return list(evicted)

    def _have_evicted(self, chunks: Mapping[int, ChunkKey]) -> None:
        """chunks: by the slots where they were."""
        if self.events.on:
            self._evicted += chunks.values()
        self.totals.chunks_evicted += len(chunks)
        self._disown(chunks)

    def _disown(self, slots: Iterable[int]) -> None:
        """Nobody may find these slots' bytes, after a restart either."""
        for slot in slots:
            self._doubtful.pop(slot, None)
            if self.pool.directory is not None:
                self.pool.directory.wipe(slot)

    def _record(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        chain: Sequence[ChunkKey],
        checksums: Sequence[bytes],
        gone: Collection[int],
    ) -> None:
        directory = self.pool.directory
        assert directory is not None
        parents: dict[ChunkKey, int] = {}
        parent = NO_PARENT
        for key in chain:
            parents[key] = parent
            slot = self.residency.find(key)
            parent = NO_PARENT if slot is None else slot
        for key, slot, checksum in zip(keys, slots, checksums, strict=True):
            if slot not in gone:
                directory.write(slot, key, parents[key], checksum)

    def _adopt(self) -> None:
        """Take over what an earlier process left in a named pool."""
        directory = self.pool.directory
        if directory is None:
            return
        adopted: dict[ChunkKey, int] = {}
        for record in least_worth_first(directory.records()):
            if record.key in adopted:
                # No process of ours writes two. Whichever is right, the checksum would tell too late.
                directory.wipe(record.slot)
                continue
            adopted[record.key] = record.slot
            self.shares.took([record.slot], record.key.tenant)
            self.residency.adopt(record.key, record.slot)
            self._doubtful[record.slot] = record.digest
        self.pool.take(adopted.values())
        self.totals.chunks_adopted = len(adopted)
        self.shares.note_over()
        self.trim(len(adopted))
        if adopted:
            _log.info("pool %s: %d chunks of an earlier process are held", self.pool.name, len(adopted))

    def _checksum(self, slot: int) -> bytes:
        """Of the chunk in this slot. Without the lock, on a slot that is leased or reserved."""
        with self.pool.chunk(slot) as chunk:
            return checksum_of(chunk)
