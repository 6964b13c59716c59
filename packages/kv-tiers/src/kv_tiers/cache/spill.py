"""Spilling: chunks of the host tier are written to a lower tier that does not hold them yet.

`through`: as soon as the tier's lane has room, oldest first. `back`: when the chunk is among the coldest and few slots
are free (and at shutdown); it is evicted once it is stored. When stores arrive faster than this, chunks are evicted at
once without waiting. A chunk is not leased until it is submitted to a lane, so a backlog blocks nothing: chunks that
are evicted from the backlog are lost to the lower tier, and counted. While being stored a chunk is leased, so that it
is found in the host tier until it can be found in the lower one. At most a part of each tenant's share is leased in
this way, so the engine's own stores always find room. Tiers have equal parts of that part: one that is slow, or hangs
in a call, which may read these slots for as long as it does, leaves the others theirs. Shares take turns, so that one
that has used up its part, or stores much, does not block the others.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

from kv_core.keys import ChunkKey
from kv_core.outcome import Stored, StoreOutcome
from kv_eviction.shares import Share

from kv_tiers.cache.host import HostTier, parents_of
from kv_tiers.events import events
from kv_tiers.index.residency import Residency
from kv_tiers.lanes.jobs import Outgoing
from kv_tiers.lanes.lane import Lane
from kv_tiers.tier_state import SERVING, SpillCounts

WriteMode = Literal["through", "back", "never"]

_DRAIN_TURN_S: Final = 0.02
"""How long a drain waits for one tier before it turns to the next."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: ChunkKey
    parent: ChunkKey | None


@dataclass(slots=True)
class _LowerTier:
    """A lower tier, and the chunks of the pool that it does not have yet.

    lane: of the tier.
    mode: when chunks go there.
    queues: the waiting chunks, for each share by slot, oldest first.
    share_of: the share of each slot in `queues`.
    turns: the shares that have waiting chunks and may lease more; the first is next.
    leased: how many slots of each share are leased for stores to this tier.
    emptying: how many of these are to be evicted afterwards.
    stores: under way.
    may_resume: a store has succeeded since `Spills._resume` last submitted one. It does not submit twice in vain,
        because a tier that takes probes but no stores would hardly ever be up for loads.
    counts: of this tier.
    """

    lane: Lane
    mode: WriteMode
    queues: dict[Share, OrderedDict[int, _Waiting]] = field(default_factory=dict)
    share_of: dict[int, Share] = field(default_factory=dict)
    turns: OrderedDict[Share, None] = field(default_factory=OrderedDict)
    leased: Counter[Share] = field(default_factory=Counter)
    emptying: Counter[Share] = field(default_factory=Counter)
    stores: "list[_SpillBatch]" = field(default_factory=list)
    may_resume: bool = True
    counts: SpillCounts = field(default_factory=SpillCounts)

    def find(self, slot: int) -> _Waiting | None:
        share = self.share_of.get(slot)
        return None if share is None else self.queues[share][slot]

    def add(self, slot: int, chunk: _Waiting, share: Share) -> None:
        self.remove(slot)  # it may wait in the queue of the share that its tenant had before a quota was set
        self.queues.setdefault(share, OrderedDict())[slot] = chunk
        self.share_of[slot] = share
        self.turns[share] = None

    def remove(self, slot: int) -> bool:
        """False: no chunk waits there."""
        share = self.share_of.pop(slot, None)
        if share is None:
            return False
        queue = self.queues[share]
        del queue[slot]
        if not queue:
            del self.queues[share]
            self.turns.pop(share, None)
        return True


@dataclass(slots=True, eq=False)
class _SpillBatch:
    tier: _LowerTier
    share: Share
    slots: list[int]
    chunks: list[_Waiting]
    then_evict: bool
    began_s: float = field(default_factory=time.monotonic)
    since: int = 0  # as returned by `Residency.lease_bytes`


class Spills:
    """Spilling from one host tier to all lower tiers. Called under the host's lock unless stated otherwise."""

    def __init__(
        self,
        host: HostTier,
        index: Residency,
        lanes: Sequence[tuple[Lane, WriteMode]],
        *,
        part: float,
        batch_chunks: int,
    ) -> None:
        """part: the fraction of each share that may be leased for spilling at a time; where chunks are written back,
        also the fraction that is kept free for new chunks."""
        self._host = host
        self._index = index
        self._tiers = [_LowerTier(lane, mode) for lane, mode in lanes]
        self._part = part
        self._batch_chunks = batch_chunks
        self._tiers_written = sum(mode != "never" for _, mode in lanes)
        self._stopped = False
        self._writes_back = any(mode == "back" for _, mode in lanes)
        # By slot, the chunk that is there and the tiers that its requests exclude.
        self._withheld: dict[int, tuple[ChunkKey, frozenset[int]]] = {}
        for tier in self._tiers:
            if tier.mode == "through":
                tier.lane.when_done = partial(self._resume, tier)

    def committed(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        chain: Sequence[ChunkKey],
        *,
        above: int | None = None,
        lower: frozenset[int] | None = None,
    ) -> None:
        """These chunks have become resident.

        above: only the tiers above this one lack them (they came from it).
        lower: the numbers of the tiers that they may go to; None: all.
        """
        if not keys or not self._tiers:
            return
        lacking = {number for number, tier in enumerate(self._tiers[:above]) if tier.mode != "never"}
        resident = [(key, slot) for key, slot in zip(keys, slots, strict=True) if self._index.key_at(slot) == key]
        for key, slot in resident:  # the others were forgotten while they were written
            for tier in self._tiers:
                # An earlier chunk of this slot that still waits has left; it may be the same one, forgotten and stored
                # again by a request with other tiers.
                tier.counts.lost += tier.remove(slot)
            self._withheld.pop(slot, None)
            if lower is not None and not lacking <= lower:
                self._withheld[slot] = key, frozenset(lacking - lower)
        parents = parents_of(chain)
        share = self._host.shares.of(keys[0].tenant)
        for number in sorted(lacking if lower is None else lacking & lower):
            tier = self._tiers[number]
            for key, slot in resident:
                tier.add(slot, _Waiting(key, parents.get(key)), share)
        self._submit_waiting(share)

    def allow(self, slots: Sequence[int], chain: Sequence[ChunkKey], lower: frozenset[int] | None) -> None:
        """These resident chunks also belong to another request, which may write them to these tiers (None: to all)."""
        if not self._withheld:
            return
        parents = parents_of(chain)
        allowed = frozenset(range(len(self._tiers))) if lower is None else lower
        added = 0
        for slot in slots:
            key, withheld = self._withheld.pop(slot, (None, frozenset[int]()))
            if key is None or self._index.key_at(slot) != key:
                continue
            if still_withheld := withheld - allowed:
                self._withheld[slot] = key, still_withheld
            for number in sorted(withheld & allowed):
                self._tiers[number].add(slot, _Waiting(key, parents.get(key)), self._host.shares.of(key.tenant))
                added += 1
        if added:
            self._submit_waiting(self._host.shares.of(chain[0].tenant))

    def waiting(self) -> list[list[tuple[int, ChunkKey, ChunkKey | None]]]:
        """By tier, the chunks that it does not have yet: the slot, the key and the parent's of each, oldest first."""
        return [
            [
                (slot, chunk.key, chunk.parent)
                for pairs in (
                    *(zip(batch.slots, batch.chunks, strict=True) for batch in tier.stores),
                    *(queue.items() for queue in tier.queues.values()),
                )
                for slot, chunk in pairs
            ]
            for tier in self._tiers
        ]

    def restore(self, number: int, waiting: Sequence[tuple[int, ChunkKey, ChunkKey | None]]) -> None:
        """In a new cache: this tier is still to get these, as `waiting` lists them."""
        tier = self._tiers[number]
        for slot, key, parent in waiting if tier.mode != "never" else ():
            tier.add(slot, _Waiting(key, parent), self._host.shares.of(key.tenant))
        for share in list(tier.queues):
            self._submit_waiting(share)

    def submit_waiting(self) -> None:
        """Submit what waits: the cache is no longer frozen."""
        for share in {share for tier in self._tiers for share in tier.queues}:
            self._submit_waiting(share)

    def _submit_waiting(self, share: Share) -> None:
        """Submit as many chunks as the lanes have room for, now that this share has new ones."""
        if self._stopped or self._host.is_frozen:
            return  # once stopped, which chunks the lower tiers lack is not known, so none may be evicted
        for tier in self._tiers:
            if tier.mode == "through":
                while self._submit_next(tier):
                    pass
        if self._writes_back:
            self._make_room(share)
            self._host.publish_evicted("watermark")

    def _resume(self, tier: _LowerTier) -> None:
        """On the lane's thread, without the lock: submit what waits, because the tier may be back from an outage or
        have been cleared, and the next commit may be far away."""
        if tier.turns and tier.may_resume:
            with self._host.lock:
                while not self._stopped and not self._host.is_frozen and self._submit_next(tier):
                    tier.may_resume = False

    def _make_room(self, share: Share) -> None:
        """Keep slots free for new chunks: evict the coldest ones, after storing those that a lower tier lacks. A tier
        that is away is not waited for, or the chunks would be lost to the others too when their slots are needed."""
        write_back = [tier for tier in self._tiers if tier.mode == "back"]
        tiers = [tier for tier in write_back if tier.lane.health()[0] in SERVING] or write_back
        while share.slots - share.slots_used + sum(tier.emptying[share] for tier in tiers) < self._part_of(share):
            slot = self._index.victim((), set(), share.policy)
            if slot is None:
                return
            key = self._index.key_at(slot)
            lacking = [
                (tier, waiting) for tier in tiers if (waiting := tier.find(slot)) is not None and waiting.key == key
            ]
            if not lacking:
                self._host.evict(slot)
                self._host.free([slot])
                continue
            for tier, waiting in lacking:
                if not self._submit(_SpillBatch(tier, share, [slot], [waiting], then_evict=True)):
                    return
                tier.remove(slot)

    def drain(self, timeout_s: float) -> None:
        """Store all waiting chunks, also those to be written back, as far as time allows. Without the lock."""
        until = time.monotonic() + timeout_s
        tiers = self._tiers
        while tiers := [tier for tier in tiers if not self._is_drained(tier, until)]:
            time.sleep(0.002)

    def _is_drained(self, tier: _LowerTier, until: float) -> bool:
        """Submit what waits for this tier, and wait a little for it. True: it is all stored, or can no longer be."""
        with self._host.lock:
            while self._submit_next(tier):
                pass
            is_submitted = not tier.share_of
        left_s = until - time.monotonic()
        if left_s <= 0 or tier.lane.health()[0] not in SERVING:
            return True
        # Not until the lane is idle: it may hang, and the other tiers need the time as well.
        is_idle = tier.lane.drain(min(left_s, _DRAIN_TURN_S))
        return is_idle and is_submitted and not tier.counts.under_way  # a store that has ended is settled after that

    def stop(self) -> int:
        """Submit nothing more. Returns how many chunks were not stored by then, summed over the tiers."""
        self._stopped = True
        key_at = self._index.key_at
        unstored = 0
        for tier in self._tiers:
            unstored += tier.counts.under_way
            for queue in tier.queues.values():
                unstored += sum(key_at(slot) == chunk.key for slot, chunk in queue.items())
            tier.queues.clear()
            tier.share_of.clear()
            tier.turns.clear()
        return unstored

    def counts(self) -> list[SpillCounts]:
        """By tier, in their order."""
        return [replace(tier.counts, waiting=len(tier.share_of)) for tier in self._tiers]

    def _submit_next(self, tier: _LowerTier) -> bool:
        """Submit the next few chunks of one prompt. False: there is no room, or nothing to submit."""
        room = min(self._batch_chunks, tier.lane.room_for_stores()) if tier.turns else 0
        while room > 0 and tier.turns:
            share = next(iter(tier.turns))
            share_room = min(room, self._room_for(tier, share))
            if share_room <= 0:
                del tier.turns[share]  # until some of its leased chunks have been stored
                continue
            batch = self._next_of(tier, share, share_room)
            if share in tier.turns:
                tier.turns.move_to_end(share)
            if batch.slots:
                return self._submit(batch)
        return False

    def _next_of(self, tier: _LowerTier, share: Share, room: int) -> _SpillBatch:
        """The next chunks of a share's queue: a few of one prompt, skipping those that are gone."""
        batch = _SpillBatch(tier, share, [], [], then_evict=False)
        while (queue := tier.queues.get(share)) and len(batch.slots) < room:
            slot, waiting = next(iter(queue.items()))
            if batch.chunks and waiting.parent != batch.chunks[-1].key:
                break
            tier.remove(slot)
            if self._index.key_at(slot) == waiting.key:
                batch.slots.append(slot)
                batch.chunks.append(waiting)
            else:
                tier.counts.lost += 1
        return batch

    def _part_of(self, share: Share) -> int:
        return max(1, int(share.slots * self._part))

    def _room_for(self, tier: _LowerTier, share: Share) -> int:
        """How many more slots of the share may be leased for stores to this tier."""
        return max(1, self._part_of(share) // self._tiers_written) - tier.leased[share]

    def _submit(self, batch: _SpillBatch) -> bool:
        if self._stopped or len(batch.slots) > self._room_for(batch.tier, batch.share):
            return False
        pool = self._host.pool
        outgoing = [
            Outgoing(chunk.key, chunk.parent, pool.pages(slot), pool.sizes.of(chunk.key))
            for slot, chunk in zip(batch.slots, batch.chunks, strict=True)
        ]
        batch.since = self._index.lease_bytes(batch.slots)
        batch.tier.leased[batch.share] += len(batch.slots)
        batch.tier.emptying[batch.share] += len(batch.slots) if batch.then_evict else 0
        batch.tier.counts.under_way += len(batch.slots)
        batch.tier.stores.append(batch)
        if batch.tier.lane.store(outgoing, lambda outcomes: self._stored(batch, outcomes)):
            return True
        self._settle(batch)
        self._requeue(batch)
        return False

    def _stored(self, batch: _SpillBatch, outcomes: Sequence[StoreOutcome]) -> None:
        """On the lane's thread, without the lock."""
        stored = sum(isinstance(outcome, Stored) for outcome in outcomes)
        is_down = stored < len(outcomes) and batch.tier.lane.health()[0] not in SERVING
        with self._host.lock:
            self._settle(batch)
            counts = batch.tier.counts
            counts.stored += stored
            batch.tier.may_resume = batch.tier.may_resume or stored > 0
            if is_down and not stored:
                self._requeue(batch)
            else:
                counts.refused += len(outcomes) - stored
            if batch.then_evict and stored and not self._host.is_frozen:
                self._evict(batch)
                self._host.publish_evicted("watermark")
            if self._host.events.on:
                self._publish(batch, outcomes, is_retried=is_down and not stored)
            self._submit_waiting(batch.share)

    def _publish(self, batch: _SpillBatch, outcomes: Sequence[StoreOutcome], *, is_retried: bool) -> None:
        pairs = zip(batch.chunks, outcomes, strict=True)
        keys = [chunk.key for chunk, outcome in pairs if isinstance(outcome, Stored)]
        self._host.events.publish(
            events.Spilled(
                batch.tier.lane.name,
                keys,
                len(outcomes) - len(keys),
                is_retried,
                self._host.pool.sizes.total(keys),
                time.monotonic() - batch.began_s,
            )
        )

    def _settle(self, batch: _SpillBatch) -> None:
        self._host.unlease(self._index.bytes_at(batch.slots, batch.since), of_bytes=True)
        batch.tier.leased[batch.share] -= len(batch.slots)
        batch.tier.emptying[batch.share] -= len(batch.slots) if batch.then_evict else 0
        batch.tier.counts.under_way -= len(batch.slots)
        batch.tier.stores.remove(batch)
        if batch.share in batch.tier.queues:
            batch.tier.turns[batch.share] = None

    def _requeue(self, batch: _SpillBatch) -> None:
        """Put the chunks back at the head of the queue."""
        for slot, chunk in zip(reversed(batch.slots), reversed(batch.chunks), strict=True):
            if self._index.key_at(slot) == chunk.key and not self._stopped:
                batch.tier.add(slot, chunk, batch.share)
                batch.tier.queues[batch.share].move_to_end(slot, last=False)

    def _evict(self, batch: _SpillBatch) -> None:
        for slot, chunk in zip(batch.slots, batch.chunks, strict=True):
            if self._index.key_at(slot) == chunk.key and not self._index.is_leased(slot):
                self._host.evict(slot)
                self._host.free([slot])
