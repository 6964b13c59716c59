"""Hand-overs under vLLM's real schedulers. One engine is both sides, and every byte that is attended to is checked."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from oracle import Oracle
from test_stores_behind import Engine, started, step

PROMPT = [3 + (7 * i) % 40 for i in range(200)]  # three chunks of 64 and eight tokens
LONGER = PROMPT + PROMPT[:40]  # and 48
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
SCHEDULERS = pytest.mark.parametrize("asynchronous", [False, True], ids=["Scheduler", "AsyncScheduler"])


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def oracle(request: pytest.FixtureRequest, tiny_llama: str) -> Iterator[Oracle]:
    made = Oracle(tiny_llama, asynchronous=request.param, handover={"wait_s": 0.05})
    yield made
    made.run()
    made.assert_at_rest()
    made.close()


def prefill(oracle: Oracle, prompt: list[int]) -> dict[str, Any]:
    name = f"prefill {len(oracle.tokens)}"
    oracle.ask(name, prompt, 1, params=PREFILL)
    return oracle.answers[name]


def decode(oracle: Oracle, prompt: list[int], params: dict[str, Any], new_tokens: int = 4) -> int:
    """How many tokens were given to the request instead of being computed."""
    before = given(oracle)
    oracle.ask(f"decode {len(oracle.tokens)}", prompt, new_tokens, params=params)
    return given(oracle) - before


def given(oracle: Oracle) -> int:
    assert oracle.engine.scheduler is not None
    return oracle.engine.scheduler.counts.loaded_tokens


@pytest.mark.parametrize(
    ("prompt", "handed_over", "loaded"),
    [(LONGER, 240, 239), (PROMPT, 192, 192), (PROMPT[:192], 192, 191), (PROMPT[:20], 20, 19), (PROMPT[:80], 80, 79)],
    ids=["a long tail", "a tail not worth it", "no tail", "a tail alone", "the shortest tail"],
)
def test_all_but_a_token_is_loaded_and_every_byte_of_it_is_right(
    oracle: Oracle, prompt: list[int], handed_over: int, loaded: int
) -> None:
    params = prefill(oracle, prompt)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_num_tokens"] == handed_over
    assert decode(oracle, prompt, params) == loaded
    assert decode(oracle, prompt, params, 100) == loaded  # over what the partial chunk was filled with


def test_without_a_proxys_word_there_is_nothing_of_the_kind(oracle: Oracle) -> None:
    oracle.ask("plain", LONGER, 1)
    assert oracle.answers == {}
    assert decode(oracle, LONGER, {"do_remote_prefill": True, "do_remote_decode": False}) == 192


def test_an_aborted_prefill_hands_nothing_over(oracle: Oracle) -> None:
    oracle.submit("aborted", LONGER, 1, params=PREFILL)
    oracle.step()
    oracle.abort("aborted")
    oracle.run()
    assert oracle.answers == {}
    assert decode(oracle, LONGER, {}) in (0, 64, 128)


@pytest.mark.parametrize(
    "words",
    [
        {"remote_num_tokens": 10**12},
        {"remote_num_tokens": -1},
        {"remote_num_tokens": True},
        {"remote_num_tokens": "many"},
        {"remote_num_tokens": 239},
        {"do_remote_prefill": "yes"},
        {"remote_host": "203.0.113.7", "remote_port": 1, "remote_engine_id": "nobody", "remote_block_ids": [[1, 2]]},
    ],
    ids=repr,
)
def test_whatever_a_proxy_says_the_tokens_are_right(oracle: Oracle, words: dict[str, Any]) -> None:
    params = prefill(oracle, LONGER)
    assert decode(oracle, LONGER, params | words) in (192, 239)
    assert decode(oracle, LONGER[100:], params | words) == 0


def test_a_token_that_differs_in_the_tail_finds_the_chunks_before_it(oracle: Oracle) -> None:
    params = prefill(oracle, LONGER)
    assert decode(oracle, [*LONGER[:-1], 49], params) == 192


def test_a_model_with_windows_hands_over_whole_chunks(tiny_llama: str) -> None:
    oracle = Oracle(tiny_llama, kinds=("full", "window:100"))
    try:
        params = prefill(oracle, LONGER)
        assert params["remote_num_tokens"] == 192
        assert decode(oracle, LONGER, params) == 192
        oracle.assert_at_rest()
    finally:
        oracle.close()


def prefilled(engine: Engine) -> dict[str, Any]:
    """A prompt is computed, and the device has copied nothing of it."""
    engine.oracle.submit("prefill", LONGER, 1, params=PREFILL)
    step(engine, 8)
    assert engine.stored == 0
    assert engine.device.queue.pending
    return engine.oracle.answers["prefill"]


def late(engine: Engine) -> int:
    assert engine.oracle.engine.scheduler is not None
    return engine.oracle.engine.scheduler.counts.handovers_late


@SCHEDULERS
def test_what_is_still_being_stored_is_waited_for(tiny_llama: str, asynchronous: bool) -> None:
    """The prefill engine answers before its device has copied anything."""
    with started(tiny_llama, asynchronous=asynchronous, handover={"wait_s": 60.0}) as engine:
        oracle = engine.oracle
        oracle.submit("decode", LONGER, params=prefilled(engine))
        step(engine, 20)
        assert oracle.generated["decode"] == [] and oracle.loaded == 0
        until_s = time.monotonic() + 60
        while len(oracle.generated["decode"]) < 4:
            assert time.monotonic() < until_s
            step(engine, 1, len(engine.device.queue.pending))
        assert given(oracle) == 239
        assert oracle.generated["decode"] == oracle.expected_tokens("decode", len(LONGER), 4)
        assert late(engine) == 0


@SCHEDULERS
def test_what_does_not_come_in_time_is_computed(tiny_llama: str, asynchronous: bool) -> None:
    with started(tiny_llama, asynchronous=asynchronous, handover={"wait_s": 0.05}) as engine:
        oracle = engine.oracle
        oracle.submit("decode", LONGER, params=prefilled(engine))
        until_s = time.monotonic() + 60
        while len(oracle.generated["decode"]) < 4:
            assert time.monotonic() < until_s
            step(engine, 1)
        assert oracle.loaded == 0
        assert oracle.generated["decode"] == oracle.expected_tokens("decode", len(LONGER), 4)
        assert late(engine) == 1
