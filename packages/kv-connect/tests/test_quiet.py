"""Steps in which nobody needs to look at each request: none of them may complete a chunk."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_connect.halves.request import RequestTokens
from kv_connect.halves.scheduler import QuietSteps, SchedulerHalf, tokens_to_store
from kv_connect.request_options import Controls
from kv_testing.connect import DictService
from kv_testing.toy_engine import CHUNK, shape_of

SHAPE = shape_of(5)
CONTROLS = st.builds(
    Controls,
    store=st.booleans(),
    min_store_tokens=st.sampled_from([0, 0, 9]),
    max_store_tokens=st.sampled_from([None, None, 6]),
)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40), CONTROLS), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=40),
    st.integers(0, 2),
)
@settings(deadline=None)
def test_a_step_that_passes_completes_no_chunk(
    requests: list[tuple[int, int, Controls]], steps: list[int], behind: int
) -> None:
    """behind: how many of the computed tokens are not known yet, as in a step that is scheduled ahead."""
    half = SchedulerHalf(DictService(), SHAPE, name="e")
    quiet = QuietSteps(SHAPE)
    tokens = {f"r{n}": list(range(prompt)) for n, (prompt, _, _) in enumerate(requests)}
    known = {
        name: RequestTokens(name, tokens[name], keep_tokens=requests[n][1], controls=requests[n][2])
        for n, name in enumerate(tokens)
    }
    computed = dict.fromkeys(tokens, 0)
    for name in tokens:
        half.match(known[name], 0)
        half.allocated(name, 0, ())
    for most in [max(prompt for prompt, _, _ in requests), *steps]:
        passes = quiet.passes(most)
        if not passes:
            quiet.begin()
        for number, name in enumerate(tokens):
            computed[name] += most if number % 2 else 1
            while len(tokens[name]) < computed[name] - behind:
                tokens[name].append(len(tokens[name]))
            completes = half.completes_chunk(known[name], computed[name])
            assert not (passes and completes)
            if completes:
                half._tracked[name].stored_chunks = known[name].kept_tokens // CHUNK  # as `build_step` does
            if not passes:
                quiet.looked_at(known[name], computed[name])


def test_a_prompt_that_is_stored_is_quiet_for_good_and_its_generated_tokens_until_the_next_chunk() -> None:
    request = RequestTokens("a", list(range(10)), keep_tokens=10)
    assert tokens_to_store(SHAPE, request, 10) > 1 << 60
    assert tokens_to_store(SHAPE, replace(request, keep_tokens=1 << 40), 10) == 12 - 10
    assert tokens_to_store(SHAPE, replace(request, keep_tokens=1 << 40), 13) == 1  # its last tokens are not known yet
    assert tokens_to_store(replace(SHAPE, stores=False), request, 3) > 1 << 60


def test_what_is_handed_over_with_its_last_tokens_ends_the_quiet() -> None:
    request = RequestTokens("a", list(range(10)), keep_tokens=10, controls=Controls(hands_over_tokens=10))
    assert tokens_to_store(SHAPE, request, 8) == 2


def test_something_else_that_changed_ends_the_quiet() -> None:
    quiet = QuietSteps(SHAPE)
    assert not quiet.passes(1)
    quiet.begin()
    assert quiet.passes(100)
    quiet.end()
    assert not quiet.passes(1)
