"""Eviction of groups that do not need the whole prefix: windows and states, next to any policy.

A hit uses the last chunks of a window and one state, not earlier ones, so the order of last use ranks them: chunks far
behind every requested boundary age and are evicted. A policy that learns from returning prompts would be misled by
them, because most of a window does not return with its prompt. They are therefore kept out of the policy, in an order
of their own. The oldest of that order is compared with the policy's victim, and the one that was used longer ago is
evicted.
"""

from collections.abc import Container, Iterable, Mapping, Sequence

from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey, keys_in

from kv_eviction.policy import EvictionPolicy
from kv_eviction.simple import LruPolicy, NoopPolicy

_MAX_GROUPS = 1 << 12
"""Number of groups that are remembered; further ones are left to the policy."""


class BoundedGroups:
    """The groups, of all key spaces, that do not need the whole prefix, as reported by lookups. Call `note` under a
    lock."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._shapes: dict[bytes, ChunkShape] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def note(self, keys: Sequence[ChunkKey], shape: ChunkShape) -> None:
        """keys: of a lookup, chunk-major."""
        if keys and not shape.is_plain and len(self._known) < _MAX_GROUPS:
            space_id = keys[0].space_id
            if self._shapes.get(space_id) == shape:
                return
            self._shapes[space_id] = shape
            for group, coverage in enumerate(shape.groups):
                if coverage.kind != "all":
                    self._known.add(_group_of(keys[group * shape.shards]))

    def shape_of(self, space_id: bytes) -> ChunkShape | None:
        """The shape of the latest lookup in a key space. None: there was none, or only of whole prefixes."""
        return self._shapes.get(space_id)

    def shapes(self) -> dict[bytes, ChunkShape]:
        """By key space, the shape of the latest lookup with such groups."""
        return dict(self._shapes)

    def restore(self, shapes: Mapping[bytes, ChunkShape]) -> None:
        """In a new object: the `shapes` of another."""
        for space_id, shape in shapes.items():
            self.note(
                keys_in(space_id, [bytes(16)], groups=range(len(shape.groups)), shards=range(shape.shards)), shape
            )

    def has(self, key: ChunkKey) -> bool:
        return _group_of(key) in self._known

    def beside(self, key: ChunkKey) -> list[ChunkKey]:
        """The keys of the same chunk in bounded groups, which no hit can use without the chunk that `key` names."""
        shape = self._shapes.get(key.space_id)
        if shape is None or self.has(key):
            return []
        groups = [group for group, coverage in enumerate(shape.groups) if coverage.kind != "all"]
        return keys_in(key.space_id, [key.digest], groups=groups, shards=range(shape.shards), tenant=key.tenant)


class CoveragePolicy(EvictionPolicy):
    """An `EvictionPolicy` around another that never sees bounded groups. Without bounded groups, it passes everything
    on.
    """

    def __init__(self, policy: EvictionPolicy, bounded: BoundedGroups) -> None:
        self.policy = policy
        self._bounded = bounded
        self._recent = LruPolicy()
        self.bounded_slots: set[int] = set()
        """The slots of chunks of bounded groups, and of those that were demoted: `_recent` orders them."""
        self._demoted: set[int] = set()
        self._last_use: list[int] = []  # by slot, since there are such slots or groups; 0: never
        self._now = 0

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        if not self._bounded and not self.bounded_slots:
            self.policy.added(keys, slots)
            return
        # A chunk that came before its group was known stays with the policy.
        self.bounded_slots.update(slot for key, slot in zip(keys, slots, strict=True) if self._bounded.has(key))
        recent, keys, slots = self._partition(keys, slots)
        if slots:
            self.policy.added(keys, slots)
        # In the reverse order of a prefix, because the last chunks of a window are worth most.
        self._recent.added((), recent[::-1])

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        is_miss = not slots
        recent, keys, slots = self._partition(keys, slots)
        if slots or is_miss:
            self.policy.used(keys, slots)
        self._recent.used((), recent[::-1])

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        recent, keys, slots = self._partition(keys, slots)
        if slots:
            self.policy.extended(keys, slots)
        self._recent.extended((), recent[::-1])

    def turn_ended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        if self._bounded or self.bounded_slots:
            keys = [key for key in keys if not self._bounded.has(key)]
            slots = [slot for slot in slots if slot not in self.bounded_slots]
        self.policy.turn_ended(keys, slots)

    def removed(self, slot: int) -> None:
        if slot < len(self._last_use):
            self._last_use[slot] = 0
        if slot in self.bounded_slots:
            self.bounded_slots.remove(slot)
            self._demoted.discard(slot)
            self._recent.removed(slot)
        else:
            self.policy.removed(slot)

    def victim(self) -> int | None:
        victim = self.policy.victim()
        if not self.bounded_slots or isinstance(self.policy, NoopPolicy):
            return victim
        oldest_bounded = self._recent.victim()
        if oldest_bounded is None or victim is None:
            return victim if oldest_bounded is None else oldest_bounded
        return oldest_bounded if self._used_at(oldest_bounded) <= self._used_at(victim) else victim

    def victims(self, at_most: int) -> Iterable[int]:
        return super().victims(at_most) if self.bounded_slots else self.policy.victims(at_most)

    def evicted(self, slots: Sequence[int]) -> None:
        if self._last_use or self.bounded_slots:
            super().evicted(slots)
        else:
            self.policy.evicted(slots)

    def refuses(self, key: ChunkKey, *, is_last: bool) -> bool:
        return not self._bounded and self.policy.refuses(key, is_last=is_last)

    def demote(self, slots: Sequence[int], *, excluded: Container[int] = ()) -> None:
        """Make these chunks the next victims, the last of them first. From now on they are ranked by their last use.

        excluded: those that are not to be offered until they are reinserted.
        """
        for slot in slots:
            if slot not in self.bounded_slots:
                self.policy.removed(slot)
                self.bounded_slots.add(slot)
                self._demoted.add(slot)
                self._recent.added((), [slot])
                if slot in excluded:
                    self._recent.exclude(slot)
            self._recent.demote(slot)
            if slot < len(self._last_use):
                self._last_use[slot] = 0

    def exclude(self, slot: int) -> None:
        (self._recent if slot in self.bounded_slots else self.policy).exclude(slot)

    def reinsert(self, slots: Sequence[int]) -> None:
        still_demoted = [slot for slot in slots if slot in self._demoted and not self._used_at(slot)]
        recent, _, slots = self._partition((), slots)
        if slots:
            self.policy.reinsert(slots)
        self._recent.reinsert(recent[::-1])
        self.demote(still_demoted)

    def _used_at(self, slot: int) -> int:
        return self._last_use[slot] if slot < len(self._last_use) else 0

    def _partition(
        self, keys: Sequence[ChunkKey], slots: Sequence[int]
    ) -> tuple[list[int], Sequence[ChunkKey], Sequence[int]]:
        """The slots of bounded groups, then the keys and slots of the others. All of these chunks count as used now."""
        if not self._bounded and not self.bounded_slots:
            return [], keys, slots
        self._now = now = self._now + 1
        bounded_slots, last_use = self.bounded_slots, self._last_use
        if slots and (missing := max(slots) + 1 - len(last_use)) > 0:
            last_use += [0] * (missing + len(last_use) // 8)
        for slot in slots:
            last_use[slot] = now
        if not self._bounded and bounded_slots.isdisjoint(slots):
            return [], keys, slots
        # In a lookup, bounded groups come last.
        split = len(slots)
        while split and slots[split - 1] in bounded_slots:
            split -= 1
        unbounded = slots[:split]
        if bounded_slots.isdisjoint(unbounded):
            return self._worth_most_last(slots[split:]), keys[:split], unbounded
        indexes = [index for index, slot in enumerate(slots) if slot not in bounded_slots]
        recent = self._worth_most_last([slot for slot in slots if slot in bounded_slots])
        return recent, [keys[index] for index in indexes] if keys else (), [slots[index] for index in indexes]

    def _worth_most_last(self, slots: Sequence[int]) -> list[int]:
        """Of a window that is the last chunk, of chunks that were demoted the first."""
        if self._demoted.isdisjoint(slots):
            return list(slots)
        demoted = [slot for slot in slots if slot in self._demoted]
        return [slot for slot in slots if slot not in self._demoted] + demoted[::-1]


def _group_of(key: ChunkKey) -> bytes:
    """Identifies a group: the key space, and its number."""
    return key[1:17] + key[24:26]
