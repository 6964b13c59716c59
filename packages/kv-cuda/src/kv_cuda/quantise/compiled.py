"""`int8` from bfloat16 in C, on a CPU, with the same bytes as the torch operations of `kv_cuda.quantise.codes`."""

import numpy as np
import torch
from kv_core.format import ChunkFormat

from kv_cuda.kernels import CopyKernels, installed_kernels


class CompiledCodes:
    """Quantises in C for one pair of formats. For one thread at a time: it has one scratch buffer."""

    def __init__(self, exact: ChunkFormat, quantised: ChunkFormat, kernels: CopyKernels) -> None:
        self._kernels = kernels
        planes = len(exact.parts) * exact.layers
        sizes = (planes, exact.chunk_tokens, exact.heads, exact.head_dim, quantised.exact_tokens)
        self._shape = np.array([*sizes, 0, exact.chunk_tokens], np.int64)
        self._scratch = np.empty(6 * exact.heads * exact.head_dim, np.uint8)

    def encode(self, exact: torch.Tensor, quantised: torch.Tensor) -> float:
        """Fill the chunk; returns its largest magnitude. If that is too large, the chunk is worthless."""
        peak = self._kernels.call("quantise", self._shape, exact.numpy(), quantised.numpy(), self._scratch)
        return float(np.array(peak << 16, np.uint32).view(np.float32))

    def decode(self, quantised: torch.Tensor, exact: torch.Tensor, first_token: int, last_token: int) -> None:
        """Fill these tokens' numbers, the last one excluded."""
        self._shape[5:] = first_token, last_token
        self._kernels.call("dequantise", self._shape, quantised.numpy(), exact.numpy(), self._scratch)


def compiled_codes(exact: ChunkFormat, quantised: ChunkFormat) -> CompiledCodes | None:
    """None: there is no C code for these formats, or it is not installed."""
    if (exact.dtype, quantised.kind) != ("bfloat16", "int8") or (kernels := installed_kernels()) is None:
        return None
    return CompiledCodes(exact, quantised, kernels)
