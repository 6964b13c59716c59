"""Every policy keeps the contract of `EvictionPolicy`; LRU also its own."""

from kv_core.testing import key_chain
from kv_tiers import EvictionPolicy, LruPolicy
from kv_tiers.eviction import make_policy
from kv_tiers.testing.contract import PolicyContract


class TestArc(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("arc", 6)


class TestLfu(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("lfu", 6)


class TestFifo(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("fifo", 6)


class TestMru(PolicyContract):
    def make(self) -> EvictionPolicy:
        return make_policy("mru", 6)


class TestLru(PolicyContract):
    def make(self) -> EvictionPolicy:
        return LruPolicy()

    def test_the_oldest_use_leaves_first(self) -> None:
        policy = self.make()
        first, second = key_chain(2, branch="first"), key_chain(2, branch="second")
        policy.added(first, [0, 1])
        policy.added(second, [2, 3])
        policy.used(first, [0, 1])
        assert self.drained(policy) == [3, 2, 1, 0]

    def test_what_is_put_back_was_used_last(self) -> None:
        policy = self.filled(3)
        policy.set_aside(2)
        policy.put_back([2])
        assert self.drained(policy) == [1, 0, 2]
