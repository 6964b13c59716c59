"""Shares on the way down, on the way up, and after a restart."""

import uuid
from collections import Counter

from kv_core.testing import key_chain
from kv_testing.tenants import ANN, BEN, CYD, SLOT, cache_of, held, store, used
from kv_testing.tower import Tower
from kv_tiers.pool.host_pool import HostPool


def test_a_named_pool_is_trimmed_to_the_quotas_of_the_next_process() -> None:
    name = f"tenants-{uuid.uuid4().hex}"
    try:
        cache = cache_of(12, name=name)
        mine, other = key_chain(6, salt="ann"), key_chain(6, salt="ben")
        store(cache, mine)
        store(cache, other)
        cache.close()
        cache = cache_of(12, {ANN: 2, CYD: 7}, name=name)
        assert used(cache) == {ANN: 2, BEN: 3, CYD: 0}
        assert (held(cache, mine), held(cache, other)) == (2, 3)
        assert store(cache, key_chain(7, salt="cyd")) == 7
        cache.close()
        cache = cache_of(12, name=name)  # and what was trimmed does not come back
        assert used(cache) == {ANN: 2, BEN: 3, CYD: 7}
        cache.close()
    finally:
        HostPool.unlink(name)


def test_pins_have_half_of_a_tenants_share_at_most() -> None:
    cache = cache_of(20, {ANN: 8})
    mine, other = key_chain(8, salt="ann"), key_chain(10)
    store(cache, mine)
    store(cache, other)
    assert cache.admin.pin(mine[:3], "one") == 3
    assert cache.admin.pin(mine, "two") == 1
    assert cache.admin.pin(other, "three") == 6
    assert store(cache, key_chain(8, branch="more", salt="ann")) == 5  # the second pin is on the first one's head
    assert (held(cache, mine), held(cache, other)) == (3, 10)
    cache.close()


def test_a_small_tenant_stores_while_a_tier_is_slow_and_its_backlog_keeps_nobody_waiting() -> None:
    """No more than a part of its share is leased for going down; others' chunks go down meanwhile."""
    tower = Tower("through", slots=24, quotas={ANN: 4 * SLOT, BEN: 8 * SLOT})
    assert tower.store(key_chain(4, salt="ann")) == 4
    assert tower.store(key_chain(4, branch="more", salt="ann")) == 3  # one is leased
    assert tower.store(key_chain(8, salt="ben")) == 8
    queued = Counter(chunk.key.tenant for job in tower.lanes[0]._jobs._stores for chunk in job.chunks)
    assert queued == {ANN: 1, BEN: 2}
    tower.run()
    assert tower.tiers[0].holds(key_chain(8, salt="ben")) == [True] * 8
    assert tower.tiers[0].holds(key_chain(3, branch="more", salt="ann")) == [True] * 3
    tower.close()


def test_written_back_each_share_keeps_room_of_its_own() -> None:
    tower = Tower("back", slots=24, quotas={ANN: 8 * SLOT})
    tower.store(key_chain(16, salt="ben"))
    tower.run()
    assert used(tower.cache) == {ANN: 0, BEN: 12}  # a quarter of its share is free for what comes next
    assert tower.store(key_chain(8, salt="ann")) == 8
    tower.run()
    assert used(tower.cache) == {ANN: 6, BEN: 12}
    assert tower.tiers[0].holds(key_chain(8, salt="ann")) == [False] * 6 + [True] * 2
    tower.close()


def test_what_waits_to_go_down_waits_once_although_a_quota_was_set_meanwhile() -> None:
    """In two shares' queues it would never have left the first, and closing would not have ended."""
    tower = Tower("back", slots=24)
    (waiting,) = tower.cache.lower.spills._tiers
    tower.store(key_chain(8, salt="ann"))
    tower.cache.admin.set_quota(ANN, 9 * SLOT)
    tower.lanes[0]._jobs._max_store_chunks = 0  # as if many others were being stored
    assert tower.store(key_chain(1, branch="more", salt="ann")) == 1
    assert sum(map(len, waiting.queues.values())) == len(waiting.share_of) == 9
    tower.lanes[0]._jobs._max_store_chunks = 256
    tower.close()


def test_going_down_shares_take_turns() -> None:
    tower = Tower("through", slots=64, quotas={ANN: 32 * SLOT})
    lane = tower.lanes[0]
    lane._jobs._max_store_chunks = 2  # as if the others were being stored
    tower.store(key_chain(8, salt="ann"))
    tower.store(key_chain(4, salt="ben"))
    order = []
    while lane._jobs._stores:
        order.append(lane._jobs._stores[0].chunks[0].key.tenant)
        lane.step()
    assert order == [ANN, ANN, BEN, ANN, BEN, ANN]
    tower.close()


def test_what_comes_up_makes_room_among_its_own() -> None:
    tower = Tower("through", slots=12, quotas={ANN: 4 * SLOT})
    mine, other = key_chain(4, salt="ann"), key_chain(8, salt="ben")
    tower.store(mine)
    tower.run()
    tower.store(other)
    tower.run()
    tower.store(key_chain(4, branch="more", salt="ann"))
    tower.run()
    assert tower.fetch(mine).chunks == 4
    assert tower.cache.lookup(other, "s").chunks == 8
    assert used(tower.cache) == {ANN: 4, BEN: 8}
    tower.close()
