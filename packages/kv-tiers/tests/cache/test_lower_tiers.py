"""The tiers below the pool: what goes down comes up again, whole or not at all, and nobody waits long for it."""

import threading
from typing import Any, NoReturn

import pytest
from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.service import Ended, LookupPlan
from kv_core.testing import key_chain
from kv_testing.faults import Fault
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.tower import Tower
from kv_testing.wait import until
from kv_tiers.cache import promote
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import ColdConfig
from kv_tiers.lanes.lane import Health
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.tier_state import SERVING

KEYS = key_chain(6)


def test_what_left_the_pool_comes_back_from_below() -> None:
    tower = Tower()
    tower.store_below(KEYS)
    assert tower.cache.lookup(KEYS, "r").chunks == 0  # it may not wait: only what is in the pool
    first = tower.ask(KEYS)
    assert (first.chunks, first.ended) == (0, Ended.PENDING)
    plan = tower.fetch(KEYS)
    assert (plan.chunks, plan.ended, plan.tiers) == (6, Ended.ALL_HELD, ("tier0",) * 6)
    tower.read(KEYS)
    assert tower.ask(KEYS).tiers == ("host",) * 6  # used once, it is the pool's own
    tower.close()


def test_an_owners_waits_end_with_its_leases_and_beyond_the_limit_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = Tower()
    tower.store_below(KEYS)
    tower.store(KEYS[:1])
    monkeypatch.setattr(promote, "MAX_WAITS", 2)
    for holder in ("1/a", "1/b", "2/a", "2/b"):
        plan = tower.cache.lookup(KEYS, holder, wait_for_promotion=True)
        assert (plan.chunks, plan.ended) == (1, Ended.PENDING)
    assert tower.cache._promotions.waiting() == {"1/b", "2/b"}
    assert tower.cache.parts.leases.count("1") == (2, 2)
    tower.cache.end_all("1")
    assert tower.cache._promotions.waiting() == {"2/b"}
    assert tower.cache.parts.leases.holders() == {"2/a", "2/b"}
    tower.cache.end_all("2")
    tower.run()
    tower.close()


def test_a_question_that_has_to_be_asked_again_counts_once() -> None:
    tower = Tower()
    tower.store_below(KEYS)
    before = tower.cache.counts()
    for _ in range(5):
        assert tower.ask(KEYS).ended is Ended.PENDING
    assert tower.cache.counts().lookups == before.lookups
    tower.run()
    assert tower.ask([*KEYS, *key_chain(2, branch="unknown")]).chunks == 6
    after = tower.cache.counts()
    assert after.lookups == before.lookups + 1
    assert (after.chunks_asked - before.chunks_asked, after.chunks_hit - before.chunks_hit) == (8, 6)
    tower.close()


def test_what_the_pool_has_and_what_is_below_make_one_prefix() -> None:
    tower = Tower(slots=8)
    tower.store(KEYS)
    tower.run()
    tower.store(key_chain(4, branch="crowd"))
    assert tower.cache.lookup(KEYS, "s").chunks == 4  # the tail left first
    tower.cache.end("s")
    assert tower.ask(KEYS).chunks == 4  # promised while the rest is on its way
    plan = tower.fetch(KEYS)
    assert plan.tiers == ("host",) * 4 + ("tier0",) * 2
    tower.read(KEYS)
    tower.close()


def test_nobody_waits_longer_than_is_worth_it_and_what_comes_late_is_there_for_the_next() -> None:
    tower = Tower()
    tower.store_below(KEYS)
    assert tower.ask(KEYS).ended is Ended.PENDING
    tower.lanes[0].step()  # one batch of two chunks arrives in time
    tower.clock.advance(1.1)
    plan = tower.ask(KEYS)
    assert (plan.chunks, plan.ended) == (2, Ended.ABSENT)
    assert tower.ask(KEYS).ended is Ended.ABSENT  # the wait is had once
    tower.run()
    assert tower.ask(KEYS, "s").chunks == 6
    tower.close()


def test_a_wait_of_nothing_is_none_and_what_comes_is_there_for_the_next() -> None:
    tower = Tower(cold=ColdConfig(wait_s=0.0, prefetch_share=1.0))
    tower.store_below(KEYS)
    for _ in range(2):
        plan = tower.ask(KEYS)
        assert (plan.chunks, plan.ended) == (0, Ended.ABSENT)
    assert not tower.cache._promotions.waiting()
    tower.run()
    plan = tower.ask(KEYS, "s")
    assert (plan.chunks, plan.tiers) == (6, ("tier0",) * 6)
    tower.read(KEYS)
    tower.close()


@pytest.mark.parametrize("far", [False, True])
def test_a_tier_that_is_always_too_slow_soon_costs_next_to_nothing_and_earns_its_patience_back(far: bool) -> None:
    tower = Tower("through", remote=[far])
    prompts = [key_chain(2, branch=str(number)) for number in range(8)]
    for keys in prompts:
        tower.store(keys)
        tower.run()
    tower.crowd_out()

    def waited_s(keys: list[ChunkKey]) -> float:
        waited = 0.0
        while tower.ask(keys, "s").ended is Ended.PENDING:
            tower.clock.advance(0.01)
            waited += 0.01
        tower.cache.end("s")
        return waited

    slow = [waited_s(keys) for keys in prompts[:7]]
    assert slow[0] == pytest.approx(1.0, abs=0.05)
    assert slow[1] == pytest.approx(0.5, abs=0.05)
    assert slow[-1] < 0.04
    tower.run()  # it brings them after all, too late
    tower.crowd_out()
    for keys in (prompts[0], prompts[1]):
        assert tower.fetch(keys).chunks == 2
        tower.cache.end("r")
        tower.crowd_out()
    assert waited_s(prompts[7]) > 2 * slow[-1]
    tower.close()


@pytest.mark.parametrize("far", [False, True])
def test_a_tier_that_was_slow_for_a_moment_is_waited_for_again(far: bool) -> None:
    """It needs 0.6 s, and after one wait in vain it was given 0.5 s, then 0.25 s, and never again long enough."""
    tower = Tower("through", remote=[far])
    prompts = [key_chain(2, branch=str(number)) for number in range(6)]
    for keys in prompts:
        tower.store(keys)
        tower.run()
    tower.crowd_out()

    def hit(keys: list[ChunkKey], needed_s: float) -> int:
        began_s = tower.clock.now_s()
        works_at_s = [began_s + needed_s / 2] * far + [began_s + needed_s]  # a question, if it is far, and the load
        final: LookupPlan | None = None
        while works_at_s or final is None:
            if final is None and (plan := tower.ask(keys, "s")).ended is not Ended.PENDING:
                final = plan
            tower.clock.advance(0.01)
            if works_at_s and tower.clock.now_s() >= works_at_s[0]:
                del works_at_s[0]
                tower.run()
        tower.cache.end("s")
        tower.crowd_out()
        return final.chunks

    assert hit(prompts[0], 1.2) == 0
    hits = [hit(keys, 0.6) for keys in prompts[1:]]
    assert hits[1:] == [2] * 4
    tower.close()


def test_a_tier_far_away_that_hardly_ever_has_anything_is_asked_and_not_waited_for() -> None:
    tower = Tower("through", remote=[True])
    tower.tiers[0].fault = "delay"
    waits = []
    for number in range(60):
        keys = key_chain(2, branch=f"unique {number}")
        waits.append(tower.ask(keys).ended is Ended.PENDING)
        tower.fetch(keys)
        tower.run()
        tower.cache.end("r")
    assert waits[0]
    assert not waits[-1]
    assert tower.tiers[0].calls.count("holds") == 60  # asked all the same
    for number in range(3):  # and when it has something again, it is
        keys = key_chain(2, branch=f"comes back {number}")
        tower.store_below(keys)
        tower.ask(keys, "s")
        tower.run()
        tower.cache.end("s")
    assert tower.ask(key_chain(2, branch="another")).ended is Ended.PENDING
    tower.close()


@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_a_gap_gives_up_what_lies_behind_it(fault: str) -> None:
    tower = Tower()
    tower.store_below(KEYS)
    assert tower.ask(KEYS).ended is Ended.PENDING
    tower.lanes[0].step()
    tower.tiers[0].fault = fault  # type: ignore[assignment]
    tower.lanes[0].step()
    tower.tiers[0].fault = ""
    tower.run()
    plan = tower.ask(KEYS)
    assert (plan.chunks, plan.ended) == (2, Ended.ABSENT)
    counts = tower.cache.lower.promotions.counts
    assert (counts.requested, counts.arrived, counts.given_up) == (6, 2, 4)
    tower.read(KEYS[:2])
    tower.close()


def test_a_tier_that_only_says_it_holds_them_costs_one_try() -> None:
    tower = Tower()
    tower.tiers[0].fault = "lie"
    plan = tower.fetch(KEYS)
    assert (plan.chunks, plan.ended) == (0, Ended.ABSENT)
    assert tower.tiers[0].calls.count("load") == 3  # one for each batch of the one try
    tower.close()


def test_a_tier_far_away_is_asked_once_and_not_on_the_engines_thread() -> None:
    tower = Tower("through", remote=[True])
    tower.store_below(KEYS)
    tower.tiers[0].calls.clear()
    for _ in range(5):
        assert tower.ask([*KEYS, *key_chain(1, branch="more")]).ended is Ended.PENDING
    assert tower.tiers[0].calls == []
    plan = tower.fetch([*KEYS, *key_chain(1, branch="more")])
    assert (plan.chunks, plan.ended) == (6, Ended.ABSENT)
    assert tower.tiers[0].calls.count("holds") <= 2  # the whole prompt, and what lay behind its answer
    tower.read(KEYS)
    tower.close()


def test_each_chunk_comes_from_the_hottest_tier_that_has_it() -> None:
    tower = Tower("through", "through", remote=[False, True])
    tower.store_below(KEYS)
    tower.tiers[0].discard(KEYS[3:5])
    plan = tower.fetch(KEYS)
    assert plan.tiers == ("tier0",) * 3 + ("tier1",) * 2 + ("tier0",)
    tower.read(KEYS)
    tower.run()
    assert tower.tiers[0].holds(KEYS) == [True] * 6  # what came from further below is kept above it too
    tower.close()


def test_two_prefetches_larger_than_the_pool_both_end() -> None:
    tower = Tower(slots=8, below=64, cold=ColdConfig(batch_bytes=2 * 4096, prefetch_share=0.75, drain_s=0.2))
    one, two = key_chain(7, branch="one"), key_chain(7, branch="two")
    for keys in (one, two):
        tower.store(keys)
        tower.run()
    tower.crowd_out()
    plans: dict[str, LookupPlan] = {}
    for _ in range(40):
        for holder, keys in (("r", one), ("s", two)):
            if holder not in plans and (plan := tower.ask(keys, holder)).ended is not Ended.PENDING:
                plans[holder] = plan
        tower.lanes[0].step()
    assert sorted(plans) == ["r", "s"]
    assert sum(plan.chunks for plan in plans.values()) >= 7
    assert min(plan.chunks for plan in plans.values()) >= 1
    tower.cache.end("r")
    assert tower.fetch(two, "s2").chunks == 7  # with room again, so has the other
    tower.cache.end("s2")
    tower.close()


def test_a_pool_that_is_wholly_leased_is_no_reason_to_wait() -> None:
    tower = Tower(slots=6)
    other = key_chain(6, branch="other")
    tower.store(KEYS)
    tower.run()
    tower.store(other)
    tower.run()
    assert tower.ask(other, "s").chunks == 6
    assert tower.ask(KEYS).ended is Ended.ABSENT
    tower.cache.end("s")
    assert tower.fetch(KEYS, "l").chunks == 6
    tower.close()


def test_written_back_when_it_is_coldest_and_not_before() -> None:
    tower = Tower("back", slots=16, cold=ColdConfig(batch_bytes=2 * 4096, spill_share=0.5, drain_s=0.2))
    tower.store(KEYS)
    tower.run()
    assert tower.tiers[0].calls == []
    tower.store(key_chain(6, branch="crowd"))
    tower.read(KEYS)  # found in the pool until it can be found below
    tower.run()
    assert tower.tiers[0].holds(KEYS) == [False] * 2 + [True] * 4
    assert tower.cache.counts().slots_used == 8
    assert tower.cache.lookup(KEYS, "s").chunks == 2
    assert tower.fetch(KEYS).chunks == 6
    tower.read(KEYS)
    assert tower.cache.lower.states()[0].spill.lost == 0
    tower.close()


def test_what_there_is_no_time_to_store_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    tower = Tower("back", cold=ColdConfig(batch_bytes=2 * 4096, drain_s=0.0))
    tower.store(KEYS[:4])
    with caplog.at_level("WARNING"):
        tower.close()
    assert "4 chunks were not stored in the lower tiers after 0.0 s; a longer cold.drain_s" in caplog.text


def test_what_is_written_back_is_stored_when_the_cache_closes() -> None:
    tower = Tower("back", threads=1)
    tower.store(KEYS[:4])
    below = tower.tiers[0]
    seen: list[bool] = []
    close = below.close
    below.close = lambda: (seen.extend(below.holds(KEYS[:4])), close())  # type: ignore[method-assign,func-returns-value,assignment]
    tower.cache.close()
    assert seen == [True] * 4


def test_stores_that_have_ended_but_are_not_settled_are_not_reported_as_lost_when_the_cache_closes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = Tower("back", threads=1, cold=ColdConfig(batch_bytes=2 * 4096, drain_s=10.0))
    tower.store(KEYS[:4])
    spills, lane, looks = tower.cache.lower.spills, tower.lanes[0], threading.Semaphore(0)
    settle, drain = spills._stored, lane.drain

    def settle_late(*outcome: Any) -> None:
        """Only after the closing thread has found the lane idle twice."""
        while looks.acquire(blocking=False):
            pass
        assert looks.acquire(timeout=10) and looks.acquire(timeout=10)
        settle(*outcome)

    def drained(timeout_s: float) -> bool:
        is_idle = drain(timeout_s)
        if is_idle:
            looks.release()
        return is_idle

    monkeypatch.setattr(spills, "_stored", settle_late)
    monkeypatch.setattr(lane, "drain", drained)
    with caplog.at_level("WARNING"):
        tower.cache.close()
    assert "were not stored" not in caplog.text


def test_a_tier_for_reading_only_is_never_written() -> None:
    tower = Tower("never")
    tower.store(KEYS)
    tower.crowd_out()
    tower.store(KEYS)
    tower.run()
    assert "store" not in tower.tiers[0].calls
    tower.close()


def test_sequences_that_overfill_the_pool_back_to_back_are_kept() -> None:
    """An allocation that fails evicts at once: no poll, no watermark, also while the tier below cannot keep up."""
    tower = Tower("back", slots=8)
    for number in range(12):
        keys = key_chain(6, branch=str(number))
        assert tower.store(keys) == 6
        assert tower.cache.lookup(keys, "s").chunks == 6
        tower.cache.end("s")
    (state,) = tower.cache.lower.states()
    assert state.spill.lost > 0  # the price, paid below and not by the engine
    tower.close()


def test_a_stuck_tier_never_takes_the_pool_from_the_engine() -> None:
    tower = Tower("through", slots=8, threads=1)
    tower.tiers[0].fault = "hang"
    for number in range(10):
        assert tower.store(key_chain(5, branch=str(number))) == 5
    tower.close()


def test_what_was_forgotten_is_found_nowhere_and_new_bytes_under_its_key_are_right() -> None:
    tower = Tower()
    tower.store_below(KEYS)
    tower.cache.forget(KEYS[2:])
    assert tower.fetch(KEYS).chunks == 2
    tower.cache.end("r")
    tower.store(KEYS, b"new")
    tower.cache.forget(KEYS)  # what waits to be stored is forgotten too
    tower.store_below(KEYS, b"newer")
    assert tower.fetch(KEYS, "s").chunks == 6
    tower.read(KEYS, b"newer")
    tower.close()


def test_forgotten_while_it_is_on_its_way_up() -> None:
    tower = Tower()
    tower.store_below(KEYS)
    assert tower.ask(KEYS).ended is Ended.PENDING
    tower.cache.forget(KEYS[1:])
    tower.run()
    assert tower.fetch(KEYS).chunks == 1
    tower.read(KEYS[:1])
    tower.close()


def test_cleared_is_cleared_below() -> None:
    tower = Tower("through", "through", remote=[False, True])
    tower.store_below(KEYS)
    assert tower.ask(KEYS).ended is Ended.PENDING
    tower.cache.clear()
    tower.run()
    assert tower.fetch(KEYS, "s").chunks == 0
    assert [tier.holds(KEYS) for tier in tower.tiers] == [[False] * 6] * 2
    tower.store_below(KEYS, b"new")
    assert tower.fetch(KEYS, "l").chunks == 6
    tower.read(KEYS, b"new")
    tower.close()


@pytest.mark.parametrize("fault", ["down", "bug", "refuse"])
def test_a_tier_that_is_down_is_a_miss_and_gets_what_it_missed_when_it_is_back(fault: str) -> None:
    tower = Tower()
    tower.store(KEYS[:2])
    tower.run()
    tower.tiers[0].fault = fault  # type: ignore[assignment]
    tower.store_below(KEYS)
    assert tower.fetch(KEYS).chunks == 0
    tower.tiers[0].fault = ""
    tower.clock.advance(0.1)
    tower.run()
    assert tower.cache.lower.states()[0].health is Health.UP
    assert tower.fetch(KEYS, "s").chunks == 2
    missed = key_chain(8, branch="crowd")
    tower.store(key_chain(1, branch="nudge"))
    tower.run()
    if fault != "refuse":  # a refusal is an answer, not an absence
        assert tower.tiers[0].holds(missed[:5]) == [True] * 5
    tower.close()


@pytest.mark.parametrize("why", ["it was down", "it was being cleared", "it hung"])
def test_what_waits_is_stored_once_the_tier_takes_it_though_nothing_else_is_stored(why: str) -> None:
    tower = Tower(slots=16, remote=[True], threads=1 if why == "it hung" else 0)
    tier, lane = tower.tiers[0], tower.lanes[0]
    if why == "it was down":
        tier.fault = "down"
    elif why == "it was being cleared":
        tower.cache.clear()
    else:
        tier.fault = "hang"
        lane.ask(KEYS, lambda held: None)
        until(lambda: "holds" in tier.calls)
        tower.clock.advance(10.1)
        assert lane.health()[0] is Health.STUCK
    tower.store(KEYS)
    if why == "it was down":
        tower.run()
        assert lane.health()[0] is Health.DOWN
    tier.let_go()
    tower.clock.advance(0.1)
    tower.settle()
    until(lambda: tier.holds(KEYS) == [True] * 6)
    tower.close()


def test_a_tier_that_takes_probes_and_no_stores_is_up_for_loads_while_nothing_else_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tower, tried = Tower(slots=16), list[str]()

    def store(_: object) -> NoReturn:
        tried.append("store")
        raise TierDown("you cannot write against a read-only replica")

    monkeypatch.setattr(tower.tiers[0], "store", store)
    tower.store(KEYS)
    for _ in range(5):
        tower.run()
        tower.clock.advance(1.0)
    assert len(tried) == 2 and tower.lanes[0].health()[0] is Health.UP
    monkeypatch.undo()
    tower.store(key_chain(1, branch="nudge"))
    tower.run()
    assert tower.tiers[0].holds(KEYS) == [True] * 6
    tower.close()


def test_a_tier_that_hangs_costs_its_wait_and_closing_says_so() -> None:
    tower = Tower(threads=1, cold=ColdConfig(batch_bytes=2 * 4096, prefetch_share=0.5, drain_s=0.2))
    tower.store_below(KEYS)
    tower.tiers[0].fault = "hang"
    assert tower.ask(KEYS).ended is Ended.PENDING
    tower.clock.advance(1.1)
    assert tower.ask(KEYS).ended is Ended.ABSENT
    assert tower.store(key_chain(3, branch="on")) == 3  # the engine goes on
    with pytest.raises(BufferError, match="has not returned"):
        tower.cache.close()
    tower.tiers[0].let_go()
    until(lambda: not tower.lanes[0]._running)
    assert tower.lanes[0].health()[0] is Health.CLOSED
    tower.cache.close()


def test_a_request_that_waits_uses_what_it_has_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine asks again in each of its steps, which says nothing about how often the chunks are wanted."""
    tower = Tower(slots=16)
    tower.store_below(KEYS)
    tower.store(KEYS[:3])
    policy = tower.cache._host.shares.of(KEYS[0].tenant).policy
    used: list[int] = []
    monkeypatch.setattr(policy, "used", lambda keys, slots: used.append(len(slots)))
    for _ in range(5):
        plan = tower.ask(KEYS)
        assert plan.ended is Ended.PENDING
        assert plan.chunks == 3
    assert tower.fetch(KEYS).chunks == 6
    assert used == [6]
    tower.tiers[0].fault = "refuse"
    tower.ask([*KEYS, *key_chain(1, branch="more")], "s")
    assert used == [6, 6], "nor does one that has nothing to wait for wait for its use"
    monkeypatch.undo()
    tower.close()


def test_what_a_tier_that_hangs_was_to_deliver_is_computed_and_stored() -> None:
    """Once it is bypassed. Each request for a prompt would wait in vain, and nobody could store it in the meantime."""
    tower = Tower(slots=16, threads=1)
    tower.store_below(KEYS)
    tower.tiers[0].fault = "hang"
    assert tower.ask(KEYS).ended is Ended.PENDING
    until(lambda: bool(tower.lanes[0]._running))
    assert tower.ask(KEYS, "s").ended is Ended.PENDING, "until it is bypassed"
    tower.cache.end("s")
    tower.clock.advance(11.0)
    assert tower.lanes[0].health()[0] is Health.STUCK
    assert tower.ask(KEYS, "s").ended is Ended.ABSENT
    assert tower.store(KEYS) == 6
    assert tower.cache.lookup(KEYS, "s").chunks == 6
    tower.tiers[0].let_go()
    until(lambda: not tower.cache.counts().chunks_reserved)
    tower.read(KEYS)
    tower.close()


def test_what_a_tier_that_hangs_was_to_deliver_comes_from_the_next() -> None:
    tower = Tower("through", "through", slots=16, threads=1)
    tower.store_below(KEYS)
    tower.tiers[0].fault = "hang"
    assert tower.ask(KEYS).ended is Ended.PENDING
    until(lambda: bool(tower.lanes[0]._running))
    tower.clock.advance(11.0)
    until(lambda: tower.ask(KEYS, "s").chunks == 6)
    tower.read(KEYS)
    tower.close()


def test_a_tier_that_hangs_or_is_slow_leaves_the_others_their_part_of_what_may_be_spilled() -> None:
    """The call may read these slots until it returns, so they stay leased, whether the tier is bypassed or not."""
    tower = Tower("through", "through", slots=8, threads=2)
    tower.tiers[0].fault = "hang"
    tower.store(KEYS)
    until(lambda: tower.tiers[1].holds(KEYS) == [True] * 6)
    until(lambda: [state.spill.under_way for state in tower.cache.lower.states()] == [1, 0])
    tower.tiers[0].let_go()
    until(lambda: tower.tiers[0].holds(KEYS) == [True] * 6)
    tower.close()


@pytest.mark.parametrize("fault", ["hang", "down"])
def test_what_cannot_be_written_back_to_one_tier_is_to_the_others(fault: Fault) -> None:
    tower = Tower("back", "back", slots=8, threads=2)
    tower.tiers[0].fault = fault
    tower.store(KEYS)
    tower.store(key_chain(1, branch="crowd"))  # one has to leave
    until(lambda: "store" in tower.tiers[0].calls)
    if fault == "hang":
        tower.clock.advance(11.0)
    until(lambda: tower.lanes[0].health()[0] not in SERVING)
    for number in range(6):
        tower.store(key_chain(1, branch=str(number)))
        until(lambda: tower.cache.counts().slots_used <= 6)  # a quarter is kept free
    first, second = (state.spill for state in tower.cache.lower.states())
    assert (first.stored, second.lost) == (0, 0) and second.stored >= 13 - 6
    tower.close()


def test_a_tier_that_hangs_when_the_cache_is_closed_leaves_the_others_time() -> None:
    tower = Tower("back", "back", slots=16, threads=1)
    tower.tiers[0].fault = "hang"
    tower.store(KEYS)
    tower.cache.lower.drain(0.5)
    assert tower.tiers[1].holds(KEYS) == [True] * 6
    tower.close()


def test_a_named_pool_that_is_closed_before_all_went_down_keeps_what_did_not() -> None:
    """Slots are no longer kept free: nobody stores what is evicted for it."""
    HostPool.unlink("below-test")
    try:
        tower = Tower("back", pool=HostPool.named("below-test", CHUNK_BYTES, 8, fingerprint="t"))
        keys = key_chain(8)
        tower.store(keys)
        assert tower.cache.lower.states()[0].lane.queued == 2
        tower.cache.close()
        again = LocalCache(HostPool.named("below-test", CHUNK_BYTES, 8, fingerprint="t"))
        assert again.lookup(keys, "r").chunks == 8
        again.close()
    finally:
        HostPool.unlink("below-test")


def test_promoted_chunks_of_a_named_pool_are_there_for_the_next_process() -> None:
    HostPool.unlink("below-test")
    try:
        tower = Tower(pool=HostPool.named("below-test", CHUNK_BYTES, 8, fingerprint="t"))
        tower.store_below(KEYS)
        assert tower.fetch(KEYS).chunks == 6
        tower.close()
        again = LocalCache(HostPool.named("below-test", CHUNK_BYTES, 8, fingerprint="t"))
        assert again.lookup(KEYS, "r").chunks == 6
        assert again.counts().chunks_damaged == 0
        again.close()
    finally:
        HostPool.unlink("below-test")
