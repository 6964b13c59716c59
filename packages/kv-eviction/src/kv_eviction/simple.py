"""Policies that keep one order: LRU, MRU, FIFO, LFU; and one that keeps none and evicts nothing."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kv_core.keys import ChunkKey

from kv_eviction.policy import EvictionPolicy

# Which resident chunk follows which, for policies that would otherwise evict a head before its tail.
#
# A chunk that others follow is not a victim: a policy that reaches one sets it aside (`waiting`) and takes it back
# when the last follower has left. So every chunk is skipped once, however long its prompt.
#
# A chunk that is excluded keeps what it follows, but holds nothing back. Links are only made of chunks in the order of
# a prompt, or they could lead in a circle, and each chunk in it would be followed for good.


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


class OneOrder(EvictionPolicy):
    """Offers the oldest chunk. The policy decides which that is, and where reinserted ones go."""

    def __init__(self) -> None:
        self._oldest_first: OrderedDict[int, None] = OrderedDict()
        self._excluded: set[int] = set()

    def removed(self, slot: int) -> None:
        if slot in self._excluded:
            self._excluded.remove(slot)
        else:
            del self._oldest_first[slot]

    def victim(self) -> int | None:
        return next(iter(self._oldest_first), None)

    def demote(self, slot: int) -> None:
        """Offer this one next, unless it is excluded."""
        if slot not in self._excluded:
            self._oldest_first.move_to_end(slot, last=False)

    def exclude(self, slot: int) -> None:
        del self._oldest_first[slot]
        self._excluded.add(slot)


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

    def victims(self, at_most: int) -> Iterable[int]:
        return itertools.islice(self._oldest_first, at_most)

    def reinsert(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self._excluded.remove(slot)
            self._oldest_first[slot] = None


# First in, first out: the baseline that ignores use (Belady, IBM Systems Journal 5:2, 1966).


class FifoPolicy(OneOrder):
    """Offer the chunk that arrived first. O(1) a chunk.

    A chunk counts as arriving with the youngest of its descendants, because otherwise the head of a prompt that is
    stored in pieces would be evicted before its tail.
    """

    def __init__(self) -> None:
        super().__init__()
        self._grew = False

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self._oldest_first[slot] = None
        self._grew = True

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        pass

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        if not self._grew:
            return
        self._grew = False
        for slot in reversed(slots):
            if slot in self._oldest_first:
                self._oldest_first.move_to_end(slot)

    def reinsert(self, slots: Sequence[int]) -> None:
        # They are the oldest: each was the next victim when it was excluded.
        for slot in slots:
            self._excluded.remove(slot)
            self._oldest_first[slot] = None
            self._oldest_first.move_to_end(slot, last=False)


class NoopPolicy(FifoPolicy):
    """Offer nothing: what is held stays, and what comes to a full tier is not stored."""

    def victim(self) -> int | None:
        return None


# Most recently used: suits circular scans that do not fit (Chou and DeWitt, "An evaluation of buffer management
# strategies for relational database systems", VLDB 1985); a baseline for everything else.


class MruPolicy(EvictionPolicy):
    """Offer the most recently used chunk of those that no resident chunk follows. O(1) per chunk."""

    def __init__(self) -> None:
        self._youngest_last: OrderedDict[int, None] = OrderedDict()
        self._links = Links()

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._links.added(slots)
        self._links.chain(slots)
        for slot in slots:
            self._youngest_last[slot] = None

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        # Head first, unlike in other policies: here the youngest is evicted, and that must be the tail.
        for slot in slots:
            if slot not in self._links.excluded:
                self._links.waiting.discard(slot)
                self._youngest_last[slot] = None
                self._youngest_last.move_to_end(slot)

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._links.chain(slots)
        self.used(keys, slots)

    def removed(self, slot: int) -> None:
        self._youngest_last.pop(slot, None)  # waiting and excluded ones are in no order
        self._offer_again(self._links.removed(slot))

    def victim(self) -> int | None:
        while self._youngest_last:
            slot = next(reversed(self._youngest_last))
            if not self._links.is_followed(slot):
                return slot
            del self._youngest_last[slot]
            self._links.waiting.add(slot)
        return None

    def exclude(self, slot: int) -> None:
        del self._youngest_last[slot]
        self._offer_again(self._links.exclude(slot))

    def reinsert(self, slots: Sequence[int]) -> None:
        self._links.reinserted(slots)
        for slot in slots:
            self._youngest_last[slot] = None

    def _offer_again(self, slot: int | None) -> None:
        """Offer a parent again (None: there is none), whose last follower has left."""
        if slot is not None:
            self._youngest_last[slot] = None


# Least frequently used, in constant time (Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache
# eviction scheme", 2010): chunks of one count share a list, and a use moves a chunk to the next list.


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
                if len(self._counts) > 64 + 2 * len(self._by_uses):
                    # Victims remove only the lowest former counts; of others every use would leave one more.
                    self._counts, self._in_heap = sorted(self._by_uses), set(self._by_uses)
        self._by_uses[uses][slot] = None

    def _take_out(self, slot: int) -> None:
        uses = self._uses_of[slot]
        order = self._by_uses[uses]
        del order[slot]
        if not order:
            del self._by_uses[uses]
