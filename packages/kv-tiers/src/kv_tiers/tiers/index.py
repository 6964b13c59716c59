"""The index of a tier that stores its chunks in units of a medium: which chunk is where, and which is evicted next.

States, leases and policies are those of the host tier (`kv_tiers.index.residency`). A tier adds a lock, free space, and
the parent of each chunk: unlike the host tier, which sees whole prompts at every lookup, it sees pieces of them, and
follows parents so that heads do not leave before their tails. Windows and states age separately
(`kv_eviction.coverage`), and each is the next to leave once its chunk of the prefix has left.

A chunk has an *entry*, a number that identifies it, and an *extent*, the units of its payload. A tier may have several
media (directories): entry e and its units belong to medium e % n.

A tier that drops parts makes room by cutting chunks before it evicts any: an encoded chunk keeps its first units and
the others are freed, so no byte is moved. What is left is as long as a reader of first parts may request (`cut_bytes`),
and the chunk keeps its entry.
"""

import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_eviction.coverage import BoundedGroups, CoveragePolicy
from kv_eviction.parts import PartsPolicy
from kv_eviction.policy import EvictionPolicy
from kv_eviction.shares import Shares

from kv_tiers.index.journal import Journal
from kv_tiers.index.residency import Residency, most_worth_first
from kv_tiers.pool.machine import spelled
from kv_tiers.tier import ANY_CHUNKS, RankedChunk, TierContext
from kv_tiers.tier_state import TierQuota
from kv_tiers.tiers.space import (
    CHUNKS_A_SLOT,
    CUTS,
    MAX_UNITS,
    Extent,
    Geometry,
    PackedUnits,
    Place,
    RecoveredChunk,
    RoomMade,
    Space,
    cut_bytes,
    pack,
    unpack,
)

_GROWS_BY: Final = 1024
"""The minimum number of entries to grow by."""
MAX_QUOTAS_LISTED: Final = 64
_DISCARDED_AT_ONCE: Final = 1024
"""Chunks that are discarded before others get the lock: a few milliseconds' work. A tenant may have a million."""


@dataclass(frozen=True, slots=True)
class _Protected:
    """Entries that must not leave. Parts of them may be dropped."""

    entries: Container[int]
    shares: Shares

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, int) and entry in self.entries and _parts_at(self.shares, entry).is_lowest(entry)


@dataclass(slots=True)
class _Search:
    """The search for room in one call.

    prompt: entries of the prompt that room is wanted for, in its order.
    protected: those of them that must stay.
    skipped: those of them that the policy offered; they are put back into its order when the call ends.
    no_room_for: a search for this many free units failed, and none have been freed since.
    evicted: as for `RoomMade`.
    cut: entries of which less is stored than before; they may have been evicted since.
    """

    prompt: Collection[int]
    protected: Container[int]
    skipped: set[int] = field(default_factory=set)
    no_room_for: int = MAX_UNITS + 1
    evicted: list[int] = field(default_factory=list)
    cut: set[int] = field(default_factory=set)


def _parts_at(shares: Shares, entry: int) -> PartsPolicy:
    policy = shares.at(entry).policy
    assert isinstance(policy, PartsPolicy)
    return policy


class ExtentIndex:
    """Safe to call from any thread. Under its lock nothing waits, and no byte of a chunk is touched."""

    def __init__(
        self,
        slots: Sequence[int],
        geometry: Geometry,
        policy: EvictionPolicy,
        *,
        overhead_bytes: int = 0,
        bounded: BoundedGroups | None = None,
        drops_parts: bool = False,
        quotas: Mapping[bytes, int] | None = None,
        share_policy: Callable[[int], EvictionPolicy] | None = None,
    ) -> None:
        """slots: of each medium.
        overhead_bytes: what the medium stores with each payload.
        bounded: as for `TierContext`.
        drops_parts: cut chunks before any is evicted. Only for readers of first parts.
        quotas: slots that tenants have for themselves, by their tag. In all no more than there are.
        share_policy: creates the policy of such a share of so many slots.
        """
        self.slots = sum(slots)
        self._media = len(slots)
        self._geometry, self._overhead_bytes = geometry, overhead_bytes
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._bounded = known = BoundedGroups() if bounded is None else bounded
        self._drops_parts = drops_parts
        slot_units = geometry.slot_units
        # Entries are limited too, and a share has its part of those.
        self._least_units = -(-slot_units // CHUNKS_A_SLOT) if quotas else 1

        def ranking(whole: EvictionPolicy) -> EvictionPolicy:
            covered = CoveragePolicy(whole, known)
            return PartsPolicy(covered, len(CUTS) - 1) if drops_parts else covered

        def make_share(units: int) -> EvictionPolicy:
            assert share_policy is not None
            return ranking(share_policy(max(1, units // slot_units)))

        self._units_in_all = self.slots * slot_units
        self._shares = Shares(self._units_in_all, ranking(policy), make_share, numbered=0)
        for tenant, quota in (quotas or {}).items():
            self._shares.set_quota(tenant, quota * slot_units)
            self._shares.end_move()
        self._quotas = {tenant: self._shares.of(tenant) for tenant in quotas or {}}
        self._residency = Residency(0, self._shares)
        self._decoded_bytes: dict[int, int] = {}  # of the chunks that can be cut
        self._cut: dict[int, int] = {}  # by entry of a cut chunk: by which of `CUTS`
        self._parents: list[ChunkKey | None] = []
        self._stored_bytes = array("q")
        self._units: list[PackedUnits] = []
        self._slots_of_medium = list(slots)
        self._forget_places()
        self._turn = 0
        self._reading = 0
        self.releases = 0
        """Counts the events that may have made room. Read it before `reserve`, for `wait_for_room`."""
        self._withheld: list[Place] | None = None

    @property
    def chunks(self) -> int:
        return self._residency.chunks_resident

    @property
    def chunks_cut(self) -> int:
        """Chunks of which less is left than was stored."""
        return len(self._cut)

    def by_group(self) -> tuple[int, ...]:
        """As for `TierUsage`. Takes no lock: a report must not wait until a whole medium has been taken over."""
        return self._residency.by_group()

    @property
    def used_units(self) -> int:
        """Units that hold chunks, or are reserved or withheld. Takes no lock either."""
        return sum(space.used_units for space in self._spaces)

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._lock:
            find = self._residency.find
            return [find(key) is not None for key in keys]

    def quotas(self) -> tuple[TierQuota, ...]:
        """As for `TierUsage`. Takes no lock."""
        unit_bytes = self._geometry.unit_bytes
        listed = nlargest(MAX_QUOTAS_LISTED, self._quotas.items(), key=lambda one: one[1].slots_used)
        return tuple(
            TierQuota(tag.hex(), share.slots_used * unit_bytes, share.slots * unit_bytes) for tag, share in listed
        )

    def adopt(self, chunks: Iterable[RecoveredChunk]) -> list[int]:
        """Take over the chunks found at a restart, those worth least first. Only valid while the index is idle. Returns
        the entries of those that are beyond a share's size, and have left."""
        taken: list[list[PackedUnits]] = [[] for _ in self._spaces]
        used: list[set[int]] = [set() for _ in self._spaces]
        with self._lock:
            for place in self._withheld or ():
                self._shares.left(place.entry, self._counted(place.entry))
            self._forget_places()
            self._withheld = None
            self._decoded_bytes.clear()
            self._cut.clear()
            for key, parent, entry, stored_bytes, units, decoded_bytes, divisor in chunks:
                number, medium = divmod(entry, self._media)
                taken[medium].append(units)
                used[medium].add(number)
                self._grow(entry)
                self._units[entry], self._stored_bytes[entry] = units, stored_bytes
                self._shares.took([entry], key.tenant, each=self._counted(entry))
                self._residency.adopt(key, entry)
                self._parents[entry] = parent
                if self._drops_parts and decoded_bytes:
                    self._decoded_bytes[entry] = decoded_bytes
                    if divisor > 1:
                        _parts_at(self._shares, entry).lower(entry, CUTS.index(divisor))
                        self._cut[entry] = divisor
            for medium, space in enumerate(self._spaces):
                space.adopt(taken[medium])
                self._untouched_entries[medium] = end = max(used[medium], default=-1) + 1
                self._free_entries[medium] = [number for number in range(end) if number not in used[medium]]
            gone: list[int] = []
            self._shares.note_over()
            for share in self._shares.over:
                while share.slots_used > share.slots and (victim := share.policy.victim()) is not None:
                    self._empty(victim)
                    self._free(victim)
                    gone.append(victim)
            self._shares.over.clear()
            return gone

    def begin_load(self, keys: Sequence[ChunkKey], *, touch: bool = True) -> list[int | None]:
        """The entries of those that are here, each leased until `end_load`. touch: this counts as a use of them."""
        with self._lock:
            entries = [self._residency.find(key) for key in keys]
            present = [(key, entry) for key, entry in zip(keys, entries, strict=True) if entry is not None]
            self._residency.lease([entry for _, entry in present])
            self._reading += len(present)
            if present and touch:
                self._residency.touch(*self._prompt([key for key, _ in present], [entry for _, entry in present]))
            return entries

    def extent(self, entry: int) -> Extent:
        """The extent of a chunk that the caller has leased."""
        return Extent(unpack(self._units[entry], self._geometry.slot_units), self._stored_bytes[entry])

    def end_load(self, entries: Sequence[int | None]) -> None:
        present = [entry for entry in entries if entry is not None]
        with self._lock:
            for entry in self._residency.unlease(present):
                self._free(entry)
            self._reading -= len(present)
            self._notify()

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        stored_bytes: Sequence[int],
        parent: ChunkKey | None,
        decoded_bytes: Sequence[int] = (),
    ) -> RoomMade:
        """Reserve room for payloads of these sizes, for those of `keys` that are neither here nor arriving. The others
        get None, and so do all after the first that finds no room (`holds_or_writes` tells them apart). Keys are in the
        prompt's order; `parent` is the first one's.

        decoded_bytes: sizes of the chunks whose payloads can be cut, 0 for the others; empty: none can.

        A chunk is never evicted for its own descendants, but parts of it may be dropped for them.
        """
        places: list[Place | None] = []
        with self._lock:
            _, present = self._residency.resident(keys)
            search = self._search([*self._entries_above(parent), *present])
            missing = set(self._residency.not_held(keys))
            units_of = {size: self._geometry.units_for(self._overhead_bytes + size) for size in set(stored_bytes)}
            for number, (key, nbytes) in enumerate(zip(keys, stored_bytes, strict=True)):
                place = None
                if key in missing:
                    place = self._room(key, units_of[nbytes], nbytes, search)
                    missing.discard(key) if place is not None else missing.clear()
                places.append(place)
                if place is not None and self._drops_parts and decoded_bytes and decoded_bytes[number]:
                    self._decoded_bytes[place.entry] = decoded_bytes[number]
            taken = [place for place in places if place is not None]
            self._residency.reserve([place.key for place in taken], [place.entry for place in taken])
            return self._ended(search, places)

    def holds_or_writes(self, key: ChunkKey) -> bool:
        with self._lock:
            return self._residency.is_held(key)

    def commit(self, places: Sequence[Place], parents: Sequence[ChunkKey | None]) -> list[Place]:
        """The bytes are there: make the chunks visible. Returns those that were discarded meanwhile: they stay hidden,
        and their units are free.
        """
        if not places:
            return []
        with self._lock:
            keys, entries = [place.key for place in places], [place.entry for place in places]
            gone = self._residency.commit(keys, entries)
            for entry, parent in zip(entries, parents, strict=True):
                self._parents[entry] = parent
            for entry in gone:
                self._free(entry)
            if gone:
                keys = [key for key, entry in zip(keys, entries, strict=True) if entry not in gone]
                entries = [entry for entry in entries if entry not in gone]
            self._notify()
            if entries:
                self._residency.extend(*self._prompt(keys, entries))
        return [place for place in places if place.entry in gone]

    def abort(self, places: Sequence[Place]) -> None:
        with self._lock:
            self._residency.abort([place.key for place in places], [place.entry for place in places])
            for place in places:
                self._free(place.entry)
            self._notify()

    def evict_ahead(self, free_slots: int, parent: ChunkKey | None, tenant: bytes) -> RoomMade:
        """Keep this many slots free ahead of demand, or their part of the tenant's share, unless some were never used.

        parent: of the chunk that is being stored; nothing of its prompt is evicted.
        """
        with self._lock:
            if any(space.has_untouched() for space in self._spaces):
                return RoomMade([], [], {})
            share = self._shares.of(tenant)
            wanted = free_slots * self._geometry.slot_units * share.slots // self._units_in_all
            free_units = sum(space.free_units for space in self._spaces)
            missing = wanted - min(free_units, share.slots - share.slots_used)
            if missing <= 0:
                return RoomMade([], [], {})
            search = self._search(self._entries_above(parent))
            while missing > 0:
                entry = self._residency.victim(search.protected, search.skipped, share.policy)
                if entry is None:
                    break
                units = len(self.extent(entry).units)
                if self._shrink(entry, search.cut, last=True):
                    missing -= units - len(self.extent(entry).units)
                    continue
                self._empty(entry)
                missing -= units
                # Reused last, so that there is time for what must happen to the entry before, such as a durable wipe.
                self._free(entry, last=True)
                search.evicted.append(entry)
            return self._ended(search, [])

    def withhold(self, places: Sequence[Place]) -> None:
        """Abort these because the medium has no space. Neither their room nor room never used is handed out until
        `resume`."""
        with self._lock:
            self._residency.abort([place.key for place in places], [place.entry for place in places])
            self._withheld = [*(self._withheld or []), *places]
            for space in self._spaces:
                space.grows = False
            self._notify()

    def resume(self) -> None:
        """There may be space again."""
        with self._lock:
            for place in self._withheld or ():
                self._free(place.entry)
            self._withheld = None
            for space in self._spaces:
                space.grows = True

    def wait_for_room(self, releases: int, timeout_s: float, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> bool:
        """Wait until something has been released since `releases` was read. False: nothing was released in time, or
        nothing is held that could be: the share of these chunks, for which `reserve` found no room, has at most their
        own prompt, whatever others hold.
        """
        with self._lock:
            prompt = {*self._entries_above(parent), *self._residency.resident(keys)[1]}
            if self._shares.of(keys[0].tenant).slots_used <= sum(map(self._counted, prompt)):
                return False
            if self.releases != releases:
                return True
            return (self._reading > 0 or self._residency.chunks_reserved > 0) and self._released.wait(timeout_s)

    def discard(self, keys: Sequence[ChunkKey]) -> list[int]:
        """From now on no load finds these chunks. Returns the entries of those that were here; some may still be being
        read."""
        entries = []
        for start in range(0, len(keys), _DISCARDED_AT_ONCE):
            if start:
                time.sleep(0.0001)  # or lookups that wait for the lock would not get it in between
            with self._lock:
                for key in keys[start : start + _DISCARDED_AT_ONCE]:
                    entry = self._residency.forget(key)
                    if entry is not None:
                        entries.append(entry)
                        if self._residency.is_free(entry):
                            self._free(entry)
                self._notify()
        return entries

    def is_idle(self) -> bool:
        """Nothing is here, arriving or being read."""
        with self._lock:
            return not (self._residency.chunks_resident or self._residency.chunks_reserved or self._reading)

    def all_keys(self) -> list[ChunkKey]:
        """The keys of all chunks that are here or arriving."""
        with self._lock:
            return self._residency.held()

    def most_worth_first(self) -> list[RankedChunk]:
        """As for `RanksChunks`."""
        entries = most_worth_first(self._residency, self._lock)
        # Without the lock, as there may be millions: an entry may have become another chunk's, and its parent is a
        # hint.
        return [(key, self._parents[entry]) for entry in entries if (key := self._residency.key_at(entry)) is not None]

    def track(self, journal: Journal) -> None:
        """As for `TracksKeys`."""
        with self._lock:
            self._residency.journal = journal

    # Under the lock.

    def _notify(self) -> None:
        self.releases += 1
        self._released.notify_all()

    def _forget_places(self) -> None:
        self._spaces = [Space(slots, self._geometry.slot_units) for slots in self._slots_of_medium]
        self._free_entries: list[list[int]] = [[] for _ in self._spaces]
        self._untouched_entries = [0] * self._media

    def _search(self, prompt: Iterable[int]) -> _Search:
        entries = dict.fromkeys(prompt).keys()
        return _Search(entries, _Protected(entries, self._shares) if self._drops_parts else entries)

    def _room(self, key: ChunkKey, units: int, stored_bytes: int, search: _Search) -> Place | None:
        share, counted = self._shares.of(key.tenant), max(units, self._least_units)
        while True:
            if units < search.no_room_for and share.slots_used + counted <= share.slots:
                place = self._free_place(key, units, stored_bytes)
                if place is not None:
                    self._shares.took([place.entry], key.tenant, each=counted)
                    return place
                search.no_room_for = units
            victim = self._residency.victim(search.protected, search.skipped, share.policy)
            if victim is None:
                return None
            if self._shrink(victim, search.cut):
                search.no_room_for = MAX_UNITS + 1
                continue
            self._empty(victim)
            search.evicted.append(victim)
            first_unit = self._units[victim]
            if units == self._geometry.slot_units and isinstance(first_unit, int):
                self._decoded_bytes.pop(victim, None)
                self._shares.left(victim, units)
                self._shares.took([victim], key.tenant, each=units)
                self._stored_bytes[victim] = stored_bytes  # a whole slot for a whole slot
                return Place(key, victim, range(first_unit, first_unit + units), stored_bytes)
            self._free(victim)
            search.no_room_for = MAX_UNITS + 1

    def _free_place(self, key: ChunkKey, units: int, stored_bytes: int) -> Place | None:
        """A place in free units, if there are enough. Media take turns."""
        for turn in range(self._turn, self._turn + self._media):
            medium = turn % self._media
            space = self._spaces[medium]
            if not space.has_room(units) or (entry := self._entry(medium)) is None:
                continue
            taken = space.take(units)
            assert taken is not None
            self._turn = medium + 1
            self._units[entry], self._stored_bytes[entry] = pack(taken), stored_bytes
            return Place(key, entry, taken, stored_bytes)
        return None

    def _ended(self, search: _Search, places: list[Place | None]) -> RoomMade:
        if search.skipped:
            self._residency.reinsert([entry for entry in search.prompt if entry in search.skipped])
        # Without those that were evicted after all, whatever their entries are used for now.
        cut = {entry: divisor for entry in search.cut if (divisor := self._cut.get(entry)) is not None}
        return RoomMade(places, search.evicted, cut)

    def _shrink(self, entry: int, cut: set[int], *, last: bool = False) -> bool:
        """Drop the victim's next part instead of evicting it, or count a step if it has no part that can be dropped.
        False: it has taken all steps.

        cut: receives the entry if this freed units. last: as for `Space.give`.
        """
        if not self._drops_parts or (parts := _parts_at(self._shares, entry)).is_lowest(entry):
            return False
        step = parts.step(entry) + 1
        decoded_bytes = self._decoded_bytes.get(entry, 0)
        if not decoded_bytes:
            parts.lower(entry, len(CUTS) - 1)
            return True
        parts.lower(entry, step)
        remaining_bytes = cut_bytes(decoded_bytes, CUTS[step])
        units = tuple(self.extent(entry).units)  # not a range, which would mean a whole slot
        needed = self._geometry.units_for(self._overhead_bytes + remaining_bytes)
        if remaining_bytes < self._stored_bytes[entry] and needed < len(units):
            self._spaces[entry % self._media].give(units[needed:], last=last)
            counted = self._counted(entry)
            self._units[entry], self._stored_bytes[entry] = units[:needed], remaining_bytes
            self._shares.shrank(entry, counted - self._counted(entry))
            self._cut[entry] = CUTS[step]
            cut.add(entry)
        return True

    def _empty(self, entry: int) -> None:
        key = self._residency.empty(entry)
        policy = self._shares.at(entry).policy
        if isinstance(policy, PartsPolicy):
            policy = policy.policy
        assert isinstance(policy, CoveragePolicy)
        if policy.bounded_slots:
            bounded_entries = map(self._residency.find, self._bounded.beside(key))
            policy.demote([entry for entry in bounded_entries if entry in policy.bounded_slots])

    def _entry(self, medium: int) -> int | None:
        free = self._free_entries[medium]
        if free:
            return free.pop() * self._media + medium
        number = self._untouched_entries[medium]
        if number == CHUNKS_A_SLOT * self._slots_of_medium[medium]:
            return None
        self._untouched_entries[medium] = number + 1
        self._grow(number * self._media + medium)
        return number * self._media + medium

    def _grow(self, entry: int) -> None:
        """Extend the tables to this entry. They grow on demand, as a medium may have room for far more chunks than it
        will ever hold."""
        size = len(self._parents)
        if entry >= size:
            added = entry + 1 - size + max(_GROWS_BY, size // 8)
            self._residency.grow(size + added)
            self._shares.grow(added)
            self._parents += [None] * added
            self._stored_bytes.frombytes(bytes(8 * added))
            self._units += [0] * added

    def _free(self, entry: int, *, last: bool = False) -> None:
        number, medium = divmod(entry, self._media)
        self._decoded_bytes.pop(entry, None)
        self._cut.pop(entry, None)
        self._shares.left(entry, self._counted(entry))
        self._spaces[medium].give(self.extent(entry).units, last=last)
        self._free_entries[medium].append(number)

    def _counted(self, entry: int) -> int:
        """The units of its share that this entry's chunk counts as."""
        units = self._units[entry]
        return self._geometry.slot_units if isinstance(units, int) else max(self._least_units, len(units))

    def _entries_above(self, key: ChunkKey | None) -> list[int]:
        """The entries of this chunk and of those ancestors that are here and that it needs, from the prompt's first."""
        above: list[int] = []
        if key is None or (self._bounded and self._bounded.has(key)):
            return above
        while key is not None and (entry := self._residency.find(key)) is not None and len(above) < len(self._parents):
            above.append(entry)
            key = self._parents[entry]
        return above[::-1]

    def _prompt(self, keys: Sequence[ChunkKey], entries: Sequence[int]) -> tuple[list[ChunkKey], list[int]]:
        """These consecutive chunks, preceded by all that they build on."""
        above = self._entries_above(self._parents[entries[0]])
        if not above:
            return list(keys), list(entries)
        above_keys = [key for key in map(self._residency.key_at, above) if key is not None]
        return [*above_keys, *keys], [*above, *entries]


def read_quotas(
    quota_bytes: Mapping[str, int], capacity_bytes: int, context: TierContext, slots: int, media: int = 1
) -> dict[bytes, int]:
    """The slots that tenants have for themselves, by their tag. Raises `ConfigError`: there is no such tenant (which
    `ANY_CHUNKS` does not know), or it cannot have so much.

    quota_bytes: by the tenant's name. capacity_bytes: of which the tier makes this many slots.
    """
    quotas: dict[bytes, int] = {}
    for name, nbytes in quota_bytes.items():
        quota = nbytes * slots // capacity_bytes
        if nbytes < 0 or (nbytes and quota < media):
            least = -(-media * capacity_bytes // slots)
            raise ConfigError(
                f"quota_bytes: {name!r} has {nbytes}; write at least {least} ({spelled(least)}), which is a chunk of "
                "this model in every directory, or 0 if nothing of it is to be stored there"
            )
        if name in context.tenants:
            quotas[context.tenants[name]] = quota
        elif context is not ANY_CHUNKS:
            raise ConfigError(f"quota_bytes: no tenant is called {name!r}; list it in tenants")
    if (total := sum(quota_bytes.values())) > capacity_bytes:
        raise ConfigError(
            f"quota_bytes: the quotas are {total} bytes ({spelled(total)}) in all, and the tier's capacity_bytes is "
            f"{capacity_bytes} ({spelled(capacity_bytes)}); write smaller quotas or a larger capacity"
        )
    return quotas


# What tiers answer from an index of their own in memory.


class IndexedTier(ABC):
    """The calls of a `Tier`, of `TracksKeys` and of `RanksChunks` that need no more than the index."""

    def __init__(self, index: ExtentIndex) -> None:
        self._index = index

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._index.holds(keys)

    @abstractmethod
    def discard(self, keys: Sequence[ChunkKey]) -> None: ...

    def clear(self) -> None:
        self.discard(self._index.all_keys())

    def clear_tenant(self, tenant: bytes) -> None:
        self.discard([key for key in self._index.all_keys() if key.tenant == tenant])

    def track(self, journal: Journal) -> None:
        self._index.track(journal)

    def all_keys(self) -> list[ChunkKey]:
        return self._index.all_keys()

    def most_worth_first(self) -> list[RankedChunk]:
        return self._index.most_worth_first()
