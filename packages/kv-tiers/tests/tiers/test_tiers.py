"""The tiers in this process keep the promises of every tier."""

from kv_core.keys import ChunkKey
from kv_eviction.simple import LruPolicy
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.testing.tier_contract import BoundedTierContract
from kv_tiers.tier import Tier, TierContext
from kv_tiers.tiers.dram import DramTier
from kv_tiers.tiers.space import runs


class TestDram(BoundedTierContract):
    def make(self, context: TierContext, chunks: int) -> Tier:
        return DramTier(HostPool.anonymous("dram", context.chunk_bytes, chunks), LruPolicy())

    def spoil(self, key: ChunkKey, at: int) -> None:
        assert isinstance(self.tier, DramTier)
        (entry,) = self.tier._index.begin_load([key])
        assert entry is not None
        for first, count in runs(self.tier._index.extent(entry).units):
            nbytes = count * self.tier._unit_bytes
            if at < nbytes:
                self.tier._pool.view[first * self.tier._unit_bytes + at] ^= 4
                break
            at -= nbytes
        self.tier._index.end_load([entry])
