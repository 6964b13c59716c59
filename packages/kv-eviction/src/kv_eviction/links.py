"""Which resident chunk follows which, for policies that would otherwise evict a head before its tail.

A chunk that others follow is not a victim: a policy that reaches one sets it aside (`waiting`) and takes it back when
the last follower has left. So every chunk is skipped once, however long its prompt.

A chunk that is excluded keeps what it follows, but holds nothing back. Links are only made of chunks in the order of a
prompt, or they could lead in a circle, and each chunk in it would be followed for good.
"""

import itertools
from collections.abc import Sequence


class Links:
    """Constant time per chunk. A chunk whose parent is unknown, or has left, follows none."""

    def __init__(self) -> None:
        self._number: dict[int, int] = {}  # by slot; a new one for every chunk that enters it
        self._parent: dict[int, tuple[int, int]] = {}  # slot → its parent's slot and number
        self._followers: dict[int, int] = {}  # how many follow it, without excluded ones
        self._last_number = 0
        self.excluded: set[int] = set()
        self.waiting: set[int] = set()

    def added(self, slots: Sequence[int]) -> None:
        for number, slot in enumerate(slots, self._last_number + 1):
            self._number[slot] = number
        self._last_number += len(slots)

    def chain(self, slots: Sequence[int]) -> None:
        """Record that these chunks follow each other. They are in the order of their prompt."""
        number_of, parent_of = self._number, self._parent
        for parent, slot in itertools.pairwise(slots):
            if slot in number_of and parent in number_of and not self._has_parent(slot):
                parent_of[slot] = parent, number_of[parent]
                if slot not in self.excluded:
                    self._followers[parent] = self._followers.get(parent, 0) + 1

    def is_followed(self, slot: int) -> bool:
        return slot in self._followers

    def removed(self, slot: int) -> int | None:
        """The chunk has left. Returns its parent if that was waiting only for this chunk."""
        parent = None if slot in self.excluded else self.exclude(slot)
        self.excluded.remove(slot)
        del self._number[slot]
        self._followers.pop(slot, None)
        self._parent.pop(slot, None)
        return parent

    def reinserted(self, slots: Sequence[int]) -> None:
        """These are no longer excluded."""
        self.excluded.difference_update(slots)
        for slot in slots:
            if self._has_parent(slot):
                parent, _ = self._parent[slot]
                self._followers[parent] = self._followers.get(parent, 0) + 1

    def exclude(self, slot: int) -> int | None:
        """The chunk is excluded. Returns its parent as `removed` does."""
        self.waiting.discard(slot)
        self.excluded.add(slot)
        if not self._has_parent(slot):
            return None
        parent, _ = self._parent[slot]
        self._followers[parent] -= 1
        if self._followers[parent]:
            return None
        del self._followers[parent]
        if parent not in self.waiting:
            return None
        self.waiting.remove(parent)
        return parent

    def _has_parent(self, slot: int) -> bool:
        link = self._parent.get(slot)
        return link is not None and self._number.get(link[0]) == link[1]
