"""What this release does not cache is refused clearly: the engine runs without us, and right."""

import copy
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Engine, started
from kv_connect.halves.request import RequestTokens
from kv_connect.nodes import share_of
from kv_connect.open_cache import Replica
from kv_core.errors import ConfigError
from kv_cuda.canary import LayerGroup, Refusal
from kv_cuda.states import StateGroup
from kv_tiers.settings import Settings
from kv_vllm import connector, translate
from kv_vllm.connector import KVTiersConnector
from kv_vllm.layouts import read_groups
from kv_vllm.parallel import replica_of, shards_of_ranks
from torch import nn
from vllm import PoolingParams, SamplingParams, TokensPrompt
from vllm.config import ParallelConfig, PoolerConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.request import Request

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
CROSS = CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
ENCODER = EncoderOnlyAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
RING = CircularBufferSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
LATENT: dict[str, Any] = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
LATENT_SPEC = MLAAttentionSpec(**LATENT)
ONE_HEAD = replace(FULL, num_kv_heads=1)
COMPRESSED = MLAAttentionSpec(**LATENT, tokens_per_state=4)
REPLAYED = SlidingWindowMLASpec(**LATENT, sliding_window=64, bounded_replay=True)


class Unknown(FullAttentionSpec):
    """What a later vLLM may have."""


UNKNOWN = Unknown(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
STATE = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
PREFIX_LM = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, non_causal=True)


def attention(**fields: Any) -> Attention:
    """An attention layer of vLLM's, which has registered itself as the engine's under its name."""
    described = {"num_heads": 2, "head_size": 32, "scale": 1.0, "num_kv_heads": 2, "prefix": "a"} | fields
    return Attention(**described)


def read(
    config: VllmConfig, groups: list[KVCacheGroupSpec], caches: dict[str, torch.Tensor], **fields: Any
) -> list[LayerGroup | StateGroup] | Refusal:
    config = copy.deepcopy(config)
    with set_current_vllm_config(config):
        for name in caches:
            attention(prefix=name, **fields)
    return read_groups(config, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups), caches)


@pytest.mark.parametrize(
    ("groups", "shape", "why"),
    [
        (
            [KVCacheGroupSpec(["a"], STATE)],
            (8, 1, 1, 64),
            r"group 0 .*MambaSpec.*\(mamba_cache_mode none\).*--mamba-cache-mode align",
        ),
        (
            [KVCacheGroupSpec(["a"], COMPRESSED)],
            (8, 1, 8, 64),
            r"MLA.*\(1, 8, 64\), which are not 32 tokens",
        ),
        ([KVCacheGroupSpec(["a"], REPLAYED)], (8, 1, 32, 64), "keeps no KV"),
        ([KVCacheGroupSpec(["a"], RING)], (8, 2, 32, 64), "keeps no KV"),
        (
            [KVCacheGroupSpec(["a"], replace(STATE, mamba_cache_mode="align"))],
            (8, 1, 1, 64),
            "does not show its states",
        ),
        ([KVCacheGroupSpec(["a"], PREFIX_LM)], (8, 2, 32, 64), "is not causal"),
        (
            [KVCacheGroupSpec(["b"], FULL), KVCacheGroupSpec(["a"], CROSS)],
            (8, 2, 32, 64),
            "group 1 .*CrossAttentionSpec.*encoder",
        ),
        ([KVCacheGroupSpec(["a"], UNKNOWN)], (8, 2, 32, 64), "Unknown.*does not support"),
        ([KVCacheGroupSpec(["a"], FULL, host_resident=True)], (8, 2, 32, 64), "in host memory"),
        ([KVCacheGroupSpec(["a"], FULL)], (12, 2, 32, 64), r"\(12, 2, 32, 64\) for 8 blocks of 32"),
        ([KVCacheGroupSpec(["a"], FULL)], (8, 2, 32 * 64), r"\(8, 2, 2048\) for 8 blocks"),
        ([KVCacheGroupSpec(["a"], FULL)], (8, 2, 16, 64), r"\(2, 16, 64\), which are not 32 tokens"),
        ([KVCacheGroupSpec(["z"], FULL)], (8, 2, 32, 64), "no cache of its own"),
        ([KVCacheGroupSpec(["a"], ENCODER)], (8, 2, 32, 64), "keeps no KV"),
        ([], (8, 2, 32, 64), "keeps no KV"),
    ],
)
def test_a_cache_we_do_not_understand_is_refused_with_the_reason(
    config: VllmConfig, groups: list[KVCacheGroupSpec], shape: tuple[int, ...], why: str
) -> None:
    refused = read(config, groups, {"a": torch.zeros(shape)} | ({"b": torch.zeros(shape)} if len(groups) == 2 else {}))
    assert isinstance(refused, Refusal)
    assert re.search(why, refused.reason), refused.reason


@pytest.mark.parametrize("latents", [8, 5])
def test_latents_that_only_the_models_kernels_write_are_pages(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, latents: int
) -> None:
    monkeypatch.delattr(CPUAttentionBackendImpl, "do_kv_cache_update")
    groups = read(config, [KVCacheGroupSpec(["a"], COMPRESSED)], {"a": torch.zeros(8, 1, latents, 64)})
    if isinstance(groups, Refusal):
        assert "has 5 latents in a block of 32 tokens" in groups.reason
        return
    assert [group.opaque.page_bytes for group in groups if isinstance(group, LayerGroup)] == [4 * 8 * 64]


@pytest.mark.parametrize("alignment", [None, 512])
def test_pages_that_are_rounded_up_reach_into_their_padding_alone(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, alignment: int | None
) -> None:
    """Two layers share each block, the second one's bytes behind the first one's: 260, rounded up to 288."""
    monkeypatch.delattr(CPUAttentionBackendImpl, "do_kv_cache_update")
    spec = MLAAttentionSpec(**LATENT | {"head_size": 65}, tokens_per_state=32, alignment=alignment)
    blocks = torch.zeros(8, 2 * spec.page_size_bytes // 4)
    caches = {name: blocks[:, at:][:, :65].view(8, 1, 1, 65) for name, at in (("a", 0), ("b", blocks.shape[1] // 2))}
    groups = read(config, [KVCacheGroupSpec(["a", "b"], spec)], caches)
    if isinstance(groups, Refusal):
        assert alignment is None and "blocks of 260 bytes, which are not padded to a multiple of 32" in groups.reason
        return
    assert alignment == 512
    assert [group.opaque.page_bytes for group in groups if isinstance(group, LayerGroup)] == [288]


def test_a_backend_without_an_update_to_prove_with_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(CPUAttentionBackendImpl, "do_kv_cache_update")
    refused = read(config, [KVCacheGroupSpec(["a"], FULL)], {"a": torch.zeros(8, 2, 32, 64)})
    assert isinstance(refused, Refusal)
    assert "no cache update of its own" in refused.reason


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            r"--decode-context-parallel-size is 2: the tokens of a block are spread over 2 ranks",
        ),
        ({"prefill_context_parallel_size": 2}, r"--prefill-context-parallel-size is 2"),
        (
            {"tensor_parallel_size": 2, "nnodes": 4, "data_parallel_size": 2, "distributed_executor_backend": "mp"},
            r"data-parallel replica are on 2 machines: start kv-server on every machine",
        ),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            r"--distributed-executor-backend is external_launcher: each of the 2 ranks has a scheduler of its own",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_spreads_layers_or_tokens_is_an_error_at_start_that_says_what_to_write(
    config: VllmConfig, parallel: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # vLLM changes it for external launchers
    spread = copy.copy(config)
    spread.parallel_config = ParallelConfig(**parallel)
    with pytest.raises(ConfigError, match=why):
        KVTiersConnector(spread, KVConnectorRole.WORKER, KVCacheConfig(8, [], []))


def test_a_server_that_refuses_the_scheduler_is_an_error_at_start(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would serve without the cache, and only its log say so."""

    def refused(*_arguments: Any) -> None:
        raise ConfigError("the server has caches of as many formats as it may")

    monkeypatch.setattr(connector, "bind_scheduler", refused)
    with pytest.raises(ConfigError, match="as many formats"):
        KVTiersConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(8, [], []))


@pytest.mark.parametrize(
    ("engine_id", "local_rank", "expected"),
    [
        ("0f3a", 0, None),
        ("0f3a_dp0", 0, Replica("0f3a", leads=True)),
        ("0f3a_dp1", 1, Replica("0f3a", leads=False)),
        ("0f3a_dp4", 0, Replica("0f3a", leads=True)),  # the first of its host
        ("0f3a_dp0", None, Replica("0f3a", leads=True)),
        ("0f3a_dp1", None, Replica("0f3a", leads=False)),
    ],
)
def test_of_the_replicas_on_a_host_the_first_starts_the_server(
    config: VllmConfig, engine_id: str, local_rank: int | None, expected: Replica | None
) -> None:
    """vLLM tells the engine cores of a dense model that they are alone, and marks their ids."""
    one = copy.copy(config)
    one.kv_transfer_config = copy.copy(config.kv_transfer_config)
    one.kv_transfer_config.engine_id = engine_id
    one.parallel_config = ParallelConfig()
    one.parallel_config.data_parallel_rank_local = local_rank
    assert replica_of(one) == expected


@pytest.mark.parametrize(
    ("ranks", "heads", "shares"),
    [
        (1, 8, [(0, True)]),
        (2, 8, [(0, True), (1, True)]),
        (2, 1, [(0, True), (0, False)]),  # MLA
        (4, 2, [(0, True), (0, False), (1, True), (1, False)]),
    ],
)
def test_of_ranks_with_the_same_heads_one_stores(ranks: int, heads: int, shares: list[tuple[int, bool]]) -> None:
    found = [share_of(rank, ranks, heads) for rank in range(ranks)]
    assert [(share.shard, share.stores) for share in found] == shares
    assert {share.shards for share in found} == {min(ranks, heads)}


class Attends(nn.Module):
    """A layer's attention as vLLM's models have it: the layer that has a cache, beside the projection that feeds it."""

    def __init__(self, layer: Attention, total: int, *, is_adapted: bool = False) -> None:
        super().__init__()
        projection = QKVParallelLinear.__new__(QKVParallelLinear)
        nn.Module.__init__(projection)
        projection.total_num_kv_heads, projection.num_kv_heads = total, 1
        self.qkv_proj = nn.ModuleDict() if is_adapted else projection
        if is_adapted:  # with a LoRA around it
            self.qkv_proj.base_layer = projection
        self.attn = layer


@pytest.mark.parametrize(
    ("totals", "spec", "shards"),
    [
        ([4, 4, 4], ONE_HEAD, 4),
        ([1, 1, 1], ONE_HEAD, 1),
        ([4, 2, 4], ONE_HEAD, 4),
        ([1, 8, 8], ONE_HEAD, 8),  # DeciLM, of which vLLM reports 1, and whose layers have equal shapes on 8 ranks
        ([4, 8, 4], ONE_HEAD, 8),  # MiMo-V2's windows
        ([1, None, 1], ONE_HEAD, 8),  # not known of the second: each rank has its own
        ([None, None, None], FULL, 8),  # two heads on each rank
        ([None, None, None], LATENT_SPEC, 1),
        ([None, None, None], replace(STATE, mamba_cache_mode="align"), 8),
    ],
)
@pytest.mark.parametrize("is_adapted", [False, True])
def test_ranks_share_what_all_layers_say_that_they_share(
    config: VllmConfig, totals: list[int | None], spec: Any, shards: int, is_adapted: bool
) -> None:
    config = copy.deepcopy(config)
    names = [f"layers.{number}.attn" for number in range(len(totals))]
    with set_current_vllm_config(config):
        layers = [attention(prefix=name) for name in names]
    model = [
        Attends(layer, total, is_adapted=is_adapted)
        for layer, total in zip(layers, totals, strict=True)
        if total is not None
    ]
    groups = [KVCacheGroupSpec(names, spec)]
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    context = config.compilation_config.static_forward_context
    assert shards_of_ranks(8, caches, context) == shards
    assert shards_of_ranks(1, caches, context) == 1
    assert len(model) <= len(layers)  # which must live until then


def test_stages_have_shares_of_their_own() -> None:
    """Two stages of two ranks: each of the four has layers or heads that no other has."""
    found = [share_of(rank, 2, 4, stage=stage, stages=2) for stage in range(2) for rank in range(2)]
    assert [(share.rank, share.ranks, share.shard, share.shards, share.stores) for share in found] == [
        (rank, 4, rank, 4, True) for rank in range(4)
    ]
    latent = [share_of(rank, 2, 1, stage=stage, stages=2) for stage in range(2) for rank in range(2)]
    assert [(share.shard, share.shards, share.stores) for share in latent] == [
        (0, 2, True),
        (0, 2, False),
        (1, 2, True),
        (1, 2, False),
    ]


def test_heads_that_ranks_cannot_share_out_are_an_error() -> None:
    with pytest.raises(ConfigError, match="3 tensor-parallel ranks cannot have equal parts of 2 KV heads"):
        share_of(0, 3, 2)


def request(**fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=4, **fields.pop("sampling", {}))
    plain = {"request_id": "a", "prompt_token_ids": [1, 2, 3], "sampling_params": sampling, "pooling_params": None}
    return Request(**plain | fields)


@pytest.mark.parametrize(
    "unnamed",
    [
        {"prompt_token_ids": None, "prompt_embeds": torch.zeros(3, 4)},
        {"prompt_embeds": torch.zeros(3, 4), "prompt_is_token_ids": [True, False, True]},
        {"resumable": True, "mm_features": [SimpleNamespace(identifier="an image")]},
        {"lora_request": LoRARequest("a", 1, "/adapters/a", load_inplace=True)},
        {"lora_request": LoRARequest("not read yet", 1, "/adapters/a")},
        {"sampling_params": None, "pooling_params": PoolingParams(task="embed")},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_request_whose_content_has_no_stable_name_is_left_alone(
    unnamed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(lora: LoRARequest, _request_id: str) -> str | None:
        return None if lora.lora_name == "not read yet" else f"{lora.lora_name}@content"

    monkeypatch.setattr(translate, "adapter_identity", lambda _weights: identity)
    served_model = SimpleNamespace(is_prefix_caching_supported=False)
    engine: Any = SimpleNamespace(weights=None, cache=None)
    configs = SimpleNamespace(model_config=served_model), SimpleNamespace(kv_cache_groups=[])
    read = translate.request_reader(*configs, Settings(), engine)
    assert read(request()) is not None
    assert read(request(**unnamed)) is None
    served = request(lora_request=LoRARequest("a", 1, "/adapters/a"))
    named = read(served)
    assert isinstance(named, RequestTokens) and named.lora == "a@content"


@pytest.mark.parametrize("asked", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}])
def test_what_may_not_be_read_is_stored_all_the_same(asked: dict[str, Any]) -> None:
    configs = (
        SimpleNamespace(model_config=SimpleNamespace(is_prefix_caching_supported=True)),
        SimpleNamespace(kv_cache_groups=[]),
    )
    engine: Any = SimpleNamespace(weights=None, cache=None)
    tokens = translate.request_reader(*configs, Settings(), engine)(request(sampling=asked))
    assert isinstance(tokens, RequestTokens) and tokens.controls.store and not tokens.controls.load


@pytest.mark.parametrize("pooling_type", [pytest.param("MEAN", marks=pytest.mark.slow), "CLS"])
def test_poolers_that_fail_on_part_of_a_prompt_get_all_of_it(pooling_type: str, spelling_llama: str) -> None:
    prompts = [[3 + (7919 * i) % 2000 for i in range(600)]] * 2
    pooled = {
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": PoolerConfig(pooling_type=pooling_type),
        "max_num_batched_tokens": 4096,
        "enable_chunked_prefill": False,
        "skip_tokenizer_init": False,
    }

    def embed(engine: Engine) -> list[list[float]]:
        outputs = [engine.llm.embed([TokensPrompt(prompt_token_ids=prompt)], use_tqdm=False)[0] for prompt in prompts]
        return [output.outputs.embedding for output in outputs]

    with started(spelling_llama, cache=None, **pooled) as plain:
        expected = embed(plain)
    with started(spelling_llama, cache={"host": {"capacity_bytes": "64MiB"}}, **pooled) as ours:
        assert embed(ours) == expected
        seen = ours.assert_at_rest()
        assert seen["cache"]["chunks_committed"] == 0
