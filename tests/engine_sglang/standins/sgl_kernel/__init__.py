"""What an engine on a CPU without AMX needs of SGLang's compiled kernels: one function. Others raise when called."""

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new places, which lie one request after the other, into its row of the table."""
    assert req_to_token.shape[1] == pool_len
    done = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


# SGLang looks these up where it imports its layers with states and Qwen's processors of images. They have no kernel, so
# a call is an error.
_OPERATORS = torch.library.Library("sgl_kernel", "DEF")
for _name in (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
):
    _OPERATORS.define(f"{_name}() -> ()")


def missing(name: str) -> Callable[..., Any]:
    """What raises when it is called."""

    def call(*_arguments: Any, **_named: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in and was called")

    return call


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)
