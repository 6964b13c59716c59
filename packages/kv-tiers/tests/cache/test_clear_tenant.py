"""A tenant is cleared on every tier, and nobody else is."""

import random
from functools import partial
from typing import Any

import pytest
from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_testing.tenants import ANN, BEN, cache_of, held, store, used
from kv_testing.tower import Tower, leading
from kv_testing.turnstile import Turnstile


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


@pytest.mark.parametrize("verb", ["clear", "clear_tenant"])
@pytest.mark.parametrize("seed", range(30))
def test_others_take_turns_while_the_pool_is_cleared(verb: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they store and promote meanwhile is gone too, whatever is being read, written or spilled at the end."""
    monkeypatch.setattr("kv_tiers.cache.admin.AT_ONCE", 1)
    chance = random.Random(seed)
    tower = Tower("through", "back", slots=24)
    cache, turns = tower.cache, 0
    anns = [key_chain(8, branch=branch, salt="ann") for branch in "xyz"]
    ben = key_chain(4, salt="ben")
    tower.store_below(anns[0])
    tower.store(ben)
    tower.run()  # so that no turn evicts what no tier below has
    tower.store(anns[1])
    writes: list[Any] = []

    def turn() -> None:
        nonlocal turns
        turns += 1
        prompt, chunks = chance.choice(anns), chance.randrange(1, 9)
        match chance.randrange(6):
            case 0:
                tower.ask(prompt, chance.choice("ab"))
            case 1:
                tower.store(prompt[:chunks])
            case 2 if len(writes) < 2:
                writes.append(cache.begin_store(prompt[:chunks], "w"))
            case 3 if writes:
                cache.commit(writes.pop())
            case 4:
                cache.end(chance.choice("ab"))
            case _:
                chance.choice(tower.lanes).step()

    turnstile = Turnstile(cache, turn)

    def is_ending(verb_of_lane: Any, *tenant: bytes) -> None:
        turnstile.is_turn = True  # nobody else's any more
        verb_of_lane(*tenant)

    monkeypatch.setattr(cache.lower, verb, partial(is_ending, getattr(cache.lower, verb)))
    if verb == "clear":
        cache.clear()
    else:
        cache.admin.clear_tenant(ANN)
    assert turns >= 8  # one a chunk that the pool had
    assert [held(cache, prompt) for prompt in anns] == [0, 0, 0]
    for lease in writes:
        cache.commit(lease)
    for holder in "ab":
        cache.end(holder)
    tower.run()
    assert [tower.fetch(prompt, "s").chunks for prompt in anns] == [0, 0, 0]
    cache.end("s")
    assert tower.fetch(ben, "t").chunks == (0 if verb == "clear" else 4)
    cache.end("t")
    assert tower.store(anns[0]) == 8
    tower.close()
