"""Every way in which vLLM lets a request be asked, cold and then found in the cache: the answers are the same.

One engine for all of them. What is asked first is computed, since no two tests share a prefix.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import Engine, started

CACHE: dict[str, Any] = {"host": {"capacity_bytes": "128MiB"}}


@pytest.fixture(scope="module")
def engine(spelling_llama: str) -> Iterator[Engine]:
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "enable_prompt_embeds": True,
        "scheduling_policy": "priority",
        "max_num_seqs": 16,
        "structured_outputs_config": {"backend": "xgrammar"},
    }
    with started(spelling_llama, cache=CACHE, **arguments) as running:
        yield running
        running.assert_at_rest()


def prompt(number: int, tokens: int = 600) -> list[int]:
    return [3 + (7919 * (i + 1) * (number + 2) + 31 * number) % 2000 for i in range(tokens)]


def generate(engine: Engine, asked: list[Any], **sampling: Any) -> tuple[Any, list[int]]:
    """All candidates' tokens of each prompt, and how many tokens of it were found."""
    from vllm import SamplingParams

    options = {key: sampling.pop(key) for key in ("priority",) if key in sampling}
    chosen = SamplingParams(
        **({"temperature": 0, "max_tokens": 12, "detokenize": False, "ignore_eos": True} | sampling)
    )
    outputs = engine.llm.generate(asked, chosen, use_tqdm=False, **options)
    answers = [[tuple(candidate.token_ids) for candidate in output.outputs] for output in outputs]
    return answers, [output.num_cached_tokens or 0 for output in outputs]


def tokens(number: int, length: int = 600) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt(number, length)}


def structured(**constraint: Any) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**constraint), "detokenize": True, "ignore_eos": False}


@pytest.mark.parametrize(
    ("number", "sampling"),
    [
        (1, {"n": 3, "temperature": 1.0, "seed": 7}),
        (2, {"n": 2, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 3}),
        (3, {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
        (4, {"logprobs": 4}),
        (5, {"logit_bias": {17: 5.0}, "bad_words": [], "min_tokens": 3, "stop_token_ids": [900]}),
    ],
    ids=["candidates", "sampling", "penalties", "logprobs", "steering"],
)
def test_sampling(engine: Engine, number: int, sampling: dict[str, Any]) -> None:
    cold, hits = generate(engine, [tokens(number)], **sampling)
    assert hits == [0]
    warm, hits = generate(engine, [tokens(number)], **sampling)
    assert (warm, hits) == (cold, [512])


@pytest.mark.parametrize("constraint", [{"regex": "w1[0-9] w2[0-9]"}, {"choice": ["w17 w18", "w19"]}])
def test_structured_output(engine: Engine, constraint: dict[str, Any]) -> None:
    number = 10 + len(next(iter(constraint)))
    cold, hits = generate(engine, [tokens(number)], **structured(**constraint))
    assert hits == [0]
    assert generate(engine, [tokens(number)], **structured(**constraint)) == (cold, [512])


def test_beams(engine: Engine) -> None:
    from vllm.sampling_params import BeamSearchParams

    def search() -> list[list[int]]:
        (output,) = engine.llm.beam_search([tokens(20)], BeamSearchParams(beam_width=3, max_tokens=6))
        return [beam.tokens for beam in output.sequences]

    cold = search()
    before = engine.inside("kv_snapshot")["worker"]["loaded_tokens"]
    assert search() == cold
    assert engine.inside("kv_snapshot")["worker"]["loaded_tokens"] > before


def test_logprobs_of_the_prompt_read_no_cache(engine: Engine) -> None:
    """vLLM asks for that, as they are made by computing the prompt. What was computed is there for others."""
    cold, hits = generate(engine, [tokens(30)], prompt_logprobs=2)
    assert hits == [0]
    assert generate(engine, [tokens(30)], prompt_logprobs=2) == (cold, [0])
    answers, hits = generate(engine, [tokens(30)])
    assert answers == cold and hits[0] > 0


def test_embeddings_for_a_prompt_are_left_alone(engine: Engine) -> None:
    embeds = {"prompt_embeds": torch.randn(600, 256, generator=torch.Generator().manual_seed(1))}
    cold, _ = generate(engine, [embeds])
    assert generate(engine, [embeds]) == (cold, [0])


def test_priorities(engine: Engine) -> None:
    """The last comes first, and finds nothing less for it."""
    asked = [tokens(40 + number) for number in range(20)]
    priorities = list(range(20, 0, -1))
    cold, hits = generate(engine, asked, priority=priorities)
    assert hits == [0] * 20
    assert generate(engine, asked, priority=priorities) == (cold, [512] * 20)


def test_a_salt_finds_nothing_of_another(engine: Engine) -> None:
    cold, _ = generate(engine, [tokens(70) | {"cache_salt": "a"}])
    assert generate(engine, [tokens(70) | {"cache_salt": "b"}]) == (cold, [0])
    assert generate(engine, [tokens(70) | {"cache_salt": "a"}]) == (cold, [512])
