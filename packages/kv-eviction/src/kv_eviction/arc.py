"""ARC, adaptive replacement (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003).

Chunks requested once and chunks requested repeatedly are in two lists, and the keys of recently evicted chunks tell
which list was too short. There are two differences from the paper: a victim is chosen before it is known which chunk
replaces it, so the paper's exception for a key in the second ghost list does not apply; and a chunk that others follow
is not evicted before them.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kv_core.keys import ChunkKey

from kv_eviction.policy import EvictionPolicy
from kv_eviction.simple import Links

_ONCE, _AGAIN = 0, 1


class ArcPolicy(EvictionPolicy):
    """Offer the oldest chunk of the list that is longer than it should be. O(1) a chunk; as many ghosts as chunks."""

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity = capacity_chunks
        self._once_target = 0.0
        self._oldest_first: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self._ghosts: tuple[OrderedDict[ChunkKey, None], OrderedDict[ChunkKey, None]] = (OrderedDict(), OrderedDict())
        self._list_of: dict[int, int] = {}
        self._key_at: dict[int, ChunkKey] = {}
        self._chunks = [0, 0]  # of each list, with those that wait or are excluded
        self._links = Links()
        self._offered: int | None = None

    @property
    def once_share(self) -> float:
        """The part of the tier that chunks requested once should have."""
        return self._once_target / self._capacity

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._offered = None
        self._links.added(slots)
        self._links.chain(slots)
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            self._key_at[slot] = key
            list_index = self._list_of[slot] = self._list_for(key)
            self._chunks[list_index] += 1
            self._oldest_first[list_index][slot] = None

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._offered = None
        for slot in reversed(slots):
            list_index = self._list_of[slot]
            if list_index == _ONCE:
                self._list_of[slot] = _AGAIN
                self._chunks[_ONCE] -= 1
                self._chunks[_AGAIN] += 1
            if slot not in self._links.excluded:
                self._oldest_first[list_index].pop(slot, None)
                self._links.waiting.discard(slot)
                self._oldest_first[_AGAIN][slot] = None

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._offered = None
        self._links.chain(slots)
        for slot in reversed(slots):
            if slot not in self._links.excluded:
                order = self._oldest_first[self._list_of[slot]]
                self._links.waiting.discard(slot)
                order[slot] = None
                order.move_to_end(slot)

    def removed(self, slot: int) -> None:
        list_index = self._list_of.pop(slot)
        key = self._key_at.pop(slot)
        self._chunks[list_index] -= 1
        if slot == self._offered:  # evicted, not forgotten
            self._ghosts[list_index][key] = None
            self._trim()
        self._offered = None
        self._oldest_first[list_index].pop(slot, None)  # waiting and excluded ones are in no order
        self._offer_again(self._links.removed(slot))

    def victim(self) -> int | None:
        if self._offered is None:
            preferred = _ONCE if self._chunks[_ONCE] > self._once_target else _AGAIN
            self._offered = self._oldest(preferred)
            if self._offered is None:
                self._offered = self._oldest(1 - preferred)
        return self._offered

    def exclude(self, slot: int) -> None:
        self._offered = None
        del self._oldest_first[self._list_of[slot]][slot]
        self._offer_again(self._links.exclude(slot))

    def reinsert(self, slots: Sequence[int]) -> None:
        self._offered = None
        self._links.reinserted(slots)
        for slot in reversed(slots):
            self._oldest_first[self._list_of[slot]][slot] = None

    def _list_for(self, key: ChunkKey) -> int:
        """The list for an arrival; adapts the lengths of the lists if the chunk has been here before."""
        once_ghosts, again_ghosts = self._ghosts
        if key in once_ghosts:
            self._once_target = min(self._capacity, self._once_target + max(1.0, len(again_ghosts) / len(once_ghosts)))
            del once_ghosts[key]
            return _AGAIN
        if key in again_ghosts:
            self._once_target = max(0.0, self._once_target - max(1.0, len(once_ghosts) / len(again_ghosts)))
            del again_ghosts[key]
            return _AGAIN
        return _ONCE

    def _trim(self) -> None:
        once_ghosts, again_ghosts = self._ghosts
        while once_ghosts and self._chunks[_ONCE] + len(once_ghosts) > self._capacity:
            once_ghosts.popitem(last=False)
        while again_ghosts and len(once_ghosts) + len(again_ghosts) > self._capacity:
            again_ghosts.popitem(last=False)

    def _oldest(self, list_index: int) -> int | None:
        order = self._oldest_first[list_index]
        while order:
            slot = next(iter(order))
            if not self._links.is_followed(slot):
                return slot
            del order[slot]
            self._links.waiting.add(slot)
        return None

    def _offer_again(self, slot: int | None) -> None:
        """Offer a parent again (None: there is none), whose last follower has left."""
        if slot is not None:
            order = self._oldest_first[self._list_of[slot]]
            order[slot] = None
            order.move_to_end(slot, last=False)
