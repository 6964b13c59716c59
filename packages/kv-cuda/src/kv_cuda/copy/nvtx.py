"""NVTX ranges around the copies of a CUDA device, for profilers such as Nsight Systems.

A range is on the thread that enqueues the work. With the profiler's projection onto the device it covers the kernels
and copies themselves.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

MakeRange = Callable[[str], AbstractContextManager[object]]


def nvtx_ranges(device: torch.device) -> MakeRange:
    """A function that makes a range from its name; for a device without CUDA, a range that does nothing."""
    if device.type != "cuda":
        return lambda _: nullcontext()
    return torch.cuda.nvtx.range
