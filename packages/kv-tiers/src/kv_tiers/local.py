"""The cache: `CacheService` over one host pool. Who may read or write what, until when, and what leaves to make room.

One lock guards the index, the policy and the leases; under it nothing waits and no chunk's bytes are read. The two
things that take longer, making a chunk's checksum when a named pool commits it and checking it when an adopted chunk is
first asked for, happen outside, on slots that a lease of their own keeps in place.

A holder's leases are found by the holder and, for those that expire, in one order by deadline: every lease lives
equally long from when it was given or renewed, so the order of giving is the order of expiring, and looking for expired
ones costs nothing while there are none.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import xxhash
from kv_core.clock import Clock
from kv_core.errors import ConfigError, MisuseError
from kv_core.keys import ChunkKey
from kv_core.lookup import Ended, LookupPlan
from kv_core.outcome import Damaged
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
from kv_tiers.directory import MAX_KEY_NBYTES, NO_PARENT, least_worth_first
from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.eviction.policy import EvictionPolicy
from kv_tiers.pool import HostPool
from kv_tiers.residency import Residency

_log = logging.getLogger(__name__)

TIER = "host"


@dataclass(slots=True)
class _Read:
    """A promise or a read lease: one lease on each of its slots."""

    number: int
    holder: Holder
    slots: list[int]
    deadline_s: float


@dataclass(slots=True)
class _Write:
    """Slots in which chunks are being written. chain: all keys of the prompt up to there."""

    holder: Holder
    keys: list[ChunkKey]
    slots: list[int]
    chain: list[ChunkKey]


@dataclass(slots=True)
class _Holding:
    """All that one holder has."""

    promise: int | None = None
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    done: list[Completion] = field(default_factory=list)

    def is_empty(self) -> bool:
        return self.promise is None and not self.reads and not self.writes and not self.done


@dataclass(slots=True)
class _Totals:
    """What only grows; each is described by its namesake in `CacheCounts`."""

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


class LocalCache:
    """A `CacheService` in this process, safe to call from any thread. It owns the pool and closes it."""

    def __init__(
        self,
        pool: HostPool,
        *,
        policy: EvictionPolicy | None = None,
        lease_s: float = 300.0,
        clock: Clock | None = None,
    ) -> None:
        if not lease_s > 0:
            raise ConfigError(f"lease_s={lease_s}: a lease must last longer than nothing; 300 is the default")
        self.pool = pool
        self._lease_s = lease_s
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._lock = threading.Lock()
        self._residency = Residency(pool.slots, LruPolicy() if policy is None else policy)
        self._reads: OrderedDict[int, _Read] = OrderedDict()  # by deadline
        self._writes: dict[int, _Write] = {}
        self._holdings: dict[Holder, _Holding] = {}
        self._doubtful: dict[int, bytes] = {}  # slots adopted and not looked at yet → the checksum their record gives
        self._totals = _Totals()
        self._last_number = 0
        self._closed = False
        self._adopt()

    def lookup(self, keys: Sequence[ChunkKey], holder: Holder, *, keys_per_chunk: int = 1) -> LookupPlan:
        asked = list(keys)
        if keys_per_chunk < 1 or len(asked) % keys_per_chunk:
            raise MisuseError(
                f"a lookup of {len(asked)} keys, {keys_per_chunk} a chunk: give all the keys of every chunk"
            )
        while True:
            now_s = self._clock.now_s()
            with self._lock:
                self._begin(now_s)
                slots = self._residency.leading(asked)
                if not (doubtful := self._lease_doubtful(slots)):
                    return self._promise(asked, slots, holder, keys_per_chunk, now_s)
            self._verify(doubtful)

    def renew(self, holder: Holder) -> bool:
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            holding = self._holdings.get(holder)
            if holding is None or holding.promise is None:
                return False
            self._reads[holding.promise].deadline_s = now_s + self._lease_s
            self._reads.move_to_end(holding.promise)
            return True

    def begin_load(self, keys: Sequence[ChunkKey], holder: Holder) -> Ticket:
        asked = list(keys)
        while True:
            now_s = self._clock.now_s()
            with self._lock:
                self._begin(now_s)
                slots = self._residency.leading(asked)
                if not (doubtful := self._lease_doubtful(slots)):
                    return self._answer_load(asked, slots, holder, now_s)
            self._verify(doubtful)

    def begin_store(self, keys: Sequence[ChunkKey], holder: Holder) -> WriteLease:
        chain = list(keys)
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            residency = self._residency
            if self.pool.directory is not None and any(len(key) > MAX_KEY_NBYTES for key in chain):
                raise MisuseError(f"a named pool's keys have at most {MAX_KEY_NBYTES} bytes")
            own_slots = self._touch(chain)
            missing = [key for key in chain if not residency.is_held(key)] if len(own_slots) < len(chain) else []
            slots: list[int] = []
            reserved: list[ChunkKey] = []
            refused = 0
            own = frozenset(own_slots)
            set_aside: set[int] = set()
            for place, key in enumerate(missing):
                if residency.is_held(key):  # named twice in the chain
                    continue
                slot = self.pool.allocate()
                if slot is None:
                    slot = self._make_room(own, set_aside)
                if slot is None:
                    refused = len(set(missing[place:]) - set(reserved))
                    break
                residency.reserve(key, slot)
                reserved.append(key)
                slots.append(slot)
            if set_aside:
                residency.put_back([slot for slot in dict.fromkeys(own_slots) if slot in set_aside])
            self._totals.chunks_reserved_ever += len(slots)
            self._totals.chunks_refused += refused
            number = self._next_number()
            write = self._writes[number] = _Write(holder, reserved, slots, chain)
            self._holding(holder).writes.add(number)
        why = ""
        if refused:
            why = (
                f"no room for {refused} of {len(chain)} chunks: each of the pool's {self.pool.slots} slots is "
                "being read or written, or holds an earlier chunk of the same prompt"
            )
        if short := self.pool.back(slots):
            unbacked = self._give_up_from(number, write, min(map(slots.index, short)))
            why = f"the file system of pool {self.pool.name} has no memory left for {unbacked} of {len(chain)} chunks"
        return WriteLease(LeaseId(number), tuple(write.keys), tuple(map(self.pool.extent, write.slots)), why)

    def commit(self, lease: WriteLease) -> None:
        with self._lock:
            self._check_open()
            # Out of the open leases first: from here a release, or its holder's end, comes too late to abort it.
            write = self._writes.pop(lease.id, None)
            if write is None:
                raise MisuseError(
                    f"write lease {lease.id} is not open: committed or released before, or its holder ended"
                )
            self._let_go(write.holder, write=lease.id)
        directory = self.pool.directory
        digests = [] if directory is None else [self._digest(slot) for slot in write.slots]
        with self._lock:
            freed = self._residency.commit(write.keys, write.slots)
            for slot in freed:
                self.pool.free(slot)
            self._totals.chunks_aborted += len(freed)
            self._totals.chunks_committed += len(write.slots) - len(freed)
            if directory is not None:
                self._record(write, digests, freed)
            # The head of the chain is older than what was added just now, and must not leave before it.
            self._touch(write.chain)

    def release(self, lease: ReadLease | WriteLease) -> bool:
        now_s = self._clock.now_s()
        with self._lock:
            self._expire(now_s)
            if isinstance(lease, WriteLease):
                if lease.id not in self._writes:
                    return False
                self._let_go(self._writes[lease.id].holder, write=lease.id)
                self._abort(lease.id)
                return True
            read = self._reads.get(lease.id)
            if read is None:
                return False
            self._let_go(read.holder, read=lease.id)
            self._end_read(lease.id)
            return True

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._check_open()
            for key in keys:
                self._totals.chunks_forgotten += self._forget(key)

    def end(self, holder: Holder) -> None:
        with self._lock:
            holding = self._holdings.pop(holder, None)
            if holding is None:
                return
            if holding.promise is not None:
                self._end_read(holding.promise)
            for number in holding.reads:
                self._end_read(number)
            for number in holding.writes:
                self._abort(number)

    def poll(self, holder: Holder) -> list[Completion]:
        with self._lock:
            self._check_open()
            holding = self._holdings.get(holder)
            if holding is None or not holding.done:
                return []
            done, holding.done = holding.done, []
            if holding.is_empty():
                del self._holdings[holder]
            return done

    def clear(self) -> None:
        """Forget every chunk that is held. What is being written now will not be found either."""
        with self._lock:
            self._check_open()
            for key in self._residency.keys() + self._residency.writing():
                self._totals.chunks_forgotten += self._forget(key)

    def counts(self) -> CacheCounts:
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            totals = self._totals
            return CacheCounts(
                slots_total=self.pool.slots,
                slots_used=self.pool.slots_used,
                chunks_resident=self._residency.chunks_resident,
                chunks_reserved=self._residency.chunks_reserved,
                read_leases=len(self._reads),
                write_leases=len(self._writes),
                lookups=totals.lookups,
                chunks_asked=totals.chunks_asked,
                chunks_hit=totals.chunks_hit,
                chunks_reserved_ever=totals.chunks_reserved_ever,
                chunks_committed=totals.chunks_committed,
                chunks_aborted=totals.chunks_aborted,
                chunks_evicted=totals.chunks_evicted,
                chunks_forgotten=totals.chunks_forgotten,
                chunks_adopted=totals.chunks_adopted,
                chunks_refused=totals.chunks_refused,
                chunks_damaged=totals.chunks_damaged,
                leases_expired=totals.leases_expired,
            )

    def resident_keys(self) -> list[ChunkKey]:
        """What a lookup could find now. For tools and tests: it copies the index."""
        with self._lock:
            self._check_open()
            return self._residency.keys()

    def close(self) -> None:
        """Give up every lease and unmap the pool. A named pool's chunks are there for the next process.

        Raises:
            BufferError: somebody still has the pool's memory; the cache is closed, the pool is not: close again later.
        """
        with self._lock:
            self._closed = True
            for holding in self._holdings.values():
                for number in holding.writes:
                    self._abort(number)
            self._holdings.clear()
            self._reads.clear()
        self.pool.close()

    # What follows is called under the lock, but where it says otherwise.

    def _check_open(self) -> None:
        if self._closed:
            raise MisuseError("the cache is closed")

    def _begin(self, now_s: float) -> None:
        self._check_open()
        self._expire(now_s)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _holding(self, holder: Holder) -> _Holding:
        holding = self._holdings.get(holder)
        if holding is None:
            holding = self._holdings[holder] = _Holding()
        return holding

    def _let_go(self, holder: Holder, *, read: int | None = None, write: int | None = None) -> None:
        """Strike a lease from its holder's list."""
        holding = self._holdings[holder]
        if read is not None:
            if holding.promise == read:
                holding.promise = None
            holding.reads.discard(read)
        if write is not None:
            holding.writes.discard(write)
        if holding.is_empty():
            del self._holdings[holder]

    def _open_read(self, holder: Holder, slots: list[int], now_s: float) -> int:
        """A lease on slots whose leases are counted already."""
        number = self._next_number()
        self._reads[number] = _Read(number, holder, slots, now_s + self._lease_s)
        return number

    def _end_read(self, number: int) -> None:
        self._free(self._residency.unlease(self._reads.pop(number).slots))

    def _expire(self, now_s: float) -> None:
        while self._reads:
            oldest = next(iter(self._reads.values()))
            if oldest.deadline_s > now_s:
                return
            self._let_go(oldest.holder, read=oldest.number)
            self._end_read(oldest.number)
            self._totals.leases_expired += 1

    def _promise(
        self, asked: list[ChunkKey], slots: list[int], holder: Holder, keys_per_chunk: int, now_s: float
    ) -> LookupPlan:
        chunks, over = divmod(len(slots), keys_per_chunk)
        if len(slots) == len(asked):
            ended = Ended.ALL_HELD
        else:
            ended = Ended.INCOMPLETE if over else Ended.ABSENT
            if over:
                slots = slots[:-over]
        totals = self._totals
        totals.lookups += 1
        totals.chunks_asked += len(asked) // keys_per_chunk
        totals.chunks_hit += chunks
        holding = self._holdings.get(holder)
        before = None if holding is None else holding.promise
        if slots:
            # The new lease before the old one ends, so that what is in both is never without.
            self._residency.lease(slots)
            self._residency.touch(asked, slots)
            if holding is None:
                holding = self._holdings[holder] = _Holding()
            holding.promise = self._open_read(holder, slots, now_s)
        if before is not None:
            if not slots:
                self._let_go(holder, read=before)
            self._end_read(before)
        return LookupPlan(holder, chunks, ended, (TIER,) * chunks)

    def _answer_load(self, asked: list[ChunkKey], slots: list[int], holder: Holder, now_s: float) -> Ticket:
        ticket = Ticket(self._next_number())
        holding = self._holding(holder)
        if len(slots) < len(asked):
            missing = tuple(key for key in asked[len(slots) :] if self._residency.find(key) is None)
            holding.done.append(LoadFailed(ticket, missing, f"{len(missing)} of {len(asked)} chunks are not held"))
            return ticket
        self._residency.lease(slots)
        number = self._open_read(holder, slots, now_s)
        holding.reads.add(number)
        lease = ReadLease(LeaseId(number), tuple(asked), tuple(map(self.pool.extent, slots)))
        holding.done.append(LoadReady(ticket, lease))
        return ticket

    def _touch(self, chain: list[ChunkKey]) -> list[int]:
        """Tell the policy that this chain's resident chunks were used; their slots."""
        slots = self._residency.leading(chain)
        keys = chain
        if len(slots) < len(chain):
            there = [(key, slot) for key in chain if (slot := self._residency.find(key)) is not None]
            keys, slots = [key for key, _ in there], [slot for _, slot in there]
        if slots:
            self._residency.touch(keys, slots)
        return slots

    def _make_room(self, spared: Collection[int], set_aside: set[int]) -> int | None:
        """Evict one chunk; its slot, taken for a new one."""
        slot = self._residency.evict(spared, set_aside)
        if slot is None:
            return None
        self._totals.chunks_evicted += 1
        self._disown(slot)
        return slot

    def _free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.pool.free(slot)

    def _disown(self, slot: int) -> None:
        """Nobody may find this slot's bytes, after a restart either."""
        self._doubtful.pop(slot, None)
        if self.pool.directory is not None:
            self.pool.directory.wipe(slot)

    def _forget(self, key: ChunkKey) -> bool:
        """True if a resident chunk was forgotten."""
        slot = self._residency.forget(key)
        if slot is None:
            return False
        self._disown(slot)
        if self._residency.is_free(slot):
            self.pool.free(slot)
        return True

    def _abort(self, number: int) -> None:
        write = self._writes.pop(number)
        self._residency.abort(write.keys, write.slots)
        self._free(write.slots)
        self._totals.chunks_aborted += len(write.slots)

    def _give_up_from(self, number: int, write: _Write, first: int) -> int:
        """Abort what a new write lease has from its chunk `first` on; how many those are. Takes the lock itself."""
        with self._lock:
            keys, slots = write.keys[first:], write.slots[first:]
            if number in self._writes:  # else its holder has ended meanwhile, and everything is aborted already
                self._residency.abort(keys, slots)
                self._free(slots)
                self._totals.chunks_aborted += len(slots)
                self._totals.chunks_refused += len(slots)
            write.keys, write.slots = write.keys[:first], write.slots[:first]
        return len(slots)

    def _record(self, write: _Write, digests: list[bytes], orphaned: Collection[int]) -> None:
        directory = self.pool.directory
        assert directory is not None
        parents: dict[ChunkKey, int] = {}
        parent = NO_PARENT
        for key in write.chain:
            parents[key] = parent
            slot = self._residency.find(key)
            parent = NO_PARENT if slot is None else slot
        for key, slot, digest in zip(write.keys, write.slots, digests, strict=True):
            if slot not in orphaned:
                directory.write(slot, key, parents[key], digest)

    def _adopt(self) -> None:
        """Take over what an earlier process left in a named pool."""
        directory = self.pool.directory
        if directory is None:
            return
        adopted: dict[ChunkKey, int] = {}
        for record in least_worth_first(directory.records()):
            if (
                record.key in adopted
            ):  # no process of ours writes two; whichever is right, the checksum would tell too late
                directory.wipe(record.slot)
                continue
            adopted[record.key] = record.slot
            self._residency.adopt(record.key, record.slot)
            self._doubtful[record.slot] = record.digest
        self.pool.take(adopted.values())
        self._totals.chunks_adopted = len(adopted)
        if adopted:
            _log.info("pool %s: %d chunks of an earlier process are held", self.pool.name, len(adopted))

    def _lease_doubtful(self, slots: list[int]) -> dict[int, bytes]:
        """Those of the slots that nobody has verified, leased until `_verify` is done with them."""
        if not self._doubtful:
            return {}
        doubtful = {slot: self._doubtful[slot] for slot in slots if slot in self._doubtful}
        self._residency.lease(list(doubtful))
        return doubtful

    def _verify(self, doubtful: dict[int, bytes]) -> None:
        """Believe or discard each. Without the lock while the bytes are read."""
        wrong = [slot for slot, digest in doubtful.items() if self._digest(slot) != digest]
        with self._lock:
            for slot in doubtful:
                key = self._residency.key_at(slot)
                if slot in wrong and key is not None and slot in self._doubtful:
                    damaged = Damaged(f"the checksum of {key!r} in pool {self.pool.name} is wrong")
                    _log.warning("%s; it is discarded", damaged.reason)
                    self._forget(key)
                    self._totals.chunks_damaged += 1
                self._doubtful.pop(slot, None)
            self._free(self._residency.unlease(list(doubtful)))

    def _digest(self, slot: int) -> bytes:
        """xxh3_128 of the chunk in this slot. Without the lock, on a slot that is leased or reserved."""
        with self.pool.chunk(slot) as chunk:
            return xxhash.xxh3_128_digest(chunk)
