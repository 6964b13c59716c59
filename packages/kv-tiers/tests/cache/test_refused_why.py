"""The reason of a store that got no room names what is full, and nothing else."""

from pathlib import Path

import pytest
from kv_core.keys import tenant_tag
from kv_core.testing import key_chain
from kv_eviction import LruPolicy
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.tenants import ANN, SLOT, cache_of, held, store
from kv_testing.wait import until
from kv_tiers import HostPool, LocalCache
from kv_tiers.build import build_local_cache
from kv_tiers.config import HostConfig
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


def test_with_the_policy_noop_a_full_pool_keeps_what_it_has_and_says_so() -> None:
    cache = cache_of(8, {ANN: 4}, policy="noop")
    first, mine = key_chain(3, branch="first"), key_chain(4, salt="ann")
    assert (store(cache, first), store(cache, mine)) == (3, 4)
    lease = cache.begin_store(key_chain(3, branch="second"), "w")
    cache.commit(lease)
    assert len(lease.keys) == 1 and "kept by the policy" in lease.refused  # there was room for its first chunk
    for number in range(20):
        assert store(cache, key_chain(2, branch=str(number), salt="ann")) == 0
        assert store(cache, key_chain(2, branch=str(number))) == 0
    assert (held(cache, first), held(cache, mine), cache.counts().chunks_evicted) == (3, 4, 0)
    cache.admin.set_quota(ANN, 2 * SLOT)  # what no longer fits stays too
    assert (held(cache, mine), store(cache, key_chain(1, branch="third", salt="ann"))) == (4, 0)
    assert cache.admin.clear_tenant(ANN) == 4
    assert store(cache, key_chain(4, branch="after", salt="ann")) == 2
    cache.close()


def test_with_the_policy_noop_a_full_tier_below_keeps_what_it_has(tmp_path: Path) -> None:
    disk = {"type": "disk", "directory": str(tmp_path), "capacity_bytes": 64 * SLOT, "policy": "noop"}
    cache = build_local_cache(
        HostConfig(capacity_bytes=4 * SLOT), group_bytes=(CHUNK_BYTES,), fingerprint="f", tiers=[disk]
    )
    prompts = [key_chain(2, branch=str(number)) for number in range(30)]
    for prompt in prompts:
        store(cache, prompt)
        until(lambda: not cache.lower.states()[0].spill.waiting and not cache.lower.states()[0].spill.under_way)
    (lane,) = cache.lower.lanes
    is_held = [all(lane.tier.holds(prompt)) for prompt in prompts]
    assert is_held == sorted(is_held, reverse=True) and 8 < sum(is_held) < 16
    cache.close()
