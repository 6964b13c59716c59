"""What vLLM says of its groups of layers, as we take it: coverage, block table, and which layers go together."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_core.coverage import Coverage
from kv_cuda.bind import BoundGroups, bind_groups
from kv_cuda.canary import LayerGroup, Refusal
from kv_cuda.states import StateGroup
from kv_vllm.layouts import keeps_prompts_only, read_groups
from kv_vllm.served import tags_of_groups
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

BLOCKS = 8
ONE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**ONE)
FOUR_HEADS = FullAttentionSpec(**ONE | {"num_kv_heads": 4})
WINDOW = SlidingWindowSpec(**ONE, sliding_window=64)
LOCAL = ChunkedLocalAttentionSpec(**ONE, attention_chunk_size=96)
SINK = SinkFullAttentionSpec(**ONE, sink_len=4)
ENCODER = EncoderOnlyAttentionSpec(**ONE)


class Cache:
    """Layers of vLLM's and their memory. kernel_blocks: in each block of the table."""

    def __init__(self, config: VllmConfig, *, kernel_blocks: int = 1) -> None:
        self.config = copy.deepcopy(config)
        self.kernel_blocks = kernel_blocks
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, heads: int = 2, memory: torch.Tensor | None = None, shares: str | None = None) -> None:
        with set_current_vllm_config(self.config):
            Attention(num_heads=heads, head_size=32, scale=1.0, num_kv_heads=heads, prefix=name)
        layer = self.config.compilation_config.static_forward_context[name]
        layer.kv_sharing_target_layer_name, layer.isa = shares, "vec"  # vLLM chooses when it makes metadata
        if memory is None:
            memory = torch.zeros(BLOCKS * self.kernel_blocks, heads, 32 // self.kernel_blocks, 64)
        self.tensors[name] = self.tensors[shares] if shares else memory

    def read(self, *groups: KVCacheGroupSpec) -> list[LayerGroup | StateGroup] | Refusal:
        described = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=list(groups))
        return read_groups(self.config, described, self.tensors)

    def bind(self, *groups: KVCacheGroupSpec) -> BoundGroups:
        read = self.read(*groups)
        assert not isinstance(read, Refusal), read
        bound = bind_groups(read, "auto", 96)
        assert isinstance(bound, BoundGroups), bound
        return bound


def described(bound: BoundGroups) -> list[tuple[str, int, int]]:
    """(coverage, table, layers) of each."""
    return [(str(group.coverage), group.table, len(group.tensors)) for group in bound.groups]


@pytest.fixture
def cache(config: VllmConfig) -> Cache:
    return Cache(config)


def test_windows_and_local_attention_are_proved_beside_full_attention_on_the_same_bytes(cache: Cache) -> None:
    """vLLM's hybrid manager lays layers of different groups over each other."""
    memory = torch.randn(BLOCKS, 2, 32, 64)
    for name in "abc":
        cache.add(name, memory=memory)
    before = memory.clone()
    bound = cache.bind(KVCacheGroupSpec(["a"], WINDOW), KVCacheGroupSpec(["b"], FULL), KVCacheGroupSpec(["c"], LOCAL))
    assert described(bound) == [("window:64", 0, 1), ("all", 1, 1), ("local:96", 2, 1)]
    assert {layout.name for layout in bound.layouts} == {"vLLM CPU, K transposed"}
    assert torch.equal(memory, before)


def test_layers_are_numbered_by_their_names_through_every_cut(cache: Cache) -> None:
    """By which codecs know them apart. A name that does not say one number leaves its group without."""
    for name in ("model.layers.0.attn", "model.layers.2.attn", "model.layers.1.attn", "a.1.b.2", "c"):
        cache.add(name)
    windows, full = ["model.layers.0.attn", "model.layers.2.attn"], ["model.layers.1.attn"]
    bound = cache.bind(
        *(KVCacheGroupSpec(*each) for each in ((windows, WINDOW), (full, FULL), (["a.1.b.2", "c"], FULL)))
    )
    assert [group.numbers for group in bound.groups] == [(0,), (2,), (1,), (), ()]


def test_tokens_that_a_draft_model_needs_behind_a_window_belong_to_it(cache: Cache) -> None:
    cache.add("a")
    bound = cache.bind(KVCacheGroupSpec(["a"], replace(WINDOW, extra_retained_tokens=5)))
    assert bound.groups[0].coverage == Coverage("window", 69)


def test_reference_windows_are_kept_as_full_attention(cache: Cache) -> None:
    """Of prompts, whose tokens all see each other; the connector stores no more (`keeps_prompts_only`)."""
    cache.add("a")
    group = KVCacheGroupSpec(["a"], RSWASpec(**ONE, rswa_window=64))
    assert described(cache.bind(group)) == [("all", 0, 1)]
    for groups, only_prompts in (([group], True), ([KVCacheGroupSpec(["a"], FULL)], False)):
        assert keeps_prompts_only(KVCacheConfig(BLOCKS, [], groups)) is only_prompts


def test_a_window_of_latents_is_a_window(cache: Cache) -> None:
    """Proved by vLLM's own update of MLA's cache. A draft model's tokens behind the window belong to it."""
    rank, rope = 48, 16
    impl = CPUMLAImpl.__new__(CPUMLAImpl)  # its update needs the rank alone
    impl.kv_lora_rank = rank
    layer = SimpleNamespace(impl=impl, kv_cache_dtype="auto", _k_scale=torch.ones(()), _k_scale_float=1.0)
    cache.config.compilation_config.static_forward_context["a"] = layer
    cache.tensors["a"] = torch.zeros(BLOCKS, 1, 32, rank + rope)
    spec = SlidingWindowMLASpec(
        block_size=32,
        num_kv_heads=1,
        head_size=rank + rope,
        dtype=torch.float32,
        sliding_window=64,
        extra_retained_tokens=3,
    )
    bound = cache.bind(KVCacheGroupSpec(["a"], spec))
    assert described(bound) == [("window:67", 0, 1)]
    assert [layout.name for layout in bound.layouts] == ["vLLM MLA"]


def test_layers_with_other_heads_are_groups_of_ours_with_one_table(cache: Cache) -> None:
    cache.add("a")
    cache.add("b", heads=4)
    cache.add("c")
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL, "b": FOUR_HEADS, "c": FULL})
    bound = cache.bind(KVCacheGroupSpec(["a", "b", "c"], uniform))
    assert described(bound) == [("all", 0, 2), ("all", 0, 1)]
    assert bound.group_bytes[0] == bound.group_bytes[1]


def test_layers_of_one_table_with_and_without_a_window(cache: Cache) -> None:
    """Without the hybrid manager vLLM keeps all blocks of both, and calls both full attention."""
    cache.add("a")
    cache.add("b")
    bound = cache.bind(KVCacheGroupSpec(["a", "b"], replace(FULL, sliding_window=64)))
    assert described(bound) == [("all", 0, 2)]


def test_layers_that_read_anothers_cache_have_nothing_of_their_own(cache: Cache) -> None:
    cache.add("a")
    cache.add("b", shares="a")
    assert described(cache.bind(KVCacheGroupSpec(["a", "b"], FULL))) == [("all", 0, 1)]


def test_attention_sinks_are_full_attention(cache: Cache) -> None:
    cache.add("a")
    assert described(cache.bind(KVCacheGroupSpec(["a"], SINK))) == [("all", 0, 1)]


def test_encoders_keep_nothing_and_the_rest_is_cached(cache: Cache) -> None:
    cache.add("a")
    bound = cache.bind(KVCacheGroupSpec(["e"], ENCODER), KVCacheGroupSpec(["a"], FULL))
    assert described(bound) == [("all", 1, 1)]


def test_what_vllm_makes_anew_after_a_load_is_left_to_it(cache: Cache) -> None:
    cache.add("a")
    cache.add("b")
    bound = cache.bind(KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], FULL, enable_kv_transfer=False))
    assert described(bound) == [("all", 0, 1)]


def test_kernel_blocks_smaller_than_the_tables(config: VllmConfig) -> None:
    """The table counts blocks of 32 tokens, and each is two neighbours of 16 in the kernel's cache."""
    small = Cache(config, kernel_blocks=2)
    small.add("a")
    bound = small.bind(KVCacheGroupSpec(["a"], FULL))
    assert bound.shapes[0].block_tokens == 32
    assert (bound.layouts[0].blocks, bound.layouts[0].block_tokens) == (16, 16)
    whole = Cache(config)
    whole.add("a")
    assert bound.fingerprint == whole.bind(KVCacheGroupSpec(["a"], FULL)).fingerprint  # and the bytes are the same


def test_all_layers_of_a_block_side_by_side(config: VllmConfig) -> None:
    """vLLM's layout BLHNC: a block's layers follow each other, and a layer's blocks are far apart."""
    blocks = torch.zeros(BLOCKS, 3, 2, 32, 64)
    across = Cache(config)
    for number, name in enumerate("abc"):
        across.add(name, memory=blocks[:, number])
    bound = across.bind(KVCacheGroupSpec(["a", "b", "c"], FULL))
    assert described(bound) == [("all", 0, 3)]


def test_only_one_group_with_all_layers_in_their_order_is_not_part_of_the_key() -> None:
    def tags(*groups: list[str]) -> tuple[tuple[str, str], ...]:
        specs = [KVCacheGroupSpec(names, FULL) for names in groups]
        return tags_of_groups(KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=specs))

    layers = [f"model.layers.{number}.self_attn.attn" for number in range(12)]
    assert tags() == tags(layers) == ()
    dealt = [(layers[::-1],), (sorted(layers),), (layers[::2], layers[1::2]), (layers[:6], layers[6:])]
    assert len({tags(*groups) for groups in dealt} - {()}) == len(dealt)
