"""Loading or computing: what is estimated slower is never chosen, and a quicker link never makes it compute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_connect.halves.engine_costs import EngineCosts
from kv_connect.halves.request import RequestTokens
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.request_options import Controls
from kv_core import ChainScheme, KeySequence, KeySpace, tenant_tag
from kv_core.clock import HandClock
from kv_core.cost import Choice, Costs, Skipped, Wait, choose, choose_wait, won_by
from kv_core.shape import ConnectShape, GroupShape
from kv_testing.connect import DictService

SECONDS = st.floats(0.0, 100.0)
SMALL = st.floats(0.0, 1e-2)
COSTS = st.builds(
    Costs,
    st.integers(0, 100_000),
    st.one_of(st.none(), st.tuples(SMALL, st.floats(0.0, 1e-6))),
    st.one_of(st.none(), st.tuples(SECONDS, SMALL)),
)
TOKENS = st.integers(1, 1024)
CHUNKS = st.integers(0, 1000)
SPACE = KeySpace("model", "r1", "float32", "f", 1, "sha256:4")


@given(COSTS, TOKENS, CHUNKS)
def test_what_is_estimated_slower_is_not_loaded(costs: Costs, tokens: int, chunks: int) -> None:
    choice = choose(costs, tokens, chunks)
    if choice.load_s is None or choice.compute_s is None:
        assert choice.chunks == chunks  # as if there were no estimates
    else:
        assert choice.chunks == (chunks if choice.load_s <= choice.compute_s else 0)


@given(COSTS, TOKENS, CHUNKS, st.floats(0.0, 1.0))
def test_a_quicker_link_never_makes_it_compute(costs: Costs, tokens: int, chunks: int, part: float) -> None:
    if costs.load is not None and choose(costs, tokens, chunks).chunks:
        quicker = Costs(costs.computed_tokens, costs.compute, (costs.load[0] * part, costs.load[1] * part))
        assert choose(quicker, tokens, chunks).chunks == chunks


@given(COSTS, TOKENS, st.integers(0, 100), st.lists(st.tuples(st.integers(1, 1000), SECONDS), max_size=8), SECONDS)
def test_what_is_waited_for_pays_and_nothing_pays_more(
    costs: Costs, tokens: int, have: int, waits: list[tuple[int, float]], most_s: float
) -> None:
    given_waits = [Wait(have + more, seconds) for more, seconds in waits]
    chosen = choose_wait(costs, tokens, have, given_waits, most_s)

    def gain(wait: Wait) -> float:
        last = wait.chunks * tokens
        load_s = (costs.load_s(0, last) or 0.0) - (costs.load_s(0, have * tokens) or 0.0)
        return (costs.compute_s(have * tokens, last) or 0.0) - load_s - wait.seconds

    allowed = [wait for wait in given_waits if wait.seconds <= most_s]
    if chosen is None:
        assert all(gain(wait) <= 1e-9 for wait in allowed)
    else:
        assert chosen.seconds <= most_s and gain(chosen) > 0.0
        assert gain(chosen) >= max(map(gain, allowed)) - 1e-9


def test_a_leading_part_is_waited_for_where_the_rest_does_not_pay() -> None:
    costs = Costs(0, (1e-3, 0.0), (0.0, 0.0))
    waits = [Wait(10, 0.1), Wait(20, 5.0)]
    assert choose_wait(costs, 100, 0, waits, 10.0) == Wait(10, 0.1)
    assert choose_wait(costs, 100, 0, [Wait(10, 0.1), Wait(20, 0.2)], 10.0) == Wait(20, 0.2)
    assert choose_wait(costs, 100, 0, [Wait(10, 2.0)], 10.0) is None


def test_what_comes_before_the_first_chunk_is_attended_to() -> None:
    whole = Costs(0, (1e-3, 1e-6))
    after = Costs(0, (1e-3, 1e-6), before_tokens=30_000)
    assert after.compute_s(0, 1000) == pytest.approx(whole.compute_s(30_000, 31_000))
    waits = [Wait(10, 20.0)]
    assert choose_wait(whole, 100, 0, waits, 60.0) is None
    assert choose_wait(after, 100, 0, waits, 60.0) == waits[0]


def test_what_the_engine_has_itself_is_not_counted() -> None:
    costs = Costs(1000, (1e-3, 1e-6), (0.5, 1e-4))
    assert costs.compute_s(0, 1000) == 0.0 and costs.load_s(0, 900) == 0.0
    assert costs.compute_s(0, 1100) == pytest.approx(100 * 1e-3 + 1e-6 * (1100**2 - 1000**2) / 2)
    assert costs.load_s(0, 1100) == pytest.approx(0.51)
    skipped = Skipped(3, "disk", 1.0, 0.5)
    assert choose(costs, 100, 11, skipped) == Choice(0, costs.load_s(0, 1100), costs.compute_s(0, 1100), skipped)


class Engine:
    """Computes and loads at given speeds, by a clock that is moved by hand."""

    def __init__(self, token_s: float, load_token_s: float) -> None:
        self.clock = HandClock(100.0)
        self.costs = EngineCosts(self.clock)
        self.token_s, self.load_token_s = token_s, load_token_s
        self._requests = 0

    def compute(self, tokens: int) -> None:
        self.costs.step_scheduled(tokens, tokens * tokens / 2, counts=True)
        self.clock.advance(0.001 + tokens * self.token_s)
        self.costs.step_ended()

    def serve(self, tokens: int) -> bool:
        """Whether a hit of so many tokens was loaded."""
        costs = self.costs.of(0)
        assert costs is not None
        loads = choose(costs, tokens, 1).chunks == 1
        self.costs.chose(to_load=loads)
        if loads:
            self._requests += 1
            self.costs.load_began(str(self._requests), tokens)
            self.clock.advance(0.002 + tokens * self.load_token_s)
            self.costs.load_ended(str(self._requests), failed=False)
        else:
            self.compute(tokens)
        return loads

    def warm_up(self) -> None:
        for tokens in (100, 1000, 300, 2000, 600):
            self.compute(tokens)


def test_an_engine_that_computes_quicker_than_it_loads_computes() -> None:
    engine = Engine(token_s=1e-5, load_token_s=1e-4)
    engine.warm_up()
    served = [engine.serve(1000 + number) for number in range(200)]
    assert served[:4].count(True) == 4  # that is how it learns
    assert served[4:].count(True) <= 2
    assert not any(served[-50:])


def test_a_link_that_became_quick_again_is_found_out() -> None:
    engine = Engine(token_s=1e-5, load_token_s=1e-4)
    engine.warm_up()
    for number in range(50):
        engine.serve(1000 + number)
    engine.load_token_s = 1e-7
    asked = 0
    while not all(engine.serve(1000 + number) for number in range(10)):
        asked += 1
        engine.clock.advance(1.0)
        assert asked < 60
    assert all(engine.serve(2000) for _ in range(20))


def test_a_link_that_stays_slow_is_tried_ever_more_seldom() -> None:
    engine = Engine(token_s=1e-5, load_token_s=1e-4)
    engine.warm_up()
    tried = [engine.serve(1000) or engine.clock.advance(1.0) or False for _ in range(3000)]
    assert 2 <= tried[100:].count(True) <= 12
    assert tried[-600:].count(True) <= 2


def test_after_a_restart_where_all_is_found_a_slow_link_is_not_waited_for() -> None:
    """Each step computes the 48 tokens behind a hit, in 40 ms of which 20 are its fixed part; the hit's own 512 would
    take 0.21 s, and 0.36 s come by the link."""
    clock = HandClock()
    costs = EngineCosts(clock)

    def compute(tokens: int) -> None:
        costs.step_scheduled(tokens, 0.0, counts=True)
        clock.advance(0.02 + tokens * 0.02 / 48)
        costs.step_ended()

    def waits(seconds: float) -> bool:
        return won_by(costs.of(0), 128, 0, Wait(4, seconds)) > 0.0

    for _ in range(4):
        compute(48)
    assert (costs.of(0).compute_s(0, 512) or 0.0) > 0.36
    assert waits(0.07) and not waits(0.09)  # twice 48 tokens' time
    for _ in range(6):
        compute(560)
        compute(48)
    assert costs.of(0).compute_s(0, 512) == pytest.approx(512 * 0.02 / 48, rel=0.2)
    assert costs.of(0).compute_s(0, 8192) == pytest.approx(8192 * 0.02 / 48, rel=0.2)


def test_a_first_long_step_outweighs_what_short_ones_say_of_it() -> None:
    """Else its surprise is taken for a disturbance, and a slow link is waited for until long steps were tried often."""
    clock = HandClock()
    costs = EngineCosts(clock)
    for tokens in (48, 48, 48, 48, 560):
        costs.step_scheduled(tokens, tokens * tokens / 2, counts=True)
        clock.advance(0.02 + tokens * 2e-5)
        costs.step_ended()
    assert won_by(costs.of(0), 128, 0, Wait(4, 0.04)) < 0.0


def test_where_steps_are_limited_no_longer_one_has_to_be_measured() -> None:
    """Else half of what computing takes is believed for ever, and a tier that is as quick as that is never read."""
    clock = HandClock()
    known, limited = EngineCosts(clock), EngineCosts(clock, step_tokens=256)
    for costs in (known, limited):
        for tokens in (256, 48, 256, 48, 256):
            costs.prefill_took(tokens, 0.0, 0.02 + tokens * 4e-4)
    assert won_by(known.of(0), 128, 0, Wait(16, 0.6)) < 0.0 < won_by(limited.of(0), 128, 0, Wait(16, 0.6))


def test_a_long_step_that_was_disturbed_is_measured_again() -> None:
    """Else all is loaded over a slow link for ever, and only short steps are measured."""
    clock = HandClock()
    costs = EngineCosts(clock)

    def compute(tokens: int, seconds: float) -> None:
        costs.step_scheduled(tokens, 0.0, counts=True)
        clock.advance(seconds)
        costs.step_ended()

    for _ in range(4):
        compute(48, 0.04)
    compute(560, 2.0)
    tests = []
    for number in range(2000):
        if won_by(costs.of(0), 512, 0, Wait(1, 0.15)) < 0.0:
            tests.append(number)
            compute(560, 0.25)
        else:
            compute(48, 0.04)
    assert tests[0] < 20 and 4 <= len(tests) <= 12


def test_steps_that_overlap_are_counted_from_the_one_before() -> None:
    """Two under way: each begins on the device when the one before has ended."""
    clock = HandClock(5.0)
    costs = EngineCosts(clock)
    costs.step_scheduled(1000, 5e5, counts=True)
    for _ in range(20):
        clock.advance(0.001)
        costs.step_scheduled(1000, 5e5, counts=True)
        clock.advance(0.999)
        costs.step_ended()
    now = costs.of(0)
    assert now is not None
    assert now.compute_s(0, 1000) == pytest.approx(1.0, rel=0.2)


def test_steps_that_compute_no_prompt_say_nothing() -> None:
    clock = HandClock()
    costs = EngineCosts(clock)
    for _ in range(50):
        costs.step_scheduled(8, 100.0, counts=False)
        clock.advance(1.0)
        costs.step_ended()
    now = costs.of(0)
    assert now is not None and now.compute is None


def test_settings_and_requests_say_when_there_are_no_costs() -> None:
    clock = HandClock()
    assert EngineCosts(clock, use="always").of(7) == Costs(7)
    assert EngineCosts(clock, prefill_tokens_per_second=1000.0).of(7, "always") == Costs(7)
    assert EngineCosts(clock, use="always").of(7, "auto") == Costs(7)
    told = EngineCosts(clock, prefill_tokens_per_second=1000.0).of(0)
    assert told is not None and told.compute_s(0, 500) == pytest.approx(0.5)


def test_the_half_offers_nothing_that_is_slower_to_load_and_says_what_became_of_its_estimates() -> None:
    """Both halves over a dictionary, on an engine whose loads are slow: what is held is declined, and given back."""
    engine = Engine(token_s=1e-4, load_token_s=1e-2)
    service = DictService()
    shape = ConnectShape(ChainScheme("sha256", 4), SPACE, (GroupShape(4),))
    half = SchedulerHalf(service, shape, name="e", costs=engine.costs)
    tokens = list(range(40))
    keys = SPACE.keys(KeySequence(shape.scheme, root=shape.scheme.root()).append(tokens), tenant=tenant_tag(None))
    service.held.update(zip(keys, range(len(keys)), strict=True))
    engine.warm_up()
    offers = []
    for number in range(8):
        request = RequestTokens(f"r{number}", tokens, len(tokens))
        offered = half.match(request, 0)
        assert offered is not None
        offers.append(offered)
        half.allocated(request.request_id, offered, (list(range(10)),))
        half.build_step([])
        if offered:
            engine.clock.advance(0.4)
            half.loads_ended([request.request_id], [])
            half.allocated(request.request_id, 0, (list(range(10)),))
        half.finished(request.request_id)
    assert offers == [39] * 4 + [0] * 4
    assert service.promised == {} and half.tracked_phases() == {}
    assert half.counts.declined_tokens == 4 * 39
    assert {sample.what for sample in service.samples} == {"compute"}  # the loads were not known before
    engine.clock.advance(20.0)  # time for another look
    always = RequestTokens("r8", tokens, len(tokens), controls=Controls(use="always"))
    assert half.match(always, 0) == 39
    half.finished("r8")
    assert half.match(RequestTokens("r9", tokens, len(tokens)), 0) == 39
    half.allocated("r9", 39, (list(range(10)),))
    half.build_step([])
    engine.clock.advance(0.4)
    half.loads_ended(["r9"], [])
    half.finished("r9")
    assert half.match(RequestTokens("r10", tokens, len(tokens)), 0) == 0
    half.build_step([])
    assert "load" in {sample.what for sample in service.samples}
