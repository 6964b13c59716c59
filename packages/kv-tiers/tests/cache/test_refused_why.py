"""The reason of a store that got no room names what is full, and nothing else."""

import pytest
from kv_core.keys import tenant_tag
from kv_core.testing import key_chain
from kv_eviction import LruPolicy
from kv_testing.service_contract import CHUNK_BYTES
from kv_tiers import HostPool, LocalCache
from kv_tiers.pool.host_pool import slot_bytes_for

SLOTS = 8


@pytest.mark.parametrize(
    ("quota", "salt", "said", "not_said"),
    [
        (0, None, "each of the pool's 8 slots", "quota"),
        (3, "acme", "each of the 3 slots that are the quota of its tenant", "8 slots"),
        (3, None, "each of the 5 slots that the quotas leave to other tenants", "the pool's"),
        (8, None, "the quotas leave nothing to other tenants", "is being read"),
    ],
)
def test_what_is_full_is_named(quota: int, salt: str | None, said: str, not_said: str) -> None:
    quotas = {tenant_tag("acme"): quota * slot_bytes_for(CHUNK_BYTES)} if quota else {}
    pool = HostPool.anonymous("host", CHUNK_BYTES, SLOTS)
    cache = LocalCache(pool, policy=LruPolicy(), quotas=quotas, share_policy=lambda _: LruPolicy())
    refused = cache.begin_store(key_chain(12, salt=salt), "w").refused
    assert said in refused and not_said not in refused
    cache.end("w")
    cache.close()
