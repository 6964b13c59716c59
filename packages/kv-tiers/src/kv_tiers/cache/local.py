"""`LocalCache`: the `CacheService` over a host tier and the lower tiers.

One lock guards the index, the policy and the leases; under it nothing waits and no chunk's bytes are read. Two things
take longer: computing a chunk's checksum when it is committed to a named pool, and verifying it when an adopted chunk
is first requested. Both run outside the lock, on slots that a lease keeps in place.

Only chunks in the pool are promised, and to an engine that reads files itself those in a tier's (`FindsInFiles`). Other
chunks of lower tiers are promoted first (`kv_tiers.cache.promote`), and committed chunks are spilled automatically
(`kv_tiers.cache.spill`). Leases are in `kv_tiers.cache.leases`, operators' verbs in `admin`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Final

from kv_core.clock import Clock
from kv_core.cost import Costs, Measured, Skipped, choose
from kv_core.coverage import PLAIN, ChunkShape
from kv_core.errors import MisuseError
from kv_core.keys import ChunkKey
from kv_core.service import CacheCounts, Ended, Holder, LeaseId, LoadFailed, LookupPlan, ReadLease, WriteLease
from kv_core.transfer import FileExtent
from kv_eviction.coverage import BoundedGroups, CoveragePolicy
from kv_eviction.policy import EvictionPolicy
from kv_eviction.registry import DEFAULT_POLICY, make_policy
from kv_eviction.shares import Shares

from kv_tiers.cache.admin import Administration, quota_slots, warn_if_all_taken
from kv_tiers.cache.extension import CacheParts, Extension, FindsInFiles
from kv_tiers.cache.hits import Hit, find_hit, own_chunks, slowest_tiers
from kv_tiers.cache.host import FROZEN, TIER, CacheTotals, Doubtful, HostTier
from kv_tiers.cache.leases import Holds, Leases, ReadEntry, WriteEntry, owner_of
from kv_tiers.cache.lower_tiers import LowerTiers
from kv_tiers.cache.spill import WriteMode
from kv_tiers.clock import MonotonicClock
from kv_tiers.config import ColdConfig, check_lease
from kv_tiers.events import events
from kv_tiers.events.bus import UNWATCHED, Source
from kv_tiers.events.changes import Changes
from kv_tiers.index.residency import Residency
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.directory import MAX_KEY_BYTES
from kv_tiers.pool.host_pool import HostPool

_MAX_KEY_SPACES: Final = 64
"""Key spaces for which an engine's costs are remembered."""


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
        bounded: BoundedGroups | None = None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        """lanes: the tiers below the pool, hottest first, and when chunks are written there. The cache closes them.
        events: where the cache publishes events; the caller closes the bus.
        quotas: bytes that tenants have for themselves, by their tag; see `Administration.set_quota`.
        share_policy: makes the policy of such a tenant's share, given its size in chunks.
        bounded: where lookups note the groups that do not need the whole prefix; the lower tiers read it.
        extensions: what takes part in this cache besides its tiers. Tiers that are extensions take part anyway.
        Raises `ConfigError`: the quotas exceed the pool, or `lease_s` is not positive."""
        check_lease(lease_s)
        self.pool = pool
        self.events = UNWATCHED if events is None else events
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._cold = ColdConfig() if cold is None else cold
        default = partial(make_policy, DEFAULT_POLICY)
        make_share_policy = default if share_policy is None else share_policy
        self._bounded = BoundedGroups() if bounded is None else bounded
        self._costs: dict[bytes, tuple[Costs, ChunkShape]] = {}
        shares = Shares(
            pool.slots,
            CoveragePolicy(default(pool.slots) if policy is None else policy, self._bounded),
            lambda slots: CoveragePolicy(make_share_policy(slots), self._bounded),
            numbered=pool.mapped_slots,
        )
        for tenant, quota_bytes in (quotas or {}).items():
            shares.set_quota(tenant, quota_slots(quota_bytes, pool.slot_bytes))
            shares.end_move()
        warn_if_all_taken(shares)
        self._totals = CacheTotals()
        self._index = Residency(pool.mapped_slots, shares)
        self._host = HostTier(pool, self._index, shares, self._totals, self.events)
        self._lock = self._host.lock
        self.lease_s = lease_s
        self._leases = Leases(lease_s)
        self.holds = Holds(self._host, self._index, shares)
        for lane, _ in lanes:
            lane.events = self.events
        self.lower = LowerTiers(self._host, self._index, lanes, self._cold, keep_s=lease_s, clock=self._clock)
        self._promotions, self._spills = self.lower.promotions, self.lower.spills
        self._refuses_new = ""
        self._order = {name: rank for rank, name in enumerate((TIER, *(lane.name for lane, _ in lanes)))}
        self._direct = next((extension for extension in extensions if isinstance(extension, FindsInFiles)), None)
        if self._direct is not None:
            self.lower.on_forgotten = self._direct.forget
        self._own_extensions = tuple(extensions)
        self.parts = CacheParts(
            self._host, self._index, self.lower, self.holds, self._leases, self._totals, self._bounded, self._clock,
            verify=self._verify, refuse_new=self._refuse_new, fetch_held=self._fetch_held,
            cleared_for_s=self.cleared_for_s,
        )  # fmt: skip
        """For extensions, and for whoever passes the cache on to another process."""
        self.admin = Administration(self, self.parts)
        self.extensions = self._own_extensions
        for extension in extensions:
            extension.attach(self.parts)
        self.attach_tiers()

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        holder: Holder,
        *,
        shape: ChunkShape = PLAIN,
        wait_for_promotion: bool = False,
        costs: Costs | None = None,
        tiers: Sequence[str] | None = None,
        reads_files: bool = False,
    ) -> LookupPlan:
        keys = list(keys)
        lower = self.lower.numbers(tiers)
        requested, remainder = divmod(len(keys), shape.keys_per_chunk)
        if remainder:
            raise MisuseError(
                f"a lookup of {len(keys)} keys, {shape.keys_per_chunk} a chunk: give all the keys of every chunk"
            )
        while True:
            now_s = self._clock.now_s()
            with self._lock:
                self._begin(now_s)
                self._bounded.note(keys, shape)
                hit = find_hit(self._index, keys, shape)
                have = max(hit.chunks, own_chunks(costs, shape))
                if not (doubtful := self._host.lease_doubtful(hit.slots)):
                    plan = self._promise(hit, shape, holder, now_s, costs)
                    may_wait = wait_for_promotion and have < requested and self.lower.any_of(lower)
                    self._promotions.promised(holder, hit.slots, may_wait=may_wait)
                    if not may_wait:
                        self._count_lookup(keys, hit, shape, costs, plan)
                    break
            self._verify(doubtful)
        skipped: Skipped | None = None
        files: Sequence[FileExtent] | None = ()
        if self._direct is not None and may_wait and reads_files:
            pays = partial(self._pays, shape, hit.chunks, costs)
            files = self._direct.find(keys, shape, holder, hit=hit.chunks, lower=lower, pays=pays)
        elif self._direct is not None:
            self._direct.end(holder)
        if files is None:
            plan = replace(plan, ended=Ended.PENDING)
        elif files and self._direct is not None:
            plan = _with_files(plan, files, self._direct.tier, requested)
            if costs is not None:
                plan = replace(plan, choice=choose(costs, shape.chunk_tokens, plan.chunks))
            with self._lock:
                self._count_lookup(keys, hit, shape, costs, plan)
        elif may_wait:
            # The chunks promised so far stay leased meanwhile, so chunks that are promoted extend the hit.
            is_pending = self._promotions.is_pending(keys, shape, have, holder, now_s, costs=costs, lower=lower)
            if is_pending and not self._cold.wait_s:  # what has been started is there for the next request
                self._promotions.forget_wait(holder)
                is_pending = False
            with self._lock:
                skipped = self._promotions.skipped(holder)
                if is_pending:
                    plan = replace(plan, ended=Ended.PENDING)  # the lookup is repeated, and counted then
                else:
                    self._count_lookup(keys, hit, shape, costs, plan)
        if plan.choice is not None and skipped is not None:
            plan = replace(plan, choice=replace(plan.choice, skipped=skipped))
        if self.events.on_requests:
            self.events.publish(
                events.LookedUp(
                    holder, keys, shape, plan.chunks, plan.tiers, plan.ended.name, plan.choice, own_chunks(costs, shape)
                )
            )
        return plan

    def attach_tiers(self) -> None:
        """To be called again after `LowerTiers.reopen`."""
        tiers = tuple(lane.tier for lane in self.lower.lanes if isinstance(lane.tier, Extension))
        for tier in tiers:
            tier.attach(self.parts)
        self.extensions = self._own_extensions + tiers

    @property
    def tiers(self) -> tuple[str, ...]:
        return tuple(self._order)

    def shape_of(self, space_id: bytes) -> ChunkShape | None:
        """What a hit needs in this key space, as stated by lookups. None: there was no lookup yet, or a hit needs the
        whole prefix.
        """
        return self._bounded.shape_of(space_id)

    def costs_of(self, space_id: bytes) -> tuple[Costs, ChunkShape] | None:
        """The costs and shape of the last lookup in this key space that stated costs. None: there was none."""
        return self._costs.get(space_id)

    def renew(self, holder: Holder) -> bool:
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            promise = self._leases.promise_of(holder)
            in_files = None if self._direct is None else self._direct.renew(holder)
            if promise is None:
                return bool(in_files)
            if in_files is False or self._index.any_forgotten(promise.slots):
                return False
            self._leases.renew(promise, now_s)
            return True

    def load(self, keys: Sequence[ChunkKey], holder: Holder, *, lasting: bool = False) -> ReadLease | LoadFailed:
        keys = list(keys)
        while True:
            now_s = self._clock.now_s()
            with self._lock:
                self._begin(now_s)
                slots = self._index.leading(keys)
                if not (doubtful := self._host.lease_doubtful(slots)):
                    return self._open_read(keys, slots, holder, now_s, lasting)
            self._verify(doubtful)

    def begin_store(
        self,
        keys: Sequence[ChunkKey],
        holder: Holder,
        *,
        hold_s: float = 0.0,
        retain_s: float = 0.0,
        leaves_first: bool = False,
        tiers: Sequence[str] | None = None,
    ) -> WriteLease:
        chain, lower, is_held = list(keys), self.lower.numbers(tiers), max(hold_s, retain_s) > 0
        if self.pool.directory is not None and any(len(key) > MAX_KEY_BYTES for key in chain):
            raise MisuseError(f"a named pool's keys have at most {MAX_KEY_BYTES} bytes")
        now_s = self._clock.now_s()
        # What is held has to be in the pool.
        in_files = set() if self._direct is None or is_held else self._direct.holding(chain, lower)
        with self._lock:
            self._begin(now_s)
            refuses_new = self._refuses_new or (FROZEN if self._host.is_frozen else "")
            if hold_s > 0 and not refuses_new:  # another engine waits for these, and the tier may be slow
                self._promotions.give_up(chain)
            prompt_slots = self._host.touch(chain)
            missing = self._index.not_held(chain) if len(prompt_slots) < len(chain) else []
            missing = [key for key in missing if key not in in_files] if in_files else missing
            skipped: set[int] = set()
            protected = frozenset(prompt_slots)
            # What a lower tier may take, or is held, is stored whatever it is worth.
            by_worth = not is_held and not self.lower.any_of(lower)
            slots = []
            if not refuses_new:
                slots = self._host.reserve(missing, protected, skipped, may_refuse=by_worth)
            refused = len(missing) - len(slots)
            is_worth_less = bool(
                refused and by_worth and self._host.shares.refuses(missing[len(slots)], is_last=refused == 1)
            )
            self._host.publish_evicted("store", holder)
            if skipped:
                self._index.reinsert([slot for slot in dict.fromkeys(prompt_slots) if slot in skipped])
            self._totals.chunks_refused += refused
            why = self._host.why_full(missing[len(slots)].tenant) if refused and not is_worth_less else ""
            write = self._leases.open_write(holder, missing[: len(slots)], slots, chain, now_s)
            write.lower, write.is_demoted = lower, leaves_first
            if leaves_first and not slots:  # else by the commit, which uses them all
                self._host.demote(prompt_slots)
            if is_held:
                write.held_s = hold_s, retain_s
                self._hold(list(dict.fromkeys(prompt_slots)), write, now_s)
            # After the hold, because it may evict chunks that are not held to keep slots free.
            self._spills.allow(prompt_slots, chain, lower)
        if refuses_new and refused:
            why = refuses_new
        elif why:
            why = f"no room for {refused} of {len(chain)} chunks: {why}"
        if unbacked_slots := self.pool.back(slots):
            unbacked = self._give_up_from(write, min(map(slots.index, unbacked_slots)))
            why = f"the file system of pool {self.pool.name} has no memory left for {unbacked} of {len(chain)} chunks"
        if self.events.on:
            reason = why or ("worth less than what the pool holds" if is_worth_less else "")
            refused_keys = missing[len(write.keys) :] if reason else ()
            self.events.publish(events.StoreBegun(holder, write.number, chain, write.keys, refused_keys, reason))
        return WriteLease(
            LeaseId(write.number), tuple(write.keys), self.pool.places.extents(write.keys, write.slots), why
        )

    def commit(self, lease: WriteLease) -> None:
        with self._lock:
            self._host.check_open()
            # Close the lease first: from here on, a release or the end of its holder can no longer abort it.
            write = self._leases.close_write(lease.id)
            if write is None:
                raise MisuseError(
                    f"write lease {lease.id} is not open: committed or released before, or its holder ended"
                )
        checksums = self._host.checksums(write.keys, write.slots)
        with self._lock:
            findable = self._host.commit(write.keys, write.slots, write.chain, checksums)
            # The head of the chain is older than the chunks just added, and must not be evicted before them.
            self._host.touch(write.chain)
            if any(write.held_s):
                held_slots = [slot for key in findable if (slot := self._index.find(key)) is not None]
                self._hold(held_slots, write, self._clock.now_s())
            if write.is_demoted:
                self._host.demote(self._index.resident(write.chain)[1])
            if self.events.on:
                seconds = self._clock.now_s() - write.began_s
                self.events.publish(events.Committed(write.holder, write.number, findable, seconds))
            # Last, because it keeps slots free, for which it may evict these chunks too.
            self._spills.committed(write.keys, write.slots, write.chain, lower=write.lower)

    def release(self, lease: ReadLease | WriteLease, *, ends_holds: bool = True) -> bool:
        """ends_holds: whether what was read need not be held any more."""
        now_s = self._clock.now_s()
        with self._lock:
            self._expire(now_s)
            if isinstance(lease, WriteLease):
                write = self._leases.close_write(lease.id)
                if write is not None:
                    self._abort(write)
                return write is not None
            read = self._leases.close_read(lease.id)
            if read is None:
                return False
            bytes_at = self._index.bytes_at(read.slots, read.since)
            is_void = self._index.any_forgotten(bytes_at)
            if not is_void and read.kind == "load":
                self._totals.bytes_loaded += read.nbytes
            self._publish_end(read, now_s, "forgotten" if is_void else "released")
            if ends_holds:
                self.holds.read(self._index.still_of(read.slots, bytes_at))
            self._give_back(read)
            return not is_void

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        keys = list(keys)
        with self._lock:
            self._host.check_open()
            self._host.forget(keys)
            self.admin.unpin_forgotten()
            # Under the lock, so that a chunk that is committed again reaches the lower tiers only after this discard.
            self.lower.discard(keys)
            if self.events.on:
                self.events.publish(events.Forgotten(keys))

    def end(self, holder: Holder) -> None:
        with self._lock:
            self._promotions.end(holder)
            if self._direct is not None:
                self._direct.end(holder)
            reads, writes = self._leases.end(holder)
            for read in reads:
                if read.kind == "load":
                    self._publish_end(read, self._clock.now_s(), "ended")
                self._give_back(read)
            for write in writes:
                self._abort(write)
            if self.events.on_requests:
                self.events.publish(events.HolderEnded(holder))

    def end_all(self, owner: str) -> None:
        """End all holders of this owner (`kv_tiers.cache.leases.owner_of`)."""
        with self._lock:
            holders = {lease.holder for lease in self._leases.of(owner)}
            holders |= {holder for holder in self._promotions.waiting() if owner_of(holder) == owner}
        for holder in holders:
            self.end(holder)

    def changes_since(self, upto: int) -> Changes:
        """The keys that entered and left the pool since `upto` (0 at first): see `kv_tiers.events.changes`. Raises
        `MisuseError`: the cache was created without events."""
        if self.events is UNWATCHED:
            raise MisuseError("a cache without events keeps no record of them")
        return self.events.changes_since(upto)

    def allocated(self, blocks: Mapping[Holder, int]) -> None:
        if self.events.on:
            for holder, count in blocks.items():
                self.events.publish(events.BlocksAllocated(holder, count))

    def measured(self, samples: Sequence[Measured]) -> None:
        if self.events.on_requests:
            self.events.publish(events.EngineMeasured(samples))

    def received(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._host.check_open()
            self.holds.read([slot for key in keys if (slot := self._index.find(key)) is not None])
        for extension in self.extensions:
            extension.received(keys)

    def turn_ended(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._host.check_open()
            self._host.shares.turn_ended(keys, self._index.resident(keys)[1])

    def retainable(self, keys: Sequence[ChunkKey]) -> int:
        with self._lock:
            self._host.check_open()
            return self.holds.retainable(keys)

    def clear(self) -> None:
        """Forget every chunk that is held, as `forget` does. Chunks being written now will not be found either."""
        self.admin.clear()

    def cleared_for_s(self) -> float | None:
        """How long ago everything was cleared; None: never."""
        cleared_s = self._host.cleared_s
        return None if cleared_s is None else self._clock.now_s() - cleared_s

    def counts(self) -> CacheCounts:
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            return CacheCounts(
                slots_total=self.pool.slots,
                slots_used=self.pool.slots_used,
                chunks_resident=self._index.chunks_resident,
                chunks_reserved=self._index.chunks_reserved,
                read_leases=self._leases.reads_open,
                write_leases=self._leases.writes_open,
                **asdict(self._totals),
            )

    def close(self) -> None:
        """End every lease, finish pending spills, and unmap the pool. Takes a few seconds at most
        (`ColdConfig.drain_s`). Raises `BufferError`: the pool's memory is still in use; the cache is closed but the
        pool is not: close again later.

        A named pool's chunks remain for the next process.
        """
        for extension in self.extensions:
            extension.detach()
        with self._lock:
            self._host.stop()
            for write in self._leases.clear():
                self._abort(write)
            self.admin.pinned.clear()
            self.holds.clear()
        if not self.lower.close(self._cold.drain_s):
            raise BufferError(f"pool {self.pool.name!r} stays mapped: a tier has not returned from a call")
        self.pool.close()

    def _verify(self, doubtful: Doubtful) -> None:
        """Verify adopted chunks, and end the pins and holds of damaged ones. Takes the lock itself."""
        if self._host.verify(doubtful):
            with self._lock:
                self.admin.unpin_forgotten()

    def _pays(self, shape: ChunkShape, have: int, costs: Costs | None, part: tuple[str, int, int, int]) -> bool:
        """Whether this part is worth waiting for, as far as that is known. Takes no lock."""
        if costs is None or costs.compute is None:
            return True
        return self.lower.worth([part], shape, have, costs).chunks > have

    # The methods below are called under the lock unless they say otherwise.

    def _begin(self, now_s: float) -> None:
        self._host.check_open()
        self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        self._promotions.expire(now_s)
        self.holds.expire(now_s)
        for read in self._leases.expire(now_s):
            if self.events.on:
                self.events.publish(events.LeaseExpired(read.holder, read.number, len(read.slots), read.kind))
            self._give_back(read)
            self._totals.leases_expired += 1

    def _hold(self, slots: Sequence[int], write: WriteEntry, now_s: float) -> None:
        """Hold these chunks of a chain, and tell the extensions of the new ones that are for another engine."""
        chain, (hold_s, retain_s) = write.chain, write.held_s
        until_s = now_s + hold_s
        if hold_s > 0 and (new := set(self.holds.hold(slots, until_s, now_s))):
            positions = [position for position, key in enumerate(chain) if self._index.find(key) in new]
            for extension in self.extensions:
                extension.held(chain[: positions[-1] + 1], positions[0], until_s)
        if retain_s > 0:
            self.holds.hold(slots, now_s + retain_s, now_s, retain=True)

    def _fetch_held(self, tier: int, chain: Sequence[ChunkKey], first: int, hold_s: float) -> bool:
        """For `CacheParts.fetch_held`. Takes the lock itself."""
        if self._host.is_frozen:
            return True
        until_s = self._clock.now_s() + hold_s
        return self._promotions.prefetch(
            tier, chain, first, lambda slots: self.holds.hold(slots, until_s, self._clock.now_s())
        )

    def _refuse_new(self, why: str) -> None:
        """For `CacheParts.refuse_new`. Takes the lock itself."""
        with self._lock:
            self._refuses_new = why

    def _count_lookup(
        self, keys: Sequence[ChunkKey], hit: Hit, shape: ChunkShape, costs: Costs | None, plan: LookupPlan
    ) -> None:
        """Count a lookup at its final answer. Only now is it a use of the hit: a waiting request repeats its lookup."""
        own = own_chunks(costs, shape)
        self._totals.lookups += 1
        self._totals.chunks_asked += max(0, len(keys) // shape.keys_per_chunk - own)
        self._totals.chunks_hit += max(0, plan.chunks - own)
        if shape.chunk_tokens > 1 and (plan.choice is None or plan.choice.chunks):  # as in `PLAIN`: unknown
            computed_tokens = 0 if costs is None else costs.computed_tokens
            self._totals.tokens_saved += max(0, plan.chunks * shape.chunk_tokens - computed_tokens)
        promise = self._leases.promise_of(plan.holder)
        # While the lock was free, the promise may have ended, or some of its chunks may have been forgotten.
        if promise is not None and promise.slots is hit.slots and not self._index.any_forgotten(hit.slots):
            self._index.touch(hit.keys, hit.slots)
        elif not hit.slots and shape.is_plain:
            self._index.touch(keys, ())  # policies learn from misses

    def _promise(self, hit: Hit, shape: ChunkShape, holder: Holder, now_s: float, costs: Costs | None) -> LookupPlan:
        slots = hit.slots
        choice = None
        if costs is not None:
            choice = choose(costs, shape.chunk_tokens, hit.chunks)
            if hit.keys and (costs.compute or costs.load):
                self._costs[hit.keys[0].space_id] = costs, shape
                if len(self._costs) > _MAX_KEY_SPACES:
                    del self._costs[next(iter(self._costs))]
        if slots:
            # The new lease begins before the old one ends, so that chunks in both are leased throughout.
            self._index.lease(slots)
        previous = self._leases.promise(holder, slots, now_s)
        if previous is not None:
            self._host.unlease(previous.slots)
        tiers = slowest_tiers(hit.chunks, shape, self._promotions.sources(slots), self._order.__getitem__, TIER)
        return LookupPlan(holder, hit.chunks, hit.ended, tiers, hit.prefix_chunks, hit.lacking, choice)

    def _open_read(
        self, keys: list[ChunkKey], slots: list[int], holder: Holder, now_s: float, lasting: bool
    ) -> ReadLease | LoadFailed:
        if len(slots) < len(keys):
            missing = tuple(key for key in keys[len(slots) :] if self._index.find(key) is None)
            if self.events.on_requests:
                self.events.publish(events.LoadBegun(holder, 0, keys, len(missing)))
            return LoadFailed(missing, f"{len(missing)} of {len(keys)} chunks are not held")
        since = self._index.lease_bytes(slots)
        self._promotions.used(slots)
        read = self._leases.open_read(holder, slots, now_s, lasting=lasting)
        number, read.nbytes, read.since = read.number, self.pool.sizes.total(keys), since
        if self.events.on_requests:
            self.events.publish(events.LoadBegun(holder, number, keys, 0))
        return ReadLease(LeaseId(number), tuple(keys), self.pool.places.extents(keys, slots))

    def _give_back(self, read: ReadEntry) -> None:
        if read.kind == "load":
            self._host.unlease(self._index.bytes_at(read.slots, read.since), of_bytes=True)
        else:
            self._host.unlease(read.slots)

    def _publish_end(self, read: ReadEntry, now_s: float, how: events.LoadEnding) -> None:
        if self.events.on_requests:
            seconds = now_s - read.began_s
            self.events.publish(events.LoadEnded(read.holder, read.number, len(read.slots), read.nbytes, seconds, how))

    def _abort(self, write: WriteEntry) -> None:
        self._host.abort(write.keys, write.slots)
        if self.events.on:
            self.events.publish(events.Aborted(write.holder, write.number, write.keys))

    def _give_up_from(self, write: WriteEntry, first: int) -> int:
        """Abort a new write lease's chunks from `first` on; returns how many there are. Takes the lock itself."""
        with self._lock:
            keys, slots = write.keys[first:], write.slots[first:]
            if self._leases.is_writing(write):  # else its holder ended meanwhile, and everything is aborted already
                self._host.abort(keys, slots)
                self._totals.chunks_refused += len(slots)
            write.keys, write.slots = write.keys[:first], write.slots[:first]
        return len(slots)


def _with_files(plan: LookupPlan, files: Sequence[FileExtent], tier: str, requested: int) -> LookupPlan:
    """The plan of a hit in the pool, longer by chunks that the engine reads from a tier's files."""
    chunks = plan.chunks + len(files)
    return replace(
        plan,
        chunks=chunks,
        ended=Ended.ALL_HELD if chunks == requested else Ended.ABSENT,
        tiers=(*plan.tiers, *[tier] * len(files)),
        prefix_chunks=chunks,
        files=tuple(files),
    )
