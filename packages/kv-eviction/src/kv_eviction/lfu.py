"""Least frequently used, in constant time (Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache
eviction scheme", 2010): chunks of one count share a list, and a use moves a chunk to the next list.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from kv_core.keys import ChunkKey

from kv_eviction.policy import EvictionPolicy


class LfuPolicy(EvictionPolicy):
    """Offer the chunk that was requested least often since it arrived; among equals, the least recently used.

    O(1) per chunk; a victim takes the logarithm of the number of different counts. Counts never decay, so chunks that
    were once popular stay. A prefix is requested at least as often as what follows it, and among equals its tail is
    older: tails are evicted first.
    """

    def __init__(self) -> None:
        self._uses_of: dict[int, int] = {}
        self._by_uses: dict[int, OrderedDict[int, None]] = {}
        self._excluded: set[int] = set()
        self._counts: list[int] = []  # a heap of the keys of _by_uses, and some former ones
        self._in_heap: set[int] = set()

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self._uses_of[slot] = 0
            self._insert(slot)

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            if slot in self._excluded:
                self._uses_of[slot] += 1
            else:
                self._take_out(slot)
                self._uses_of[slot] += 1
                self._insert(slot)

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            if slot not in self._excluded:
                self._by_uses[self._uses_of[slot]].move_to_end(slot)

    def removed(self, slot: int) -> None:
        if slot in self._excluded:
            self._excluded.remove(slot)
        else:
            self._take_out(slot)
        del self._uses_of[slot]

    def victim(self) -> int | None:
        while self._counts and self._counts[0] not in self._by_uses:
            self._in_heap.remove(heapq.heappop(self._counts))
        return next(iter(self._by_uses[self._counts[0]])) if self._counts else None

    def exclude(self, slot: int) -> None:
        self._take_out(slot)
        self._excluded.add(slot)

    def reinsert(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self._excluded.remove(slot)
            self._insert(slot)

    def _insert(self, slot: int) -> None:
        uses = self._uses_of[slot]
        if uses not in self._by_uses:
            self._by_uses[uses] = OrderedDict()
            if uses not in self._in_heap:
                self._in_heap.add(uses)
                heapq.heappush(self._counts, uses)
        self._by_uses[uses][slot] = None

    def _take_out(self, slot: int) -> None:
        uses = self._uses_of[slot]
        order = self._by_uses[uses]
        del order[slot]
        if not order:
            del self._by_uses[uses]
