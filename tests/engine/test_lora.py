"""Adapters on the real engine: KV computed under one is never found under another, nor without one.

A random LoRA on the attention's projections changes every token, so a wrong hit would show in the tokens as well.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import NEW_TOKENS, SHARED, Answer, Engine, started
from kv_core.clock import HandClock
from kv_testing.tiny import TinyLlama
from kv_testing.wait import until
from oracle import Oracle

PROMPT = SHARED[:700]
RANK = 4


def write_adapter(directory: Path, seed: int) -> Path:
    """A LoRA for the queries and values of every layer of the tiny Llama, large enough to change what is generated."""
    from safetensors.numpy import save_file

    shape, random = TinyLlama(), np.random.default_rng(seed)
    out = {"q_proj": shape.heads * shape.head_dim, "v_proj": shape.kv_heads * shape.head_dim}
    tensors = {}
    for layer in range(shape.layers):
        for name, size in out.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = random.normal(0, 0.2, (RANK, shape.hidden)).astype(np.float32)
            tensors[f"{place}.lora_B.weight"] = random.normal(0, 0.2, (size, RANK)).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": RANK, "target_modules": sorted(out), "peft_type": "LORA", "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    return directory


Adapter = tuple[str, int, Path]
"""Its name, vLLM's number for it, and its directory."""


def ask(engine: Engine, adapter: Adapter | None) -> Answer:
    from vllm import SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    (output,) = engine.llm.generate(
        [TokensPrompt(prompt_token_ids=PROMPT)],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True),
        lora_request=None if adapter is None else LoRARequest(adapter[0], adapter[1], str(adapter[2])),
        use_tqdm=False,
    )
    engine.hits = [output.num_cached_tokens or 0]
    return tuple(output.outputs[0].token_ids)


def found(engine: Engine, adapter: Adapter | None, expected: Answer) -> bool:
    """Whether the prompt's whole chunks were found. However that is, the tokens are right."""
    assert ask(engine, adapter) == expected
    return engine.hits == [512]


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    return [(name, number, write_adapter(tmp_path / name, seed=number)) for number, name in ((1, "one"), (2, "two"))]


def test_an_adapter_is_what_vllm_loaded_and_not_what_was_written_over_it_before_its_first_request(
    tiny_llama: str, tmp_path: Path
) -> None:
    """`--lora-modules` and `/v1/load_lora_adapter` load it when nobody has asked for it yet."""
    from kv_vllm.weights import VllmWeights
    from vllm.lora.request import LoRARequest

    oracle = Oracle(tiny_llama)
    weights = oracle.engine.weights
    assert isinstance(weights, VllmWeights)
    adapter = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", seed=1)))
    weights.called("add_lora", (adapter,))
    assert weights.adapters.wait(30)
    (tmp_path / "one" / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    first = weights.adapter(adapter)
    assert weights.adapters.wait(30)
    assert weights.adapter(adapter) is None, "vLLM may read it again"
    written = LoRARequest("one", 2, adapter.lora_path)
    weights.called("add_lora", (written,))
    assert weights.adapters.wait(30)
    assert first is not None and weights.adapter(written) not in (None, first)
    oracle.close()


def test_a_request_that_comes_after_the_files_of_its_adapter_changed_is_not_taken_for_one_of_before(
    tiny_llama: str, tmp_path: Path
) -> None:
    """vLLM may have put the adapter away since its last request, and reads its files again for this one."""
    from kv_vllm.weights import VllmWeights
    from vllm.lora.request import LoRARequest

    oracle, clock = Oracle(tiny_llama), HandClock()
    weights, cache, scheduler = oracle.engine.weights, oracle.engine.cache, oracle.engine.scheduler
    assert isinstance(weights, VllmWeights) and cache is not None and scheduler is not None
    weights.adapters._clock = clock
    adapter = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", seed=1)))
    weights.called("add_lora", (adapter,))
    assert weights.adapters.wait(30)
    oracle.submit("first", PROMPT[:200], lora_request=adapter)
    oracle.run()
    assert (cache.counts().chunks_resident, scheduler.counts.loaded_tokens) == (3, 0)
    assert weights.adapters.wait(30)
    clock.advance(3600.0)
    oracle.submit("later", PROMPT[:200], lora_request=adapter)
    oracle.run()
    assert scheduler.counts.loaded_tokens == 192, "its files were looked at, and had not changed"
    assert weights.adapters.wait(30)
    clock.advance(3600.0)
    (tmp_path / "one" / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    oracle.submit("after", PROMPT[:300], lora_request=adapter)
    oracle.run()
    assert (cache.counts().chunks_resident, scheduler.counts.loaded_tokens) == (3, 192)
    oracle.assert_at_rest()
    oracle.close()


def test_an_adapter_of_the_hub_is_the_commit_that_vllm_fetches_when_it_loads_it(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from kv_vllm.weights import VllmWeights
    from vllm.lora.request import LoRARequest

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    oracle = Oracle(tiny_llama)
    weights = oracle.engine.weights
    assert isinstance(weights, VllmWeights)
    adapter = LoRARequest("one", 1, "org/helper")
    weights.called("add_lora", (adapter,))
    assert weights.adapters.wait(30)
    commit, repository = "a" * 40, tmp_path / "models--org--helper"
    write_adapter(repository / "snapshots" / commit, seed=1)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert weights.adapter(adapter) is None
    assert weights.adapters.wait(30)
    assert weights.adapter(adapter) == f"one@org/helper@{commit}"
    oracle.close()


def test_an_adapter_in_the_users_home_is_its_files(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes `~` for it."""
    from kv_vllm.weights import VllmWeights
    from vllm.lora.request import LoRARequest

    monkeypatch.setenv("HOME", str(tmp_path))
    oracle = Oracle(tiny_llama)
    weights = oracle.engine.weights
    assert isinstance(weights, VllmWeights)
    path = write_adapter(tmp_path / "one", seed=1)
    spelled = [LoRARequest("one", 1, "~/one"), LoRARequest("one", 2, str(path))]
    assert [weights.adapter(each) for each in spelled] == [None, None]
    assert weights.adapters.wait(30)
    short, full = (weights.adapter(each) for each in spelled)
    assert short == full is not None
    oracle.close()


@pytest.mark.parametrize("place", ["one", "other"])
def test_nothing_is_stored_of_a_request_whose_adapter_is_replaced_under_it(
    tiny_llama: str, tmp_path: Path, place: str
) -> None:
    """vLLM goes by the adapter's number, so it goes on with the new weights: from the same path, or from another one.
    A request that was sent with the old path is computed with them, too."""
    from kv_vllm.weights import VllmWeights
    from vllm.lora.request import LoRARequest

    oracle = Oracle(tiny_llama, batch_tokens=96)
    weights, cache = oracle.engine.weights, oracle.engine.cache
    assert isinstance(weights, VllmWeights) and cache is not None
    old = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", seed=1)))
    weights.called("add_lora", (old,))
    assert weights.adapters.wait(30)
    oracle.submit("running", PROMPT[:200], lora_request=old)
    oracle.step()
    assert cache.counts().chunks_resident == 1
    (write_adapter(tmp_path / place, seed=2) / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    weights.called("add_lora", (LoRARequest("one", 1, str(tmp_path / place), load_inplace=True),))
    assert weights.adapters.wait(30)
    oracle.run()
    assert cache.counts().chunks_resident == 1, "the rest was computed with other weights"
    oracle.submit("late", PROMPT[:100], lora_request=old)
    oracle.run()
    found = oracle.engine.scheduler
    assert found is not None and found.counts.found_tokens == 0, "it was stored with other weights"
    oracle.assert_at_rest()
    oracle.close()


@contextmanager
def engine_with_adapters(model: str, cache: dict[str, Any] | None) -> Iterator[Engine]:
    with started(model, cache=cache, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        yield engine


@pytest.mark.slow
def test_what_is_computed_under_an_adapter_is_found_under_it_alone(
    tiny_llama: str, adapters: list[Adapter], tmp_path: Path
) -> None:
    """In one engine, in the next one from disk, and after the files of an adapter have changed under its path."""
    changed = write_adapter(tmp_path / "changed", seed=3)
    with engine_with_adapters(tiny_llama, None) as engine:
        alone = ask(engine, None)
        own = [ask(engine, adapter) for adapter in adapters]
        after_change = ask(engine, ("changed", 3, changed))
    assert len({alone, *own, after_change}) == 4, "an adapter that changes no token proves nothing"
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    (one, two), (of_one, of_two) = adapters, own

    with engine_with_adapters(tiny_llama, cache) as engine:
        assert not found(engine, None, alone)
        assert found(engine, None, alone)
        for adapter, expected in zip(adapters, own, strict=True):
            assert not found(engine, adapter, expected), "it was stored under another adapter, or under none"
            # Its files are read by a thread, and until that is done nothing is stored.
            until(lambda adapter=adapter, expected=expected: found(engine, adapter, expected), within_s=60)

    with engine_with_adapters(tiny_llama, cache) as engine:
        assert found(engine, None, alone)
        until(lambda: found(engine, two, of_two), within_s=60)
        until(lambda: found(engine, one, of_one), within_s=60)
        for file in changed.iterdir():
            shutil.copy(file, one[2] / file.name)
        # vLLM goes on with what it read. Nothing can tell which of the two it has, so neither is found any more.
        until(lambda: not found(engine, one, of_one), within_s=60)
        assert not found(engine, one, of_one)
        reloaded = ("one", 9, one[2])
        assert not found(engine, reloaded, after_change)
        until(lambda: found(engine, reloaded, after_change), within_s=60)
        assert found(engine, two, of_two)
        engine.assert_at_rest()
