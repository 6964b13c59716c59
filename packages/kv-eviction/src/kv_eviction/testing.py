"""The contract of `EvictionPolicy` as a test class: inherit it, define `make`, and run pytest.

Plain assertions on purpose: they are read by authors of new policies.
"""

from kv_core.testing import key_chain

from kv_eviction.policy import EvictionPolicy


class PolicyContract:
    """Define `make`: a policy that has seen nothing."""

    def make(self) -> EvictionPolicy:
        raise NotImplementedError

    def filled(self, chunks: int = 6) -> EvictionPolicy:
        policy = self.make()
        policy.added(key_chain(chunks), range(chunks))
        return policy

    def drained(self, policy: EvictionPolicy) -> list[int]:
        order = []
        while (slot := policy.victim()) is not None:
            order.append(slot)
            policy.removed(slot)
        return order

    def test_nothing_is_offered_while_there_is_nothing(self) -> None:
        assert self.make().victim() is None

    def test_every_chunk_is_offered_once(self) -> None:
        assert sorted(self.drained(self.filled())) == [0, 1, 2, 3, 4, 5]

    def test_victims_together_are_those_one_after_the_other(self) -> None:
        policy, order = self.filled(), list[int]()
        while run := list(policy.victims(4)):
            order += run
            policy.evicted(run)
        assert order == self.drained(self.filled())

    def test_an_offer_stands_until_it_is_taken(self) -> None:
        policy = self.filled()
        assert policy.victim() == policy.victim()

    def test_the_tail_of_a_prompt_is_offered_before_its_head(self) -> None:
        policy = self.filled()
        policy.used(key_chain(6), range(6))
        assert self.drained(policy) == [5, 4, 3, 2, 1, 0]

    def test_it_says_whether_a_chunk_is_worth_its_victims_place(self) -> None:
        assert self.filled().refuses(key_chain(1, branch="new")[0], is_last=True) in (False, True)

    def test_what_was_removed_is_not_offered(self) -> None:
        policy = self.filled()
        policy.removed(5)
        policy.removed(2)
        assert sorted(self.drained(policy)) == [0, 1, 3, 4]

    def test_what_is_excluded_is_not_offered_until_it_is_reinserted(self) -> None:
        policy = self.filled()
        excluded = []
        for _ in range(3):
            slot = policy.victim()
            assert slot is not None
            policy.exclude(slot)
            excluded.append(slot)
        assert policy.victim() not in excluded
        policy.used(key_chain(6), range(6))
        policy.removed(excluded.pop())
        policy.reinsert(excluded)
        assert sorted(self.drained(policy)) == sorted({0, 1, 2, 3, 4, 5} - {3})

    def test_a_slot_may_come_again_with_another_chunk(self) -> None:
        policy = self.filled()
        policy.removed(3)
        policy.added(key_chain(1, branch="new"), [3])
        assert sorted(self.drained(policy)) == [0, 1, 2, 3, 4, 5]
