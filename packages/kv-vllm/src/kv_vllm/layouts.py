"""Candidate layouts of the tensors that vLLM passes to `register_kv_caches`, described for `kv_cuda`.

Nothing is decided here. A `KVCacheSpec` describes how vLLM manages the blocks of a group of layers, and becomes a
`Coverage`, or the reason why the group is not cached. A candidate is an interpretation that the shapes allow; the
canary finds the correct one (`kv_cuda.canary`, `kv_cuda.states`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import torch
from kv_connect.halves.request import EngineState
from kv_core.coverage import ALL, STATE, Coverage
from kv_core.errors import InputError
from kv_cuda import PagedLayout, latent, split_parts, tiled_keys_and_values, transposed_keys
from kv_cuda.canary import EngineUpdate, LayerGroup, Refusal
from kv_cuda.states import StateGroup

from kv_vllm.interface import vllm_version

_FP8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""vLLM's quantised caches with one byte per element and one scale per layer, and the dtype of the byte. Its other
quantised caches have scales among the elements, and only their whole blocks can be stored."""

_TILES: Final = {
    "vLLM CPU, AMX": ((16, 2), (2, 16)),
    "vLLM CPU, NEON with BFMMLA": ((8, 4), (4, 2)),
}
"""Tiles of K and of V, (tokens, dims), by the name of the layout. AMX: measured, for bfloat16 and for fp8 under a model
of bfloat16. NEON: taken from vLLM's csrc/cpu/cpu_attn_neon_bfmmla.hpp, not measured."""


@dataclass(frozen=True, slots=True)
class NeededLayers:
    """Layers of one of vLLM's groups with one spec: they share a block table, perhaps with layers of other specs.

    names: the names of the layers that have their own cache.
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
            own_caches = tuple(
                name for name in names if not _shares(layers.get(name)) and not _is_used_up(name, spec, layers)
            )
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
    if not spec.prefix_cacheable:
        # After a hit vLLM recomputes it (bounded_replay), or it is empty there (a ring of what no latent has yet).
        return None
    if kind is EncoderOnlyAttentionSpec:
        return None
    if kind is CrossAttentionSpec:
        return (
            "attends to an encoder's output for the request's audio or image, which is not part of the prefix that "
            "keys name; encoder-decoder models run without this cache"
        )
    if kind in (FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec, RSWASpec):
        if spec.non_causal:
            return "is not causal: the KV of a token depends on the tokens after it"
        return ALL  # reference windows (R-SWA) too: all tokens of a prompt see each other
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


_COMPRESSOR: Final = ".compressor.state_cache"


def _is_used_up(name: str, spec: Any, layers: Mapping[str, Any]) -> bool:
    """Whether this is what latents of several tokens are made of, and each of its own tokens alone: a chunk ends with a
    latent, and the next one needs nothing before it, although vLLM keeps a window of as many tokens.

    DeepSeek-V4 has such latents of 128 tokens, while its latents of 4 overlap (`CompressorStateCache`).
    """
    latents = layers.get(name.removesuffix(_COMPRESSOR))
    return name.endswith(_COMPRESSOR) and getattr(latents, "compress_ratio", None) == getattr(spec, "sliding_window", 0)


def read_groups(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> list[LayerGroup | StateGroup] | Refusal:
    """The model's groups of layers, or why they cannot be cached. Layers of one of vLLM's groups that differ become
    several of our groups with one block table.
    """
    layers = vllm_config.compilation_config.static_forward_context
    needed = needed_layers(kv_cache_config, layers)
    if isinstance(needed, Refusal):
        return needed
    groups: list[LayerGroup | StateGroup] = []
    for group_layers in needed:
        cached_layers = replace(group_layers, names=tuple(name for name in group_layers.names if name in kv_caches))
        if not cached_layers.names:
            return group_layers.refused("has no cache of its own")
        for uniform_layers in _split_by_form(cached_layers, kv_caches):
            reader = read_states if uniform_layers.coverage.kind == "state" else _read_group
            group = reader(vllm_config, uniform_layers, kv_caches, kv_cache_config.num_blocks)
            if isinstance(group, Refusal):
                return group
            groups.append(group)
    return groups


def _split_by_form(layers: NeededLayers, kv_caches: Mapping[str, torch.Tensor]) -> Iterator[NeededLayers]:
    """Separate layers with different numbers of heads, or different sizes."""
    names: dict[Any, list[str]] = {}
    for name in layers.names:
        tensor = kv_caches[name]
        names.setdefault((tensor.shape, tensor.stride(), tensor.dtype), []).append(name)
    return (replace(layers, names=tuple(same_form)) for same_form in names.values())


def _read_group(
    vllm_config: Any, needed: NeededLayers, kv_caches: Mapping[str, torch.Tensor], blocks: int
) -> LayerGroup | Refusal:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    spec, names = needed.spec, needed.names
    layers = vllm_config.compilation_config.static_forward_context
    tensors = tuple(kv_caches[name] for name in names)
    shape, stride, dtype = tensors[0].shape, tensors[0].stride(), tensors[0].dtype
    kernel_blocks = shape[0] // blocks  # the number in each block of the table
    if len(shape) != 4 or shape[0] != kernel_blocks * blocks or spec.block_size % max(1, kernel_blocks):
        return needed.refused(f"has a cache of {tuple(shape)} for {blocks} blocks of {spec.block_size} tokens")
    block_tokens = spec.block_size // kernel_blocks
    mla = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    missing = [name for name in names if not hasattr(getattr(layers.get(name), "impl", None), "do_kv_cache_update")]
    if mla and len(missing) == len(names):
        return _read_pages(needed, tensors, [layers.get(name) for name in names], block_tokens)
    if missing:
        return needed.refused(f"has {missing[0]}, whose backend has no cache update of its own to prove a layout with")
    attention = [layers[name] for name in names]
    if any(getattr(layer, "calculate_kv_scales", False) for layer in attention):
        return Refusal(
            "the scales of the quantised cache are calculated while the engine runs (calculate_kv_scales), and chunks "
            "stored before have different ones; leave that out, or use a checkpoint that has the scales"
        )
    heads, head_dim = int(shape[1]), int(shape[3]) if mla else int(shape[3]) // 2
    kinds = {str(layer.kv_cache_dtype) for layer in attention}
    row_dtype = vllm_config.model_config.dtype
    stored_dtype = _stored_dtype(kinds, dtype, row_dtype)
    sizes: dict[str, int | str] = {
        "dtype": str(stored_dtype or dtype).removeprefix("torch."),
        "itemsize": dtype.itemsize,
        "layers": len(tensors),
        "blocks": shape[0],
        "block_tokens": block_tokens,
        "heads": heads,
        "head_dim": head_dim,
    }
    if tensors[0][0].numel() != (1 if mla else 2) * block_tokens * heads * head_dim:
        return needed.refused(f"has blocks of {tuple(shape[1:])}, which are not {block_tokens} tokens of {heads} heads")
    candidates = (
        (latent("vLLM MLA", block=stride[0], token=stride[2], **sizes),) if mla else tuple(layouts(stride, sizes))
    )
    backend = f"{type(attention[0].impl).__name__}/{getattr(attention[0], 'isa', '')}"
    kind = ",".join(sorted(kinds))
    return LayerGroup(
        tensors=tensors,
        block_tokens=block_tokens,
        blocks=shape[0],
        candidates=candidates if stored_dtype is not None else (),
        opaque=candidates[0],
        origin=f"vllm-{vllm_version()}/{backend}/{tuple(shape[1:])}/{tuple(stride[1:])}/{dtype}/{kind}",
        row_dtype=row_dtype,
        row_shape=(int(spec.num_kv_heads), int(spec.head_size)),
        scales=tuple(_scales(layer) for layer in attention) if stored_dtype not in (None, row_dtype) else (),
        update=_mla_update(attention, tensors) if mla else _update(attention, tensors),
        coverage=needed.coverage,
        table=needed.table,
        table_tokens=spec.block_size,
        numbers=_numbers(names),
    )


def _read_pages(
    needed: NeededLayers, tensors: tuple[torch.Tensor, ...], layers: Sequence[Any], block_tokens: int
) -> LayerGroup | Refusal:
    """Whole blocks of layers that are written within larger kernels: indices of sparse attention, latents of several
    tokens, and the states that these are made of.

    A chunk is a whole number of blocks, and a block of latents, so no latent is unfinished at its end.
    """
    blocks, states = tensors[0].shape[0], tensors[0].shape[2]
    if block_tokens % states and states % block_tokens:
        return needed.refused(f"has {states} latents in a block of {block_tokens} tokens")
    views = tuple(view for layer in layers if isinstance(view := getattr(layer, "kv_cache", None), torch.Tensor))
    if len(views) < len(layers):
        return needed.refused("has a layer that does not show its cache")
    stride, size = (number * tensors[0].element_size() for number in (tensors[0].stride(0), tensors[0][0].numel()))
    token = -(-size // block_tokens)  # rounded up into the block's padding, which nothing reads
    if token * needed.spec.block_size > needed.spec.page_size_bytes:  # another layer's bytes may be next
        return needed.refused(f"has blocks of {size} bytes, which are not padded to a multiple of {block_tokens}")
    opaque = latent(
        "vLLM pages",
        block=stride,
        token=token,
        dtype="uint8",
        itemsize=1,
        layers=len(tensors),
        blocks=blocks,
        block_tokens=block_tokens,
        heads=1,
        head_dim=token,
    )
    shape, dtype = tuple(tensors[0].shape[1:]), tensors[0].dtype
    return LayerGroup(
        tensors=tensors,
        block_tokens=block_tokens,
        blocks=blocks,
        candidates=(),
        opaque=opaque,
        origin=f"vllm-{vllm_version()}/{type(layers[0]).__name__}/{shape}/{block_tokens}/{dtype}",
        row_dtype=dtype,
        row_shape=(1, token),
        update=None,
        coverage=needed.coverage,
        table=needed.table,
        table_tokens=needed.spec.block_size,
        numbers=_numbers(needed.names),
        views=views,
    )


def _numbers(names: Sequence[str]) -> tuple[int, ...]:
    """These layers' numbers in the model, as in model.layers.7.self_attn.attn; () if a name has none or several."""
    decimals = [[part for part in name.split(".") if part.isdecimal()] for name in names]
    return tuple(int(number) for (number,) in decimals) if all(len(parts) == 1 for parts in decimals) else ()


def _stored_dtype(kinds: set[str], dtype: torch.dtype, row_dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of one element of the cache; None if it is not a single number, so that only whole blocks are
    meaningful.
    """
    (kind,) = kinds if len(kinds) == 1 else ("",)
    if kind in _FP8 and dtype.itemsize == 1:
        return getattr(torch, _FP8[kind])  # type: ignore[no-any-return]  # torch has no type for its attributes by name
    plain = kind == "auto" or kind == str(row_dtype).removeprefix("torch.")
    return dtype if plain and dtype == row_dtype else None


def _scales(layer: Any) -> tuple[float, float]:
    """The divisors of this layer's K and V before they become one byte."""
    return float(layer._k_scale_float), float(layer._v_scale_float)


def layouts(stride: tuple[int, ...], sizes: Mapping[str, int | str]) -> Iterator[PagedLayout]:
    """Every reading of blocks of shape (kv_heads, block_tokens, 2 × head_dim) at these strides, the plain one first.

    stride: strides of (blocks, kv_heads, block_tokens, 2 × head_dim), in elements. sizes: the layout's other fields.
    """
    block, head, token, dim = stride
    tokens, head_dim = int(sizes["block_tokens"]), int(sizes["head_dim"])
    # As the shape reads: K and V of a head side by side, in whatever order the strides put tokens and heads.
    yield split_parts("vLLM K‖V", block=block, token=token, head=head, dim=dim, value_offset=head_dim, **sizes)
    if (head, token, dim) != (tokens * 2 * head_dim, 2 * head_dim, 1):
        return
    # What the CPU backend actually stores in that shape: "vec" and "vec16" on x86. According to vLLM's source, not
    # measured, also VXE, VSX, RVV, and NEON without BFMMLA.
    yield transposed_keys("vLLM CPU, K transposed", block=block, **sizes)
    run = tokens * head_dim
    yield split_parts(
        "vLLM, K then V in a head", block=block, token=head_dim, head=2 * run, dim=1, value_offset=run, **sizes
    )
    for name, (keys, values) in _TILES.items():
        try:
            yield tiled_keys_and_values(name, block=block, keys=keys, values=values, **sizes)
        except InputError:
            continue  # the tiles do not divide the block or the head, so vLLM has not chosen them


def _update(attention: list[Any], tensors: tuple[torch.Tensor, ...]) -> EngineUpdate:
    def update(number: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        layer = attention[number]
        layer.impl.do_kv_cache_update(layer, rows["k"], rows["v"], tensors[number], slots)

    return update


def _mla_update(attention: list[Any], tensors: tuple[torch.Tensor, ...]) -> EngineUpdate:
    def update(number: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        layer, row = attention[number], rows["kv"]
        rank = layer.impl.kv_lora_rank
        # The operation takes the cache without its axis of one head.
        layer.impl.do_kv_cache_update(
            row[:, 0, :rank].contiguous(),
            row[:, :, rank:].contiguous(),
            tensors[number].squeeze(1),
            slots,
            layer.kv_cache_dtype,
            layer._k_scale,
        )

    return update


def read_states(
    vllm_config: Any, needed: NeededLayers, kv_caches: Mapping[str, torch.Tensor], blocks: int
) -> StateGroup | Refusal:
    """The states of layers that share a block table, or why they cannot be cached.

    vLLM provides each layer's blocks as bytes, and the layer itself takes its states from them (`MambaBase`). When vLLM
    resumes from a state it also moves states between blocks (v1/worker/mamba_utils.py), with functions of the model
    that define the bytes of a state. Ours must be the same.
    """
    layers = vllm_config.compilation_config.static_forward_context
    spec = needed.spec
    tensors = tuple(kv_caches[name] for name in needed.names)
    views = []
    for name, tensor in zip(needed.names, tensors, strict=True):
        states = getattr(layers.get(name), "kv_cache", None)
        if not isinstance(states, tuple | list) or not all(isinstance(state, torch.Tensor) for state in states):
            return needed.refused(f"has a layer, {name}, that does not show its states")
        if [(tuple(state.shape[1:]), state.dtype) for state in states] != list(
            zip(map(tuple, spec.shapes), spec.dtypes, strict=True)
        ):
            return needed.refused(f"has a layer, {name}, whose states are not those of its spec")
        if (why := _why_other_bytes(vllm_config, spec, states)) is not None:
            return needed.refused(f"has a layer, {name}, {why}")
        if tensor.shape[0] != blocks:
            return needed.refused(f"has {tensor.shape[0]} blocks in {name} where vLLM counts {blocks}")
        views.append(tuple(states))
    state_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    kinds = [f"{tuple(shape)}:{dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    return StateGroup(
        tensors=tensors,
        views=tuple(views),
        state_bytes=state_bytes,
        blocks=blocks,
        table_tokens=spec.block_size,
        origin=f"vllm-{vllm_version()}/{spec.mamba_type.name}/{'/'.join(kinds)}/{_order()}",
        table=needed.table,
    )


def settled_states(vllm_config: Any, scheduler_output: Any, request: Any) -> tuple[EngineState, ...]:
    """The states that vLLM offers in this step and that will be final when its forward pass has ended.

    With speculation a step leaves one state for each guess, in consecutive blocks, and after sampling vLLM moves the
    state of the last accepted token to its place (`postprocess_mamba_align_gpu`). The synchronous scheduler offers a
    boundary in the step that reaches it, before that move, so the state read then may belong to a rejected guess; a
    prompt's boundaries are reached without guesses. The asynchronous one does not know a step's tokens when it
    schedules the next, and offers a boundary once its tokens are known, after the move.
    """
    offered = scheduler_output.kv_connector_block_state.boundary_state_offloads.get(request.request_id, ())
    states = tuple(EngineState(*state) for state in offered)
    if not states or vllm_config.speculative_config is None or vllm_config.scheduler_config.async_scheduling:
        return states
    if request.request_id in scheduler_output.scheduled_spec_decode_tokens:
        return ()
    return tuple(state for state in states if state.boundary <= request.num_prompt_tokens)


def _order() -> str:
    """The axis order of vLLM's convolution states, which an environment variable decides."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return "dim first" if is_conv_state_dim_first() else "dim last"


def _why_other_bytes(vllm_config: Any, spec: Any, states: Any) -> str | None:
    """None if vLLM, when it moves the state of a block, moves exactly the bytes of the layer's views."""
    functions = _copy_functions(vllm_config, spec)
    if functions is None:
        return "of a model that does not say how vLLM copies its states"
    if len(functions) != len(states):
        return f"with {len(states)} states of which vLLM copies {len(functions)}"
    for state, function in zip(states, functions, strict=True):
        for block in (1, state.shape[0] - 1):
            copied = function(state, [block], 0, 1)
            if (copied.start_addr, copied.num_elements) != (state[block].data_ptr(), state[block].numel()):
                return "whose states vLLM copies from places other than those that its layers show"
    return None


def _copy_functions(vllm_config: Any, spec: Any) -> Any | None:
    from vllm.model_executor.models import ModelRegistry

    config = vllm_config.model_config
    model, _ = ModelRegistry.resolve_model_cls(config.architecture, model_config=config)
    get = getattr(model, "get_mamba_state_copy_funcs", None)
    return get({spec.mamba_type}).get(spec.mamba_type) if get is not None else None
