"""`LocalCache` keeps every promise of a `CacheService`, in an anonymous pool and in a named one."""

import uuid

import pytest
from kv_core.clock import HandClock
from kv_core.errors import ConfigError, MisuseError
from kv_core.service import CacheService, ReadLease
from kv_core.testing import key_chain
from kv_eviction import LruPolicy
from kv_testing.service_contract import CHUNK_BYTES, ServiceContract
from kv_tiers import HostPool, LocalCache


class TestInAnAnonymousPool(ServiceContract):
    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        self.teardown_method()
        self.cache = LocalCache(HostPool.anonymous("test", CHUNK_BYTES, slots), clock=clock)
        return self.cache, self.cache.pool.view

    def teardown_method(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()


class TestInANamedPool(ServiceContract):
    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        self.teardown_method()
        self.name = f"test-{uuid.uuid4().hex}"
        self.cache = LocalCache(HostPool.named(self.name, CHUNK_BYTES, slots), clock=clock)
        return self.cache, self.cache.pool.view

    def teardown_method(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            HostPool.unlink(self.name)


def make(slots: int = 4) -> LocalCache:
    return LocalCache(HostPool.anonymous("test", CHUNK_BYTES, slots), clock=HandClock())


def test_a_closed_cache_says_so_and_takes_no_harm() -> None:
    cache = make()
    writing = cache.begin_store(key_chain(2), "w")
    cache.lookup(key_chain(1), "r")
    cache.close()
    cache.close()
    cache.end("r")
    assert not cache.release(writing)
    for call in (lambda: cache.lookup([], "r"), lambda: cache.begin_store([], "w"), cache.counts, cache.clear):
        with pytest.raises(MisuseError, match="closed"):
            call()


def test_a_pool_that_somebody_still_uses_is_not_unmapped_under_them() -> None:
    cache = make()
    borrowed = cache.pool.view[:10]
    with pytest.raises(BufferError, match="still exists"):
        cache.close()
    borrowed[:] = b"0123456789"
    borrowed.release()
    cache.close()


def test_a_lease_must_last_longer_than_nothing() -> None:
    pool = HostPool.anonymous("test", CHUNK_BYTES, 1)
    for lease_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="lease_s"):
            LocalCache(pool, lease_s=lease_s)
    pool.close()


def test_a_thousand_leased_chunks_are_met_once_by_those_who_need_room() -> None:
    """Looking for a victim must not walk past all that is leased each time."""

    class CountingPolicy(LruPolicy):
        offers = 0

        def victim(self) -> int | None:
            self.offers += 1
            return super().victim()

    policy = CountingPolicy()
    cache = LocalCache(HostPool.anonymous("test", CHUNK_BYTES, 1010), policy=policy, clock=HandClock())
    for number in range(100):
        keys = key_chain(10, branch=f"leased {number}")
        cache.commit(cache.begin_store(keys, "w"))
        cache.lookup(keys, f"r{number}")
    for number in range(50):
        cache.commit(cache.begin_store(key_chain(10, branch=f"passing {number}"), "w"))
    assert policy.offers < 1000 + 50 * 12
    for number in range(100):
        cache.end(f"r{number}")
    assert len(cache.begin_store(key_chain(1010, branch="all"), "w").keys) == 1010
    cache.close()


def test_the_lease_of_a_load_is_its_own() -> None:
    """The promise may end before the copy does."""
    cache = make()
    keys = key_chain(2)
    cache.commit(cache.begin_store(keys, "w"))
    cache.lookup(keys, "request")
    lease = cache.load(keys, "worker")
    assert isinstance(lease, ReadLease)
    cache.end("request")
    assert cache.begin_store(key_chain(4, branch="other"), "w").keys == tuple(key_chain(2, branch="other"))
    assert cache.release(lease)
    cache.close()


def test_resident_keys_are_those_that_can_be_found() -> None:
    cache = make()
    keys = key_chain(3)
    cache.commit(cache.begin_store(keys[:2], "w"))
    cache.begin_store(keys, "w")
    assert cache.admin.resident_keys() == keys[:2]
    cache.close()
