"""Candidate layouts of the tensors that vLLM passes to `register_kv_caches`, described for `kv_cuda`.

Nothing is decided here. A candidate is an interpretation that the shapes allow; the canary finds the correct one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from kv_core.errors import InputError
from kv_cuda import PagedLayout, latent, split_parts, tiled_keys_and_values, transposed_keys
from kv_cuda.canary import EngineUpdate, LayerGroup, Refusal
from kv_cuda.states import StateGroup

from kv_vllm.interface import vllm_version
from kv_vllm.needs import NeededLayers, needed_layers
from kv_vllm.states import read_states

_FP8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""vLLM's quantised caches with one byte per element and one scale per layer, and the dtype of the byte. Its other
quantised caches have scales among the elements, and only their whole blocks can be stored."""

_TILES: Final = {
    "vLLM CPU, AMX": ((16, 2), (2, 16)),
    "vLLM CPU, NEON with BFMMLA": ((8, 4), (4, 2)),
}
"""Tiles of K and of V, (tokens, dims), by the name of the layout. AMX: measured, for bfloat16 and for fp8 under a model
of bfloat16. NEON: taken from vLLM's csrc/cpu/cpu_attn_neon_bfmmla.hpp, not measured."""


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
    missing = [name for name in names if not hasattr(getattr(layers.get(name), "impl", None), "do_kv_cache_update")]
    if missing:
        return needed.refused(f"has {missing[0]}, whose backend has no cache update of its own to prove a layout with")
    attention = [layers[name] for name in names]
    if any(getattr(layer, "calculate_kv_scales", False) for layer in attention):
        return Refusal(
            "the scales of the quantised cache are calculated while the engine runs (calculate_kv_scales), and chunks "
            "stored before have different ones; leave that out, or use a checkpoint that has the scales"
        )
    mla = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
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
    candidates = tuple(mla_layouts(stride, sizes) if mla else layouts(stride, sizes))
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


def mla_layouts(stride: tuple[int, ...], sizes: Mapping[str, int | str]) -> Iterator[PagedLayout]:
    yield latent("vLLM MLA", block=stride[0], token=stride[2], **sizes)


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
