"""What tiers answer from an index of their own in memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kv_core.keys import ChunkKey

from kv_tiers.index.journal import Journal
from kv_tiers.tier import RankedChunk
from kv_tiers.tiers.index import ExtentIndex


class IndexedTier(ABC):
    """The calls of a `Tier`, of `TracksKeys` and of `RanksChunks` that need no more than the index."""

    def __init__(self, index: ExtentIndex) -> None:
        self._index = index

    @abstractmethod
    def discard(self, keys: Sequence[ChunkKey]) -> None: ...

    def clear(self) -> None:
        self.discard(self._index.all_keys())

    def clear_tenant(self, tenant: bytes) -> None:
        self.discard([key for key in self._index.all_keys() if key.tenant == tenant])

    def track(self, journal: Journal) -> None:
        self._index.track(journal)

    def all_keys(self) -> list[ChunkKey]:
        return self._index.all_keys()

    def most_worth_first(self) -> list[RankedChunk]:
        return self._index.most_worth_first()
