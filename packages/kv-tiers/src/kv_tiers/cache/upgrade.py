"""Upgrades: approximations in the pool become exact while their tier has nothing else to do.

A tier with `approximate: true` delivers first parts of chunks, as many as a request should wait for. The rest is
read later, on a thread of the lane that has nothing else to do (`Lane.when_idle`), into a second slot. When the bytes
there are whole and verified, the two slots change places: later loads read the exact bytes. All else that is known of
the chunk (its order, its tenant, its holds, pins and promises) stays with its slot. A reader of the chunk at that
moment continues with the old bytes, which keep the second slot until the last such read has ended.

Only chunks from a tier are upgraded. What an engine computed behind an approximation stays as it is, so the cache
remains separate (docs/adr/0010).

Nothing waits for an upgrade, and nothing is queued for one: the pool's own approximations are the list of what may be
upgraded, and the lane takes the next when it is free. A chunk is tried once. If its rest cannot be read (the tier
fails, no longer has it, or has it damaged), it stays an approximation until it leaves the pool. First parts that were
read are cached, as far as there is room, so that a tier that can resume a read (`ReadsRemainders`) reads only the
others.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from kv_core.clock import Clock
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded

from kv_tiers import chunk_header
from kv_tiers.cache.host import HostTier
from kv_tiers.events import events
from kv_tiers.index.residency import Residency
from kv_tiers.lanes.jobs import Arrival, FirstBytes, LoadRemainder
from kv_tiers.lanes.lane import Lane
from kv_tiers.tier import Read, ReadsRemainders

KEPT_BYTES: Final = 64 << 20
"""Limit of first parts of chunks that are cached in memory outside the pool, so that they need not be read again."""
_MAX_EXAMINED: Final = 256
"""Chunks examined at most in the search for one to upgrade, which is done under the lock."""
_STILL_READ: Final = 2
"""Limit of second slots with old bytes that are still being read. While there are this many, no chunk that is being
read is upgraded; while there are more, because a reader came during the last upgrade, no chunk at all is."""


@dataclass(eq=False, slots=True)
class Approximation:
    """A chunk in the pool that is not exact. The object stands for this residence of the chunk in the pool only.

    tier: the number of the tier that it came from.
    parts: how many first parts it was decoded from.
    first_bytes: these, if they are cached.
    """

    key: ChunkKey
    tier: int
    parts: int
    first_bytes: FirstBytes | None = None


@dataclass(eq=False, slots=True)
class _OngoingUpgrade:
    """An upgrade that is being read.

    slot: of the chunk.
    spare: the second slot.
    began_s: when it began, before any interruptions.
    is_paused: it was interrupted, and resumes at the lane's next idle turn.
    """

    approximation: Approximation
    slot: int
    spare: int
    remainder: LoadRemainder
    began_s: float
    is_paused: bool = False


class Upgrades:
    """The upgrades of one cache, whose host tier reports changes of slots. Methods are called under the host's lock
    unless they say otherwise."""

    def __init__(self, host: HostTier, index: Residency, lanes: Sequence[Lane], *, clock: Clock) -> None:
        self._host = host
        self._index = index
        self._lanes = list(lanes)
        self._clock = clock
        self.by_slot: dict[int, Approximation] = {}
        self._wanted: list[OrderedDict[int, Approximation]] = [OrderedDict() for _ in lanes]  # by tier: not tried yet
        self._under_way: list[_OngoingUpgrade | None] = [None for _ in lanes]
        self._passed_over: set[int] = set()  # slots that were being read, or for which there was no second one
        self._cached_bytes = 0
        self._stopped = False
        self.counts = [0 for _ in lanes]
        """By tier, how often a chunk in the pool got better bytes."""
        for number, lane in enumerate(self._lanes):
            if len(lane.divisors) > 1:
                host.watcher = self
                lane.when_idle = partial(self._next, number)
        self.adopt()

    @property
    def approximations(self) -> int:
        """How many chunks in the pool are approximations of what a tier has."""
        return len(self.by_slot)

    def keeps(self, tier: int, nbytes: int) -> bool:
        """Whether first parts of this many bytes of chunks are worth caching, and there is room for them."""
        lane = self._lanes[tier]
        is_of_use = len(lane.divisors) > 1 and isinstance(lane.tier, ReadsRemainders)
        return is_of_use and self._cached_bytes + nbytes // lane.divisors[-1] <= KEPT_BYTES

    def arrived(self, tier: int, slots: Sequence[int], arrivals: Sequence[Arrival], divisor: int | None) -> None:
        """These have become resident.

        divisor: how much of each was requested. If all of it was, there is no more to read.
        """
        for slot, arrival in zip(slots, arrivals, strict=True):
            if arrival.parts and self._index.key_at(slot) == arrival.key:
                approximation = self.by_slot[slot] = Approximation(arrival.key, tier, arrival.parts)
                self._host.is_approximate(slot, arrival.parts)
                if divisor != 1 and not self._stopped:
                    self._wanted[tier][slot] = approximation
                    self._cache_first_bytes(approximation, arrival.first_bytes)
        self._wake_lanes([tier])

    def left(self, slots: Collection[int]) -> None:
        """See `SlotWatcher`."""
        if not self.by_slot:
            return
        for slot in slots:
            if (approximation := self.by_slot.pop(slot, None)) is not None:
                self._wanted[approximation.tier].pop(slot, None)
                self._passed_over.discard(slot)
                self._cache_first_bytes(approximation, None)
                under_way = self._under_way[approximation.tier]
                if under_way is not None and under_way.approximation is approximation and under_way.is_paused:
                    self._drop(approximation.tier, under_way)

    def unleased(self, slots: Sequence[int], *, makes_room: bool) -> None:
        """See `SlotWatcher`."""
        if self._passed_over and (makes_room or not self._passed_over.isdisjoint(slots)):
            self._passed_over.clear()
            self._wake_lanes(range(len(self._lanes)))

    def stop(self) -> None:
        """Stop upgrading. A read in progress is given up at its lane's next check."""
        self._stopped = True
        for tier, under_way in enumerate(self._under_way):
            if under_way is not None and under_way.is_paused:
                self._drop(tier, under_way)
        for wanted in self._wanted:
            wanted.clear()

    def resume(self) -> None:
        """Upgrade again what `stop` left."""
        self._stopped = False
        for slot, approximation in self.by_slot.items():
            self._wanted[approximation.tier][slot] = approximation
        self._wake_lanes(range(len(self._lanes)))

    def adopt(self) -> None:
        """Request the remainder of adopted approximations from the first tier that has parts, as their own tier is not
        known. Without the lock, before the cache is in use.
        """
        tier = next((number for number, lane in enumerate(self._lanes) if len(lane.divisors) > 1), None)
        for slot, parts in self._host.adopted_parts.items():
            key = self._index.key_at(slot)
            if tier is not None and key is not None:
                self.by_slot[slot] = self._wanted[tier][slot] = Approximation(key, tier, parts)
        if tier is not None:
            self._wake_lanes([tier])

    def _wake_lanes(self, tiers: Iterable[int]) -> None:
        """Notify the lanes of these tiers that have approximations to upgrade."""
        for tier in tiers:
            if self._wanted[tier]:
                self._lanes[tier].has_remainders()

    def _next(self, tier: int) -> LoadRemainder | None:
        """On the lane's thread, without the lock: what to read now."""
        pool = self._host.pool
        with self._host.lock:
            under_way = self._under_way[tier]
            if under_way is not None:
                under_way.is_paused = False
                return under_way.remainder
            begun = self._begin(tier)
            self._host.publish_evicted("upgrade")
        if begun is None:
            return None
        if pool.back([begun.spare]):
            with self._host.lock:
                self._drop(tier, begun)
            return None
        return begun.remainder

    def _begin(self, tier: int) -> _OngoingUpgrade | None:
        """Begin with the first waiting chunk that is not being read and for which there is a second slot. Of chunks
        being read only a few are taken at a time, because each may keep its second slot for long.
        """
        wanted = self._wanted[tier]
        for slot, approximation in list(islice(wanted.items(), _MAX_EXAMINED)):
            if wanted.get(slot) is not approximation:
                continue
            is_too_much = self._index.replaced + self._index.is_read(slot) > _STILL_READ
            if is_too_much or (spare := self._host.take_spare(slot)) is None:
                self._passed_over.add(slot)
                continue
            if wanted.pop(slot, None) is not approximation:  # room was made by evicting the chunk itself
                self._host.free_spare(spare)
                continue
            pool = self._host.pool
            header = bytearray(chunk_header.HEADER_BYTES)
            read = Read(
                approximation.key, header, pool.pages(spare), pool.chunk_bytes, pool.sizes.of(approximation.key)
            )
            remainder = LoadRemainder(read, partial(self._arrived, tier))
            if approximation.first_bytes is not None:
                remainder.first_bytes = approximation.first_bytes
                self._cache_first_bytes(approximation, None)
            begun = self._under_way[tier] = _OngoingUpgrade(approximation, slot, spare, remainder, self._clock.now_s())
            return begun
        return None

    def _arrived(self, tier: int, arrival: Arrival | None) -> None:
        """On the lane's thread, without the lock. arrival: None if it was interrupted."""
        with self._host.lock:
            under_way = self._under_way[tier]
            assert under_way is not None
            approximation, slot = under_way.approximation, under_way.slot
            is_here = self.by_slot.get(slot) is approximation and not self._stopped
            if is_here and arrival is None:
                under_way.is_paused = True
            elif not is_here or arrival is None or not _is_better(arrival, approximation):
                self._drop(tier, under_way)
            else:
                self._under_way[tier] = None
                self._exchange(under_way, arrival)

    def _exchange(self, upgrade: _OngoingUpgrade, arrival: Arrival) -> None:
        """Replace the chunk's bytes with those read into the spare slot."""
        approximation = upgrade.approximation
        self._host.exchange(upgrade.slot, upgrade.spare, arrival.checksum, arrival.parts)
        approximation.parts = arrival.parts
        if not approximation.parts:
            del self.by_slot[upgrade.slot]
        self.counts[approximation.tier] += 1
        if self._host.events.on:
            name, key = self._lanes[approximation.tier].name, approximation.key
            nbytes, seconds = self._host.pool.sizes.of(key), self._clock.now_s() - upgrade.began_s
            self._host.events.publish(events.Upgraded(name, [key], nbytes, seconds))

    def _drop(self, tier: int, upgrade: _OngoingUpgrade) -> None:
        self._under_way[tier] = None
        self._host.free_spare(upgrade.spare)

    def _cache_first_bytes(self, approximation: Approximation, first_bytes: FirstBytes | None) -> None:
        """Cache these first bytes for the chunk (None: none), in place of those cached before."""
        for part, sign in ((approximation.first_bytes, -1), (first_bytes, 1)):
            if part is not None:
                self._cached_bytes += sign * len(part.payload)
        approximation.first_bytes = first_bytes


def _is_better(arrival: Arrival, approximation: Approximation) -> bool:
    return isinstance(arrival.outcome, Loaded) and (not arrival.parts or arrival.parts > approximation.parts)
