"""A frozen cache: what it holds stays and is served, and nothing comes or goes, whatever is asked of it."""

from kv_core.service import LoadFailed
from kv_core.testing import key_chain
from kv_testing.tenants import ANN, SLOT, cache_of, held, store, used
from kv_testing.tower import Tower, leading
from kv_tiers.config import ColdConfig

KEYS = key_chain(8)


def test_stores_are_declined_and_those_that_have_begun_are_completed() -> None:
    cache = cache_of(8, {})
    begun, given_up = (
        cache.begin_store(key_chain(3, branch="begun"), "w"),
        cache.begin_store(key_chain(1, branch="x"), "w"),
    )
    store(cache, KEYS[:4])
    cache.admin.freeze(True)
    cache.commit(begun)
    assert cache.release(given_up)
    lease = cache.begin_store(KEYS, "w", hold_s=5.0)  # there is room for one, and for another engine
    assert (lease.keys, lease.refused) == ((), "the cache is frozen, and stores nothing new")
    cache.commit(lease)
    assert (held(cache, KEYS), held(cache, begun.keys)) == (4, 3)
    assert cache.begin_store(KEYS[:4], "w").refused == ""  # all of it is here
    assert cache.counts().chunks_evicted == 0
    assert not isinstance(cache.load(KEYS[:4], "r"), LoadFailed)
    cache.admin.freeze(False)
    assert store(cache, key_chain(6, branch="new")) == 4  # the others are being read, or belong to that prompt
    cache.close()


def test_a_quota_is_trimmed_when_it_ends_and_what_is_cleared_goes_at_once() -> None:
    cache = cache_of(12, {ANN: 6})
    mine = key_chain(6, salt="ann")
    store(cache, mine)
    store(cache, KEYS[:4])
    cache.admin.freeze(True)
    cache.admin.set_quota(ANN, 2 * SLOT)
    assert used(cache)[ANN] == 6
    store(cache, mine)
    assert (held(cache, mine), cache.counts().chunks_evicted) == (6, 0)
    cache.forget(KEYS[2:4])
    assert held(cache, KEYS) == 2
    cache.admin.freeze(False)
    assert (used(cache)[ANN], held(cache, mine)) == (2, 2)
    cache.close()


def test_chunks_come_up_into_free_room_only() -> None:
    tower = Tower(slots=8)
    tower.store_below(KEYS[:6])
    crowd = key_chain(8, branch="crowd")
    tower.cache.forget(crowd[4:])
    before = tower.cache.counts().chunks_evicted
    tower.cache.admin.freeze(True)
    assert tower.fetch(KEYS[:6]).chunks == 4
    tower.read(KEYS[:4])
    tower.cache.end("r")
    assert tower.fetch(KEYS[:6]).chunks == 4
    tower.cache.end("r")
    assert (tower.cache.lookup(crowd, "s").chunks, tower.cache.counts().chunks_evicted) == (4, before)
    tower.cache.end("s")
    tower.cache.admin.freeze(False)
    assert tower.fetch(KEYS[:6]).chunks == 6
    tower.close()


def test_nothing_goes_down_until_it_ends() -> None:
    tower = Tower(cold=ColdConfig(batch_bytes=2 * 4096, spill_share=0.25, drain_s=0.2))
    tower.store(KEYS[:6])
    tower.cache.admin.freeze(True)
    tower.run()
    (tier,) = tower.cache.lower.states()
    assert (leading(tower.lanes[0], KEYS), tier.spill.waiting) == (2, 4)  # so much was on its way
    tower.cache.admin.freeze(False)
    tower.run()
    assert leading(tower.lanes[0], KEYS) == 6
    tower.close()


def test_what_is_being_written_back_stays_in_the_pool() -> None:
    tower = Tower("back", cold=ColdConfig(batch_bytes=2 * 4096, spill_share=0.5, drain_s=0.2))
    tower.store(KEYS[:6])
    tower.cache.admin.freeze(True)
    tower.run()
    (tier,) = tower.cache.lower.states()
    assert (tier.spill.stored, tower.cache.counts().chunks_evicted) == (2, 0)
    assert held(tower.cache, KEYS) == 6
    tower.cache.admin.freeze(False)
    tower.run()
    assert held(tower.cache, KEYS) == 4
    tower.close()


def test_a_frozen_cache_that_is_closed_stores_below_what_waits() -> None:
    tower = Tower("back", threads=1, cold=ColdConfig(drain_s=5.0))
    tower.store(KEYS[:2])
    tower.cache.admin.freeze(True)
    tower.cache.close()
    (tier,) = tower.cache.lower.states()
    assert tier.spill.stored == 2
