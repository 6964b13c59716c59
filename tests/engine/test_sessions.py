"""Streaming sessions: requests whose prompt goes on while they live, under both of vLLM's schedulers with the oracle,
and on the real engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from oracle import Oracle

SHARED = [3 + (7 * i) % 40 for i in range(400)]
Make = Callable[..., Oracle]


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def make(request: pytest.FixtureRequest, tiny_llama: str) -> Iterator[Make]:
    made: list[Oracle] = []

    def build(**options: Any) -> Oracle:
        made.append(Oracle(tiny_llama, asynchronous=request.param, **options))
        return made[-1]

    yield build
    for oracle in made:
        oracle.drain()
        oracle.run()
        oracle.assert_at_rest()
        oracle.close()


def spoken(oracle: Oracle, name: str, turns: list[list[int]], new_tokens: int) -> list[int]:
    """A session of these turns; all of its tokens."""
    oracle.submit(name, turns[0], new_tokens, resumable=True)
    for turn in turns[1:]:
        oracle.run_until_it_waits(name)
        oracle.go_on(name, turn, new_tokens)
    oracle.run_until_it_waits(name)
    tokens = list(oracle.scheduler.requests[name].all_token_ids)
    oracle.abort(name)
    oracle.run()
    return tokens


def found(oracle: Oracle, name: str, prompt: list[int]) -> int:
    before = oracle.loaded
    oracle.ask(name, prompt)
    return oracle.loaded - before


@pytest.mark.parametrize("save_decode", [False, True])
def test_what_a_session_has_heard_and_said_is_found_by_the_next(make: Make, save_decode: bool) -> None:
    """Its last sampled token of every turn is dropped by vLLM, and is in no chunk of ours."""
    oracle = make(save_decode=save_decode)
    turns = [SHARED[:100], SHARED[100:190], [9] * 70, SHARED[200:231]]
    tokens = spoken(oracle, "a", turns, 7)
    heard = len(tokens) - 7  # what it said after the last turn is no prompt
    kept = (len(tokens) - 1 if save_decode else heard) // 64 * 64
    assert found(oracle, "b", [*tokens, 5]) == kept


def test_a_session_finds_what_was_stored_before_it_and_at_every_turn_goes_on_right(make: Make) -> None:
    oracle = make()
    oracle.ask("a", SHARED[:300])
    spoken(oracle, "b", [SHARED[:200], SHARED[200:260], SHARED[:70]], 20)
    assert oracle.loaded == 192


def test_sessions_beside_requests_that_are_preempted(make: Make) -> None:
    oracle = make(blocks=24, save_decode=True)
    for number in range(4):
        oracle.submit(f"r{number}", [number, *SHARED[:120]], 80)
    tokens = spoken(oracle, "s", [SHARED[:90], SHARED[90:180], SHARED[20:100]], 30)
    oracle.run()
    assert found(oracle, "t", [*tokens, 5]) >= (len(tokens) - 1) // 64 * 64 - 64


async def _answers(model: str, cache: dict[str, Any] | None, sessions: list[list[list[int]]]) -> list[list[int]]:
    """Each session's tokens, of all turns one after the other."""
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = None
    if cache is not None:
        transfer = KVTransferConfig(
            kv_connector="KVTiersConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=cache,
        )
    arguments: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096, "enable_prefix_caching": False}
    arguments |= {"enforce_eager": True, "skip_tokenizer_init": True}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, kv_transfer_config=transfer, **arguments))
    sampling = SamplingParams(
        temperature=0, max_tokens=8, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def ask(number: int, turns: list[list[int]]) -> tuple[list[int], int | None]:
        answered = asyncio.Semaphore(1)

        async def inputs() -> AsyncIterator[StreamingInput]:
            for turn in turns:
                await asyncio.wait_for(answered.acquire(), 120)
                yield StreamingInput(prompt={"prompt_token_ids": list(turn)})  # vLLM appends to it

        said: list[int] = []
        cached: int | None = None  # of the first turn; vLLM adds up something else for those that follow
        async for output in engine.generate(inputs(), sampling, f"session {number}"):
            said += output.outputs[0].token_ids
            cached = output.num_cached_tokens if cached is None else cached
            if len(said) % 8 == 0 and output.outputs[0].token_ids:
                answered.release()
        return said, cached

    try:
        answers = [await ask(number, turns) for number, turns in enumerate(sessions)]
    finally:
        engine.shutdown()
    assert cache is None or answers[-1][1] == 512, answers[-1][1]
    return [said for said, _ in answers]


@pytest.mark.slow
def test_sessions_on_the_real_engine_say_the_same_with_us(spelling_llama: str) -> None:
    """The second session begins as the first does, and finds that."""
    first, more = [3 + (7919 * i) % 2000 for i in range(600)], [5 + (31 * i) % 1900 for i in range(300)]
    sessions = [[first, more, first[:40]], [first, more[:100], more]]
    plain = asyncio.run(_answers(spelling_llama, None, sessions))
    assert [len(said) for said in plain] == [24, 24]
    assert asyncio.run(_answers(spelling_llama, {"host": {"capacity_bytes": "128MiB"}}, sessions)) == plain
