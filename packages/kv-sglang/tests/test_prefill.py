"""How fast SGLang computes prompts, from the steps of its scheduler."""

from dataclasses import dataclass, field

import pytest
from kv_core.clock import HandClock
from kv_sglang.scheduler_calls import PrefillSpeed

TOKEN_S, PAIR_S = 1e-4, 1e-8


@dataclass
class Mode:
    """Of a step: SGLang's `ForwardMode`."""

    computes_prompts: bool = True
    is_split: bool = False

    def is_extend_without_speculative(self) -> bool:
        return self.computes_prompts

    def is_split_prefill(self) -> bool:
        return self.is_split


@dataclass
class Batch:
    """What `process_batch_result` gets of a step: SGLang's `ScheduleBatch`, or its copy."""

    launch_ts: float
    prefix_lens: list[int]
    extend_lens: list[int]
    forward_mode: Mode = field(default_factory=Mode)


def step_s(batch: Batch) -> float:
    return sum(
        new * (TOKEN_S + PAIR_S * (before + new / 2))
        for before, new in zip(batch.prefix_lens, batch.extend_lens, strict=True)
    )


def compute_s(speed: PrefillSpeed, first_token: int, last_token: int) -> float | None:
    costs = speed.costs()
    return None if costs is None else costs.compute_s(first_token, last_token)


def computed(clock: HandClock, speed: PrefillSpeed, *batches: Batch) -> None:
    """The steps were launched at once, and end one after the other."""
    for batch in batches:
        clock.advance(step_s(batch))
        speed.step_ended(batch)


@pytest.mark.parametrize("at_once", [1, 2])
def test_it_is_learnt_from_steps_which_may_be_launched_before_the_last_has_ended(at_once: int) -> None:
    clock = HandClock()
    speed = PrefillSpeed(clock=clock)
    assert speed.costs() is None
    for number in range(40):
        lengths = [64 * (1 + (number + other) % 7) for other in range(at_once)]
        launched_s = clock.now_s()
        computed(clock, speed, *(Batch(launched_s, [1024 * (number % 5)], [tokens]) for tokens in lengths))
    for first, tokens in ((0, 16), (0, 1600), (3200, 160)):
        expected_s = tokens * (TOKEN_S + PAIR_S * (first + tokens / 2))
        assert compute_s(speed, first, first + tokens) == pytest.approx(expected_s, rel=0.2)
    assert speed.take_measured()
    assert not speed.take_measured()


@pytest.mark.parametrize(
    "batch",
    [
        Batch(0.0, [], [], Mode(computes_prompts=False)),
        Batch(0.0, [0], [512], Mode(is_split=True)),
        Batch(0.0, [100, 200], [1, 1]),
    ],
    ids=["decode", "a part of the layers", "hardly a prompt"],
)
def test_other_steps_say_nothing_of_it(batch: Batch) -> None:
    clock = HandClock()
    speed = PrefillSpeed(clock=clock)
    for _ in range(10):
        clock.advance(1.0)
        speed.step_ended(batch)
    assert speed.costs() is None


def test_a_step_begins_when_the_one_before_has_ended_whatever_that_computed() -> None:
    clock = HandClock()
    speed = PrefillSpeed(clock=clock)
    for _ in range(10):
        launched_s = clock.now_s()
        clock.advance(5.0)
        speed.step_ended(Batch(launched_s, [], [], Mode(computes_prompts=False)))
        computed(clock, speed, Batch(launched_s, [0], [512]))
    found = compute_s(speed, 0, 512)
    assert found is not None
    assert found < 1.0


def test_a_steps_fixed_part_is_not_taken_for_computing_once_there_are_short_ones() -> None:
    """Where all prompts are as long, only those that are found leave little to compute."""
    clock = HandClock()
    speed = PrefillSpeed(clock=clock)

    def step(before: int, tokens: int) -> None:
        launched_s = clock.now_s()
        clock.advance(0.1 + tokens * TOKEN_S * 5)
        speed.step_ended(Batch(launched_s, [before], [tokens]))

    for _ in range(10):
        step(0, 560)
    assert compute_s(speed, 0, 512) == pytest.approx(0.38 * 512 / 560, rel=0.1)
    for _ in range(10):
        step(512, 48)
        step(0, 560)
    assert compute_s(speed, 0, 512) == pytest.approx(512 * TOKEN_S * 5, rel=0.1)


@pytest.mark.parametrize(("step_tokens", "measured_tokens"), [(0, 256), (512, 0), (513, 256)])
def test_what_holds_for_the_longest_step_that_there_can_be_holds_for_any(
    step_tokens: int, measured_tokens: int
) -> None:
    clock = HandClock()
    speed = PrefillSpeed(clock=clock)
    for tokens in (256, 48, 256, 48, 256):
        clock.advance(tokens * TOKEN_S)
        speed.step_ended(Batch(clock.now_s() - tokens * TOKEN_S, [0], [tokens]), step_tokens)
    assert (costs := speed.costs()) is not None and costs.measured_tokens == measured_tokens


def test_a_speed_that_is_given_is_not_measured() -> None:
    clock = HandClock()
    speed = PrefillSpeed(tokens_per_second=1000.0, clock=clock)
    for _ in range(10):
        launched_s = clock.now_s()
        clock.advance(9.0)
        speed.step_ended(Batch(launched_s, [0], [512]))
    assert compute_s(speed, 100, 260) == pytest.approx(0.16)


def test_what_comes_before_a_lookup_makes_its_pages_take_longer() -> None:
    speed = PrefillSpeed(tokens_per_second=1000.0)
    for number in range(10_000):
        speed.will_look_up(f"page {number}", 100 + number)
    speed.will_look_up("page 9999", 10_099)
    costs = [speed.costs(page) for page in ("page 9999", "page 0", "")]
    assert [one.before_tokens for one in costs if one is not None] == [10_099, 0, 0]
