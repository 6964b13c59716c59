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


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments: Any, **_named: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in and was called")

    return missing
