"""Quotas and what tenants can learn of each other: nothing anyone does moves a chunk of a tenant with a quota."""

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core.clock import HandClock
from kv_core.errors import ConfigError
from kv_core.keys import NO_TENANT, ChunkKey, tenant_tag
from kv_core.lookup import Ended
from kv_core.service import ReadLease, WriteLease
from kv_core.testing import key_chain
from kv_tiers.cache.local import LocalCache
from kv_tiers.eviction import POLICY_NAMES, EvictionPolicy, make_policy
from kv_tiers.eviction.shares import Shares
from kv_tiers.pool.host_pool import HostPool, slot_bytes_for
from kv_tiers.testing.contract import CHUNK_BYTES, PolicyContract, assert_adds_up
from kv_tiers.testing.tower import Tower

SLOT = slot_bytes_for(CHUNK_BYTES)
ANN, BEN, CYD = (tenant_tag(name) for name in ("ann", "ben", "cyd"))


def cache_of(
    slots: int, quotas: dict[bytes, int] | None = None, *, policy: str = "lru", name: str = "", clock: Any = None
) -> LocalCache:
    """quotas: in slots."""
    pool = HostPool.named(name, CHUNK_BYTES, slots) if name else HostPool.anonymous("t", CHUNK_BYTES, slots)
    return LocalCache(
        pool,
        policy=make_policy(policy, slots),
        clock=clock or HandClock(),
        quotas={tenant: chunks * SLOT for tenant, chunks in (quotas or {}).items()},
        share_policy=partial(make_policy, policy),
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


class Divided:
    """`Shares` as whoever owns slots uses it: told of every slot before and after its chunk's time."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.used, self.extended, self.victim = shares.used, shares.extended, shares.victim
        self.exclude, self.reinsert = shares.exclude, shares.reinsert

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            self.shares.took([slot], key.tenant)
        self.shares.added(keys, slots)

    def removed(self, slot: int) -> None:
        self.shares.removed(slot)
        self.shares.left(slot)


class TestOfSharesNobodyHas(PolicyContract):
    def make(self) -> EvictionPolicy:
        return Divided(Shares(8, make_policy("prefix", 8), partial(make_policy, "prefix")))


class TestOfSharesWhereOthersHaveOne(TestOfSharesNobodyHas):
    """The contract's chunks are of no tenant, and so in the common share."""

    def make(self) -> EvictionPolicy:
        divided = Divided(Shares(16, make_policy("lru", 8), partial(make_policy, "prefix")))
        divided.shares.set_quota(ANN, 8)
        divided.shares.end_move()
        return divided


class TestOfAShareOfOnesOwn(TestOfSharesNobodyHas):
    def make(self) -> EvictionPolicy:
        divided = Divided(Shares(16, make_policy("lru", 8), partial(make_policy, "prefix")))
        divided.shares.set_quota(NO_TENANT, 8)
        divided.shares.end_move()
        return divided


def test_a_store_of_several_tenants_ends_where_one_of_them_has_no_room() -> None:
    cache = cache_of(8, {ANN: 2})
    prompt = [*key_chain(1), *key_chain(3, salt="ann"), *key_chain(2, salt="ben")]
    lease = cache.begin_store(prompt, "w")
    assert lease.keys == tuple(prompt[:3]) and "3 of 6 chunks" in lease.refused
    cache.commit(lease)
    assert used(cache) == {NO_TENANT: 1, ANN: 2}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_tenant_at_its_limit_evicts_only_its_own(policy: str) -> None:
    cache = cache_of(12, {ANN: 3, BEN: 4}, policy=policy)
    quiet, other = key_chain(4, salt="ben"), key_chain(5)
    assert (store(cache, quiet), store(cache, other)) == (4, 5)
    for number in range(6):
        assert store(cache, key_chain(3, branch=str(number), salt="ann")) == 3
        assert used(cache) == {ANN: 3, BEN: 4, NO_TENANT: 5}
    assert (held(cache, quiet), held(cache, other)) == (4, 5)
    assert held(cache, key_chain(3, branch="5", salt="ann")) == 3
    assert store(cache, key_chain(9, branch="long", salt="ann")) == 3  # its head, and no more than there is
    assert cache.counts().slots_used == 12
    cache.close()


def test_what_others_have_free_is_theirs() -> None:
    cache = cache_of(10, {ANN: 2, BEN: 5})
    lease = cache.begin_store(key_chain(4, salt="ann"), "w")
    assert (len(lease.keys), cache.counts().slots_used) == (2, 2)
    assert "no room for 2 of 4 chunks" in lease.refused
    cache.commit(lease)
    assert store(cache, key_chain(9)) == 3
    assert used(cache) == {ANN: 2, BEN: 0, NO_TENANT: 3}
    cache.close()


def test_a_share_that_is_wholly_leased_refuses_and_takes_from_nobody() -> None:
    cache = cache_of(6, {ANN: 2})
    mine, other = key_chain(2, salt="ann"), key_chain(3)
    store(cache, mine)
    store(cache, other)
    assert cache.lookup(mine, "r").chunks == 2
    assert store(cache, key_chain(2, branch="more", salt="ann")) == 0
    assert used(cache) == {ANN: 2, NO_TENANT: 3}
    cache.end("r")
    assert store(cache, key_chain(2, branch="more", salt="ann")) == 2
    assert held(cache, other) == 3
    cache.close()


def test_tenants_without_a_quota_share_what_the_quotas_leave() -> None:
    cache = cache_of(6, {ANN: 2})
    store(cache, key_chain(4, salt="ben"))
    store(cache, key_chain(3, salt="cyd"))
    assert used(cache) == {ANN: 0, BEN: 1, CYD: 3}
    cache.close()


def test_a_quota_is_lowered_at_once_as_far_as_leases_allow_and_the_rest_as_they_end() -> None:
    cache = cache_of(8, {ANN: 6})
    keys, other = key_chain(6, salt="ann"), key_chain(2)
    store(cache, keys)
    store(cache, other)
    cache.lookup(keys[:4], "r")
    cache.admin.set_quota(ANN, 2 * SLOT)
    assert used(cache) == {ANN: 4, NO_TENANT: 2}  # four are promised
    assert store(cache, key_chain(1, branch="more", salt="ann")) == 0
    assert store(cache, key_chain(4, branch="more")) == 4  # all there is yet: six less the two that must still go
    cache.end("r")
    assert used(cache) == {ANN: 2, NO_TENANT: 4}
    assert held(cache, keys) == 2  # its head
    assert store(cache, key_chain(6, branch="more")) == 2
    assert used(cache) == {ANN: 2, NO_TENANT: 6}
    cache.close()


def test_what_is_being_written_beyond_a_lowered_quota_goes_when_it_is_committed() -> None:
    cache = cache_of(8, {ANN: 6})
    lease = cache.begin_store(key_chain(5, salt="ann"), "w")
    cache.admin.set_quota(ANN, 3 * SLOT)
    assert used(cache)[ANN] == 5
    cache.commit(lease)
    assert used(cache)[ANN] == 3
    assert held(cache, key_chain(5, salt="ann")) == 3
    lease = cache.begin_store(key_chain(5, branch="b", salt="ann"), "w")
    cache.admin.set_quota(ANN, 0)
    cache.release(lease)
    assert used(cache) == {ANN: 0}
    cache.close()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_first_quota_takes_what_is_there_along_and_the_last_one_gives_it_back(policy: str) -> None:
    cache = cache_of(12, policy=policy)
    mine, other = key_chain(6, salt="ann"), key_chain(6, salt="ben")
    store(cache, mine)
    store(cache, other)
    cache.lookup(mine[:2], "r")  # leased, and perhaps excluded by what follows
    store(cache, key_chain(1, branch="x", salt="ben"))
    before = used(cache)
    cache.admin.set_quota(ANN, 3 * SLOT)
    assert used(cache)[ANN] == 3
    if policy != "mru":  # which takes what came last for the youngest, here as when a named pool is adopted
        assert held(cache, mine, "other") == 3  # heads stay
    assert held(cache, other) == before[BEN] - 1
    cache.end("r")
    store(cache, key_chain(9, branch="y", salt="ben"))
    assert used(cache) == {ANN: 3, BEN: 9}
    cache.admin.set_quota(ANN, None)
    store(cache, key_chain(12, branch="z", salt="ben"))
    assert used(cache) == {BEN: 12}
    cache.close()


def test_a_first_quota_finds_chunks_that_are_leased_and_out_of_order() -> None:
    cache = cache_of(4)
    store(cache, key_chain(4, salt="ann"))
    cache.lookup(key_chain(4, salt="ann"), "r")
    assert store(cache, key_chain(1)) == 0  # it was offered all of them, and they are excluded
    cache.admin.set_quota(ANN, 4 * SLOT)
    cache.end("r")
    assert store(cache, key_chain(4, branch="more", salt="ann")) == 4
    assert used(cache) == {ANN: 4}
    cache.close()


class Turnstile:
    """A cache's lock that has somebody else take a turn whenever it is released."""

    def __init__(self, cache: LocalCache, turn: Callable[[], None]) -> None:
        self.is_held = self.is_turn = False
        self._lock, self._turn = threading.Lock(), turn
        cache._lock = cache._host.lock = self  # type: ignore[assignment]

    def __enter__(self) -> None:
        self._lock.acquire()
        self.is_held = True

    def __exit__(self, *_: object) -> None:
        self.is_held = False
        self._lock.release()
        if not self.is_turn:
            self.is_turn = True
            self._turn()
            self.is_turn = False


class ReadOutsideTheLock(list[Any]):
    lock: Turnstile

    def __iter__(self) -> Any:
        assert not self.lock.is_held
        return super().__iter__()


def test_a_quota_holds_the_lock_for_a_few_chunks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many the tenant has, and however large the pool is."""
    monkeypatch.setattr("kv_tiers.cache.admin.AT_ONCE", 2)
    cache = cache_of(40)
    store(cache, key_chain(20, salt="ann"))
    seen: list[tuple[int, int]] = []

    def turn() -> None:
        shares = cache._host._shares
        moved = shares.common.slots_used if shares._own == {} else shares._own[ANN].slots_used
        seen.append((moved, cache.counts().slots_used))

    cache._host._shares._account_at = scanned = ReadOutsideTheLock(cache._host._shares._account_at)
    scanned.lock = turnstile = Turnstile(cache, turn)
    for quota in (7 * SLOT, None):
        cache.admin.set_quota(ANN, quota)
        steps = list(pairwise(seen))
        assert all(abs(after - before) <= 2 for one, other in steps for before, after in zip(one, other, strict=True))
        assert seen[-1] == (7, 7)
        seen.clear()
    turnstile.is_turn = True  # nobody else's any more
    cache.close()


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_others_take_turns_while_a_quota_is_set(policy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk of a tenant may have to move. In between the accounts are exact, and nobody else loses a chunk."""
    monkeypatch.setattr("kv_tiers.cache.admin.AT_ONCE", 1)
    monkeypatch.setattr("kv_tiers.cache.host.AT_ONCE", 1)
    chance = random.Random(seed)
    cache = cache_of(96, policy=policy)  # room for all, and for what is forgotten while it is used
    ben = key_chain(4, salt="ben")
    anns = [key_chain(8, branch=branch, salt="ann") for branch in "xyz"]
    store(cache, ben)
    for prompt in anns[:2]:
        store(cache, prompt[:6])
    writes: list[WriteLease] = []

    def turn() -> None:
        prompt, chunks, holder = chance.choice(anns), chance.randrange(1, 9), chance.choice("ab")
        act = chance.randrange(7)
        if act == 0:
            cache.lookup(prompt, holder)
        elif act == 1:
            store(cache, prompt[:chunks])
        elif act == 2 and len(writes) < 3:
            writes.append(cache.begin_store(prompt[:chunks], "w"))
        elif act == 3 and writes:
            cache.commit(writes.pop())
        elif act == 4 and writes:
            cache.release(writes.pop())
        elif act == 5:
            cache.forget(prompt[:chunks])
        else:
            cache.end(holder)
        assert used(cache)[BEN] == 4

    cache._host._shares._account_at = scanned = ReadOutsideTheLock(cache._host._shares._account_at)
    scanned.lock = turnstile = Turnstile(cache, turn)
    for quota in (chance.randrange(8, 21), chance.randrange(0, 8), None, chance.randrange(21), None):
        cache.admin.set_quota(ANN, None if quota is None else quota * SLOT)
        assert quotas_of(cache) == ({} if quota is None else {ANN: quota})
        shares = cache._host._shares
        assert (shares.common.slots, shares._moving) == (96 - (quota or 0), None)
    turnstile.is_turn = True  # nobody else's any more
    for holder in "ab":
        cache.end(holder)
    for lease in writes:
        cache.release(lease)
    assert held(cache, ben) == 4
    assert store(cache, key_chain(96, branch="all")) == 96  # no slot was lost, and each can be evicted
    assert used(cache) == {NO_TENANT: 96}
    cache.close()


def quotas_of(cache: LocalCache) -> dict[bytes, int]:
    """In slots."""
    return {use.tenant: use.quota_bytes // SLOT for use in cache.admin.tenants() if use.quota_bytes is not None}


def test_quotas_beyond_the_pool_are_refused_and_change_nothing() -> None:
    with pytest.raises(ConfigError, match="a quota of 5 chunks, where the other quotas leave 4"):
        cache_of(8, {ANN: 4, BEN: 5})
    cache = cache_of(8, {ANN: 4, BEN: 2})
    store(cache, key_chain(2, salt="cyd"))
    cache.lookup(key_chain(2, salt="cyd"), "r")
    store(cache, key_chain(2, branch="more", salt="cyd"))
    for tenant, nbytes in ((ANN, 7 * SLOT), (CYD, 3 * SLOT), (ANN, SLOT - 1), (ANN, -SLOT)):
        with pytest.raises(ConfigError):
            cache.admin.set_quota(tenant, nbytes)
    assert [(use.tenant, use.quota_bytes) for use in cache.admin.tenants()] == sorted(
        [(ANN, 4 * SLOT), (BEN, 2 * SLOT), (CYD, None)]
    )
    cache.end("r")
    assert store(cache, key_chain(2, branch="more", salt="cyd")) == 2  # what was excluded is in order again
    cache.admin.set_quota(ANN, 6 * SLOT)
    assert used(cache) == {ANN: 0, BEN: 0}
    cache.close()


def test_a_thousand_tenants() -> None:
    quotas = {tenant_tag(str(number)): 2 for number in range(1000)}
    cache = cache_of(2500, quotas, policy="prefix")
    for turn in range(2):
        for number in range(1000):
            assert store(cache, key_chain(3, branch=str(turn), salt=str(number))) == 2
        for number in range(1000, 1300):
            store(cache, key_chain(2, branch=str(turn), salt=str(number)))
    uses = used(cache)
    assert all(uses[tenant] == 2 for tenant in quotas)
    assert sum(uses.values()) == 2500
    assert all(held(cache, key_chain(3, branch="1", salt=str(number))) == 2 for number in range(1000))
    cache.admin.clear_tenant(tenant_tag("7"))
    for number in range(1000):
        cache.admin.set_quota(tenant_tag(str(number)), SLOT)
    uses = used(cache)
    assert (uses.pop(tenant_tag("7")), {uses[tenant] for tenant in quotas if tenant in uses}) == (0, {1})
    cache.close()


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
    answers: list[int] = []
    assert tower.lanes[0].ask(mine, answers.append)
    assert tower.cache.admin.clear_tenant(ANN) == 0
    assert (tower.lanes[0].leading(mine), tower.lanes[0].leading(other)) == (0, 4)
    assert tower.lanes[0].holds(mine + other) == [False] * 4 + [True] * 4
    assert tower.lanes[0].step()
    assert answers == [0]  # though it was asked before
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


# A tenant alone, and the same tenant among noise.

STEM = 3
steps = st.tuples(st.sampled_from(["store", "ask", "load"]), st.integers(0, 3), st.integers(1, 6))


def prompt(salt: str | None, branch: int, chunks: int) -> list[ChunkKey]:
    """Some share a stem."""
    stem = key_chain(min(STEM, chunks), branch=str(branch % 2), salt=salt)
    return [*stem, *key_chain(max(0, chunks - STEM), branch=f"tail {branch}", salt=salt)]


def walk(cache: LocalCache, salt: str | None, step: tuple[str, int, int]) -> int:
    verb, branch, chunks = step
    keys = prompt(salt, branch, chunks)
    if verb == "store":
        return store(cache, keys)
    if verb == "load":
        lease = cache.load(keys, "l")
        return len(lease.keys) if isinstance(lease, ReadLease) and cache.release(lease) else -1
    return cache.lookup(keys, f"holder {salt} {branch}").chunks  # and the promise stays until it asks again


@pytest.mark.parametrize("policy", POLICY_NAMES)
@given(
    mine=st.lists(steps, max_size=25),
    noise=st.lists(st.tuples(st.sampled_from(["ben", "cyd", None]), steps), max_size=60),
    chance=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=40)
def test_a_tenant_hits_what_it_would_hit_alone(policy: str, mine: list[Any], noise: list[Any], chance: Any) -> None:
    def answers(among: list[Any]) -> list[int]:
        cache = cache_of(12, {ANN: 5, BEN: 3}, policy=policy)
        left = list(among)
        said = []
        for step in mine:
            while left and chance.random() < 0.7:
                walk(cache, *left.pop())
            said.append(walk(cache, "ann", step))
        return said

    assert answers(noise) == answers([])


# What a lookup does, counted and not timed.


class CountingDict(dict[Any, Any]):
    asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


def spy(wrapped: Any, seen: Counter[str]) -> Any:
    class Spy:
        def __getattr__(self, name: str) -> Any:
            found = getattr(wrapped, name)
            if not callable(found):
                return found

            def call(*args: Any) -> Any:
                seen[name] += 1
                return found(*args)

            return call

    return Spy()


@dataclass(frozen=True)
class Work:
    """All that one question made the cache do."""

    answer: Any
    probes: int
    policy: dict[str, int]
    tiers: list[list[str]]
    counts: dict[str, int]
    waits: int
    promotions: Any


def work_of(tower: Tower, keys: list[ChunkKey], seen: Counter[str], index: CountingDict) -> Work:
    for tier in tower.tiers:
        tier.calls.clear()
    seen.clear()
    index.asked = 0
    before = tower.cache.counts()
    plan = tower.fetch(keys, "r")
    promotions = tower.cache.lower.promotions
    waits = len(promotions._waits)
    tower.cache.end("r")
    after = tower.cache.counts()
    names = ("lookups", "chunks_asked", "chunks_hit", "slots_used", "chunks_resident", "read_leases", "chunks_evicted")
    return Work(
        (plan.chunks, plan.ended, plan.tiers),
        index.asked,
        dict(seen),
        [list(tier.calls) for tier in tower.tiers],
        {name: getattr(after, name) - getattr(before, name) for name in names},
        waits,
        (promotions.counts.asked, promotions.counts.arrived),
    )


@pytest.mark.parametrize("where", ["pool", "below"])
@pytest.mark.parametrize("quotas", [{}, {ANN: 6 * SLOT, BEN: 8 * SLOT}], ids=["no quotas", "quotas"])
def test_another_tenants_prompt_is_looked_up_exactly_like_one_that_nobody_has(
    where: str, quotas: dict[bytes, int]
) -> None:
    """Not the answer, not the probes of the index, not what the policy hears, not what tiers are asked: nothing tells
    a tenant that another has the same prompt."""
    tower = Tower("through", "through", slots=24, remote=[False, True], quotas=quotas)
    tower.store(key_chain(6, branch="theirs", salt="ben"))
    tower.store(key_chain(2, branch="mine", salt="ann"))
    tower.run()
    if where == "below":
        tower.store(key_chain(24, branch="crowd", salt="ben"))
        tower.store(key_chain(24, branch="crowd"))
        tower.run()
        assert tower.cache.lookup(key_chain(6, branch="theirs", salt="ben"), "s").chunks == 0
    seen: Counter[str] = Counter()
    residency = tower.cache._index
    residency._policy = spy(residency._policy, seen)
    residency._slot_of = index = CountingDict(residency._slot_of)
    cached_by_another = work_of(tower, key_chain(6, branch="theirs", salt="ann"), seen, index)
    cached_by_nobody = work_of(tower, key_chain(6, branch="never seen", salt="ann"), seen, index)
    assert cached_by_another == cached_by_nobody
    own = work_of(tower, key_chain(6, branch="theirs", salt="ben"), seen, index)
    assert own.answer[0] == 6
    assert own != cached_by_another  # what is counted would have told
    tower.close()


# Any order of anything.

PEOPLE: tuple[str | None, ...] = ("ann", "ben", "cyd", None)
POOL = 10
people = st.sampled_from(PEOPLE)
prompts = st.builds(prompt, people, st.integers(0, 3), st.integers(1, 6))


class TenantsMachine(RuleBasedStateMachine):
    """What each call may change, and what must hold after every one."""

    policy = "lru"

    @initialize()
    def start(self) -> None:
        self.cache = cache_of(POOL, policy=self.policy)
        self.quotas: dict[bytes, int] = {}
        self.writes: list[WriteLease] = []
        self.reads: list[ReadLease] = []
        self.void: set[int] = set()

    def resident(self) -> dict[bytes, set[ChunkKey]]:
        found: dict[bytes, set[ChunkKey]] = {}
        for key in self.cache.admin.resident_keys():
            found.setdefault(key.tenant, set()).add(key)
        return found

    def undisturbed(self, act: Callable[[], None], *tenants: bytes) -> None:
        """Nothing changes for tenants with a quota, but for these."""
        before = self.resident()
        act()
        after = self.resident()
        for tenant in self.quotas:
            if tenant not in tenants:
                assert after.get(tenant, set()) == before.get(tenant, set())

    @rule(keys=prompts)
    def store(self, keys: list[ChunkKey]) -> None:
        self.undisturbed(lambda: assert_stored(self.cache, keys), keys[0].tenant)

    @rule(keys=prompts)
    def begin(self, keys: list[ChunkKey]) -> None:
        self.undisturbed(lambda: self.writes.append(self.cache.begin_store(keys, "open")), keys[0].tenant)

    @rule(data=st.data(), whole=st.booleans())
    def finish(self, data: st.DataObject, whole: bool) -> None:
        if self.writes:
            lease = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
            own = {key.tenant for key in lease.keys}
            if whole:
                self.undisturbed(lambda: self.cache.commit(lease), *own)
            else:
                self.undisturbed(lambda: assert_true(self.cache.release(lease)), *own)

    @rule(keys=prompts, name=st.sampled_from("abc"))
    def ask(self, keys: list[ChunkKey], name: str) -> None:
        # The promise before ends, and it was perhaps the last that kept another tenant above its quota.
        over = self.over()
        self.undisturbed(lambda: assert_prefix(self.cache.lookup(keys, name).chunks, keys), *over)

    @rule(keys=prompts)
    def load(self, keys: list[ChunkKey]) -> None:
        lease = self.cache.load(keys, "l")
        if isinstance(lease, ReadLease):
            self.reads.append(lease)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.reads:
            lease = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
            good = lease.id not in self.void
            self.undisturbed(lambda: assert_true(self.cache.release(lease) == good), *self.over())

    @rule(name=st.sampled_from("abc"))
    def end(self, name: str) -> None:
        self.undisturbed(lambda: self.cache.end(name), *self.over())

    @rule(keys=prompts, name=st.sampled_from("pq"))
    def pin(self, keys: list[ChunkKey], name: str) -> None:
        self.undisturbed(lambda: assert_prefix(self.cache.admin.pin(keys, name), keys), *self.over())

    @rule(name=st.sampled_from("pq"))
    def unpin(self, name: str) -> None:
        self.undisturbed(lambda: assert_bool(self.cache.admin.unpin(name)), *self.over())

    @rule(keys=prompts)
    def forget(self, keys: list[ChunkKey]) -> None:
        self.void |= {lease.id for lease in self.reads if not set(keys).isdisjoint(lease.keys)}
        self.undisturbed(lambda: self.cache.forget(keys), keys[0].tenant)

    @rule(who=people)
    def clear(self, who: str | None) -> None:
        tenant = tenant_tag(who)
        self.void |= {lease.id for lease in self.reads if any(key.tenant == tenant for key in lease.keys)}
        held = len(self.resident().get(tenant, set()))
        self.undisturbed(lambda: assert_true(self.cache.admin.clear_tenant(tenant) == held), tenant)
        assert tenant not in self.resident()

    @rule(who=people, chunks=st.none() | st.integers(0, POOL))
    def set_quota(self, who: str | None, chunks: int | None) -> None:
        tenant = tenant_tag(who)
        others = sum(quota for one, quota in self.quotas.items() if one != tenant)
        nbytes = None if chunks is None else chunks * SLOT
        before = self.cache.admin.tenants(), self.resident()
        if chunks is not None and others + chunks > POOL:
            with pytest.raises(ConfigError):
                self.cache.admin.set_quota(tenant, nbytes)
            assert (self.cache.admin.tenants(), self.resident()) == before
            return
        self.undisturbed(lambda: self.cache.admin.set_quota(tenant, nbytes), tenant)
        self.quotas.pop(tenant, None)
        if chunks is not None:
            self.quotas[tenant] = chunks

    def over(self) -> list[bytes]:
        return [use.tenant for use in self.cache.admin.tenants() if use.chunks > self.quotas.get(use.tenant, POOL)]

    @invariant()
    def accounts_add_up(self) -> None:
        uses = {use.tenant: use for use in self.cache.admin.tenants()}
        assert_adds_up(self.cache.counts())
        assert sum(use.chunks for use in uses.values()) == self.cache.counts().slots_used
        resident = self.resident()
        assert uses.keys() >= resident.keys() | self.quotas.keys()
        for tenant, use in uses.items():
            assert use.chunks >= len(resident.get(tenant, ()))
            assert use.quota_bytes == (self.quotas[tenant] * SLOT if tenant in self.quotas else None)

    @invariant()
    def nobody_has_more_than_its_quota_but_what_is_in_use(self) -> None:
        uses = {use.tenant: use.chunks for use in self.cache.admin.tenants()}
        index = self.cache._index
        limits = {(tenant,): quota for tenant, quota in self.quotas.items()}
        common = tuple(tenant for tenant in uses if tenant not in self.quotas)
        limits[common] = POOL - sum(self.quotas.values())
        for tenants, limit in limits.items():
            if sum(uses[tenant] for tenant in tenants) > limit:
                for key in self.cache.admin.resident_keys():
                    slot = index.find(key)
                    assert key.tenant not in tenants or (slot is not None and index.is_leased(slot))

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for name in (*"abc", "l", "open", "w"):
            self.cache.end(name)
        for name in "pq":
            self.cache.admin.unpin(name)
        self.nobody_has_more_than_its_quota_but_what_is_in_use()
        assert not self.over()
        assert not any(self.cache._index._leases)
        for tenant in list(self.quotas):
            self.cache.admin.set_quota(tenant, None)
        assert store(self.cache, key_chain(POOL, branch="all")) == POOL  # no slot was lost
        assert used(self.cache) == {NO_TENANT: POOL}
        self.cache.close()


def assert_stored(cache: LocalCache, keys: list[ChunkKey]) -> None:
    assert store(cache, keys) <= len(keys)


def assert_prefix(chunks: int, keys: list[ChunkKey]) -> None:
    assert 0 <= chunks <= len(keys)


def assert_true(said: bool) -> None:
    assert said is True


def assert_bool(said: bool) -> None:
    assert isinstance(said, bool)


class PrefixTenantsMachine(TenantsMachine):
    policy = "prefix"


class ArcTenantsMachine(TenantsMachine):
    policy = "arc"


TestTenantsInAnyOrder = TenantsMachine.TestCase
TestTenantsInAnyOrder.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestPrefixTenantsInAnyOrder = PrefixTenantsMachine.TestCase
TestPrefixTenantsInAnyOrder.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestArcTenantsInAnyOrder = ArcTenantsMachine.TestCase
TestArcTenantsInAnyOrder.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
