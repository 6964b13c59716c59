"""`LocalCache` against a dict that is always right, under any order of calls."""

import uuid

from hypothesis import settings
from kv_core.clock import HandClock
from kv_core.keys import ChunkKey
from kv_core.service import CacheService
from kv_eviction import make_policy
from kv_testing.model import ServiceMachine
from kv_testing.service_contract import CHUNK_BYTES, GROUP_BYTES
from kv_tiers import HostPool, LocalCache

SETTINGS = settings(max_examples=150, stateful_step_count=40, deadline=None)


class LocalMachine(ServiceMachine):
    cache: LocalCache
    policy = "prefix"

    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        pool = HostPool.anonymous("model", CHUNK_BYTES, slots, group_bytes=GROUP_BYTES)
        self.cache = LocalCache(pool, policy=make_policy(self.policy, slots), clock=clock)
        return self.cache, self.cache.pool.view

    def resident(self) -> list[ChunkKey]:
        residency = self.cache._index
        assert min(residency._leases) >= 0
        return self.cache.admin.resident_keys()

    def close(self) -> None:
        assert not self.cache._leases.holders()
        assert not any(self.cache._index._leases)
        self.cache.close()


class LruMachine(LocalMachine):
    policy = "lru"


class NamedMachine(LocalMachine):
    """The same in a named pool; and when all is over, the next process finds exactly what was held, and believes it."""

    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        self.name = f"model-{uuid.uuid4().hex}"
        pool = HostPool.named(self.name, CHUNK_BYTES, slots, group_bytes=GROUP_BYTES)
        self.cache = LocalCache(pool, policy=make_policy(self.policy, slots), clock=clock)
        return self.cache, self.cache.pool.view

    def close(self) -> None:
        super().close()
        try:
            pool = HostPool.named(self.name, CHUNK_BYTES, self.model.slots, group_bytes=GROUP_BYTES)
            again = LocalCache(pool, clock=self.clock)
            assert set(again.admin.resident_keys()) == set(self.model.held)
            for key, chunk in self.model.held.items():
                lease = again.load([key], "r")
                (extent,) = lease.extents
                assert bytes(again.pool.view[extent.offset : extent.offset + extent.nbytes]) == chunk.data
            again.close()
        finally:
            HostPool.unlink(self.name)


TestLocalCacheAgainstTheModel = LocalMachine.TestCase
TestLocalCacheAgainstTheModel.settings = SETTINGS
TestLruAgainstTheModel = LruMachine.TestCase
TestLruAgainstTheModel.settings = SETTINGS
TestNamedPoolAgainstTheModel = NamedMachine.TestCase
TestNamedPoolAgainstTheModel.settings = settings(SETTINGS, max_examples=60)
