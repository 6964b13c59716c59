"""The index of a pool: which chunk is in which slot, its state, and its leases.

A slot identifies a chunk while it is resident. States, leases and keys are lists indexed by slot rather than one object
per chunk: slots of chunks stored together are adjacent, and with a million chunks cache misses dominate. For the same
reason a lookup searches the index for the first key only and then follows its *run*: the slots that followed that slot
last time, verified against the keys that they hold now. A run is only a hint; a stale one costs a little time.

A lease keeps a chunk in its slot, and a read lease also keeps its bytes unchanged (`lease_bytes`). So a chunk that has
no read lease may get better bytes at any time, and the old bytes of a chunk that is being read stay until that ends.

Nothing here locks, waits or reads a chunk's bytes: the cache holds its only lock around every call.
"""

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import pairwise
from typing import Final

from kv_core.keys import ChunkKey
from kv_eviction.coverage import CoveragePolicy
from kv_eviction.policy import EvictionPolicy

from kv_tiers.index.journal import Journal
from kv_tiers.index.life import Life, LifeEvent, advance

# Bytes that were replaced by better ones while they were being read.
#
# A chunk's slot keeps its number, so read leases, which name bytes, and all others, which name a chunk, would be
# counted on the same slot. When its bytes are exchanged for those of a second slot (`Residency.exchange`), the read
# leases move to that slot, which from then on has the old bytes. The holder of such a lease has only the slot that it
# leased and the value of `number` at that time; `bytes_at` finds its bytes from these two.


class Replaced:
    """The replaced bytes of one index."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the last exchange of bytes that were being read."""
        # By slot: the number of each exchange, and the slot that has had the old bytes since.
        self._moved_to: dict[int, list[tuple[int, int]]] = {}
        self._chunks: dict[int, tuple[int, ChunkKey]] = {}  # by slot with old bytes: the chunk's slot, and the chunk

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, slot: int) -> bool:
        """Whether this slot has replaced bytes."""
        return slot in self._chunks

    def add(self, slot: int, key: ChunkKey, to: int) -> None:
        """From now on the bytes of this chunk that are being read are in the slot `to`."""
        self.number += 1
        self._moved_to.setdefault(slot, []).append((self.number, to))
        self._chunks[to] = slot, key

    def drop(self, old_slot: int) -> None:
        """The replaced bytes in this slot are no longer being read."""
        slot, _ = self._chunks.pop(old_slot)
        remaining = [move for move in self._moved_to[slot] if move[1] != old_slot]
        if remaining:
            self._moved_to[slot] = remaining
        else:
            del self._moved_to[slot]

    def of(self, key: ChunkKey) -> list[int]:
        """The slots that have replaced bytes of this chunk."""
        return [old_slot for old_slot, (_, replaced_key) in self._chunks.items() if replaced_key == key]

    def keys(self) -> list[ChunkKey]:
        """The chunks that have replaced bytes."""
        return [key for _, key in self._chunks.values()]

    def key_of(self, old_slot: int) -> ChunkKey:
        """The chunk to which the replaced bytes in this slot belong."""
        return self._chunks[old_slot][1]

    def bytes_at(self, slots: Sequence[int], since: int) -> Sequence[int]:
        """Where the bytes that were in each of these slots when they were leased for reading are now.

        since: `number` at that time.
        """
        if not self._moved_to:
            return slots
        moved_to = self._moved_to
        return [next((place for number, place in moved_to.get(slot, ()) if number > since), slot) for slot in slots]


_SHARE_AT: Final = slice(24, 28)
"""The part of a key that names its group and shard."""
_CHAIN_BYTES: Final = _SHARE_AT.stop
"""The length of the beginning that all keys of one chain share."""
_EVICT: Final = LifeEvent.EVICT  # reading a member of an enum takes five times as long, which counts once a chunk
_READ: Final = 1 << 32
"""A read lease counts as this much more than 1, so that one number contains the counts of both kinds."""


class Residency:
    """The index of one pool. The caller holds the lock and returns freed slots to the pool."""

    def __init__(self, slots: int, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._slot_of: dict[ChunkKey, int] = {}  # RESIDENT only: the keys that can be found
        self._resident_of: Counter[bytes] = Counter()  # by group and shard, as keys have them
        self._writing: dict[ChunkKey, int] = {}  # RESERVED only
        self._life: list[Life] = []
        self._key_at: list[ChunkKey | None] = []  # RESIDENT only, so that equal keys mean a hit
        self._leases: list[int] = []
        self._runs: list[list[int] | None] = []
        self._orphans = 0
        self._leaving: set[int] = set()
        self._replaced = Replaced()
        self._excluded: set[int] = set()  # leased, skipped by an eviction, and so out of the policy's order
        self.journal: Journal | None = None
        """If set, records every chunk that becomes findable or stops being so."""
        self.grow(slots)

    def grow(self, slots: int) -> None:
        """Have at least this many slots: those of a large medium then take memory only once they are used."""
        missing = slots - len(self._life)
        if missing > 0:
            self._life += [Life.ABSENT] * missing
            self._key_at += [None] * missing
            self._leases += [0] * missing
            self._runs += [None] * missing

    @property
    def chunks_resident(self) -> int:
        return len(self._slot_of)

    @property
    def chunks_reserved(self) -> int:
        """Chunks whose bytes are still arriving, including those that were forgotten meanwhile."""
        return len(self._writing) + self._orphans

    @property
    def excluded(self) -> int:
        """How many slots evictions have skipped because they are leased. Each is a victim again when that ends."""
        return len(self._excluded)

    def by_group(self) -> tuple[int, ...]:
        """How many chunks of each group of layers are resident, each counted once, however many of its shards are. May
        be called without the lock."""
        groups: Counter[int] = Counter()
        for share, chunks in list(self._resident_of.items()):
            group = int.from_bytes(share[:2], "big")
            groups[group] = max(groups[group], chunks)
        return tuple(groups[group] for group in range(max(groups, default=-1) + 1))

    def payload_bytes(self, bytes_of: Callable[[int], int]) -> int:
        """The bytes of all resident chunks, in all groups and shards. bytes_of: the size of a group's chunks."""
        return sum(chunks * bytes_of(int.from_bytes(share[:2], "big")) for share, chunks in self._resident_of.items())

    def keys(self) -> list[ChunkKey]:
        """The keys that lookups find."""
        return list(self._slot_of)

    def held(self) -> list[ChunkKey]:
        """The keys that lookups find, and those being written."""
        return [*self._slot_of, *self._writing]

    def forgettable(self) -> list[ChunkKey]:
        """All keys on which `forget` has an effect: those held, and those of replaced bytes that are being read, whose
        chunks may have left since.
        """
        return list(dict.fromkeys([*self.held(), *self._replaced.keys()]))

    def leading(self, keys: Sequence[ChunkKey]) -> list[int]:
        """The slots of the leading run of resident keys. The list is shared: do not modify it."""
        key_at, find = self._key_at.__getitem__, self._slot_of.get
        slots: list[int] = []
        pieces = branch = 0
        while (position := len(slots)) < len(keys):
            slot = find(keys[position])
            if slot is None:
                break
            pieces += 1
            if pieces == 2:
                branch = position
            run = self._runs[slot]
            if run is None:
                slots.append(slot)
                continue
            run = run[: len(keys) - position]
            expected_keys = keys[position : position + len(run)]
            present_keys = list(map(key_at, run))
            if present_keys != expected_keys:
                del run[next(n for n, key in enumerate(expected_keys) if present_keys[n] != key) :]
            slots += run
        if pieces > 1:
            # Remembered from the start and from where prompts diverge, so that lookups of two alternating prompts both
            # stay quick.
            self._runs[slots[0]] = slots
            self._runs[slots[branch]] = slots[branch:]
        return slots

    def find(self, key: ChunkKey) -> int | None:
        return self._slot_of.get(key)

    def resident(self, keys: Sequence[ChunkKey]) -> tuple[list[ChunkKey], list[int]]:
        """Those of the keys that are resident, in any position, and their slots."""
        slot_of = self._slot_of
        resident_keys = [key for key in keys if key in slot_of]
        return resident_keys, [slot_of[key] for key in resident_keys]

    def key_at(self, slot: int) -> ChunkKey | None:
        """The key of the resident chunk in this slot, if there is one."""
        return self._key_at[slot]

    def is_held(self, key: ChunkKey) -> bool:
        """Whether the chunk is resident or being written."""
        return key in self._slot_of or key in self._writing

    def not_held(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of the keys that are neither resident nor being written, without repetitions, in the given order."""
        slot_of, writing = self._slot_of, self._writing
        return list(dict.fromkeys([key for key in keys if key not in slot_of and key not in writing]))

    def lease(self, slots: Sequence[int]) -> None:
        leases = self._leases
        for slot in slots:
            leases[slot] += 1

    def lease_bytes(self, slots: Sequence[int]) -> int:
        """Lease these slots so that their bytes can be read; returns the `since` that `bytes_at` needs."""
        leases = self._leases
        for slot in slots:
            leases[slot] += _READ + 1
        return self._replaced.number

    def bytes_at(self, slots: Sequence[int], since: int) -> Sequence[int]:
        """Where the bytes that were leased in these slots are now: in the same slots, unless they have been replaced.
        Call `unlease` with the result.

        since: what `lease_bytes` returned.
        """
        return self._replaced.bytes_at(slots, since)

    def still_of(self, slots: Sequence[int], bytes_at: Sequence[int]) -> list[int]:
        """Those of the slots whose chunk is still the one that was leased there for reading."""
        if not self._replaced:
            return list(slots)
        pairs = zip(slots, bytes_at, strict=True)
        return [slot for slot, place in pairs if place == slot or self._key_at[slot] == self._replaced.key_of(place)]

    def unlease(self, slots: Sequence[int], *, of_bytes: bool = False) -> list[int]:
        """End one lease on each slot; returns the slots that this frees. of_bytes: it was by `lease_bytes`."""
        leases, weight = self._leases, _READ + 1 if of_bytes else 1
        if not self._excluded and not self._leaving and not self._replaced:
            for slot in slots:
                leases[slot] -= weight
            return []
        freed, unleased = [], []
        for slot in slots:
            leases[slot] -= weight
            if leases[slot]:
                continue
            if slot in self._leaving or slot in self._replaced:
                self._gone(slot)
                freed.append(slot)
            elif slot in self._excluded:
                self._excluded.remove(slot)
                unleased.append(slot)
        if unleased:
            self._policy.reinsert(unleased)
        return freed

    def touch(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """A request looked up `keys`; `slots` are those of the leading chunks that it hit."""
        self._policy.used(keys, slots)

    def extend(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """A request stores more of this prompt."""
        self._policy.extended(keys, slots)

    def demote(self, slot: int, policy: CoveragePolicy) -> None:
        """Make this resident chunk the next victim. policy: the part of the policy that ranks it."""
        policy.demote([slot], excluded=self._excluded)

    def reserve(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Reserve slots for chunks whose bytes are still to come. None of the keys is held, and none is repeated
        (`not_held`).
        """
        self._move(slots, LifeEvent.RESERVE)
        self._writing.update(zip(keys, slots, strict=True))

    def commit(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> list[int]:
        """Make chunks visible to lookups; returns the slots that became free because their chunks were forgotten, or
        given to another writer, while being written.
        """
        freed = [slot for slot in slots if self._life[slot] is Life.ORPHANED] if self._orphans else []
        self._orphans -= len(freed)
        live_keys, live_slots = list(keys), list(slots)
        if freed:
            live_keys = [key for key, slot in zip(keys, slots, strict=True) if slot not in freed]
            live_slots = [slot for slot in slots if slot not in freed]
        self._move(slots, LifeEvent.COMMIT)
        for key, slot in zip(live_keys, live_slots, strict=True):
            del self._writing[key]
            self._key_at[slot] = key
        self._slot_of.update(zip(live_keys, live_slots, strict=True))
        self._resident_of.update([key[_SHARE_AT] for key in live_keys])
        if self.journal is not None:
            self.journal.note(live_keys)
        if live_slots:
            self._runs[live_slots[0]] = live_slots
            self._policy.added(live_keys, live_slots)
        return freed

    def abort(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Give up reserved slots. All of them are free afterwards."""
        for key, slot in zip(keys, slots, strict=True):
            if self._life[slot] is Life.ORPHANED:
                self._orphans -= 1
            else:
                del self._writing[key]
        self._move(slots, LifeEvent.ABORT)

    def orphan(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Let another writer reserve the chunks that are being written to these slots. What is written here is
        discarded by `commit` or `abort`, which free the slots."""
        for key, slot in zip(keys, slots, strict=True):
            if self._writing.get(key) == slot:  # else it was forgotten before
                del self._writing[key]
                self._move([slot], LifeEvent.FORGET)
                self._orphans += 1

    def take_spare(self, slot: int) -> None:
        """Use a free slot for better bytes of a resident chunk."""
        self._move([slot], LifeEvent.TAKE_SPARE)

    def free_spare(self, slot: int) -> None:
        """Free a spare slot."""
        self._move([slot], LifeEvent.FREE_SPARE)

    def exchange(self, slot: int, spare: int) -> bool:
        """From now on a resident chunk has the better bytes of the spare slot, which gets the old ones with all read
        leases on them. True: there are none, so the spare slot is free.
        """
        reads = self._leases[slot] // _READ
        if not reads:
            self.free_spare(spare)
            return True
        key = self._key_at[slot]
        assert key is not None
        self._move([spare], LifeEvent.REPLACE)
        self._leases[spare] = reads * (_READ + 1)
        self._leases[slot] -= reads * (_READ + 1)
        self._replaced.add(slot, key, spare)
        if not self._leases[slot] and slot in self._excluded:
            self._excluded.remove(slot)
            self._policy.reinsert([slot])
        return False

    def adopt(self, key: ChunkKey, slot: int) -> None:
        """Add a chunk that an earlier process stored. Chunks adopted later count as used later."""
        self._move([slot], LifeEvent.ADOPT)
        self._slot_of[key] = slot
        self._resident_of[key[_SHARE_AT]] += 1
        self._key_at[slot] = key
        self._policy.added([key], [slot])
        if self.journal is not None:
            self.journal.note([key])

    def evict(
        self,
        wanted: int,
        protected: Container[int],
        skipped: set[int],
        policy: EvictionPolicy | None = None,
        arriving: Sequence[ChunkKey] = (),
    ) -> dict[int, ChunkKey]:
        """Evict up to this many chunks, the best victims first, fewer if the others are leased or in `protected`.
        Returns the key that was in each slot.

        skipped, policy: as for `victim`.
        arriving: the chunks that take the victims' places, which the policy may refuse: it evicts none for the first
            that it refuses, nor for those behind it.
        """
        policy = self._policy if policy is None else policy
        slots: list[int] = []
        while len(slots) < wanted:
            run: list[int] = []
            for number, slot in enumerate(policy.victims(wanted - len(slots)), len(slots)):
                if self._leases[slot] or slot in protected:
                    break
                if arriving and policy.refuses(arriving[number], is_last=number == len(arriving) - 1):
                    wanted = number
                    break
                run.append(slot)
            if not run and self.victim(protected, skipped, policy) is None:
                break
            policy.evicted(run)
            slots += run
        self._move(slots, LifeEvent.EVICT)
        return {slot: self._hide(slot) for slot in slots}

    def victim(self, protected: Container[int], skipped: set[int], policy: EvictionPolicy | None = None) -> int | None:
        """The slot that an eviction would empty: the same one again until it is emptied, leased or touched. None: all
        resident chunks are leased or in `protected`.

        protected: slots that must not be chosen, in addition to leased ones.
        skipped: receives the protected slots that had to be excluded; `reinsert` them when the protection ends.
        policy: the part of the policy that ranks the eligible chunks (`Share`); None: all of it.
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
        """Evict the chunk in this slot, which must not be leased; returns its key."""
        self._policy.removed(slot)
        self._excluded.discard(slot)
        advance(self._life, (slot,), _EVICT)
        return self._hide(slot)

    def set_aside(self, at_most: int) -> list[int]:
        """The next victims, in order. They are not offered as victims again until they are used, or `take_back`."""
        slots: list[int] = []
        while len(slots) < at_most and (slot := self._policy.victim()) is not None:
            self._policy.exclude(slot)
            self._excluded.add(slot)
            slots.append(slot)
        return slots

    def take_back(self, slots: Sequence[int]) -> None:
        """Offer these slots from `set_aside` again, the last of them first."""
        available = [slot for slot in slots if slot in self._excluded and not self._leases[slot]]
        self._excluded.difference_update(available)
        if available:
            self._policy.reinsert(available)

    def parents(self) -> dict[int, int]:
        """By slot, the slot of the chunk before it in a prompt, as far as runs show. May be called without the lock, so
        the result is only a hint."""
        parents: dict[int, int] = {}
        for run in self._runs:
            for parent_slot, slot in pairwise(run or ()):
                key, parent_key = self._key_at[slot], self._key_at[parent_slot]
                if key is not None and parent_key is not None and key[:_CHAIN_BYTES] == parent_key[:_CHAIN_BYTES]:
                    parents[slot] = parent_slot
        return parents

    def is_leased(self, slot: int) -> bool:
        return self._leases[slot] > 0

    def is_read(self, slot: int) -> bool:
        """Whether its present bytes are leased for reading."""
        return self._leases[slot] >= _READ

    @property
    def replaced(self) -> int:
        """How many slots have replaced bytes that are still being read."""
        return len(self._replaced)

    def reinsert(self, slots: Sequence[int]) -> None:
        self._policy.reinsert(slots)

    def forget(self, key: ChunkKey) -> int | None:
        """Hide the chunk from lookups, and make all reads of it void. Returns its slot if it was resident; the slot may
        already be free.
        """
        for old_slot in self._replaced.of(key) if self._replaced else ():
            if old_slot not in self._leaving:
                self._move([old_slot], LifeEvent.FORGET)
                self._leaving.add(old_slot)
        if (slot := self._writing.pop(key, None)) is not None:
            self._move([slot], LifeEvent.FORGET)
            self._orphans += 1
            return None
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        self._move([slot], LifeEvent.FORGET)
        self._policy.removed(slot)
        self._hide(slot)
        self._excluded.discard(slot)
        self._leaving.add(slot)
        if not self._leases[slot]:
            self._gone(slot)
        return slot

    def leaving(self) -> list[int]:
        """The slots of chunks that were forgotten and are still leased."""
        return list(self._leaving)

    def restore_leaving(self, slots: Iterable[int]) -> None:
        """In a new index: chunks that were forgotten in an earlier one are still read there. Lease them."""
        for slot in slots:
            self._life[slot] = Life.LEAVING
            self._leaving.add(slot)

    def orphaned(self, slots: Iterable[int]) -> list[int]:
        """Those of these reserved slots whose chunks were forgotten while being written."""
        return [slot for slot in slots if self._life[slot] is Life.ORPHANED]

    def was_forgotten(self, slot: int) -> bool:
        """Whether the chunk was forgotten and is still leased."""
        return slot in self._leaving

    def any_forgotten(self, slots: Sequence[int]) -> bool:
        """Whether `was_forgotten` holds for any of these slots, on all of which the caller has a lease. For a read
        lease, pass the slots where the bytes are now.
        """
        return bool(self._leaving) and not self._leaving.isdisjoint(slots)

    def is_free(self, slot: int) -> bool:
        return self._life[slot] is Life.ABSENT

    def tails_first(self, slots: Iterable[int]) -> list[int]:
        """The same slots, tails before heads as far as runs show. May be called without the lock."""
        requested = dict.fromkeys(slots)
        runs = [self._runs[slot] or () for slot in requested]
        heads_first = dict.fromkeys(slot for run in (*runs, requested) for slot in run if slot in requested)
        return list(reversed(heads_first))

    def has_moved(self, slot: int) -> None:
        """The slot moved to another policy's order, in which it is not excluded."""
        self._excluded.discard(slot)

    def _hide(self, slot: int) -> ChunkKey:
        key = self._key_at[slot]
        assert key is not None
        del self._slot_of[key]
        self._resident_of[key[_SHARE_AT]] -= 1
        if self.journal is not None:
            self.journal.note([key])
        self._key_at[slot] = self._runs[slot] = None
        return key

    def _gone(self, slot: int) -> None:
        self._leaving.discard(slot)
        if slot in self._replaced:
            self._replaced.drop(slot)
        self._move([slot], LifeEvent.GONE)

    def _move(self, slots: Sequence[int], event: LifeEvent) -> None:
        advance(self._life, slots, event)


# The chunks of an index in the order in which they are worth keeping.

_BATCH_CHUNKS: Final = 256
"""Chunks that are ranked each time the lock is taken."""


def most_worth_first(index: Residency, lock: threading.Lock) -> list[int]:
    """The slots of all resident chunks, those that the policy would evict last first, and heads before their tails.

    It takes the index's lock, for a few chunks at a time. It requests one victim after another from the policy.
    Policies that judge by age see all chunks as used afterwards, so it is for a medium that is about to be given up.
    """
    order: dict[int, None] = {}
    try:
        while True:
            with lock:
                batch = index.set_aside(_BATCH_CHUNKS)
            if not batch:
                break
            for slot in batch:
                order.pop(slot, None)  # it was used meanwhile
                order[slot] = None
    finally:
        best_first = list(reversed(order))
        for start in reversed(range(0, len(best_first), _BATCH_CHUNKS)):
            with lock:
                index.take_back(best_first[start : start + _BATCH_CHUNKS])
    with lock:
        resident = map(index.find, index.keys())
        in_use = [slot for slot in resident if slot is not None and slot not in order]
    return [*in_use, *best_first]
