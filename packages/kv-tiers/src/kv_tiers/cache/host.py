"""The host tier: a pool, its index, and the directory of a named pool, as one unit.

It moves chunks through their states; holders are not its concern. `lock` is the cache's only lock: every method is
called under it unless it says otherwise, and nothing under it waits or reads a chunk's bytes.
"""

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Final, NamedTuple, Protocol

from kv_core.errors import MisuseError
from kv_core.hashing import checksum_of
from kv_core.keys import TENANT_AT, ChunkKey, by_chain
from kv_core.log import limited_logger
from kv_core.service import Holder
from kv_eviction.coverage import CoveragePolicy
from kv_eviction.policy import policy_name
from kv_eviction.shares import Share, Shares

from kv_tiers.events import events
from kv_tiers.events.bus import UNWATCHED, Source
from kv_tiers.index.residency import Residency
from kv_tiers.pool.directory import NO_PARENT, least_worth_first
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.tier_state import Held

# The chains that keys form in their prompts: each group of layers and shard has one of its own.


def chains(
    keys: Sequence[ChunkKey], parents: Mapping[ChunkKey, ChunkKey], max_keys: int
) -> Iterator[tuple[list[ChunkKey], int]]:
    """Divide these keys into pieces of at most `max_keys`. For each piece, its prompt's keys up to its last one, and
    the index of its first.

    parents: for each key the one before it in its prompt, as far as is known.
    """
    remaining = dict.fromkeys(keys)
    followed = {parent for key in keys if (parent := parents.get(key)) is not None and parent in remaining}
    for tail in [key for key in keys if key not in followed]:
        piece, current = [], tail
        while current in remaining:
            del remaining[current]
            piece.append(current)
            if (parent := parents.get(current)) is None:
                break
            current = parent
        if not piece:
            continue
        ancestors: list[ChunkKey] = []
        ancestor: ChunkKey | None = parents.get(piece[-1])
        visited = set(piece)
        while ancestor is not None and ancestor not in visited:
            visited.add(ancestor)
            ancestors.append(ancestor)
            ancestor = parents.get(ancestor)
        chain = [*reversed(ancestors), *reversed(piece)]
        for first in range(len(ancestors), len(chain), max_keys):
            yield chain[: first + max_keys], first
    for key in remaining:  # those in a cycle, which wrong hints may form
        yield [key], 0


def parents_of(chain: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkKey | None]:
    """The chunk before each of these in its group and shard; None: it is the first."""
    parents: dict[ChunkKey, ChunkKey | None] = {}
    for group_keys in by_chain(chain).values():
        parents.update(zip(group_keys, (None, *group_keys), strict=False))
    return parents


_log = limited_logger(__name__)

TIER = "host"
FROZEN: Final = "the cache is frozen, and stores nothing new"
AT_ONCE: Final = 256
"""Chunks that a new quota moves or evicts before it yields the lock: well under a millisecond's work."""
_EVICTS_FROM: Final = 8
"""From this many slots on, a share evicts one chunk so that others can be upgraded. For a smaller share that is too
much."""


@dataclass(slots=True)
class CacheTotals:
    """Counters that only grow; each is described under the same name in `CacheCounts`."""

    lookups: int = 0
    chunks_asked: int = 0
    chunks_hit: int = 0
    chunks_reserved_ever: int = 0
    chunks_committed: int = 0
    chunks_aborted: int = 0
    chunks_evicted: int = 0
    chunks_forgotten: int = 0
    chunks_adopted: int = 0
    chunks_refused: int = 0
    chunks_damaged: int = 0
    leases_expired: int = 0
    tokens_saved: int = 0
    bytes_loaded: int = 0


class _Doubt(NamedTuple):
    """What the record of an adopted chunk claims about its bytes."""

    checksum: bytes
    nbytes: int


class Doubtful(NamedTuple):
    """Adopted chunks that are leased until they have been verified.

    doubts: by slot.
    since: as returned by `Residency.lease_bytes`.
    """

    doubts: dict[int, _Doubt]
    since: int

    def __bool__(self) -> bool:
        return bool(self.doubts)


class ClosedError(MisuseError):
    """The cache is closed."""


class SlotWatcher(Protocol):
    """Is notified of changes to slots. Called under the lock."""

    def left(self, slots: Collection[int]) -> None:
        """The chunks in these were evicted or forgotten."""

    def unleased(self, slots: Sequence[int], *, makes_room: bool) -> None:
        """A lease on each of these has ended; others may remain. makes_room: slots, also others, are free now, can be
        evicted for the first time, or can be evicted again after an eviction had to skip them."""


class HostTier:
    """Owns the pool and closes it. `lock`, `pool` and `events` are the whole cache's."""

    def __init__(
        self, pool: HostPool, index: Residency, shares: Shares, totals: CacheTotals, events: Source = UNWATCHED
    ) -> None:
        """index, shares: of the pool's slots. Their other users change only leases and orders in them.
        totals: the counters that this tier increments."""
        self.pool = pool
        self.events = events
        self.lock = threading.Lock()
        self._index = index
        self.shares = shares
        self._totals = totals
        policy = shares.common.policy
        self._policy_name = policy_name(policy.policy if isinstance(policy, CoveragePolicy) else policy)
        self._evicted: list[ChunkKey] = []  # not published yet
        self._doubtful: dict[int, _Doubt] = {}  # adopted slots that are not verified yet
        self.is_open = True
        self.is_frozen = False
        """No chunk makes room for another: they find free slots, or none."""
        self.cleared_s: float | None = None
        """When everything was cleared last, by the cache's clock; None: never."""
        self.watcher: SlotWatcher | None = None
        self.adopted_parts: dict[int, int] = {}
        """By slot, the number of first parts from which an adopted chunk was decoded, if it is an approximation."""
        self._adopt()

    def check_open(self) -> None:
        """Raises `ClosedError`: the cache is closed."""
        if not self.is_open:
            raise ClosedError("the cache is closed")

    def stop(self) -> None:
        """From here `check_open` raises."""
        self.is_open = False

    def held(self) -> Held:
        """The chunks that lookups can find now."""
        by_group = self._index.by_group()
        return Held(max(by_group, default=0), self._index.payload_bytes(self.pool.sizes.of_group), by_group)

    def touch(self, chain: Sequence[ChunkKey]) -> list[int]:
        """Inform the policy that more of this chain is being stored and which of its chunks are resident; returns their
        slots.
        """
        slots = self._index.leading(chain)
        keys = chain
        if len(slots) < len(chain):
            keys, slots = self._index.resident(chain)
        if slots:
            self._index.extend(keys, slots)
        return slots

    def demote(self, slots: Iterable[int]) -> None:
        """Make these resident chunks of a prompt the first to be evicted in their share, until they are used again. The
        end of the prompt goes first."""
        for slot in slots:
            policy = self.shares.at(slot).policy
            assert isinstance(policy, CoveragePolicy)
            self._index.demote(slot, policy)

    def why_full(self, tenant: bytes) -> str:
        """Why `reserve` has found no room for a chunk of this tenant."""
        share = self.shares.of(tenant)
        if share.slots <= 0:
            return "the quotas leave nothing to other tenants" if share.is_common else "the quota of its tenant is 0"
        whose = f"the pool's {share.slots} slots"
        if share.slots < self.pool.slots:
            whose = f"the {share.slots} slots that "
            whose += "the quotas leave to other tenants" if share.is_common else "are the quota of its tenant"
        used = "is being read, written or moved to another tier, kept by the policy, or holds an earlier chunk of the "
        used += "same prompt"
        return f"each of {whose} {used}"

    def reserve(
        self, keys: Sequence[ChunkKey], protected: Collection[int], skipped: set[int], *, may_refuse: bool = False
    ) -> list[int]:
        """Reserve slots for chunks whose bytes are still to come, evicting where necessary, up to the first that finds
        no room.

        Each chunk has the room of its tenant's share: other tenants' chunks are not evicted, and their free slots are
        not used.

        keys: as for `Residency.reserve`.
        skipped: as for `Residency.victim`.
        may_refuse: the policy may find that these chunks are not worth their victims' places.
        """
        slots: list[int] = []
        for tenant, tenant_keys in groupby(keys, key=itemgetter(TENANT_AT)):
            wanted = list(tenant_keys)
            arriving = wanted if may_refuse else ()
            tenant_slots = self._slots_for(tenant, len(wanted), protected, skipped, arriving)
            self.shares.took(tenant_slots, tenant)
            slots += tenant_slots
            if len(tenant_slots) < len(wanted):
                break
        self._index.reserve(keys[: len(slots)], slots)
        self._totals.chunks_reserved_ever += len(slots)
        return slots

    def to_move(self) -> list[int]:
        """The slots of the tenant whose share has changed (`Shares.set_quota`), in the order in which to `move` them.
        Without the lock: it looks at every slot."""
        return self._index.tails_first(self.shares.to_move())

    def move(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self.shares.move(slot, self._index.key_at(slot)):
                self._index.has_moved(slot)

    def trim(self, at_most: int) -> bool:
        """Evict the unleased chunks that shares have beyond their size, at most the given number from each. False:
        there was nothing to evict.
        """
        has_evicted = False
        for share in list(self.shares.over):
            evicted = self._make_room(share, min(at_most, share.slots_used - share.slots), (), set())
            self.free(evicted)
            has_evicted = has_evicted or bool(evicted)
            if share.slots_used <= share.slots:
                self.shares.over.remove(share)
            self.publish_evicted("quota")
        return has_evicted

    def commit(
        self, keys: Sequence[ChunkKey], slots: Sequence[int], chain: Sequence[ChunkKey], checksums: Sequence[bytes]
    ) -> list[ChunkKey]:
        """Make chunks visible whose bytes are in place; returns those that can now be found. A chunk that was forgotten
        while being written stays hidden, and its slot is free.

        chain: the prompt up to there.
        checksums: of each chunk, for a named pool; else empty.
        """
        freed = self._index.commit(keys, slots)
        self.free(freed)
        self._totals.chunks_aborted += len(freed)
        self._totals.chunks_committed += len(slots) - len(freed)
        if self.pool.directory is not None:
            self._record(keys, slots, chain, checksums, freed)
        if self.watcher is not None:
            self.watcher.unleased((), makes_room=bool(slots))
        self.trim(len(slots))
        return [key for key, slot in zip(keys, slots, strict=True) if self._index.find(key) == slot]

    def checksums(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> list[bytes]:
        """The checksums that `commit` requires: of each chunk if the pool is named. Called without the lock, because it
        reads all the bytes.
        """
        if self.pool.directory is None:
            return []
        return [self._checksum(slot, self.pool.sizes.of(key)) for key, slot in zip(keys, slots, strict=True)]

    def abort(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Give up reserved slots."""
        self._index.abort(keys, slots)
        self.free(slots)
        if self.watcher is not None:
            self.watcher.unleased((), makes_room=bool(slots))
        self._totals.chunks_aborted += len(slots)

    def orphan(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Let another writer reserve the chunks that are being written to these slots. Commit or abort the slots all
        the same: either only frees them."""
        self._index.orphan(keys, slots)

    def evict(self, slot: int) -> None:
        """Evict the chunk in an unleased slot, which the caller then owns. Call `publish_evicted` after the last
        eviction.
        """
        self._note_evicted({slot: self._index.empty(slot)})

    def publish_evicted(self, cause: events.EvictedFor, holder: Holder = "") -> None:
        """Publish all evictions since the last call, with why and for which holder room was needed."""
        if self._evicted:
            keys, self._evicted = self._evicted, []
            self.events.publish(events.Evicted(TIER, keys, cause, holder, self._policy_name))

    def forget(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Forget chunks, including those being written; returns those that were resident."""
        forgotten = [key for key in keys if self._forget(key)]
        self._totals.chunks_forgotten += len(forgotten)
        return forgotten

    def unlease(self, slots: Sequence[int], *, of_bytes: bool = False) -> None:
        """of_bytes: the leases were for reading, and these slots have the bytes they read (`Residency.bytes_at`)."""
        excluded = self._index.excluded
        freed = self._index.unlease(slots, of_bytes=of_bytes)
        self.free(freed)
        if self.watcher is not None:
            self.watcher.unleased(slots, makes_room=bool(freed) or self._index.excluded < excluded)
        self.trim(len(slots))

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.shares.left(slot)
            self.pool.free(slot)

    def take_spare(self, slot: int) -> int | None:
        """A second slot for better bytes of the chunk in this one, in its share. None: there is no room, or the chunk
        is the next to be evicted. Call `publish_evicted` afterwards.
        """
        key = self._index.key_at(slot)
        assert key is not None
        share = self.shares.of(key.tenant)
        if share.slots_used >= share.slots and (
            share.slots < _EVICTS_FROM or self._index.victim((), set(), share.policy) == slot
        ):
            return None
        spares = self._slots_for(key.tenant, 1, (), set())
        if not spares:
            return None
        self.shares.took(spares, key.tenant)
        self._index.take_spare(spares[0])
        return spares[0]

    def free_spare(self, spare: int) -> None:
        """Free a spare slot."""
        self._index.free_spare(spare)
        self.free([spare])

    def is_approximate(self, slot: int, parts: int) -> None:
        """Record for the next process that the chunk in this slot was decoded from this many first parts."""
        if self.pool.directory is not None:
            self.pool.directory.is_approximate(self.pool.places.at(slot), parts)

    def exchange(self, slot: int, spare: int, checksum: bytes, parts: int) -> None:
        """From now on the chunk in this slot has the bytes of the spare one, which becomes free once no lease reads the
        old bytes.

        checksum: of the new bytes. parts: as above; 0: they are exact.
        """
        if self.pool.directory is not None:
            self.pool.directory.move(self.pool.places.at(slot), self.pool.places.at(spare), checksum, parts)
        self._doubtful.pop(slot, None)
        self.pool.swap(slot, spare)
        if self._index.exchange(slot, spare):
            self.free([spare])

    def doubt(self, checksums: Mapping[int, bytes]) -> None:
        """Adopted chunks, by slot, whose bytes are to be verified before they are used."""
        for slot, checksum in checksums.items():
            if (key := self._index.key_at(slot)) is not None:
                self._doubtful[slot] = _Doubt(checksum, self.pool.sizes.of(key))

    def unverified(self) -> dict[int, bytes]:
        """By slot, the checksums given to `doubt` of chunks that are still here and were not verified since."""
        return {slot: doubt.checksum for slot, doubt in self._doubtful.items()}

    def lease_doubtful(self, slots: Sequence[int]) -> Doubtful:
        """Lease those of the slots that have not been verified yet, until `verify` is done with them."""
        if not self._doubtful:
            return Doubtful({}, 0)
        doubts = {slot: self._doubtful[slot] for slot in slots if slot in self._doubtful}
        return Doubtful(doubts, self._index.lease_bytes(list(doubts)))

    def verify(self, doubtful: Doubtful) -> list[ChunkKey]:
        """Accept or discard each; returns those that were discarded. Without the lock: it reads the bytes, and takes
        the lock itself.

        A chunk that was upgraded meanwhile is no longer doubtful, so it does not matter which of its bytes were read.
        """
        doubts = doubtful.doubts
        wrong = [slot for slot, doubt in doubts.items() if self._checksum(slot, doubt.nbytes) != doubt.checksum]
        with self.lock:
            damaged_keys = []
            for slot in doubts:
                key = self._index.key_at(slot)
                if slot in wrong and key is not None and slot in self._doubtful:
                    level = logging.DEBUG if self.events.is_logged else logging.WARNING
                    _log.log(level, "the checksum of %r in pool %s is wrong; it is discarded", key, self.pool.name)
                    self._forget(key)
                    self._totals.chunks_damaged += 1
                    damaged_keys.append(key)
                self._doubtful.pop(slot, None)
            self.unlease(self._index.bytes_at(list(doubts), doubtful.since), of_bytes=True)
            if damaged_keys and self.events.on:
                self.events.publish(events.DamageFound(TIER, damaged_keys, "its checksum is wrong"))
        return damaged_keys

    def _forget(self, key: ChunkKey) -> bool:
        """True if a resident chunk was forgotten."""
        slot = self._index.forget(key)
        if slot is None:
            return False
        self._disown([slot])
        if self._index.is_free(slot):
            self.free([slot])
        return True

    def _slots_for(
        self,
        tenant: bytes,
        wanted: int,
        protected: Collection[int],
        skipped: set[int],
        arriving: Sequence[ChunkKey] = (),
    ) -> list[int]:
        share = self.shares.of(tenant)
        if share.slots_used > share.slots:  # a quota was lowered, and leases of that time have ended
            self.free(self._make_room(share, min(AT_ONCE, share.slots_used - share.slots), protected, skipped))
        room = max(0, share.slots - share.slots_used)
        slots = list(islice(iter(self.pool.allocate, None), min(room, wanted)))
        if share.slots_used <= share.slots:
            slots += self._make_room(share, wanted - len(slots), protected, skipped, arriving[len(slots) :])
        return slots

    def _make_room(
        self,
        share: Share,
        wanted: int,
        protected: Collection[int],
        skipped: set[int],
        arriving: Sequence[ChunkKey] = (),
    ) -> list[int]:
        """Empty up to this many slots of this share for the caller, which then calls `publish_evicted`."""
        if self.is_frozen:
            return []
        evicted = self._index.evict(wanted, protected, skipped, share.policy, arriving)
        self._note_evicted(evicted)
        return list(evicted)

    def _note_evicted(self, chunks: Mapping[int, ChunkKey]) -> None:
        """chunks: by the slots where they were."""
        if self.events.on:
            self._evicted += chunks.values()
        self._totals.chunks_evicted += len(chunks)
        self._disown(chunks)

    def _disown(self, slots: Collection[int]) -> None:
        """Make sure that these slots' bytes are not found, not even after a restart."""
        for slot in slots:
            self._doubtful.pop(slot, None)
            if self.pool.directory is not None:
                self.pool.directory.wipe(self.pool.places.at(slot))
        if self.watcher is not None:
            self.watcher.left(slots)

    def _record(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        chain: Sequence[ChunkKey],
        checksums: Sequence[bytes],
        freed: Collection[int],
    ) -> None:
        directory = self.pool.directory
        assert directory is not None
        parents = parents_of(chain)
        for key, slot, checksum in zip(keys, slots, checksums, strict=True):
            if slot not in freed:
                parent_slot = None if (parent := parents[key]) is None else self._index.find(parent)
                place = NO_PARENT if parent_slot is None else self.pool.places.at(parent_slot)
                directory.write(self.pool.places.at(slot), key, place, checksum)

    def _adopt(self) -> None:
        """Take over the chunks that an earlier process left in a named pool."""
        directory = self.pool.directory
        if directory is None:
            return
        adopted: dict[ChunkKey, int] = {}
        for record in least_worth_first(directory.records()):
            if record.key in adopted:
                # Our processes never write two records of a key. Checksums would show too late which one is right.
                directory.wipe(record.slot)
                continue
            adopted[record.key] = record.slot
            self.shares.took([record.slot], record.key.tenant)
            self._index.adopt(record.key, record.slot)
            self._doubtful[record.slot] = _Doubt(record.digest, self.pool.sizes.of(record.key))
            if record.parts:
                self.adopted_parts[record.slot] = record.parts
        self.pool.take(adopted.values())
        self._totals.chunks_adopted = len(adopted)
        self.shares.note_over()
        self.trim(len(adopted))
        if adopted:
            _log.info("pool %s: %d chunks of an earlier process are held", self.pool.name, len(adopted))

    def _checksum(self, slot: int, nbytes: int) -> bytes:
        """The checksum of the chunk in this slot. Called without the lock, on a slot that is leased or reserved."""
        with self.pool.chunk(slot, nbytes) as chunk:
            return checksum_of(chunk)
