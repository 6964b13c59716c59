"""The order in which a pool is drained."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_eviction import POLICY_NAMES
from kv_testing.cache_servers import SLOT_BYTES
from kv_testing.service_contract import CHUNK_BYTES
from kv_tiers.build import build_local_cache
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import HostConfig
from kv_tiers.index.residency import most_worth_first


def made(slots: int, policy: str) -> LocalCache:
    host = HostConfig(capacity_bytes=slots * SLOT_BYTES, policy=policy)
    return build_local_cache(host, group_bytes=(CHUNK_BYTES,), fingerprint="f")


def store(cache: LocalCache, keys: Sequence[ChunkKey]) -> None:
    cache.commit(cache.begin_store(keys, "w"))
    cache.end("w")


def order_of(cache: LocalCache) -> list[ChunkKey]:
    slots = most_worth_first(cache._index, cache._host.lock)
    return [key for slot in slots if (key := cache._index.key_at(slot)) is not None]


@given(
    policy=st.sampled_from(POLICY_NAMES),
    uses=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=30),
    leased=st.sets(st.integers(0, 5), max_size=3),
)
def test_every_chunk_has_a_place_and_the_policy_goes_on_as_before(
    policy: str, uses: list[tuple[int, int]], leased: set[int]
) -> None:
    """Whatever was stored and used before, and while some of it is leased."""
    cache = made(16, policy)
    try:
        prompts = [key_chain(6, branch=str(number)) for number in range(6)]
        for number, chunks in uses:
            cache.lookup(prompts[number][:chunks], "r")
            store(cache, prompts[number][:chunks])
            cache.end("r")
        for number in leased:
            cache.lookup(prompts[number], f"leased {number}")
        order = order_of(cache)
        assert sorted(order) == sorted(cache.admin.resident_keys())
        assert sorted(order_of(cache)) == sorted(order)
        for number in leased:
            cache.end(f"leased {number}")
        for number in range(6):  # it evicts as ever: no slot was lost
            store(cache, key_chain(16, branch=f"new {number}"))
            assert cache.counts().chunks_resident == 16
    finally:
        cache.close()


def test_what_was_used_last_is_first_and_heads_are_before_their_tails() -> None:
    cache = made(16, "lru")
    try:
        first, second, third = (key_chain(4, branch=name) for name in ("first", "second", "third"))
        for keys in (first, second, third):
            store(cache, keys)
        cache.lookup(first, "r")
        cache.end("r")
        assert order_of(cache) == [*first, *third, *second]
        assert order_of(cache) == [*first, *third, *second]  # nor did it change that
    finally:
        cache.close()
