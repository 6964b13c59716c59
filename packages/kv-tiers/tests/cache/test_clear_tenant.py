"""A tenant is cleared on every tier, and nobody else is."""

from typing import Any

from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_testing.tenants import ANN, BEN, cache_of, held, store, used
from kv_testing.tower import Tower, leading


def test_a_tenant_is_cleared_and_nobody_else() -> None:
    cache = cache_of(12, {ANN: 6})
    mine, other = key_chain(4, salt="ann"), key_chain(4, salt="ben")
    store(cache, mine)
    store(cache, other)
    lease = cache.load(mine, "l")
    writing = cache.begin_store(key_chain(2, branch="open", salt="ann"), "w")
    assert cache.admin.clear_tenant(ANN) == 4
    assert (held(cache, mine), held(cache, other)) == (0, 4)
    assert used(cache) == {ANN: 6, BEN: 4}  # read and written still, and found by nobody
    cache.commit(writing)
    cache.release(lease)
    assert held(cache, writing.keys) == 0
    assert used(cache) == {ANN: 0, BEN: 4}
    assert store(cache, mine) == 4
    cache.close()


def test_a_tenant_is_cleared_on_every_tier() -> None:
    tower = Tower("through", "through", slots=8, remote=[False, True])
    mine, other = key_chain(4, salt="ann"), key_chain(4, salt="ben")
    tower.store(mine)
    tower.store(other)
    tower.run()
    assert tower.cache.admin.clear_tenant(ANN) == 4
    tower.crowd_out()
    assert (tower.fetch(mine).chunks, tower.fetch(other, "s").chunks) == (0, 4)
    tower.close()


def test_from_the_moment_a_tenant_is_cleared_nobody_finds_its_chunks_below() -> None:
    """Also while the tier is busy, or down, and has not been told yet. Others' are found all the while."""
    tower = Tower("through", slots=8)
    mine, other = key_chain(4, salt="ann"), key_chain(4, salt="ben")
    tower.store(mine)
    tower.store(other)
    tower.run()
    tower.store(key_chain(8, branch="crowd"))
    answers: list[list[bool]] = []
    assert tower.lanes[0].ask(mine, answers.append)
    assert tower.cache.admin.clear_tenant(ANN) == 0
    assert (leading(tower.lanes[0], mine), leading(tower.lanes[0], other)) == (0, 4)
    assert tower.lanes[0].holds(mine + other) == [False] * 4 + [True] * 4
    assert tower.lanes[0].step()
    assert answers == [[False] * 4]  # though it was asked before
    assert tower.ask(mine).ended is Ended.ABSENT
    tower.tiers[0].fault = "down"
    tower.run()
    assert "clear_tenant" in tower.tiers[0].calls
    tower.tiers[0].let_go()
    tower.run()
    assert tower.tiers[0].holds(mine + other) == [True] * 8
    tower.clock.advance(1.0)  # it rests, and is told when it is back
    tower.run()
    assert tower.tiers[0].holds(mine + other) == [False] * 4 + [True] * 4
    tower.close()


def test_a_tier_that_cannot_tell_tenants_apart_is_cleared_whole() -> None:
    class Plain:
        """A third party's, of the least that a tier must have."""

        def __init__(self, tier: Any) -> None:
            self.name, self.holds_is_local = tier.name, tier.holds_is_local
            for verb in ("holds", "load", "store", "discard", "clear", "probe", "usage", "close"):
                setattr(self, verb, getattr(tier, verb))

    tower = Tower("through", slots=8)
    tower.lanes[0].tier = Plain(tower.tiers[0])
    for salt in ("ann", "ben"):
        tower.store(key_chain(4, salt=salt))
    tower.run()
    tower.cache.admin.clear_tenant(ANN)
    tower.run()
    assert tower.tiers[0].calls[-1] == "clear"
    assert tower.tiers[0].usage().chunks == 0
    assert tower.cache.lookup(key_chain(4, salt="ben"), "r").chunks == 4  # in the pool
    tower.close()
