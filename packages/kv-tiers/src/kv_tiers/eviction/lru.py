"""Least recently used, knowing that chunk n is worthless without chunks 0 … n-1."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kv_core.keys import ChunkKey


class LruPolicy:
    """Offer the chunk whose last use is oldest, and of one prefix its tail first.

    Constant time a key. One long scan flushes it.
    """

    def __init__(self) -> None:
        self._oldest_first: OrderedDict[ChunkKey, None] = OrderedDict()

    def added(self, key: ChunkKey) -> None:
        self._oldest_first[key] = None

    def used(self, prefix: Sequence[ChunkKey]) -> None:
        # Tail first, so that the head ends up youngest: without it the others cannot be found.
        touch = self._oldest_first.move_to_end
        for key in reversed(prefix):
            touch(key)

    def removed(self, key: ChunkKey) -> None:
        del self._oldest_first[key]

    def victims(self) -> Iterator[ChunkKey]:
        return iter(self._oldest_first)
