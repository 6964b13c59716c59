"""What vLLM hands over in `register_kv_caches`, described for `kv_cuda`: which layouts it could have.

Nothing is decided here. A candidate is a reading that the shapes allow; the canary finds out which one is true.
"""

from collections.abc import Mapping
from typing import Any

import torch
from kv_cuda import PagedLayout

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
                f"group {number} of this model's layers is {type(spec).__name__}, whose blocks do not keep a whole prefix; "
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
    backend = f"{type(one.impl).__name__}/{getattr(one, 'isa', '')}"
    common: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "itemsize": dtype.itemsize,
        "layers": len(tensors),
        "blocks": blocks,
        "block_tokens": spec.block_size,
    }
    return LayerGroup(
        tensors=tensors,
        block_tokens=spec.block_size,
        blocks=blocks,
        candidates=(strided, *packed),
        opaque=strided,
        origin=f"vllm-{version('vllm')}/{backend}/{tuple(shape[1:])}/{tuple(stride[1:])}/{dtype}",
        update=_update([layers[name] for name in names], tensors, mla=_is_mla(spec)),
    )
