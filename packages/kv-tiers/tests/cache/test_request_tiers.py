"""Tiers that a request may use: nothing else is read or written for it, and it forbids nothing to another request."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core.cost import Costs
from kv_core.keys import ChunkKey
from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_testing.tower import Tower, leading
from kv_tiers.testing.tier_contract import content

KEYS = key_chain(6)
QUICK = Costs(0, (10.0, 1.0), (0.0, 0.0))
"""Of an engine for which loading always pays."""


def store(tower: Tower, keys: list[ChunkKey], tiers: tuple[str, ...] | None) -> None:
    lease = tower.cache.begin_store(keys, "w", tiers=tiers)
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        with tower.cache.pool.view[extent.offset : extent.offset + extent.nbytes] as chunk:
            chunk[:] = content(key, extent.nbytes)
    tower.cache.commit(lease)


def below(tower: Tower, keys: list[ChunkKey]) -> list[int]:
    """How many of these chunks each tier holds."""
    return [sum(tier.holds(keys)) for tier in tower.tiers]


def found(tower: Tower, tiers: tuple[str, ...] | None, costs: Costs | None = None) -> int:
    """How many chunks a request with these tiers finds, after all that it waits for."""
    while True:
        plan = tower.cache.lookup(KEYS, "r", wait_for_promotion=True, tiers=tiers, costs=costs)
        if plan.ended is not Ended.PENDING:
            tower.cache.end("r")
            return plan.chunks
        tower.run()


@pytest.mark.parametrize(
    ("tiers", "counts"),
    [
        (None, [6, 6]),
        (("host", "tier0", "tier1"), [6, 6]),
        (("tier1",), [0, 6]),
        (("host", "tier0"), [6, 0]),
        (("host",), [0, 0]),
        ((), [0, 0]),
        (("unknown",), [0, 0]),
    ],
)
def test_chunks_go_down_to_the_tiers_of_their_request(tiers: tuple[str, ...] | None, counts: list[int]) -> None:
    tower = Tower("through", "through")
    store(tower, KEYS, tiers)
    tower.run()
    assert below(tower, KEYS) == counts
    assert tower.cache.lookup(KEYS, "r").chunks == 6  # the pool has them in any case
    tower.close()


def test_chunks_that_are_written_back_go_to_the_tiers_of_their_request() -> None:
    tower = Tower("back", "back")
    store(tower, KEYS, ("tier1",))
    crowd = key_chain(8, branch="crowd")
    for length in range(1, 9):
        store(tower, crowd[:length], ("tier0",))
        tower.run()
    assert tower.cache.lookup(KEYS, "r").chunks == 0
    assert below(tower, KEYS) == [0, 6]
    tower.close()


def test_nothing_is_put_into_a_tier_that_is_never_written_to() -> None:
    tower = Tower("never", "through")
    store(tower, KEYS, ("tier0",))
    store(tower, KEYS, None)
    tower.run()
    assert below(tower, KEYS) == [0, 6]
    tower.close()


@pytest.mark.parametrize("costs", [None, QUICK])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(
    ("tiers", "chunks"), [(None, 6), (("tier1",), 6), (("tier1", "tier0"), 6), (("host", "tier0"), 0), ((), 0)]
)
def test_a_request_finds_what_its_tiers_hold(
    tiers: tuple[str, ...] | None, chunks: int, far: bool, costs: Costs | None
) -> None:
    tower = Tower("through", "through", remote=[far, far])
    store(tower, KEYS, ("tier1",))
    tower.run()
    tower.crowd_out()
    before = [len(tier.calls) for tier in tower.tiers]
    assert found(tower, tiers, costs) == chunks
    for number, tier in enumerate(tower.tiers):
        assert tiers is None or f"tier{number}" in tiers or len(tier.calls) == before[number]
    tower.close()


def test_a_request_does_not_wait_for_what_another_one_brings_from_a_tier_that_it_may_not_read() -> None:
    tower = Tower("through", "never")
    tower.store_below(KEYS)
    assert tower.ask(KEYS, "s").ended is Ended.PENDING
    plan = tower.cache.lookup(KEYS, "r", wait_for_promotion=True, tiers=("tier1",))
    assert (plan.chunks, plan.ended) == (0, Ended.ABSENT)
    tower.run()
    assert found(tower, ("tier1",)) == 6  # it is in the pool now, where everybody may read it
    tower.close()


def test_what_comes_up_for_a_request_stays_out_of_the_tiers_between() -> None:
    tower = Tower("through", "through")
    store(tower, KEYS, ("tier1",))
    tower.run()
    tower.crowd_out()
    assert found(tower, ("tier1",)) == 6
    tower.run()
    assert below(tower, KEYS) == [0, 6]
    tower.crowd_out()
    assert found(tower, None) == 6
    tower.run()
    assert below(tower, KEYS) == [6, 6]
    tower.close()


def test_a_request_forbids_nothing_to_the_next_one_with_the_same_prompt() -> None:
    """The chunks are the same: they go down once somebody may write them, and only those of the common part."""
    tower = Tower("through", "through")
    store(tower, KEYS, ())
    tower.run()
    assert below(tower, KEYS) == [0, 0]
    store(tower, KEYS[:4], ("tier1",))
    tower.run()
    assert below(tower, KEYS) == [0, 4]
    store(tower, KEYS[:2], None)
    tower.run()
    assert below(tower, KEYS) == [2, 4]
    assert [leading(lane, KEYS) for lane in tower.lanes] == [2, 4]
    store(tower, KEYS, None)
    store(tower, KEYS, None)
    tower.run()
    assert below(tower, KEYS) == [6, 6]
    assert [state.spill.stored for state in tower.cache.lower.states()] == [6, 6]  # each once
    tower.close()


def test_what_a_chunk_was_kept_from_is_forgotten_when_it_leaves_the_pool() -> None:
    tower = Tower("through", slots=1)
    other = key_chain(1, branch="other")
    for keys, tiers in ((KEYS[:1], ()), (other, None), (KEYS[:1], None), (KEYS[:1], None)):
        store(tower, keys, tiers)
        tower.run()
    assert below(tower, [*KEYS, *other]) == [2]
    assert [state.spill.stored for state in tower.cache.lower.states()] == [2]
    tower.close()


def test_a_chunk_that_is_forgotten_and_stored_again_is_its_new_requests_alone() -> None:
    """It gets the slot it had, and what waited there to be written back was of the request before."""
    tower = Tower("back", slots=4)
    store(tower, KEYS[:3], None)
    tower.cache.forget(KEYS[2:3])
    tower.run()
    store(tower, KEYS[:3], ())
    crowd = key_chain(4, branch="crowd")
    for length in range(1, 5):
        store(tower, crowd[:length], ())
        tower.run()
    assert tower.cache.lookup(KEYS, "r").chunks == 0
    assert below(tower, KEYS) == [2]
    tower.close()


def test_chunks_are_held_before_slots_are_kept_free_for_others() -> None:
    """They may go down now, so the slots are kept free of which the tier that is written back lacks nothing."""
    tower = Tower("through", "back", slots=4)
    store(tower, KEYS[:3], ())
    tower.cache.begin_store(key_chain(1, branch="being written"), "s")
    tower.cache.begin_store(KEYS[:3], "w", hold_s=30.0, tiers=("tier0",))
    assert tower.cache.holds.chunks == 2  # half of the pool
    assert tower.cache.lookup(KEYS, "r").chunks == 2
    tower.cache.end("w")
    tower.clock.advance(31.0)
    tower.close()


CHAINS = ([*KEYS[:3], *key_chain(3, branch="left")], KEYS, key_chain(5, branch="other"))
TIERS = (None, (), ("host",), ("tier0",), ("tier1",), ("host", "tier0", "tier1"))


class Requests(RuleBasedStateMachine):
    """Requests in any order over a small pool: a tier never holds what no request was allowed to write there."""

    @initialize(modes=st.tuples(*[st.sampled_from(["through", "back", "never"])] * 2), slots=st.integers(4, 9))
    def start(self, modes: tuple[str, str], slots: int) -> None:
        self.tower = Tower(*modes, slots=slots)  # type: ignore[arg-type]
        self.modes = modes
        self.allowed: set[tuple[str, ChunkKey]] = set()

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(1, 6), tiers=st.sampled_from(TIERS))
    def request(self, chain: list[ChunkKey], length: int, tiers: tuple[str, ...] | None) -> None:
        """Look up, load what comes, and store the rest."""
        keys = chain[:length]
        for _ in range(20):
            plan = self.tower.cache.lookup(keys, "r", wait_for_promotion=True, tiers=tiers)
            self.allow(keys, tiers)  # what comes up for it may go to its tiers above
            if plan.ended is not Ended.PENDING:
                break
            self.tower.run()
        if plan.chunks:
            self.tower.read(keys[: plan.chunks])
        store(self.tower, keys, tiers)
        self.tower.cache.end("r")

    def allow(self, keys: list[ChunkKey], tiers: tuple[str, ...] | None) -> None:
        names = [f"tier{number}" for number, mode in enumerate(self.modes) if mode != "never"]
        self.allowed.update((name, key) for name in names if tiers is None or name in tiers for key in keys)

    @rule(chain=st.sampled_from(CHAINS), start=st.integers(0, 5), count=st.integers(1, 3))
    def forget(self, chain: list[ChunkKey], start: int, count: int) -> None:
        keys = chain[start : start + count]
        self.tower.run()
        self.tower.cache.forget(keys)
        self.tower.run()
        self.allowed -= {(name, key) for name, key in self.allowed if key in keys}

    @rule(tier=st.integers(0, 1), steps=st.integers(1, 4))
    def work(self, tier: int, steps: int) -> None:
        for _ in range(steps):
            self.tower.lanes[tier].step()

    @invariant()
    def tiers_hold_what_they_may(self) -> None:
        if hasattr(self, "tower"):
            every = list({key for chain in CHAINS for key in chain})
            for number, tier in enumerate(self.tower.tiers):
                held = {(f"tier{number}", key) for key, there in zip(every, tier.holds(every), strict=True) if there}
                assert held <= self.allowed

    def teardown(self) -> None:
        if hasattr(self, "tower"):
            self.tower.close()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
