"""Speculation, roles and windows on the real engine: what is kept, what is loaded, and that tokens stay the same."""

from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, SHARED, WARM_HITS, Answer, Engine, started
from kv_connect.engine import engines
from kv_testing.tiny import TinyLlama

CACHE: dict[str, Any] = {"host": {"capacity_bytes": "256MiB"}}


def disk(directory: Path, **settings: Any) -> dict[str, Any]:
    tier = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "256MiB"}
    return CACHE | {"tiers": [tier]} | settings


@pytest.mark.slow
@pytest.mark.parametrize("save_decode", [pytest.param(False, marks=pytest.mark.long), True])
def test_guessed_tokens_are_not_kept_and_change_no_answer(
    save_decode: bool, tiny_llama: str, reference: list[Answer]
) -> None:
    """A prompt that repeats itself, so that guesses from the prompt are often right and often wrong.

    In a process of its own: vLLM's ngram search imports numba, and after that no engine starts in the same one.
    """
    again = (SHARED[:40] * 16)[:600]
    with started(tiny_llama, cache=None) as plain:
        expected = plain.ask([again], 300)[0]
        follow_up = plain.ask([again + list(expected)], 12)[0]
    guessing = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    cache = CACHE | {"save_decode": save_decode}
    with started(tiny_llama, cache=cache, own_process=True, speculative_config=guessing) as engine:
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS
        assert engine.ask([again], 300)[0] == expected
        assert engine.ask([again + list(expected)], 12)[0] == follow_up
        assert engine.hits == [768 if save_decode else 512]
        engine.assert_at_rest()


def accepted(engine: Engine) -> float:
    """The part of its guesses that turned out right."""
    counted = {metric.name: getattr(metric, "value", 0) for metric in engine.llm.get_metrics()}
    return counted["vllm:spec_decode_num_accepted_tokens"] / counted["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.slow
def test_as_many_guesses_are_right_from_the_cache_as_without(tiny_llama: str, tmp_path: Path) -> None:
    """Else the draft's layers would go on from wrong KV: its guesses would be worse, and no token wrong.

    The draft is the model itself, so that its guesses are right.
    """
    draft = str(TinyLlama().write(tmp_path / "draft"))
    guessing = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    prompts = [SHARED[200:800], PROMPTS[0], PROMPTS[1]]
    rates, answers = [], []
    patient = disk(tmp_path, cold={"wait_s": 20})
    for cache in (None, patient, patient):
        with started(tiny_llama, cache=cache, speculative_config=guessing, disable_log_stats=False) as engine:
            answers.append(engine.ask_in_turn(prompts, 60))
            rates.append(accepted(engine))
    assert engine.hits == [512, 512, 512]
    assert answers[0] == answers[1] == answers[2]
    assert rates[0] > 0.9
    assert rates[2] == pytest.approx(rates[0], abs=0.02)


@pytest.mark.slow
def test_a_draft_models_layers_are_part_of_the_key(tiny_llama: str, reference: list[Answer], tmp_path: Path) -> None:
    """Two drafts of one shape, whose layers lie in chunks of one format: neither finds what the other has stored."""
    drafts = [str(TinyLlama(layers=1, seed=seed).write(tmp_path / f"draft{seed}")) for seed in (1, 2)]
    hits = []
    for draft in (drafts[0], drafts[1], drafts[0]):
        guessing = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
        with started(tiny_llama, cache=disk(tmp_path), speculative_config=guessing) as engine:
            assert engine.ask_in_turn(PROMPTS[:2]) == reference[:2]
            hits.append(engine.hits)
            engine.assert_at_rest()
    assert hits == [[0, 512], [0, 512], [512, 512]]


@pytest.mark.slow
def test_a_producer_never_loads_and_a_consumer_never_stores(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    with started(tiny_llama, cache=disk(tmp_path), role="kv_consumer") as consumer:
        assert consumer.ask_in_turn(PROMPTS) == reference
        assert consumer.assert_at_rest()["cache"]["chunks_committed"] == 0
    with started(tiny_llama, cache=disk(tmp_path), role="kv_producer") as producer:
        assert producer.ask_in_turn(PROMPTS) == reference
        assert producer.hits == [0] * len(PROMPTS)
        assert producer.assert_at_rest()["cache"]["chunks_committed"] > 0
    with started(tiny_llama, cache=disk(tmp_path), role="kv_consumer") as consumer:
        assert consumer.ask_in_turn(PROMPTS) == reference
        assert consumer.hits == WARM_HITS


@pytest.mark.slow
def test_windows_are_cached_with_and_without_vllms_hybrid_manager_and_never_confused(
    tiny_gemma: str, tmp_path: Path
) -> None:
    """Without it vLLM keeps all blocks of every layer, and so do we: other chunks under other names."""
    with started(tiny_gemma, cache=disk(tmp_path)) as hybrid:
        expected = hybrid.ask_in_turn(PROMPTS)
        assert hybrid.ask_in_turn(PROMPTS) == expected
        (inner,) = engines().values()
        assert inner.facts is not None
        assert [str(group.coverage) for group in inner.facts.groups] == ["window:256", "all"]
    with started(tiny_gemma, cache=disk(tmp_path), disable_hybrid_kv_cache_manager=True) as engine:
        assert engine.ask_in_turn(PROMPTS) == expected
        assert engine.hits == [0, 512, 512, 768, 0, 0]  # nothing of the first engine's
        assert engine.ask_in_turn(PROMPTS) == expected
        assert engine.hits == WARM_HITS
        engine.assert_at_rest()
