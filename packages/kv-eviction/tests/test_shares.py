"""`Shares` keeps every promise of an `EvictionPolicy`, however many tenants have a share of their own."""

import time
from collections.abc import Sequence
from functools import partial

from kv_core.keys import NO_TENANT, ChunkKey
from kv_core.testing import key_chain
from kv_eviction import EvictionPolicy, LruPolicy, make_policy
from kv_eviction.shares import Shares
from kv_eviction.testing import PolicyContract
from kv_testing.tenants import ANN


class Divided(EvictionPolicy):
    """`Shares` as whoever owns slots uses it: told of every slot before and after its chunk's time."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.used, self.extended, self.victim = shares.used, shares.extended, shares.victim
        self.exclude, self.reinsert, self.refuses = shares.exclude, shares.reinsert, shares.refuses

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


def test_a_miss_is_told_to_the_policy_of_the_tenants_share() -> None:
    told: list[tuple[int, int]] = []

    class Told(LruPolicy):
        def __init__(self, slots: int) -> None:
            super().__init__()
            self.slots = slots

        def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
            told.append((self.slots, len(keys)))

    shares = Shares(8, Told(8), Told)
    prompt, anns = key_chain(4), key_chain(3, salt="ann")
    shares.used(prompt, ())
    shares.set_quota(anns[0].tenant, 2)
    shares.end_move()
    shares.used(prompt, ())
    shares.used(anns, ())
    assert told == [(8, 4), (8, 4), (2, 3)]


def test_twenty_thousand_quotas_are_set_at_once() -> None:
    made: list[int] = []

    def make(slots: int) -> EvictionPolicy:
        made.append(slots)
        return make_policy("prefix", slots)  # which takes the half of a millisecond

    shares = Shares(20_000, make_policy("prefix", 1), make)
    began_s = time.process_time()
    for number in range(20_000):
        shares.set_quota(number.to_bytes(7, "big"), 1)
        shares.end_move()
    assert shares.victim() is None
    assert time.process_time() - began_s < 3  # ten seconds and more if each looks at all others
    (own,) = key_chain(1)
    shares.set_quota((0).to_bytes(7, "big"), None)
    shares.end_move()
    shares.set_quota(own.tenant, 1)
    shares.end_move()
    shares.took([0], own.tenant)
    shares.added([own], [0])
    assert (shares.victim(), made) == (0, [1])
