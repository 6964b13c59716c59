"""vLLM's states of linear layers, described for `kv_cuda.states`.

vLLM provides each layer's blocks as bytes, and the layer itself takes its states from them (`MambaBase`). When vLLM
resumes from a state it also moves states between blocks (v1/worker/mamba_utils.py), with functions of the model that
define the bytes of a state. Ours must be the same.

With speculation a step leaves one state for each guess, in consecutive blocks, and after sampling vLLM moves the state
of the last accepted token to its place (`postprocess_mamba_align_gpu`). The synchronous scheduler offers a boundary in
the step that reaches it, before that move, so the state read then may belong to a rejected guess; a prompt's boundaries
are reached without guesses. The asynchronous one does not know a step's tokens when it schedules the next, and offers a
boundary once its tokens are known, after the move.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from kv_connect.halves.inputs import EngineState
from kv_cuda.canary import Refusal
from kv_cuda.states import StateGroup

from kv_vllm.interface import vllm_version
from kv_vllm.needs import NeededLayers


def read_states(
    vllm_config: Any, needed: NeededLayers, kv_caches: Mapping[str, torch.Tensor], blocks: int
) -> StateGroup | Refusal:
    """The states of layers that share a block table, or why they cannot be cached."""
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
    """The states that vLLM offers in this step and that will be final when its forward pass has ended."""
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
