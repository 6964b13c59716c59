"""`int8` from bfloat16 in C, on a CPU, with the same bytes as the torch operations of `kv_cuda.quantise.codes`.

The functions are in the library that is built with kv-tiers (docs/adr/0026). It is found by an entry point, because
neither package depends on the other; without it, torch does the work.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Final, Protocol

import numpy as np
import torch
from kv_core.format import ChunkFormat
from numpy.typing import NDArray

GROUP: Final = "kv_cuda.kernels"
"""The entry-point group. An entry point names a function that returns `Kernels`, or None if there are none."""


class Kernels(Protocol):
    """C functions by name. Raises `MisuseError` where the arrays' sizes do not fit each other."""

    def call(self, name: str, /, *arguments: NDArray[np.generic]) -> int: ...


class CompiledCodes:
    """For one pair of formats. Of one thread at a time: the scratch is its own."""

    def __init__(self, exact: ChunkFormat, quantised: ChunkFormat, kernels: Kernels) -> None:
        self._kernels = kernels
        planes = len(exact.parts) * exact.layers
        sizes = (planes, exact.chunk_tokens, exact.heads, exact.head_dim, quantised.exact_tokens)
        self._shape = np.array([*sizes, 0, exact.chunk_tokens], np.int64)
        self._scratch = np.empty(6 * exact.heads * exact.head_dim, np.uint8)

    def encode(self, exact: torch.Tensor, quantised: torch.Tensor) -> float:
        """Fill the chunk. Its largest magnitude; where that is too large, the chunk is worthless."""
        peak = self._kernels.call("quantise", self._shape, exact.numpy(), quantised.numpy(), self._scratch)
        return float(np.array(peak << 16, np.uint32).view(np.float32))

    def decode(self, quantised: torch.Tensor, exact: torch.Tensor, first_token: int, last_token: int) -> None:
        """Fill these tokens' numbers, the last one excluded."""
        self._shape[5:] = first_token, last_token
        self._kernels.call("dequantise", self._shape, quantised.numpy(), exact.numpy(), self._scratch)


def compiled_codes(exact: ChunkFormat, quantised: ChunkFormat) -> CompiledCodes | None:
    """None: these formats are none of those that C has, or it is not installed."""
    if (exact.dtype, quantised.kind) != ("bfloat16", "int8") or (kernels := _installed()) is None:
        return None
    return CompiledCodes(exact, quantised, kernels)


@cache
def _installed() -> Kernels | None:
    found = (entry.load()() for entry in entry_points(group=GROUP))
    return next((kernels for kernels in found if kernels is not None), None)
