"""The driver's functions: those that csrc/plans.c enqueues a step's copies by, and batched copies.

A batch is many long runs of bytes in one call, on the device's copy engines, without a kernel. `cuMemcpyBatchAsync`
(CUDA Driver API, Memory Management, since CUDA 12.8) takes any number of (destination, source, bytes). It needs neither
multiprocessors nor a ring buffer, but takes time for each run, so it suits runs of many kilobytes. It is called through
ctypes, which takes arrays as they are: bindings that make a Python object of each address take longer than the copies.
"""

import ctypes
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from kv_core.errors import CopyFailed
from numpy.typing import NDArray

_IN_ORDER_OF_THE_STREAM: Final = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"""


class _Location(ctypes.Structure):
    """CUmemLocation: a hint, which copies within pinned memory need not have."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


_ENQUEUE: Final = (
    *("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuEventRecord", "cuStreamWaitEvent"),
    *("cuMemcpyHtoDAsync_v2", "cuLaunchKernel"),
)
"""CUDA Driver API: Context, Event, Stream and Memory Management, Execution Control."""


def _library() -> Any | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def functions_and_context() -> tuple[int, ...]:
    """How `Device` in csrc/plans.c begins: the addresses of functions, and the current context. Empty: they are not all
    there, as on devices of another make."""
    library, context = _library(), ctypes.c_void_p()
    functions: list[Any] = [getattr(library, name, None) for name in _ENQUEUE]
    if library is None or None in functions or library.cuCtxGetCurrent(ctypes.byref(context)) or not context.value:
        return ()
    return (*[ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions], context.value)


@cache
def _batched_copy() -> Any | None:
    """The driver's function, if it has one: that of CUDA 13, or of 12.8, which also says which run failed."""
    library = _library()
    for name, has_failed_run in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        function = getattr(library, name, None)
        if function is not None:
            arrays, failed_run = [ctypes.c_void_p] * 3, [ctypes.c_void_p] * has_failed_run
            attributes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
            function.argtypes = [*arrays, *attributes, *failed_run, ctypes.c_void_p]
            return function
    return None


def is_available(device: torch.device) -> bool:
    """Whether copies of this device can be made that way."""
    return device.type == "cuda" and _batched_copy() is not None


def copy_runs(to: NDArray[np.int64], origin: NDArray[np.int64], nbytes: int, device: torch.device) -> None:
    """Put the copies of `nbytes` bytes from each address in `origin` to that in `to` into the current stream, in any
    order.

    Raises:
        CopyFailed: the driver refuses.
    """
    function = _batched_copy()
    assert function is not None, "see is_available"
    count = len(to)
    sizes = np.full(count, nbytes, np.uint64)
    attributes = _Attributes(source_access_order=_IN_ORDER_OF_THE_STREAM)
    from_first, failed_run = ctypes.c_size_t(0), ctypes.c_size_t(0)
    has_failed_run = len(function.argtypes) == 9
    arrays = [column.ctypes.data for column in (to, origin, sizes)]
    extra = [ctypes.addressof(failed_run)] * has_failed_run
    stream = torch.cuda.current_stream(device).cuda_stream
    status = function(*arrays, count, ctypes.addressof(attributes), ctypes.addressof(from_first), 1, *extra, stream)
    if status:
        raise CopyFailed(f"the driver refused a batch of {count} copies: CUresult {status}")
