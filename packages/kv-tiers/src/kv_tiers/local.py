"""`LocalCache`: the host tier behind `kv_core.service.CacheService`, in this process.

One lock guards the index, the lives, the leases and the policy together; no byte of a chunk is touched under it, so every
call returns in time that depends on how many keys it names and never on how many are held. What is counted and what is
promised is said in `kv_core.service`; here is how it is kept:

- `_resident` holds what lookups may find, `_reserved` what is being written. A chunk that is forgotten leaves both at once;
  while somebody still reads or writes it, only their lease knows of it.
- Leases that can expire lie in one queue by the time they were last renewed; whoever takes the lock to change something
  first drops those that have run out. All have the same term, so the queue is in order by itself.
- A leased chunk that comes up as a victim is moved to the young end of the policy's order, so each is met at most once a
  round, however many are leased.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_core.clock import Clock
from kv_core.errors import MisuseError
from kv_core.extent import HostExtent
from kv_core.keys import ChunkKey
from kv_core.lookup import Ended, LookupPlan
from kv_core.service import (
    CacheCounts,
    Completion,
    Holder,
    LeaseId,
    LoadFailed,
    LoadReady,
    ReadLease,
    Ticket,
    WriteLease,
)

from kv_tiers.clock import MonotonicClock
from kv_tiers.directory import checksum
from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.eviction.policy import EvictionPolicy
from kv_tiers.life import Event, Life, advance
from kv_tiers.pool import HostPool

_log = logging.getLogger(__name__)

DEFAULT_LEASE_S = 300.0
TIER_NAME = "host"


class _Entry:
    """One chunk and its slot."""

    __slots__ = ("expected", "key", "leases", "life", "slot")

    def __init__(self, key: ChunkKey, slot: int, life: Life, expected: bytes | None = None) -> None:
        self.key = key
        self.slot = slot
        self.life = life
        self.leases = 0
        self.expected = expected
        """Checksum that the bytes must still be compared with: of a chunk that a former process left."""


@dataclass(slots=True)
class _Reading:
    """An open read lease or a promise."""

    holder: Holder
    entries: list[_Entry]
    deadline_s: float


@dataclass(slots=True)
class _Writing:
    """An open write lease."""

    holder: Holder
    entries: list[_Entry]


@dataclass(slots=True)
class _Tally:
    """The counters that only grow; see `CacheCounts`."""

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


@dataclass(slots=True)
class _Held:
    """What one holder has open."""

    leases: set[LeaseId] = field(default_factory=set)
    completions: list[Completion] = field(default_factory=list)


class LocalCache:
    """The cache in this process. Safe to call from any thread."""

    def __init__(
        self,
        pool: HostPool,
        *,
        chunk_nbytes: int,
        policy: EvictionPolicy | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        """pool: empty, or named and left by a former process; it is the cache's from now on, `close` included."""
        if chunk_nbytes > pool.slot_bytes:
            raise MisuseError(f"a chunk of {chunk_nbytes} bytes does not fit into a slot of {pool.slot_bytes}")
        self.pool = pool
        self._chunk_nbytes = chunk_nbytes
        self._policy = policy if policy is not None else LruPolicy()
        self._lease_s = lease_s
        self._clock = clock if clock is not None else MonotonicClock()
        self._lock = threading.Lock()
        self._resident: dict[ChunkKey, _Entry] = {}
        self._reserved: dict[ChunkKey, _Entry] = {}
        self._promises: OrderedDict[Holder, _Reading] = OrderedDict()
        self._reads: OrderedDict[LeaseId, _Reading] = OrderedDict()
        self._writes: dict[LeaseId, _Writing] = {}
        self._holders: dict[Holder, _Held] = {}
        self._leased_chunks = 0
        self._last_id = 0
        self._tally = _Tally()
        self._adopt()

    # CacheService.

    def lookup(self, keys: Sequence[ChunkKey], holder: Holder, *, keys_per_chunk: int = 1) -> LookupPlan:
        if keys_per_chunk < 1 or len(keys) % keys_per_chunk:
            raise MisuseError(f"{len(keys)} keys are not whole chunks of {keys_per_chunk} keys")
        with self._lock:
            self._expire()
            found: list[_Entry] = []
            ended = Ended.ALL_HELD
            get = self._resident.get
            for key in keys:
                entry = get(key)
                if entry is None:
                    ended = Ended.INCOMPLETE if len(found) % keys_per_chunk else Ended.ABSENT
                    break
                found.append(entry)
            chunks = len(found) // keys_per_chunk
            del found[chunks * keys_per_chunk :]
            self._policy.used(keys[: len(found)])
            self._lease(found)
            before = self._promises.pop(holder, None)
            if before is not None:
                self._unlease(before.entries)
            if found:
                self._promises[holder] = _Reading(holder, found, self._deadline())
            tally = self._tally
            tally.lookups += 1
            tally.chunks_asked += len(keys) // keys_per_chunk
            tally.chunks_hit += chunks
        return LookupPlan(holder, chunks, ended, (TIER_NAME,) * chunks)

    def renew(self, holder: Holder) -> bool:
        with self._lock:
            self._expire()
            promise = self._promises.get(holder)
            if promise is None:
                return False
            promise.deadline_s = self._deadline()
            self._promises.move_to_end(holder)
            return True

    def begin_load(self, keys: Sequence[ChunkKey], holder: Holder) -> Ticket:
        with self._lock:
            self._expire()
            ticket = Ticket(self._next_id())
            entries = [entry for key in keys if (entry := self._resident.get(key)) is not None]
            held = self._holders.setdefault(holder, _Held())
            if len(entries) < len(keys):
                missing = tuple(key for key in keys if key not in self._resident)
                held.completions.append(LoadFailed(ticket, missing, "the chunks have left the cache"))
                return ticket
            lease = self._open_read(entries, holder)
            if all(entry.expected is None for entry in entries):
                held.completions.append(LoadReady(ticket, lease))
                return ticket
        # The bytes are a former process's. They are compared here, where they are about to be read anyway, and outside
        # the lock, which the lease makes safe.
        wrong = tuple(entry.key for entry in entries if not self._verified(entry))
        if wrong:
            self.release(lease)
            self.forget(wrong)
        with self._lock:
            self._tally.chunks_damaged += len(wrong)
            self._holders.setdefault(holder, _Held()).completions.append(
                LoadFailed(ticket, wrong, "the bytes are not those that were stored")
                if wrong
                else LoadReady(ticket, lease)
            )
        return ticket

    def begin_store(self, keys: Sequence[ChunkKey], holder: Holder) -> WriteLease:
        with self._lock:
            self._expire()
            resident, reserved = self._resident, self._reserved
            self._policy.used([key for key in keys if key in resident])
            own: set[ChunkKey] | None = None
            entries: list[_Entry] = []
            refused = 0
            for number, key in enumerate(keys):
                if key in resident or key in reserved:
                    continue
                slot = self.pool.allocate()
                if slot is None:
                    own = own if own is not None else set(keys)
                    slot = self._evict_one(own)
                if slot is None:
                    refused = sum(1 for rest in keys[number:] if rest not in resident and rest not in reserved)
                    break
                if self.pool.directory is not None:
                    self.pool.directory.clear(slot)
                entry = _Entry(key, slot, advance(Life.ABSENT, Event.RESERVE))
                reserved[key] = entry
                entries.append(entry)
            self._tally.chunks_reserved_ever += len(entries)
            self._tally.chunks_refused += refused
            lease_id = LeaseId(self._next_id())
            if entries:
                self._writes[lease_id] = _Writing(holder, entries)
                self._holders.setdefault(holder, _Held()).leases.add(lease_id)
        return WriteLease(
            lease_id,
            tuple(entry.key for entry in entries),
            tuple(self._extent(entry) for entry in entries),
            f"no room for {refused} chunks: all others are in use or their own prefix" if refused else "",
        )

    def commit(self, lease: WriteLease) -> None:
        directory = self.pool.directory
        with self._lock:
            writing = self._writes.get(lease.id)
        if writing is None:
            raise MisuseError(f"write lease {lease.id} is committed but not open")
        if directory is not None:
            for entry in writing.entries:
                directory.write(entry.slot, entry.key, self.pool.slot_view(entry.slot, self._chunk_nbytes))
        with self._lock:
            self._close_write(lease.id, Event.COMMIT)

    def release(self, lease: ReadLease | WriteLease) -> bool:
        with self._lock:
            self._expire()
            if isinstance(lease, WriteLease):
                if lease.id not in self._writes:
                    return False
                self._close_write(lease.id, Event.ABORT)
                return True
            reading = self._reads.pop(lease.id, None)
            if reading is None:
                return False
            self._drop(reading.holder, lease.id)
            self._unlease(reading.entries)
            return True

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._forget(keys)

    def end(self, holder: Holder) -> None:
        with self._lock:
            promise = self._promises.pop(holder, None)
            if promise is not None:
                self._unlease(promise.entries)
            held = self._holders.pop(holder, None)
            for lease_id in held.leases if held is not None else ():
                reading = self._reads.pop(lease_id, None)
                if reading is not None:
                    self._unlease(reading.entries)
                else:
                    self._close_write(lease_id, Event.ABORT)

    def poll(self, holder: Holder) -> list[Completion]:
        with self._lock:
            held = self._holders.get(holder)
            if held is None or not held.completions:
                return []
            done, held.completions = held.completions, []
            return done

    def clear(self) -> None:
        with self._lock:
            self._forget([*self._resident, *self._reserved])

    def counts(self) -> CacheCounts:
        with self._lock:
            self._expire()
            tally = self._tally
            return CacheCounts(
                slots_total=self.pool.slots,
                slots_used=self.pool.slots - self.pool.free_slots,
                chunks_resident=len(self._resident),
                chunks_reserved=sum(len(writing.entries) for writing in self._writes.values()),
                read_leases=len(self._promises) + len(self._reads),
                write_leases=len(self._writes),
                lookups=tally.lookups,
                chunks_asked=tally.chunks_asked,
                chunks_hit=tally.chunks_hit,
                chunks_reserved_ever=tally.chunks_reserved_ever,
                chunks_committed=tally.chunks_committed,
                chunks_aborted=tally.chunks_aborted,
                chunks_evicted=tally.chunks_evicted,
                chunks_forgotten=tally.chunks_forgotten,
                chunks_adopted=tally.chunks_adopted,
                chunks_refused=tally.chunks_refused,
                chunks_damaged=tally.chunks_damaged,
                leases_expired=tally.leases_expired,
            )

    # Beyond the service.

    def resident_keys(self) -> list[ChunkKey]:
        """Every chunk a lookup could find now, in the order in which they came."""
        with self._lock:
            return list(self._resident)

    def close(self) -> None:
        """Give the pool back to the system. A named pool's chunks stay for the next process.

        Raises:
            MisuseError: somebody still holds a view of the pool.
        """
        self.pool.close()

    # Under the lock.

    def _adopt(self) -> None:
        """Take over what a former process left in a named pool."""
        if self.pool.directory is None:
            return
        for record in self.pool.directory.records():
            if record.nbytes == self._chunk_nbytes:
                life = advance(Life.ABSENT, Event.ADOPT)
                self._resident[record.key] = _Entry(record.key, record.slot, life, expected=record.digest)
                self._policy.added(record.key)
        self.pool.adopt({entry.slot for entry in self._resident.values()})
        self._tally.chunks_adopted = len(self._resident)
        if self._resident:
            _log.info("host pool %s holds %d chunks of a former process", self.pool.name, len(self._resident))

    def _verified(self, entry: _Entry) -> bool:
        if entry.expected is None:
            return True
        if checksum(self.pool.slot_view(entry.slot, self._chunk_nbytes)) != entry.expected:
            return False
        entry.expected = None
        return True

    def _lease(self, entries: list[_Entry]) -> None:
        fresh = 0
        for entry in entries:
            if not entry.leases:
                fresh += 1
            entry.leases += 1
        self._leased_chunks += fresh

    def _unlease(self, entries: list[_Entry]) -> None:
        for entry in entries:
            entry.leases -= 1
            if not entry.leases:
                self._leased_chunks -= 1
                if entry.life is Life.LEAVING:
                    entry.life = advance(entry.life, Event.LAST_RELEASE)
                    self.pool.free(entry.slot)

    def _open_read(self, entries: list[_Entry], holder: Holder) -> ReadLease:
        self._lease(entries)
        lease_id = LeaseId(self._next_id())
        self._reads[lease_id] = _Reading(holder, entries, self._deadline())
        self._holders.setdefault(holder, _Held()).leases.add(lease_id)
        keys = tuple(entry.key for entry in entries)
        return ReadLease(lease_id, keys, tuple(self._extent(entry) for entry in entries))

    def _close_write(self, lease_id: LeaseId, event: Event) -> None:
        writing = self._writes.pop(lease_id)
        self._drop(writing.holder, lease_id)
        for entry in writing.entries:
            entry.life = advance(entry.life, event)
            if self._reserved.get(entry.key) is entry:
                del self._reserved[entry.key]
            if entry.life is Life.RESIDENT:
                self._resident[entry.key] = entry
                self._policy.added(entry.key)
                self._tally.chunks_committed += 1
            else:
                self._tally.chunks_aborted += 1
                self._free(entry)
        if event is Event.COMMIT:
            # Tail first again: the order in which chunks were added would make the head the first to go.
            self._policy.used([entry.key for entry in writing.entries if entry.life is Life.RESIDENT])

    def _forget(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            entry = self._resident.pop(key, None)
            if entry is not None:
                self._policy.removed(key)
                self._tally.chunks_forgotten += 1
                if self.pool.directory is not None:
                    self.pool.directory.clear(entry.slot)
                entry.life = advance(entry.life, Event.FORGET_LEASED if entry.leases else Event.FORGET)
                if entry.life is Life.ABSENT:
                    self.pool.free(entry.slot)
            elif (reserved := self._reserved.pop(key, None)) is not None:
                reserved.life = advance(reserved.life, Event.FORGET)

    def _evict_one(self, own: set[ChunkKey]) -> int | None:
        """The slot of the best victim, or None if all that is left is leased or in `own`."""
        while self._leased_chunks < len(self._resident):
            key = next(self._policy.victims(), None)
            if key is None or key in own:
                return None
            entry = self._resident[key]
            if entry.leases:
                self._policy.used((key,))
                continue
            del self._resident[key]
            self._policy.removed(key)
            entry.life = advance(entry.life, Event.EVICT)
            self._tally.chunks_evicted += 1
            return entry.slot
        return None

    def _free(self, entry: _Entry) -> None:
        if self.pool.directory is not None:
            self.pool.directory.clear(entry.slot)
        self.pool.free(entry.slot)

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        for queue in (self._promises, self._reads):
            while queue:
                first = next(iter(queue))
                reading = queue[first]  # type: ignore[index]  # the key came from this queue
                if reading.deadline_s > now_s:
                    break
                del queue[first]  # type: ignore[arg-type]
                if queue is self._reads:
                    self._drop(reading.holder, first)  # type: ignore[arg-type]
                self._unlease(reading.entries)
                self._tally.leases_expired += 1

    def _drop(self, holder: Holder, lease_id: LeaseId) -> None:
        held = self._holders.get(holder)
        if held is not None:
            held.leases.discard(lease_id)
            if not held.leases and not held.completions:
                del self._holders[holder]

    def _deadline(self) -> float:
        return self._clock.now_s() + self._lease_s

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _extent(self, entry: _Entry) -> HostExtent:
        return self.pool.extent(entry.slot, self._chunk_nbytes)
