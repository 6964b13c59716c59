"""What this release does not cache is refused clearly: the engine runs without us, and right."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import started
from kv_core.errors import ConfigError
from kv_cuda.tiny import TinyLlama
from kv_vllm import build
from kv_vllm.canary import Refusal
from kv_vllm.layouts import read_groups
from kv_vllm.translate import request_tokens
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
SLIDING = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)


def read(groups: list[KVCacheGroupSpec], caches: dict[str, torch.Tensor]) -> Any:
    impl = SimpleNamespace(do_kv_cache_update=None)
    layers = {name: SimpleNamespace(impl=impl) for name in caches}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return read_groups(config, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups), caches)


@pytest.mark.parametrize(
    ("groups", "shape", "why"),
    [
        ([KVCacheGroupSpec(["a"], SLIDING)], (8, 2, 32, 64), "SlidingWindowSpec.*full attention only"),
        ([KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], SLIDING)], (8, 2, 32, 64), "group 0|group 1"),
        ([KVCacheGroupSpec(["a"], FULL)], (16, 2, 16, 64), "kernel blocks smaller"),
        ([KVCacheGroupSpec(["a"], FULL)], (8, 2, 32 * 64), "is \\(8, 2, 2048\\) for 8 blocks"),
        ([KVCacheGroupSpec(["z"], FULL)], (8, 2, 32, 64), "no cache of its own"),
        ([], (8, 2, 32, 64), "keeps no KV"),
    ],
)
def test_a_cache_we_do_not_understand_is_refused_with_the_reason(
    groups: list[KVCacheGroupSpec], shape: tuple[int, ...], why: str
) -> None:
    import re

    if len(groups) == 2:
        groups = groups[::-1]  # the one that cannot be cached first: the reason names it
    refused = read(groups, {"a": torch.zeros(shape)} | ({"b": torch.zeros(shape)} if len(groups) == 2 else {}))
    assert isinstance(refused, Refusal)
    assert re.search(why, refused.reason), refused.reason


def test_a_backend_without_an_update_to_prove_with_is_refused() -> None:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": SimpleNamespace(impl=object())})
    )
    described = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], FULL)])
    refused = read_groups(config, described, {"a": torch.zeros(8, 2, 32, 64)})
    assert isinstance(refused, Refusal)
    assert "no cache update of its own" in refused.reason


def test_pipeline_stages_are_an_error_at_start_that_says_what_to_write() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(ConfigError, match=r"2 pipeline stages.*--pipeline-parallel-size 1"):
        build.check_parallelism(config)


@pytest.mark.parametrize(
    "unnamed",
    [
        {"prompt_embeds": torch.zeros(1)},
        {"prompt_is_token_ids": [True]},
        {"resumable": True},
        {"skip_reading_prefix_cache": True},
        {"lora_request": SimpleNamespace(load_inplace=True, lora_name="a", lora_path="")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_request_whose_content_has_no_stable_name_is_left_alone(unnamed: dict[str, Any]) -> None:
    plain: dict[str, Any] = {
        "request_id": "a",
        "all_token_ids": [1, 2, 3],
        "num_prompt_tokens": 3,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
    }
    assert request_tokens(SimpleNamespace(**plain), save_decode=False) is not None
    assert request_tokens(SimpleNamespace(**plain | unnamed), save_decode=False) is None


def test_a_sliding_window_model_runs_without_us_and_the_log_says_so(
    tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(TinyLlama(sliding_window=256).write(tmp_path_factory.mktemp("tiny-mistral")))
    prompts = [[3 + (7919 * i) % 2000 for i in range(700)]] * 2
    with started(model, cache=None) as plain:
        expected = plain.ask_in_turn(prompts)
    with started(model, cache={"host": {"capacity": "64MiB"}}) as ours:
        assert ours.ask_in_turn(prompts) == expected
        assert ours.hits == [0, 0]
        (inner,) = build.engines().values()
        assert "SlidingWindowSpec" in inner.off
        assert inner.faults == []
