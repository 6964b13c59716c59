"""Eviction in steps: chunks that can lose their last parts become smaller before any chunk is evicted.

Each step has its own order. Whole chunks are ranked by the tier's policy; smaller ones by their last use, because a
policy that learns from whole prompts would be misled by what is left of them. Victims come from the first order that
has any, so every chunk takes the first step before any takes the second, and is evicted only after the last.
"""

from collections.abc import Sequence

from kv_core.keys import ChunkKey

from kv_eviction.policy import EvictionPolicy
from kv_eviction.simple import LruPolicy


class PartsPolicy(EvictionPolicy):
    """Around another."""

    def __init__(self, policy: EvictionPolicy, steps: int) -> None:
        """steps: how often a chunk can be lowered."""
        self.policy = policy
        """That of whole chunks."""
        self._orders: list[EvictionPolicy] = [policy, *(LruPolicy() for _ in range(steps))]
        self._step_of: dict[int, int] = {}  # of the slots that were lowered

    def step(self, slot: int) -> int:
        """How often this chunk was lowered."""
        return self._step_of.get(slot, 0)

    def is_lowest(self, slot: int) -> bool:
        """Whether it was lowered as often as it can be."""
        return self.step(slot) == len(self._orders) - 1

    def lower(self, slot: int, step: int) -> None:
        """Rank this chunk, which is not excluded, among those of a later step from now on."""
        self.removed(slot)
        self._step_of[slot] = step
        self._orders[step].added((), [slot])

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._orders[0].added(keys, slots)

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for step, step_keys, step_slots in self._by_step(keys, slots):
            self._orders[step].used(step_keys, step_slots)

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for step, step_keys, step_slots in self._by_step(keys, slots):
            self._orders[step].extended(step_keys, step_slots)

    def turn_ended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        return None  # only the pool takes this into account

    def removed(self, slot: int) -> None:
        self._orders[self._step_of.pop(slot, 0)].removed(slot)

    def victim(self) -> int | None:
        return next((slot for order in self._orders if (slot := order.victim()) is not None), None)

    def refuses(self, key: ChunkKey, *, is_last: bool) -> bool:
        return False  # there are parts of others to be dropped first

    def exclude(self, slot: int) -> None:
        self._orders[self.step(slot)].exclude(slot)

    def reinsert(self, slots: Sequence[int]) -> None:
        for step, _, step_slots in self._by_step((), slots):
            self._orders[step].reinsert(step_slots)

    def _by_step(
        self, keys: Sequence[ChunkKey], slots: Sequence[int]
    ) -> list[tuple[int, Sequence[ChunkKey], Sequence[int]]]:
        """The chunks of each step. keys: those of the slots, perhaps followed by more of the prompt; or none."""
        if self._step_of.keys().isdisjoint(slots):
            return [(0, keys, slots)] if slots else []
        groups: list[tuple[int, Sequence[ChunkKey], Sequence[int]]] = []
        for step in range(len(self._orders)):
            indexes = [index for index, slot in enumerate(slots) if self.step(slot) == step]
            if indexes:
                step_keys = [keys[index] for index in indexes] if keys else ()
                groups.append((step, step_keys, [slots[index] for index in indexes]))
        return groups
