"""The cache: `CacheService` over a host tier and the tiers below it. Who may read or write what, and until when.

One lock guards the index, the policy and the leases; under it nothing waits and no chunk's bytes are read. The two
things that take longer, making a chunk's checksum when a named pool commits it and checking it when an adopted chunk is
first asked for, happen outside, on slots that a lease of their own keeps in place.

Only what is in the pool is ever promised. What the tiers below hold is brought there first (`kv_tiers.cache.promote`),
and what is committed here goes down by itself (`kv_tiers.cache.spill`).

A holder's leases are found by the holder and, for those that expire, in one order by deadline: every lease lives
equally long from when it was given or renewed, so the order of giving is the order of expiring, and looking for expired
ones costs nothing while there are none.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from kv_core.clock import Clock
from kv_core.errors import ConfigError, MisuseError
from kv_core.keys import ChunkKey
from kv_core.lookup import Ended, LookupPlan
from kv_core.service import CacheCounts, Holder, LeaseId, LoadFailed, ReadLease, WriteLease

from kv_tiers.cache.host import AT_ONCE, TIER, HostTier
from kv_tiers.cache.lower_tiers import Below
from kv_tiers.cache.spill import WriteMode
from kv_tiers.clock import MonotonicClock
from kv_tiers.config import ColdConfig, check_lease
from kv_tiers.events import events
from kv_tiers.events.bus import UNWATCHED, Source
from kv_tiers.eviction.policy import EvictionPolicy
from kv_tiers.eviction.registry import DEFAULT_POLICY, make_policy
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import HostPool


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
    began_s: float


@dataclass(slots=True)
class _Holding:
    """All that one holder has."""

    promise: int | None = None
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def is_empty(self) -> bool:
        return self.promise is None and not self.reads and not self.writes


@dataclass(slots=True)
class _Totals:
    """What only grows, but for the host tier's; each is described by its namesake in `CacheCounts`."""

    lookups: int = 0
    chunks_asked: int = 0
    chunks_hit: int = 0
    leases_expired: int = 0

    def answered(self, chunks_asked: int, chunks_hit: int) -> None:
        self.lookups += 1
        self.chunks_asked += chunks_asked
        self.chunks_hit += chunks_hit


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What a tenant has of the pool, in whole slots: chunks that are held, being written, or read after their end.

    tenant: its tag. quota_bytes: None for one that shares what the quotas leave with all others.
    """

    tenant: bytes
    chunks: int
    used_bytes: int
    quota_bytes: int | None


class LocalCache:
    """A `CacheService` in this process, safe to call from any thread. It owns the pool and closes it."""

    def __init__(
        self,
        pool: HostPool,
        *,
        policy: EvictionPolicy | None = None,
        lease_s: float = 300.0,
        clock: Clock | None = None,
        lanes: Sequence[tuple[Lane, WriteMode]] = (),
        cold: ColdConfig | None = None,
        events: Source | None = None,
        quotas: Mapping[bytes, int] | None = None,
        share_policy: Callable[[int], EvictionPolicy] | None = None,
    ) -> None:
        """lanes: the tiers below the pool, hottest first, and how chunks get there. The cache closes them.
        events: where it tells what happens; the bus stays the caller's to close.
        quotas: bytes that tenants have for themselves, by their tag; see `set_quota`.
        share_policy: makes the policy of such a tenant's share, given its size in chunks.

        Raises:
            ConfigError: the quotas are more than the pool, or leases last no time.
        """
        check_lease(lease_s)
        self.pool = pool
        self._lease_s = lease_s
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self.events = UNWATCHED if events is None else events
        default = partial(make_policy, DEFAULT_POLICY)
        self._host = HostTier(
            pool,
            default(pool.slots) if policy is None else policy,
            default if share_policy is None else share_policy,
            {tenant: self._slots_in(nbytes) for tenant, nbytes in (quotas or {}).items()},
            self.events,
        )
        self._lock = self._host.lock
        self._quota_lock = threading.Lock()  # of one change of a quota after another; taken before the other lock
        self._cold = ColdConfig() if cold is None else cold
        for lane, _ in lanes:
            lane.events = self.events
        self.below = Below(self._host, lanes, self._cold, keep_s=lease_s, clock=self._clock)
        self._order = {name: at for at, name in enumerate((TIER, *(lane.name for lane, _ in lanes)))}
        self._reads: OrderedDict[int, _Read] = OrderedDict()  # by deadline
        self._pins: dict[str, list[int]] = {}
        self._writes: dict[int, _Write] = {}
        self._holdings: dict[Holder, _Holding] = {}
        self._totals = _Totals()
        self._last_number = 0
        self._closed = False

    def lookup(
        self, keys: Sequence[ChunkKey], holder: Holder, *, keys_per_chunk: int = 1, wait_for_promotion: bool = False
    ) -> LookupPlan:
        asked = list(keys)
        if keys_per_chunk < 1 or len(asked) % keys_per_chunk:
            raise MisuseError(
                f"a lookup of {len(asked)} keys, {keys_per_chunk} a chunk: give all the keys of every chunk"
            )
        while True:
            now_s = self._clock.now_s()
            with self._lock:
                self._begin(now_s)
                slots = self._host.residency.leading(asked)
                have = len(slots)
                if not (doubtful := self._host.lease_doubtful(slots)):
                    plan = self._promise(asked, slots, holder, keys_per_chunk, now_s)
                    self.below.promotions.promised(holder)
                    may_wait = wait_for_promotion and have < len(asked) and bool(self.below)
                    if not may_wait:
                        self._totals.answered(len(asked) // keys_per_chunk, plan.chunks)
                    break
            self._host.verify(doubtful)
        if may_wait:
            # What is promised already stays put meanwhile, so what comes up joins it.
            if self.below.promotions.is_pending(asked, have, holder, now_s):
                plan = replace(plan, ended=Ended.PENDING)  # the same question comes again, and counts then
            else:
                with self._lock:
                    self._totals.answered(len(asked) // keys_per_chunk, plan.chunks)
        if self.events.on_requests:
            self.events.publish(
                events.LookedUp(holder, asked, keys_per_chunk, plan.chunks, plan.tiers, plan.ended.name)
            )
        return plan

    def renew(self, holder: Holder) -> bool:
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            holding = self._holdings.get(holder)
            if holding is None or holding.promise is None:
                return False
            if self._host.residency.any_forgotten(self._reads[holding.promise].slots):
                return False
            self._reads[holding.promise].deadline_s = now_s + self._lease_s
            self._reads.move_to_end(holding.promise)
            return True

    def load(self, keys: Sequence[ChunkKey], holder: Holder) -> ReadLease | LoadFailed:
        wanted = list(keys)
        while True:
            now_s = self._clock.now_s()
            with self._lock:
                self._begin(now_s)
                slots = self._host.residency.leading(wanted)
                if not (doubtful := self._host.lease_doubtful(slots)):
                    return self._open_load(wanted, slots, holder, now_s)
            self._host.verify(doubtful)

    def begin_store(self, keys: Sequence[ChunkKey], holder: Holder) -> WriteLease:
        chain = list(keys)
        self._host.check_keys(chain)
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            residency = self._host.residency
            own_slots = self._host.touch(chain)
            missing = residency.not_held(chain) if len(own_slots) < len(chain) else []
            skipped: set[int] = set()
            slots = self._host.reserve(missing, frozenset(own_slots), skipped)
            self._host.tell_evicted("store", holder)
            if skipped:
                residency.reinsert([slot for slot in dict.fromkeys(own_slots) if slot in skipped])
            refused = len(missing) - len(slots)
            self._host.totals.chunks_refused += refused
            number = self._next_number()
            write = self._writes[number] = _Write(holder, missing[: len(slots)], slots, chain, now_s)
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
        if self.events.on:
            without = missing[len(write.keys) :] if why else ()
            self.events.publish(events.StoreBegun(holder, number, chain, write.keys, without, why))
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
        checksums = self._host.checksums(write.slots)
        with self._lock:
            self._host.commit(write.keys, write.slots, write.chain, checksums)
            # The head of the chain is older than what was added just now, and must not leave before it.
            self._host.touch(write.chain)
            self.below.spills.committed(write.keys, write.slots, write.chain)
            if self.events.on:
                seconds = self._clock.now_s() - write.began_s
                self.events.publish(events.Committed(write.holder, lease.id, write.keys, seconds))

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
            is_void = self._host.residency.any_forgotten(read.slots)
            self._tell_ended(read, now_s, "forgotten" if is_void else "released")
            self._end_read(lease.id)
            return not is_void

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        gone = list(keys)
        with self._lock:
            self._check_open()
            for key in gone:
                self._host.totals.chunks_forgotten += self._host.forget(key)
            self._unpin_forgotten()
            # Under the lock, so that a chunk committed again after this is stored below after it was discarded there.
            self.below.discard(gone)
            if self.events.on:
                self.events.publish(events.Forgotten(gone))

    def end(self, holder: Holder) -> None:
        with self._lock:
            self.below.promotions.end(holder)
            holding = self._holdings.pop(holder, None)
            if holding is not None:
                if holding.promise is not None:
                    self._end_read(holding.promise)
                for number in holding.reads:
                    self._tell_ended(self._reads[number], self._clock.now_s(), "ended")
                    self._end_read(number)
                for number in holding.writes:
                    self._abort(number)
            if self.events.on_requests:
                self.events.publish(events.HolderEnded(holder))

    def pin(self, keys: Sequence[ChunkKey], name: str) -> int:
        """Keep the leading run of `keys` that the pool holds until `unpin`; how many chunks that is.

        The name's pin before is replaced. Pins have no end by time, so all together may have half the pool at most, or
        half of a tenant's quota: what is beyond that is not pinned.
        """
        with self._lock:
            self._check_open()
            before = self._pins.pop(name, [])
            slots = list(self._host.residency.leading(keys))
            if slots:
                share_at = self._host.shares.at
                share = share_at(slots[0])
                pinned = sum(len(others) for others in self._pins.values() if share_at(others[0]) is share)
                slots = slots[: max(0, share.slots // 2 - pinned)]
            self._host.residency.lease(slots)
            self._host.unlease(before)
            if slots:
                self._pins[name] = slots
            return len(slots)

    def unpin(self, name: str) -> bool:
        """Let the pinned chunks leave like any others. False: there is no pin of this name."""
        with self._lock:
            slots = self._pins.pop(name, None)
            if slots is not None:
                self._host.unlease(slots)
            return slots is not None

    def pins(self) -> dict[str, int]:
        """How many chunks each name keeps."""
        with self._lock:
            return {name: len(slots) for name, slots in self._pins.items()}

    def warm_up(self, keys: Sequence[ChunkKey], name: str, *, timeout_s: float = 60.0) -> int:
        """Bring a prefix up from the tiers below, pin it, and say how many chunks of it are pinned.

        It waits, so it is for whoever prepares a cache and not for an engine's thread.
        """
        holder = f"warm-up/{name}"
        until = time.monotonic() + timeout_s
        try:
            best = -1
            while time.monotonic() < until:
                plan = self.lookup(keys, holder, wait_for_promotion=True)
                if plan.ended is Ended.PENDING:
                    time.sleep(0.002)
                elif plan.chunks > best:  # a holder's patience is bounded, ours by `timeout_s`: once more from there
                    best = plan.chunks
                    self.below.promotions.forget_wait(holder)
                else:
                    break
            return self.pin(keys, name)
        finally:
            self.end(holder)

    def allocated(self, blocks: Mapping[Holder, int]) -> None:
        if self.events.on:
            for holder, count in blocks.items():
                self.events.publish(events.BlocksAllocated(holder, count))

    def clear(self) -> None:
        """Forget every chunk that is held, as `forget` does. What is being written now will not be found either."""
        with self._lock:
            self._check_open()
            for key in self._host.residency.keys() + self._host.residency.writing():
                self._host.totals.chunks_forgotten += self._host.forget(key)
            self._unpin_forgotten()
            self.below.clear()
            if self.events.on:
                self.events.publish(events.Forgotten((), everything=True))

    def clear_tenant(self, tenant: bytes) -> int:
        """Forget every chunk with this tag, on all tiers; how many the pool held. What is being written too.

        A tier that cannot tell tenants apart is cleared whole.
        """
        with self._lock:
            self._check_open()
            residency = self._host.residency
            keys = [key for key in residency.keys() + residency.writing() if key.tenant == tenant]
            forgotten = [key for key in keys if self._host.forget(key)]
            self._host.totals.chunks_forgotten += len(forgotten)
            self._unpin_forgotten()
            self.below.clear_tenant(tenant)
            if self.events.on:
                self.events.publish(events.Forgotten(forgotten))
            return len(forgotten)

    def tenants(self) -> list[TenantUse]:
        """Of every tenant that has chunks or a quota, by tag. Their chunks add up to the slots used."""
        slot_bytes = self.pool.slot_bytes
        with self._lock:
            self._check_open()
            uses = self._host.shares.uses()
        return [
            TenantUse(
                use.tenant,
                use.slots_used,
                use.slots_used * slot_bytes,
                None if use.slots_quota is None else use.slots_quota * slot_bytes,
            )
            for use in uses
        ]

    def set_quota(self, tenant: bytes, nbytes: int | None) -> None:
        """Set so much of the pool apart for the tenant with this tag: nobody else's chunks get there, and the tenant's
        get nowhere else. Whole chunks count. None: it shares what the quotas leave with all others.

        What does not fit any more is evicted at once, but for what is being read or written: that goes when it is not.
        For a tenant of many chunks this takes seconds; others' calls come in between, a few chunks at a time.

        Raises:
            ConfigError: a negative number, less than one chunk (0 is none at all), or more than the other quotas leave.
        """
        slots = None if nbytes is None else self._slots_in(nbytes)
        with self._quota_lock:
            with self._lock:
                self._check_open()
                self._host.shares.set_quota(tenant, slots)
            to_move = self._host.to_move()
            for at in range(0, len(to_move), AT_ONCE):
                with self._lock:
                    self._check_open()
                    self._host.move(to_move[at : at + AT_ONCE])
                _let_others_in()
            with self._lock:
                self._host.shares.end_move()
            is_too_much = True
            while is_too_much:
                with self._lock:
                    self._check_open()
                    is_too_much = self._host.trim(AT_ONCE)
                _let_others_in()

    def counts(self) -> CacheCounts:
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            totals, host = self._totals, self._host.totals
            return CacheCounts(
                slots_total=self.pool.slots,
                slots_used=self.pool.slots_used,
                chunks_resident=self._host.residency.chunks_resident,
                chunks_reserved=self._host.residency.chunks_reserved,
                read_leases=len(self._reads),
                write_leases=len(self._writes),
                lookups=totals.lookups,
                chunks_asked=totals.chunks_asked,
                chunks_hit=totals.chunks_hit,
                chunks_reserved_ever=host.chunks_reserved_ever,
                chunks_committed=host.chunks_committed,
                chunks_aborted=host.chunks_aborted,
                chunks_evicted=host.chunks_evicted,
                chunks_forgotten=host.chunks_forgotten,
                chunks_adopted=host.chunks_adopted,
                chunks_refused=host.chunks_refused,
                chunks_damaged=host.chunks_damaged,
                leases_expired=totals.leases_expired,
            )

    def resident_keys(self) -> list[ChunkKey]:
        """What a lookup could find now. For tools and tests: it copies the index."""
        with self._lock:
            self._check_open()
            return self._host.residency.keys()

    def where(self, keys: Sequence[ChunkKey]) -> list[str]:
        """The fastest tier that holds each key, "being written", or "" for nowhere. Leases and touches nothing.

        A tier that must be asked over a network is not.
        """
        with self._lock:
            self._check_open()
            residency = self._host.residency
            places = [
                TIER if residency.find(key) is not None else "being written" if residency.is_held(key) else ""
                for key in keys
            ]
        lacking = [at for at, place in enumerate(places) if not place]
        for name, held in self.below.holding([keys[at] for at in lacking]).items():
            for at, is_here in zip(lacking, held, strict=True):
                if is_here and not places[at]:
                    places[at] = name
        return places

    def close(self) -> None:
        """Give up every lease, have stored below what is to be stored there, and unmap the pool.

        A named pool's chunks are there for the next process. It takes at most some seconds (`ColdConfig.drain_s`).

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
            self._pins.clear()
        if not self.below.close(self._cold.drain_s):
            raise BufferError(f"pool {self.pool.name!r} stays mapped: a tier has not come back from a call")
        self.pool.close()

    def _slots_in(self, quota_bytes: int) -> int:
        """
        Raises:
            ConfigError: no quota for chunks of this size.
        """
        slots, rest = divmod(quota_bytes, self.pool.slot_bytes)
        if slots < 0 or (rest and not slots):
            raise ConfigError(
                f"a quota of {quota_bytes} bytes holds no chunk of this model, which takes {self.pool.slot_bytes}; "
                "write at least that, or 0 for a tenant that keeps nothing"
            )
        return slots

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
        self._host.unlease(self._reads.pop(number).slots)

    def _expire(self, now_s: float) -> None:
        self.below.promotions.expire(now_s)
        while self._reads:
            oldest = next(iter(self._reads.values()))
            if oldest.deadline_s > now_s:
                return
            if self.events.on:
                is_promise = self._holdings[oldest.holder].promise == oldest.number
                kind: Literal["promise", "load"] = "promise" if is_promise else "load"
                self.events.publish(events.LeaseExpired(oldest.holder, oldest.number, len(oldest.slots), kind))
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
        holding = self._holdings.get(holder)
        before = None if holding is None else holding.promise
        if slots:
            # The new lease before the old one ends, so that what is in both is never without.
            self._host.residency.lease(slots)
            self._host.residency.touch(asked, slots)
            if holding is None:
                holding = self._holdings[holder] = _Holding()
            holding.promise = self._open_read(holder, slots, now_s)
        if before is not None:
            if not slots:
                self._let_go(holder, read=before)
            self._end_read(before)
        sources = self.below.promotions.sources(slots)
        if keys_per_chunk > 1:
            groups = (sources[at : at + keys_per_chunk] for at in range(0, len(sources), keys_per_chunk))
            sources = [max(group, key=self._order.__getitem__) for group in groups]
        return LookupPlan(holder, chunks, ended, tuple(sources))

    def _open_load(
        self, keys: list[ChunkKey], slots: list[int], holder: Holder, now_s: float
    ) -> ReadLease | LoadFailed:
        if len(slots) < len(keys):
            missing = tuple(key for key in keys[len(slots) :] if self._host.residency.find(key) is None)
            if self.events.on_requests:
                self.events.publish(events.LoadBegun(holder, 0, keys, len(missing)))
            return LoadFailed(missing, f"{len(missing)} of {len(keys)} chunks are not held")
        self._host.residency.lease(slots)
        self.below.promotions.used(slots)
        number = self._open_read(holder, slots, now_s)
        self._holding(holder).reads.add(number)
        if self.events.on_requests:
            self.events.publish(events.LoadBegun(holder, number, keys, 0))
        return ReadLease(LeaseId(number), tuple(keys), tuple(map(self.pool.extent, slots)))

    def _unpin_forgotten(self) -> None:
        """What nobody can find any more is kept for nobody."""
        was_forgotten = self._host.residency.was_forgotten
        for name, slots in list(self._pins.items()):
            gone = [slot for slot in slots if was_forgotten(slot)]
            if gone:
                kept = [slot for slot in slots if not was_forgotten(slot)]
                if kept:
                    self._pins[name] = kept
                else:
                    del self._pins[name]
                self._host.unlease(gone)

    def _tell_ended(self, read: _Read, now_s: float, how: events.LoadEnding) -> None:
        if self.events.on_requests:
            seconds = now_s - (read.deadline_s - self._lease_s)
            self.events.publish(events.LoadEnded(read.holder, read.number, len(read.slots), seconds, how))

    def _abort(self, number: int) -> None:
        write = self._writes.pop(number)
        self._host.abort(write.keys, write.slots)
        if self.events.on:
            self.events.publish(events.Aborted(write.holder, number, write.keys))

    def _give_up_from(self, number: int, write: _Write, first: int) -> int:
        """Abort what a new write lease has from its chunk `first` on; how many those are. Takes the lock itself."""
        with self._lock:
            keys, slots = write.keys[first:], write.slots[first:]
            if number in self._writes:  # else its holder has ended meanwhile, and everything is aborted already
                self._host.abort(keys, slots)
                self._host.totals.chunks_refused += len(slots)
            write.keys, write.slots = write.keys[:first], write.slots[:first]
        return len(slots)


def _let_others_in() -> None:
    """To the lock that was just released: who waits for it would not wake before we have it again."""
    time.sleep(0.0001)
