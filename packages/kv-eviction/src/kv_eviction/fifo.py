"""First in, first out: the baseline that ignores use (Belady, IBM Systems Journal 5:2, 1966)."""

from collections.abc import Sequence

from kv_core.keys import ChunkKey

from kv_eviction.one_order import OneOrder


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
