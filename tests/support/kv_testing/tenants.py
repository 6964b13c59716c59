"""A cache shared by tenants, and the calls that tests make to it."""

from collections.abc import Sequence
from functools import partial

from kv_core.clock import Clock, HandClock
from kv_core.keys import ChunkKey, tenant_tag
from kv_eviction import make_policy
from kv_tiers.cache.extension import Extension
from kv_tiers.cache.local import LocalCache
from kv_tiers.pool.host_pool import HostPool, slot_bytes_for

from kv_testing.service_contract import CHUNK_BYTES, assert_adds_up

SLOT = slot_bytes_for(CHUNK_BYTES)
ANN, BEN, CYD = (tenant_tag(name) for name in ("ann", "ben", "cyd"))


def cache_of(
    slots: int,
    quotas: dict[bytes, int] | None = None,
    *,
    policy: str = "lru",
    name: str = "",
    clock: Clock | None = None,
    extensions: Sequence[Extension] = (),
) -> LocalCache:
    """quotas: in slots."""
    pool = HostPool.named(name, CHUNK_BYTES, slots) if name else HostPool.anonymous("t", CHUNK_BYTES, slots)
    return LocalCache(
        pool,
        policy=make_policy(policy, slots),
        clock=clock or HandClock(),
        quotas={tenant: chunks * SLOT for tenant, chunks in (quotas or {}).items()},
        share_policy=partial(make_policy, policy),
        extensions=extensions,
    )


def store(cache: LocalCache, keys: Sequence[ChunkKey]) -> int:
    lease = cache.begin_store(keys, "w")
    cache.commit(lease)
    return len(lease.keys)


def held(cache: LocalCache, keys: Sequence[ChunkKey], holder: str = "asker") -> int:
    chunks = cache.lookup(keys, holder).chunks
    cache.end(holder)
    return chunks


def used(cache: LocalCache) -> dict[bytes, int]:
    uses = cache.admin.tenants()
    assert sum(use.chunks for use in uses) == cache.counts().slots_used
    assert all(use.used_bytes == use.chunks * SLOT for use in uses)
    assert_adds_up(cache.counts())
    return {use.tenant: use.chunks for use in uses}
