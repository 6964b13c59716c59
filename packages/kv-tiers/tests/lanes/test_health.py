"""A tier's health: every state that things about it can make together, and how long it rests."""

import itertools

import pytest
from kv_core.clock import HandClock
from kv_tiers.tier_state import SERVING, Health, HealthTracker

FACTS = list(itertools.product([False, True], repeat=4))
STUCK_S = 10.0
WHY = {
    Health.UP: "",
    Health.FULL: "no room",
    Health.DOWN: "it broke",
    Health.STUCK: "a call to it has not returned",
    Health.CLOSED: "it is closed",
}


def expected(closed: bool, down: bool, stuck: bool, full: bool) -> Health:
    if closed:
        return Health.CLOSED
    if down:
        return Health.DOWN
    if stuck:
        return Health.STUCK
    return Health.FULL if full else Health.UP


def tracker(clock: HandClock) -> HealthTracker:
    return HealthTracker(backoff_s=1.0, max_backoff_s=5.0, stuck_s=STUCK_S, clock=clock)


@pytest.mark.parametrize(("closed", "down", "stuck", "full"), FACTS)
def test_of_all_that_is_true_the_first_counts(closed: bool, down: bool, stuck: bool, full: bool) -> None:
    clock = HandClock()
    made = tracker(clock)
    made.is_closed, made.full = closed, "no room" if full else ""
    if down:
        made.failed("it broke")
    running = [clock.now_s(), clock.now_s() + 5]
    clock.advance(STUCK_S + (0.1 if stuck else 0))
    health = made.now(running)
    assert health is expected(closed, down, stuck, full)
    assert (health in SERVING) == (health in (Health.UP, Health.FULL))
    assert made.why(health) == WHY[health]
    assert made.may_probe() is down
    made.is_probing = True
    assert not made.may_probe()


def test_rests_grow_until_a_load_succeeds() -> None:
    clock = HandClock()
    made = tracker(clock)
    rests = []
    for _ in range(5):
        assert made.failed("it broke")
        rests.append(made.probe_due_in_s())
        clock.advance(rests[-1] or 0)
        assert made.may_probe()
        made.probed()
        assert made.now([]) is Health.UP
    assert rests == [1.0, 2.0, 4.0, 5.0, 5.0]
    made.loaded()
    assert made.failed("again") and made.probe_due_in_s() == 1.0
    assert not made.failed("still")  # it rests already, and longer
    assert made.probe_due_in_s() == 2.0
    assert made.last_failure == "still"


def test_a_tier_that_is_being_probed_has_no_rest_to_wait_for() -> None:
    clock = HandClock()
    made = tracker(clock)
    assert made.probe_due_in_s() is None and not made.may_probe()
    made.failed("it broke")
    made.is_probing = True
    assert made.probe_due_in_s() is None
    made.is_probing = False
    clock.advance(100)
    assert made.probe_due_in_s() == 0.0
