"""Quotas: who may have how much of the pool, while it changes too."""

import random
from itertools import pairwise
from typing import Any

import pytest
from kv_core.errors import ConfigError
from kv_core.keys import NO_TENANT, tenant_tag
from kv_core.service import WriteLease
from kv_core.testing import key_chain
from kv_eviction import POLICY_NAMES
from kv_testing.tenants import ANN, BEN, CYD, SLOT, cache_of, held, store, used
from kv_testing.turnstile import Turnstile
from kv_tiers.cache.local import LocalCache


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


def test_a_refusal_names_the_share_that_is_full() -> None:
    """And not the pool, most of which may be free."""
    cache = cache_of(10, {ANN: 2, CYD: 0})
    why = cache.begin_store(key_chain(4, salt="ann"), "w").refused
    assert "each of the 2 slots that are the quota of its tenant is being read, written or moved" in why
    why = cache.begin_store(key_chain(9), "w").refused
    assert "each of the 8 slots that the quotas leave to other tenants is being" in why
    assert "the quota of its tenant is 0" in cache.begin_store(key_chain(1, salt="cyd"), "w").refused
    cache.close()


def test_quotas_of_the_whole_pool_are_said_to_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of(4, {ANN: 3})
    assert not caplog.messages
    cache.admin.set_quota(BEN, SLOT)
    assert ["nothing is stored for other tenants" in message for message in caplog.messages] == [True]
    assert "the quotas leave nothing to other tenants" in cache.begin_store(key_chain(1), "w").refused
    cache.close()
    cache_of(4, {ANN: 3, BEN: 1}).close()
    assert ["nothing is stored for other tenants" in message for message in caplog.messages] == [True, True]


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
        shares = cache._host.shares
        moved = shares.common.slots_used if shares._quota_shares == {} else shares._quota_shares[ANN].slots_used
        seen.append((moved, cache.counts().slots_used))

    cache._host.shares._account_at = scanned = ReadOutsideTheLock(cache._host.shares._account_at)
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

    cache._host.shares._account_at = scanned = ReadOutsideTheLock(cache._host.shares._account_at)
    scanned.lock = turnstile = Turnstile(cache, turn)
    for quota in (chance.randrange(8, 21), chance.randrange(0, 8), None, chance.randrange(21), None):
        cache.admin.set_quota(ANN, None if quota is None else quota * SLOT)
        assert quotas_of(cache) == ({} if quota is None else {ANN: quota})
        shares = cache._host.shares
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
