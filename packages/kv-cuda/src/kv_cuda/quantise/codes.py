"""Quantisation for `int8` and `fp8`: numbers to codes of one byte with scales, and back.

A row is one head's data for one token in one layer of one part; a channel is one element of the head over the chunk's
tokens. Each channel is divided by a power of two, so that its largest magnitude is below 1, and then each row by a
scale, so that it uses the whole range of codes. Thus neither a channel that is far larger than its neighbours, as in
Gemma's keys, nor a row that is far smaller than others reduces the precision of the rest. A chunk's first tokens are
stored exactly. docs/formats/quantised.md specifies the bytes and the bounds on the error.

It uses torch operations on whatever device the bytes are, a few planes at a time through scratch memory that is reused,
so that on a CPU the passes stay in the processor's cache, and on a GPU nothing is allocated. On a CPU, `int8` from
bfloat16 runs in C, many times as fast and with the same bytes, if kv-tiers is installed and was built with a compiler.
"""

from typing import Final

import numpy as np
import torch
from kv_core.format import SCALE_BYTES, ChunkFormat

from kv_cuda.kernels import CopyKernels, installed_kernels


class CompiledCodes:
    """`int8` from bfloat16 in C, on a CPU, with the same bytes as the torch operations of `Codes`. For one thread at a
    time: it has one scratch buffer."""

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


_LARGEST_CODE: Final = {"int8": 127.0, "fp8": 448.0}
SMALLEST_SCALE: Final = 2.0**-60
"""Rows with a smaller scale, after division by their channels', are restored as zeros. So even with a channel's least
exponent no product is a subnormal float32, which devices may or may not flush to zero."""
LARGEST_SCALE: Final = 2.0**118
"""Chunks with a number beyond the largest code times this are refused, so that no product is ever infinite."""
_EXPONENTS: Final = (-40, 120)
"""The range of a channel's exponent."""
_PIECE_NUMBERS: Final = {"cpu": 1 << 18, "cuda": 1 << 22}


class Codes:
    """Encodes and decodes one chunk format on one device. For one queue at a time: it has one set of scratch memory."""

    def __init__(
        self, exact: ChunkFormat, quantised: ChunkFormat, device: torch.device, *, may_compile: bool = True
    ) -> None:
        """exact: the canonical format of the same numbers. may_compile: whether it may run in C where possible."""
        self._exact, self._quantised = exact, quantised
        self._compiled: CompiledCodes | None = None
        if may_compile and device.type == "cpu":
            self._compiled = compiled_codes(exact, quantised)
        self._planes = len(exact.parts) * exact.layers
        shape = (exact.chunk_tokens, exact.heads, exact.head_dim)
        numbers = exact.chunk_tokens * exact.heads * exact.head_dim
        self._step = max(1, min(self._planes, _PIECE_NUMBERS.get(device.type, 1 << 20) // numbers))
        self._wide = torch.empty((self._step, *shape), dtype=torch.float32, device=device)
        self._high, self._low = (torch.empty((self._step, *shape[:2]), device=device) for _ in range(2))
        self._peaks, self._scratch = (torch.empty((self._step, *shape[1:]), device=device) for _ in range(2))
        self._peak = torch.empty((), device=device)
        self._channels = shape[1:]

    def encode(self, exact: torch.Tensor, quantised: torch.Tensor, largest: torch.Tensor) -> None:
        """Fill a chunk's codes and scales from its numbers, both uint8 of their format's size.

        largest: float32 scalar, raised to the chunk's largest magnitude divided by the largest code. The chunk is
            worthless, and must not be stored, unless that is at most `LARGEST_SCALE`. An infinity or a NaN in the chunk
            becomes the result.
        """
        if self._compiled is not None:
            self._raise_to(largest, torch.tensor(self._compiled.encode(exact, quantised)))
            return
        first_tokens, largest_code = self._quantised.exact_tokens, _LARGEST_CODE[self._quantised.kind]
        numbers, (codes, scales, leading, exponents) = self._numbers(exact), self._codes(quantised)
        quantised.view(self._planes, -1)[:, -SCALE_BYTES:] = 0  # padding; exponents overwrite the rest
        for first in range(0, self._planes, self._step):
            piece = slice(first, min(first + self._step, self._planes))
            count = piece.stop - first
            wide, scale, low = self._wide[:count], self._high[:count], self._low[:count]
            wide.copy_(numbers[piece])
            if first_tokens:
                leading[piece] = numbers[piece, :first_tokens]
                self._raise_to(
                    largest, torch.amax(self._channel_peaks(wide[:, :first_tokens]), (0, 1, 2), out=self._peak)
                )
                wide[:, :first_tokens] = 0.0
            peaks = self._channel_peaks(wide[:, first_tokens:])
            self._raise_to(largest, torch.amax(peaks, (0, 1, 2), out=self._peak))
            bits = peaks.view(torch.int32)  # of non-negative numbers: exponents, then mantissas
            bits.bitwise_right_shift_(23).sub_(126).clamp_(*_EXPONENTS)
            self._equalise(bits)
            exponents[piece] = bits.flatten(1)
            wide.mul_(bits.neg_().add_(127).bitwise_left_shift_(23).view(torch.float32).unsqueeze(1))
            # Two passes over cached memory are many times faster on a CPU than torch's norm and aminmax. NaN stays NaN.
            torch.amax(wide, -1, out=scale)
            torch.amin(wide, -1, out=low)
            torch.maximum(scale, low.neg_(), out=scale).div_(largest_code)
            torch.threshold_(scale, SMALLEST_SCALE, 0.0)
            scales[piece] = scale
            factor = scale.reciprocal_().nan_to_num_(nan=0.0, posinf=0.0)
            wide.mul_(factor.unsqueeze(-1))
            codes[piece] = wide.round_() if self._quantised.kind == "int8" else wide

    def decode(self, quantised: torch.Tensor, exact: torch.Tensor, first_token: int, last_token: int) -> None:
        """Fill these tokens' numbers (the last one excluded) from codes and scales."""
        if self._compiled is not None:
            self._compiled.decode(quantised, exact, first_token, last_token)
            return
        tokens = slice(first_token, last_token)
        exact_tokens = slice(first_token, min(last_token, self._quantised.exact_tokens))
        numbers, (codes, scales, leading, exponents) = self._numbers(exact), self._codes(quantised)
        for first in range(0, self._planes, self._step):
            piece = slice(first, min(first + self._step, self._planes))
            wide = self._wide[: piece.stop - first, : last_token - first_token]
            peaks = self._peaks[: piece.stop - first]
            wide.copy_(codes[piece, tokens])
            wide.mul_(scales[piece, tokens].unsqueeze(-1))
            bits = peaks.view(torch.int32)
            bits.copy_(exponents[piece].view(bits.shape)).add_(127).bitwise_left_shift_(23)
            wide.mul_(peaks.unsqueeze(1))
            numbers[piece, tokens] = wide
            if exact_tokens.start < exact_tokens.stop:
                numbers[piece, exact_tokens] = leading[piece, exact_tokens]

    def _channel_peaks(self, wide: torch.Tensor) -> torch.Tensor:
        """[planes, heads, head_dim], the largest magnitudes over tokens; in reused scratch memory."""
        peaks, scratch = self._peaks[: len(wide)], self._scratch[: len(wide)]
        torch.amax(wide, 1, out=peaks)
        torch.amin(wide, 1, out=scratch)
        return torch.maximum(peaks, scratch.neg_(), out=peaks)

    def _equalise(self, exponents: torch.Tensor) -> None:
        """Give all channels of a head the largest exponent if their exponents differ by at most one: scales of rows
        alone suit that head better. exponents: int32 [planes, heads, head_dim]."""
        count = len(exponents)
        top, is_level = (scratch[:count, 0].view(torch.int32) for scratch in (self._high, self._low))
        torch.amax(exponents, -1, out=top)
        torch.amin(exponents, -1, out=is_level).sub_(top).add_(2).clamp_(0, 1)
        step = self._scratch[:count].view(torch.int32)
        step.copy_(top.unsqueeze(-1).expand_as(step)).sub_(exponents).mul_(is_level.unsqueeze(-1))
        exponents.add_(step)

    def _raise_to(self, largest: torch.Tensor, peak: torch.Tensor) -> None:
        torch.maximum(largest, peak.div_(_LARGEST_CODE[self._quantised.kind]), out=largest)

    def _numbers(self, exact: torch.Tensor) -> torch.Tensor:
        """[planes, tokens, heads, head_dim]"""
        exact_format = self._exact
        shape = (self._planes, exact_format.chunk_tokens, exact_format.heads, exact_format.head_dim)
        return exact.view(getattr(torch, exact_format.dtype)).view(shape)

    def _codes(self, quantised: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes [planes, tokens, heads, head_dim], scales [planes, tokens, heads], the first tokens unquantised
        [planes, exact tokens, heads, head_dim], and exponents [planes, heads × head_dim]."""
        chunk_format = self._quantised
        planes = quantised.view(self._planes, chunk_format.layer_bytes)
        rows = (chunk_format.chunk_tokens, chunk_format.heads)
        sizes = [
            chunk_format.codes_bytes,
            chunk_format.scales_bytes,
            chunk_format.exact_bytes,
            chunk_format.exponents_bytes,
        ]
        codes, scales, leading, exponents = torch.split(planes, sizes, 1)
        channels = chunk_format.heads * chunk_format.head_dim
        shape = (chunk_format.exact_tokens, *self._channels)
        return (
            codes.view(getattr(torch, chunk_format.dtype)).unflatten(1, (*rows, -1)),  # type: ignore[no-untyped-call]
            scales.view(torch.float32).unflatten(1, rows),  # type: ignore[no-untyped-call]
            leading.view(getattr(torch, self._exact.dtype)).unflatten(1, shape),  # type: ignore[no-untyped-call]
            exponents[:, :channels].view(torch.int8),
        )
