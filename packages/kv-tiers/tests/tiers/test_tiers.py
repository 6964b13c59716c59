"""The tiers in this process keep the promises of every tier."""

from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.testing.tier_contract import BoundedTierContract
from kv_tiers.tier import Tier, TierContext
from kv_tiers.tiers.dram import DramTier


class TestDram(BoundedTierContract):
    def make(self, context: TierContext, chunks: int) -> Tier:
        return DramTier(HostPool.anonymous("dram", context.chunk_bytes, chunks), LruPolicy())
