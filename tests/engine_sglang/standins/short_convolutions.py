"""Short causal convolutions in plain torch, in place of kernels that SGLang writes in Triton, which a CPU cannot run.

With them the models whose only states are short convolutions (LFM2) run on a CPU. What a state is, where it lies, when
it is copied and to where is SGLang's own.
"""

from typing import Any

import torch


def register() -> None:
    from sglang.srt.layers.attention.mamba import causal_conv1d

    causal_conv1d._causal_conv1d_fn_triton = _convolve
    causal_conv1d._causal_conv1d_update_triton = _convolve_one


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None,
    pad_slot_id: int,
    **_: Any,
) -> torch.Tensor:
    """x: [channels, tokens of all requests]. conv_states: [slots, channels, width - 1], each the last inputs before."""
    output, width = torch.empty_like(x), weight.shape[1]
    bounds = query_start_loc.tolist()
    for number, slot in enumerate(cache_indices.tolist()):
        first, end = bounds[number], bounds[number + 1]
        if slot == pad_slot_id or first == end:
            continue
        before = conv_states[slot][:, : width - 1]
        if not bool(has_initial_state[number]):
            before = torch.zeros_like(before)
        inputs = torch.cat([before.to(x.dtype), x[:, first:end]], dim=1)
        output[:, first:end] = _filtered(inputs, weight, bias, activation)
        conv_states[slot][:, : width - 1] = inputs[:, 1 - width :]
    return output


def _convolve_one(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """x: [requests, channels], one token of each."""
    width = weight.shape[1]
    inputs = torch.cat([conv_state[conv_state_indices][:, :, : width - 1], x.unsqueeze(-1)], dim=2)
    conv_state[conv_state_indices, :, : width - 1] = inputs[:, :, 1:]
    return _filtered(inputs, weight, bias, activation).squeeze(-1)


def _filtered(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    summed = torch.nn.functional.conv1d(inputs, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return torch.nn.functional.silu(summed) if activation else summed
