"""Translates each `KVCacheSpec` of vLLM into the coverage that its group needs, or the reason why it is not cached.

A `KVCacheSpec` describes how vLLM manages the blocks of a group of layers; here it becomes a `Coverage`. The canary
(`kv_cuda.canary`, `kv_cuda.states`) verifies where the bytes are. A spec that is not listed here is refused, because
blocks managed in another way would be misread.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kv_core.coverage import ALL, STATE, Coverage
from kv_cuda.canary import Refusal


@dataclass(frozen=True, slots=True)
class NeededLayers:
    """Layers of one of vLLM's groups with one spec: they share a block table, perhaps with layers of other specs.

    table: the group's number.
    names: the names of the layers that have their own cache.
    coverage: the part of a prefix that these layers need.
    """

    table: int
    names: tuple[str, ...]
    spec: Any
    coverage: Coverage

    def refused(self, why: str) -> Refusal:
        return refused(self.table, self.spec, why)


def refused(table: int, spec: Any, why: str) -> Refusal:
    return Refusal(f"group {table} of this model's layers ({type(spec).__name__}) {why}")


def needed_layers(kv_cache_config: Any, layers: Mapping[str, Any]) -> list[NeededLayers] | Refusal:
    """Every layer whose cache a prefix needs, by group and spec.

    layers: vLLM's layers by name (`static_forward_context`).
    """
    needed: list[NeededLayers] = []
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue  # vLLM recreates it from another group after a load
        if getattr(group, "host_resident", False):
            return refused(
                table, group.kv_cache_spec, "keeps its blocks in host memory, where vLLM manages them itself"
            )
        for spec, names in _by_spec(group):
            coverage = coverage_of(spec)
            if isinstance(coverage, str):
                return refused(table, spec, coverage)
            own_caches = tuple(name for name in names if not _shares(layers.get(name)))
            if coverage is not None and own_caches:
                needed.append(NeededLayers(table, own_caches, spec, coverage))
    return needed or Refusal("this model keeps no KV")


def coverage_of(spec: Any) -> Coverage | str | None:
    """The coverage of layers with this spec, or why they cannot be cached; None: they have no cache."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        RSWASpec,
        SinkFullAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    kind = type(spec)
    if kind is EncoderOnlyAttentionSpec:
        return None
    if kind is CrossAttentionSpec:
        return (
            "attends to an encoder's output for the request's audio or image, which is not part of the prefix that "
            "keys name; encoder-decoder models run without this cache"
        )
    if kind in (MLAAttentionSpec, SlidingWindowMLASpec) and spec.tokens_per_state != 1:
        return (
            f"keeps one latent for {spec.tokens_per_state} tokens, and unfinished ones are in other layers; this "
            "release caches latents of single tokens"
        )
    if kind in (FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec, RSWASpec):
        if spec.non_causal:
            return "is not causal: the KV of a token depends on the tokens after it"
        return ALL  # reference windows (R-SWA) too: all tokens of a prompt see each other
    if kind is SlidingWindowMLASpec and spec.bounded_replay:
        return "has its window recomputed after every hit (bounded_replay), and vLLM's blocks of it serve no prefix"
    if kind in (SlidingWindowSpec, SlidingWindowMLASpec):
        return Coverage("window", spec.sliding_window + spec.extra_retained_tokens)
    if kind is ChunkedLocalAttentionSpec:
        return Coverage("local", spec.attention_chunk_size)
    if kind is MambaSpec:
        if spec.mamba_cache_mode != "align":
            return (
                f"keeps no state at the ends of blocks (mamba_cache_mode {spec.mamba_cache_mode}); start with "
                "--enable-prefix-caching --mamba-cache-mode align"
            )
        return STATE
    return "is of a kind that this release does not support, and blocks stored in another way would be misread"


def keeps_prompts_only(kv_cache_config: Any) -> bool:
    """Whether the KV of generated tokens differs from what a prefill of them would compute: with a reference window
    (R-SWA) a generated token sees the prompt and the last few tokens, and each token of a prompt all before it."""
    from vllm.v1.kv_cache_interface import RSWASpec

    groups = kv_cache_config.kv_cache_groups
    return any(isinstance(spec, RSWASpec) for group in groups for spec, _ in _by_spec(group))


def _by_spec(group: Any) -> Iterator[tuple[Any, list[str]]]:
    """Each spec of a group with the layers that have it. A group has one spec for all layers, or one for each."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    if not isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        yield group.kv_cache_spec, list(group.layer_names)
        return
    by_spec: list[tuple[Any, list[str]]] = []
    for name in group.layer_names:
        spec = group.kv_cache_spec.kv_cache_specs.get(name)
        if spec is None:
            continue  # it uses another layer's cache and has no spec
        names = next((known_names for known_spec, known_names in by_spec if known_spec == spec), None)
        if names is None:
            by_spec.append((spec, [name]))
        else:
            names.append(name)
    yield from by_spec


def _shares(layer: Any) -> bool:
    """Whether this layer reads the cache of another one and writes none."""
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None
