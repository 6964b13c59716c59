"""Ranges that a profiler such as Nsight Systems shows around the copies of a CUDA device.

A range lies on the thread that puts the work into the device's queues. With the profiler's projection onto the device
it covers the kernels and copies themselves.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

MakeRange = Callable[[str], AbstractContextManager[object]]


def nvtx_ranges(device: torch.device) -> MakeRange:
    """Makes a range from its name. Not on a CUDA device: one that does nothing."""
    if device.type != "cuda":
        return lambda _: nullcontext()
    return torch.cuda.nvtx.range
