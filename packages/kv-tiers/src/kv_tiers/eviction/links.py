"""Which resident chunk follows which, for policies that would otherwise evict a head before its tail.

A chunk that others follow is not a victim: a policy that reaches one sets it aside (`waiting`) and takes it back when
the last follower has left. So every chunk is skipped once, however long its prompt.
"""

import itertools
from collections.abc import Sequence


class Links:
    """Constant time per chunk. A chunk whose parent is unknown, or has left, follows none."""

    def __init__(self) -> None:
        self._number: dict[int, int] = {}  # by slot; a new one for every chunk that enters it
        self._parent: dict[int, tuple[int, int]] = {}  # slot → its parent's slot and number
        self._followers: dict[int, int] = {}
        self._last_number = 0
        self.waiting: set[int] = set()

    def added(self, slots: Sequence[int]) -> None:
        for number, slot in enumerate(slots, self._last_number + 1):
            self._number[slot] = number
        self._last_number += len(slots)

    def chain(self, slots: Sequence[int]) -> None:
        """Record that these chunks follow each other."""
        number, parent = self._number, self._parent
        for before, slot in itertools.pairwise(slots):
            if slot in number and before in number and not self._has_parent(slot):
                parent[slot] = before, number[before]
                self._followers[before] = self._followers.get(before, 0) + 1

    def is_followed(self, slot: int) -> bool:
        return slot in self._followers

    def removed(self, slot: int) -> int | None:
        """The chunk has left or is excluded. Returns its parent if that was waiting only for this chunk."""
        self.waiting.discard(slot)
        has_parent = self._has_parent(slot)
        del self._number[slot]
        self._followers.pop(slot, None)
        parent, _ = self._parent.pop(slot, (slot, 0))
        if not has_parent:
            return None
        self._followers[parent] -= 1
        if self._followers[parent]:
            return None
        del self._followers[parent]
        if parent not in self.waiting:
            return None
        self.waiting.remove(parent)
        return parent

    def _has_parent(self, slot: int) -> bool:
        known = self._parent.get(slot)
        return known is not None and self._number.get(known[0]) == known[1]
