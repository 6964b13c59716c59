"""Batched copies by the driver: many long runs of bytes in one call, on the device's copy engines, without a kernel.

`cudaMemcpyBatchAsync` (CUDA 13 through cuda-bindings) takes any number of (source, destination, bytes). It needs
neither multiprocessors nor a ring buffer, but takes time for each run, so it suits runs of many kilobytes.
"""

import importlib
from functools import cache
from typing import Any

import numpy as np
import torch
from kv_core.errors import CopyFailed


@cache
def _runtime() -> Any | None:
    """cuda-bindings' runtime of CUDA 13 or later, if there is one."""
    try:
        bindings = importlib.import_module("cuda.bindings")
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    return runtime if int(bindings.__version__.partition(".")[0]) >= 13 else None


def is_available(device: torch.device) -> bool:
    """Whether copies of this device can be made that way."""
    return device.type == "cuda" and _runtime() is not None


def copy_runs(to: np.ndarray, origin: np.ndarray, nbytes: np.ndarray, device: torch.device) -> None:
    """Put the copies of `nbytes[i]` bytes from address `origin[i]` to `to[i]` into the current stream, in any order.

    Raises:
        CopyFailed: the driver refuses.
    """
    runtime = _runtime()
    assert runtime is not None, "see is_available"
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    stream = torch.cuda.current_stream(device).cuda_stream
    (status,) = runtime.cudaMemcpyBatchAsync(
        to.tolist(), origin.tolist(), nbytes.tolist(), len(nbytes), [attributes], [0], 1, stream
    )
    if status != runtime.cudaError_t.cudaSuccess:
        raise CopyFailed(f"the driver refused a batch of {len(nbytes)} copies: {status.name}")
