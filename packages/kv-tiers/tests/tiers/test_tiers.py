"""The tiers in this process keep the promises of every tier."""

from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Refused
from kv_core.testing import key_chain
from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.testing.tier_contract import BoundedTierContract
from kv_tiers.tier import Read, ReadsPrefixes, Tier, TierContext, Write
from kv_tiers.tiers.dram import DramTier
from kv_tiers.tiers.null import NullTier
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


class TestNull:
    """It keeps no promise but that of its answers."""

    def test_it_refuses_everything_and_has_nothing(self) -> None:
        tier, keys = NullTier(), key_chain(2)
        assert isinstance(tier, ReadsPrefixes)
        write = Write(keys[0], None, b"", memoryview(b""), 0)
        assert [type(outcome) for outcome in tier.store([write])] == [Refused]
        assert tier.holds(keys) == [False, False]
        read = Read(keys[0], bytearray(), memoryview(b""), 0)
        assert tier.load([read]) == tier.load_prefixes([read]) == [Absent()]
