"""Which chunk is in which slot of a tier that keeps its chunks in equal slots, and which leaves for another.

The life table, leases and policies are the host tier's own (`kv_tiers.index.residency`). This adds what a tier has to
itself: a lock, free slots, and the prompt that a chunk belongs to. The host tier is told of whole prompts at every
lookup; a tier below sees pieces of them, so it keeps each chunk's parent and walks up: heads would otherwise leave
before their tails.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv_core.keys import ChunkKey

from kv_tiers.eviction.policy import EvictionPolicy
from kv_tiers.index.residency import Residency


@dataclass(frozen=True, slots=True)
class Place:
    """A slot that is reserved for a chunk. used: its last chunk was evicted for this one, or left since the start."""

    key: ChunkKey
    slot: int
    used: bool


class SlotIndex:
    """Safe to call from any thread. Nothing waits under its lock and no byte of a chunk is touched."""

    def __init__(self, slots: int, policy: EvictionPolicy) -> None:
        self.slots = slots
        self._lock = threading.Lock()
        self._let_go = threading.Condition(self._lock)
        self._residency = Residency(slots, policy)
        self._parents: list[ChunkKey | None] = [None] * slots
        self._free: list[int] = []
        self._untouched_from = 0
        self._reading = 0
        self._releases = 0
        self._withheld: list[int] | None = None

    @property
    def chunks(self) -> int:
        return self._residency.chunks_resident

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._lock:
            find = self._residency.find
            return [find(key) is not None for key in keys]

    def adopt(self, chunks: Iterable[tuple[ChunkKey, ChunkKey | None, int]]) -> None:
        """Take over (key, parent, slot) that were there before, those worth least first. Of an idle index."""
        taken: set[int] = set()
        with self._lock:
            for key, parent, slot in chunks:
                taken.add(slot)
                self._residency.adopt(key, slot)
                self._parents[slot] = parent
            self._untouched_from = max(taken, default=-1) + 1
            self._free = [slot for slot in range(self._untouched_from) if slot not in taken]
            self._withheld = None

    def begin_load(self, keys: Sequence[ChunkKey], *, touch: bool = True) -> list[int | None]:
        """The slots of those that are here, each leased until `end_load`. touch: this counts as a use of them."""
        with self._lock:
            slots = [self._residency.find(key) for key in keys]
            here = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
            self._residency.lease([slot for _, slot in here])
            self._reading += len(here)
            if here and touch:
                self._residency.touch(*self._prompt([key for key, _ in here], [slot for _, slot in here]))
            return slots

    def end_load(self, slots: Sequence[int | None]) -> None:
        here = [slot for slot in slots if slot is not None]
        with self._lock:
            self._free += self._residency.unlease(here)
            self._reading -= len(here)
            self._notify()

    def reserve(self, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> list[Place | None]:
        """Room for those of `keys` that are neither here nor arriving; None for the others, and for all after the
        first that finds no room (`holds_or_writes` tells them apart). In the prompt's order; `parent` is the first's.

        A chunk never makes room for its own descendants.
        """
        places: list[Place | None] = []
        with self._lock:
            protected = set(self._slots_above(parent))
            protected.update(slot for key in keys if (slot := self._residency.find(key)) is not None)
            skipped: set[int] = set()
            short = False
            for key in keys:
                if short or self._residency.is_held(key):
                    places.append(None)
                    continue
                place = self._room(key, protected, skipped)
                short = place is None
                if place is not None:
                    self._residency.reserve([key], [place.slot])
                places.append(place)
            if skipped:
                self._residency.reinsert(sorted(skipped))
        return places

    def holds_or_writes(self, key: ChunkKey) -> bool:
        with self._lock:
            return self._residency.is_held(key)

    def commit(self, places: Sequence[Place], parents: Sequence[ChunkKey | None]) -> list[Place]:
        """The bytes are there. Those of them that were discarded meanwhile: nobody finds them, their slots are free."""
        if not places:
            return []
        with self._lock:
            freed = self._residency.commit([place.key for place in places], [place.slot for place in places])
            self._free += freed
            self._notify()
            gone = set(freed)
            kept = []
            for place, parent in zip(places, parents, strict=True):
                if place.slot not in gone:
                    self._parents[place.slot] = parent
                    kept.append(place)
            if kept:
                self._residency.extend(*self._prompt([place.key for place in kept], [place.slot for place in kept]))
        return [place for place in places if place.slot in gone]

    def abort(self, places: Sequence[Place]) -> None:
        with self._lock:
            self._residency.abort([place.key for place in places], [place.slot for place in places])
            self._free += [place.slot for place in places]
            self._notify()

    def evict_ahead(self, free_slots: int, parent: ChunkKey | None) -> list[int]:
        """Have so many slots free before they are asked for, unless some were never used. Those emptied for it.

        parent: of the chunk that is stored just now; its prompt makes no room.
        """
        with self._lock:
            if self._untouched_from < self.slots and self._withheld is None:
                return []
            skipped: set[int] = set()
            missing = free_slots - len(self._free)
            protected = set(self._slots_above(parent)) if missing > 0 else set()
            emptied = list(self._residency.evict(missing, protected, skipped))
            if skipped:
                self._residency.reinsert(sorted(skipped))
            self._free[:0] = emptied  # taken last: whatever must happen to them first gets the time for it
            return emptied

    def withhold(self, places: Sequence[Place]) -> None:
        """Abort these for want of space on the medium: neither they nor slots never used are given until `resume`."""
        with self._lock:
            self._residency.abort([place.key for place in places], [place.slot for place in places])
            self._withheld = (self._withheld or []) + [place.slot for place in places]
            self._notify()

    def resume(self) -> None:
        """There may be space again."""
        with self._lock:
            self._free += self._withheld or []
            self._withheld = None

    @property
    def releases(self) -> int:
        """Counts what may have made room. Read it before `reserve`, for `wait_for_room`."""
        return self._releases

    def wait_for_room(self, releases: int, timeout_s: float) -> bool:
        """Wait until something was released since `releases` was read. False: nothing was in time, or nobody holds
        anything that could be."""
        with self._lock:
            if self._releases != releases:
                return True
            return (self._reading > 0 or self._residency.chunks_reserved > 0) and self._let_go.wait(timeout_s)

    def discard(self, keys: Sequence[ChunkKey]) -> list[int]:
        """No load finds these from now. The slots of those that were here; they may be being read still."""
        slots = []
        with self._lock:
            for key in keys:
                slot = self._residency.forget(key)
                if slot is not None:
                    slots.append(slot)
                    if self._residency.is_free(slot):
                        self._free.append(slot)
            self._notify()
        return slots

    def is_idle(self) -> bool:
        """Nothing is here, arriving or being read."""
        with self._lock:
            return not (self._residency.chunks_resident or self._residency.chunks_reserved or self._reading)

    def all_keys(self) -> list[ChunkKey]:
        """Of every chunk that is here or arriving."""
        with self._lock:
            return self._residency.held()

    # Under the lock.

    def _notify(self) -> None:
        self._releases += 1
        self._let_go.notify_all()

    def _room(self, key: ChunkKey, protected: set[int], skipped: set[int]) -> Place | None:
        if self._free:
            return Place(key, self._free.pop(), True)
        if self._untouched_from < self.slots and self._withheld is None:
            self._untouched_from += 1
            return Place(key, self._untouched_from - 1, False)
        return next((Place(key, slot, True) for slot in self._residency.evict(1, protected, skipped)), None)

    def _slots_above(self, key: ChunkKey | None) -> list[int]:
        """The slots of this chunk and its ancestors as far as they are here, from the prompt's first."""
        above: list[int] = []
        while key is not None and (slot := self._residency.find(key)) is not None and len(above) < self.slots:
            above.append(slot)
            key = self._parents[slot]
        return above[::-1]

    def _prompt(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> tuple[list[ChunkKey], list[int]]:
        """These, which follow each other, with all that they build on before them."""
        above = self._slots_above(self._parents[slots[0]])
        above_keys = [key for key in map(self._residency.key_at, above) if key is not None]
        return [*above_keys, *keys], [*above, *slots]
