"""Most recently used: suits circular scans that do not fit (Chou and DeWitt, "An evaluation of buffer management
strategies for relational database systems", VLDB 1985); a baseline for everything else.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kv_core.keys import ChunkKey

from kv_eviction.links import Links
from kv_eviction.policy import EvictionPolicy


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
