"""Which chunk is in which slot, how it is doing, and who counts on it.

A slot is a chunk's identity while it is here: life, leases and key are lists by slot and not an object a chunk, because
slots of chunks stored together lie together, and with a million chunks it is the cache misses that cost. For the same
reason a lookup asks the index for the first key only and then follows the *run*: the slots that followed that one last
time, checked against the keys they hold now. A run is a hint; a stale one costs a little time and nothing else.

Nothing here locks, waits or touches a chunk's bytes: the cache holds its one lock around every call.
"""

from collections.abc import Container, Iterable, Sequence

from kv_core.keys import ChunkKey

from kv_tiers.eviction.policy import EvictionPolicy
from kv_tiers.index.life import Event, Life, advance


class Residency:
    """The index of one pool. Whoever calls it owns the lock and gives freed slots back to the pool."""

    def __init__(self, slots: int, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._slot_of: dict[ChunkKey, int] = {}  # RESIDENT only: what is in here can be found
        self._writing: dict[ChunkKey, int] = {}  # RESERVED only
        self._life: list[Life] = [Life.ABSENT] * slots
        self._key_at: list[ChunkKey | None] = [None] * slots  # RESIDENT only, so that equal keys mean a hit
        self._leases: list[int] = [0] * slots
        self._runs: list[list[int] | None] = [None] * slots
        self._orphans = 0
        self._leaving: set[int] = set()
        self._excluded: set[int] = set()  # leased, skipped by an eviction, and so out of the policy's order

    @property
    def chunks_resident(self) -> int:
        return len(self._slot_of)

    @property
    def chunks_reserved(self) -> int:
        """Chunks whose bytes are still arriving, those among them that were forgotten meanwhile too."""
        return len(self._writing) + self._orphans

    def keys(self) -> list[ChunkKey]:
        """What can be found."""
        return list(self._slot_of)

    def held(self) -> list[ChunkKey]:
        """What can be found, and what is being written."""
        return [*self._slot_of, *self._writing]

    def leading(self, keys: Sequence[ChunkKey]) -> list[int]:
        """The slots of the leading run of resident keys. The list is shared: do not change it."""
        key_at, find = self._key_at.__getitem__, self._slot_of.get
        found: list[int] = []
        pieces = branch = 0
        while (at := len(found)) < len(keys):
            slot = find(keys[at])
            if slot is None:
                break
            pieces += 1
            if pieces == 2:
                branch = at
            run = self._runs[slot]
            if run is None:
                found.append(slot)
                continue
            run = run[: len(keys) - at]
            wanted = keys[at : at + len(run)]
            there = list(map(key_at, run))
            if there != wanted:
                del run[next(n for n, key in enumerate(wanted) if there[n] != key) :]
            found += run
        if pieces > 1:
            # Remembered from the start and from where prompts part, so that two that take turns both stay quick.
            self._runs[found[0]] = found
            self._runs[found[branch]] = found[branch:]
        return found

    def find(self, key: ChunkKey) -> int | None:
        return self._slot_of.get(key)

    def resident(self, keys: Sequence[ChunkKey]) -> tuple[list[ChunkKey], list[int]]:
        """Those of the keys that can be found, wherever they come, and their slots."""
        slot_of = self._slot_of
        there = [key for key in keys if key in slot_of]
        return there, [slot_of[key] for key in there]

    def key_at(self, slot: int) -> ChunkKey | None:
        """The resident chunk in this slot, if there is one."""
        return self._key_at[slot]

    def is_held(self, key: ChunkKey) -> bool:
        """Resident, or being written by somebody."""
        return key in self._slot_of or key in self._writing

    def not_held(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those that are neither resident nor being written, each once, in this order."""
        slot_of, writing = self._slot_of, self._writing
        return list(dict.fromkeys([key for key in keys if key not in slot_of and key not in writing]))

    def lease(self, slots: Sequence[int]) -> None:
        leases = self._leases
        for slot in slots:
            leases[slot] += 1

    def unlease(self, slots: Sequence[int]) -> list[int]:
        """End one lease on each; the slots that are free because of it."""
        leases = self._leases
        if not self._excluded and not self._leaving:
            for slot in slots:
                leases[slot] -= 1
            return []
        freed, back = [], []
        for slot in slots:
            leases[slot] -= 1
            if leases[slot]:
                continue
            if slot in self._leaving:
                self._gone(slot)
                freed.append(slot)
            elif slot in self._excluded:
                self._excluded.remove(slot)
                back.append(slot)
        if back:
            self._policy.reinsert(back)
        return freed

    def touch(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """A request asked for these, and has the leading ones."""
        self._policy.used(keys, slots)

    def extend(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """A request stores more of this prompt."""
        self._policy.extended(keys, slots)

    def reserve(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """The bytes of these are to come. None is held, and each is named once (`not_held`)."""
        self._move(slots, Event.RESERVE)
        self._writing.update(zip(keys, slots, strict=True))

    def commit(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> list[int]:
        """Let lookups see these; the slots of those that were forgotten while they were written, free now."""
        freed = [slot for slot in slots if self._life[slot] is Life.ORPHANED] if self._orphans else []
        self._orphans -= len(freed)
        kept_keys, kept = list(keys), list(slots)
        if freed:
            kept_keys = [key for key, slot in zip(keys, slots, strict=True) if slot not in freed]
            kept = [slot for slot in slots if slot not in freed]
        self._move(slots, Event.COMMIT)
        for key, slot in zip(kept_keys, kept, strict=True):
            del self._writing[key]
            self._key_at[slot] = key
        self._slot_of.update(zip(kept_keys, kept, strict=True))
        if kept:
            self._runs[kept[0]] = kept
            self._policy.added(kept_keys, kept)
        return freed

    def abort(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Give reserved places back. All of the slots are free."""
        for key, slot in zip(keys, slots, strict=True):
            if self._life[slot] is Life.ORPHANED:
                self._orphans -= 1
            else:
                del self._writing[key]
        self._move(slots, Event.ABORT)

    def adopt(self, key: ChunkKey, slot: int) -> None:
        """A chunk that was there before we were. Those adopted later count as used later."""
        self._move([slot], Event.ADOPT)
        self._slot_of[key] = slot
        self._key_at[slot] = key
        self._policy.added([key], [slot])

    def evict(
        self, wanted: int, protected: Container[int], skipped: set[int], policy: EvictionPolicy | None = None
    ) -> dict[int, ChunkKey]:
        """Empty so many slots, the best victims' first, or as many as are neither leased nor in `protected`; what was
        in each. skipped, policy: as of `victim`."""
        policy = self._policy if policy is None else policy
        slots: list[int] = []
        while len(slots) < wanted and (slot := self.victim(protected, skipped, policy)) is not None:
            policy.removed(slot)
            slots.append(slot)
        self._move(slots, Event.EVICT)
        return {slot: self._hide(slot) for slot in slots}

    def victim(self, protected: Container[int], skipped: set[int], policy: EvictionPolicy | None = None) -> int | None:
        """The slot that an eviction would empty. The same again until it is emptied, leased or touched. None: all that
        is resident is leased or in `protected`.

        protected: slots that are not to be chosen, besides those that are leased.
        skipped: gets the protected slots that had to be excluded; `reinsert` them when the protection ends.
        policy: the part of the policy that knows the chunks which may be chosen (`Share`); None: all of it.
        """
        policy = self._policy if policy is None else policy
        while (slot := policy.victim()) is not None:
            if self._leases[slot]:
                policy.exclude(slot)
                self._excluded.add(slot)
            elif slot in protected:
                policy.exclude(slot)
                skipped.add(slot)
            else:
                return slot
        return None

    def empty(self, slot: int) -> ChunkKey:
        """Evict the chunk in this slot, which nobody leases; what it was."""
        self._policy.removed(slot)
        self._move([slot], Event.EVICT)
        return self._hide(slot)

    def is_leased(self, slot: int) -> bool:
        return self._leases[slot] > 0

    def reinsert(self, slots: Sequence[int]) -> None:
        self._policy.reinsert(slots)

    def forget(self, key: ChunkKey) -> int | None:
        """No lookup finds the chunk from now. Its slot if it was resident; it may be free already."""
        if (slot := self._writing.pop(key, None)) is not None:
            self._move([slot], Event.FORGET)
            self._orphans += 1
            return None
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        self._move([slot], Event.FORGET)
        self._policy.removed(slot)
        self._hide(slot)
        self._excluded.discard(slot)
        self._leaving.add(slot)
        if not self._leases[slot]:
            self._gone(slot)
        return slot

    def was_forgotten(self, slot: int) -> bool:
        """Its chunk is found no more, and somebody still has a lease on it."""
        return slot in self._leaving

    def any_forgotten(self, slots: Sequence[int]) -> bool:
        """Whether `was_forgotten` is true of one of these, on all of which the caller has a lease."""
        return bool(self._leaving) and not self._leaving.isdisjoint(slots)

    def is_free(self, slot: int) -> bool:
        return self._life[slot] is Life.ABSENT

    def tails_first(self, slots: Iterable[int]) -> list[int]:
        """These in another order, as far as runs tell. It may be called without the lock."""
        among = dict.fromkeys(slots)
        runs = [self._runs[slot] or () for slot in among]
        heads_first = dict.fromkeys(slot for run in (*runs, among) for slot in run if slot in among)
        return list(reversed(heads_first))

    def has_moved(self, slot: int) -> None:
        """It is in the order of another policy now, which has not excluded it."""
        self._excluded.discard(slot)

    def _hide(self, slot: int) -> ChunkKey:
        key = self._key_at[slot]
        assert key is not None
        del self._slot_of[key]
        self._key_at[slot] = self._runs[slot] = None
        return key

    def _gone(self, slot: int) -> None:
        self._leaving.remove(slot)
        self._move([slot], Event.GONE)

    def _move(self, slots: Sequence[int], event: Event) -> None:
        life = self._life
        for slot in slots:
            life[slot] = advance(life[slot], event)
