"""Least recently used."""

from collections.abc import Sequence

from kv_core.keys import ChunkKey

from kv_eviction.one_order import OneOrder


class LruPolicy(OneOrder):
    """Offer the chunk whose last use is oldest. O(1) per chunk; one long scan flushes it."""

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self._oldest_first[slot] = None

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        if self._excluded:
            slots = [slot for slot in slots if slot not in self._excluded]
        touch = self._oldest_first.move_to_end
        # Tail first: chunk n is worthless without 0..n-1, so the head must end up youngest.
        for slot in reversed(slots):
            touch(slot)

    extended = used

    def reinsert(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self._excluded.remove(slot)
            self._oldest_first[slot] = None
