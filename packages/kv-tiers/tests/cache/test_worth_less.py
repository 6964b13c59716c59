"""Chunks that the policy finds worth less than what the pool holds: not stored, unless somebody else can have them."""

from collections.abc import Iterator

import pytest
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_eviction import LruPolicy
from kv_eviction.prefix import PrefixPolicy
from kv_tiers import HostPool, LocalCache, chunk_header
from kv_tiers.lanes.lane import Lane
from kv_tiers.tiers.dram import DramTier

CHUNKS, LENGTH = 256, 8


def loop() -> list[list[ChunkKey]]:
    """Of 1.8 times the pool: LRU would find nothing of it, ever."""
    return [key_chain(LENGTH, branch=str(number)) for number in range(58)]


def request(cache: LocalCache, keys: list[ChunkKey], *, hold_s: float = 0.0) -> int:
    """How many chunks of the prompt were held; those that were not are stored."""
    held = cache.lookup(keys, "engine").chunks
    cache.end("engine")
    if held < len(keys):
        lease = cache.begin_store(keys, "engine", hold_s=hold_s)
        assert not lease.refused, "there is room for each, so an engine has nothing to report"
        cache.commit(lease)
        cache.end("engine")
    return held


@pytest.fixture
def learned() -> Iterator[LocalCache]:
    cache = LocalCache(HostPool.anonymous("h", 100, CHUNKS), policy=PrefixPolicy(CHUNKS))
    for keys in loop() * 10:
        request(cache, keys)
    yield cache
    cache.close()


def test_a_pool_keeps_what_fits_of_a_loop_that_is_larger(learned: LocalCache) -> None:
    refused = learned.counts().chunks_refused
    assert sum(request(learned, keys) for keys in loop()) > 0.8 * 0.9 * CHUNKS
    assert learned.counts().chunks_refused > refused


def test_what_another_engine_waits_for_is_stored_whatever_it_is_worth(learned: LocalCache) -> None:
    keys = key_chain(LENGTH, branch="handed over")
    request(learned, keys, hold_s=10.0)
    assert learned.lookup(keys, "decoder").chunks == LENGTH


def test_what_a_lower_tier_may_take_is_stored_whatever_it_is_worth() -> None:
    below = DramTier(HostPool.anonymous("below", 100, 2 * CHUNKS), LruPolicy())
    lane = Lane(below, chunk_header.format_id("worth less"))
    pool = HostPool.anonymous("h", 100, CHUNKS)
    cache = LocalCache(pool, policy=PrefixPolicy(CHUNKS), lanes=[(lane, "through")])
    for keys in loop() * 10:
        request(cache, keys)
    assert cache.counts().chunks_refused == 0
    cache.close()
