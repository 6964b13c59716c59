"""How many different shards tensor parallelism makes of each layer's cache.

vLLM divides a layer's KV heads between its ranks. With fewer heads than ranks, neighbouring ranks have the same head.
Its configuration reports one number of heads for the whole model, which need not be that of each layer, so it decides
nothing here. Where a rank has one head of a layer, only the projection that computes this layer's keys and values
tells how many ranks have the same one. Where it cannot be found, each rank counts as having its own: that is right for
every model, and costs room.
"""

import gc
import math
from collections.abc import Collection, Mapping
from typing import Any

from kv_cuda.canary import Refusal
from torch import nn

from kv_vllm.needs import needed_layers


def shards_of_ranks(ranks: int, kv_cache_config: Any, layers: Mapping[str, Any]) -> int:
    """The number of different shards of this process's layers that `ranks` tensor-parallel ranks have.

    layers: vLLM's layers by name (`static_forward_context`).
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec

    needed = needed_layers(kv_cache_config, layers)
    if ranks == 1 or isinstance(needed, Refusal):
        return ranks
    with_one_head: list[Any] = []
    for group in needed:
        if isinstance(group.spec, MLAAttentionSpec | SlidingWindowMLASpec):
            continue  # all ranks have the same latent
        if not isinstance(group.spec, AttentionSpec) or group.spec.num_kv_heads != 1:
            return ranks  # several heads: no two ranks have the same; states are divided more finely than heads
        with_one_head += (layers.get(name) for name in group.names)
    shards = 1
    for total in _total_heads(with_one_head):
        if not total or (ranks % total and total < ranks):
            return ranks
        shards = math.lcm(shards, min(total, ranks))
    return shards


def _total_heads(layers: Collection[Any]) -> list[int]:
    """The number of KV heads that each of these attention layers has on all ranks together; 0: unknown.

    An attention layer does not know its projection: both are parts of one module, which is found among this process's
    objects because a connector has no access to the model.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear

    if not layers:
        return []
    totals: dict[int, set[int]] = {id(layer): set() for layer in layers}
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):  # not `isinstance`, for which some objects run code
            continue
        parts = list(module.__dict__.get("_modules", {}).values())
        for own in totals.keys() & map(id, parts):
            projections = [getattr(part, "base_layer", part) for part in parts]  # under a LoRA's
            totals[own].update(
                each.total_num_kv_heads if each.num_kv_heads == 1 else 0
                for each in projections
                if isinstance(each, QKVParallelLinear)
            )
    return [next(iter(found)) if len(found) == 1 else 0 for found in totals.values()]
