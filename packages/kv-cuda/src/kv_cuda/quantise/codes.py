"""Numbers as codes of one byte and a scale for each row, and back: what `int8` and `fp8` chunks hold.

A row here is what one head has for one token in one layer of one part. Its scale is its largest magnitude divided by
the largest code, so that every row uses the whole range of codes whatever its size; a number comes back as
code × scale. docs/formats/quantised.md has the bytes and the bounds on the error.

Torch's own operations on whatever device the bytes are, some planes at a time through scratch that is kept, so that on
a CPU the passes over it stay in the processor's cache, and on a GPU nothing is allocated.
"""

from typing import Final

import torch
from kv_core.format import ChunkFormat

_LARGEST_CODE: Final = {"int8": 127.0, "fp8": 448.0}
SMALLEST_SCALE: Final = 2.0**-100
"""Rows with less come back as zeros. A product of a code and a scale is thereby never a subnormal float32, which
devices may or may not flush to zero."""
LARGEST_SCALE: Final = 2.0**118
"""Rows with more are refused. A product of a code and a scale is thereby never infinite."""
_PIECE_NUMBERS: Final = {"cpu": 1 << 18, "cuda": 1 << 22}


class Codes:
    """For one chunk format on one device. Of one queue at a time: the scratch is its own."""

    def __init__(self, exact: ChunkFormat, quantised: ChunkFormat, device: torch.device) -> None:
        """exact: the canonical format of the same numbers."""
        self._exact, self._quantised = exact, quantised
        self._planes = len(exact.parts) * exact.layers
        shape = (exact.chunk_tokens, exact.heads, exact.head_dim)
        numbers = exact.chunk_tokens * exact.heads * exact.head_dim
        self._step = max(1, min(self._planes, _PIECE_NUMBERS.get(device.type, 1 << 20) // numbers))
        self._wide = torch.empty((self._step, *shape), dtype=torch.float32, device=device)
        self._high, self._low = (torch.empty((self._step, *shape[:2]), device=device) for _ in range(2))
        self._peak = torch.empty((), device=device)

    def encode(self, exact: torch.Tensor, quantised: torch.Tensor, largest: torch.Tensor) -> None:
        """Fill a chunk's codes and scales from its numbers, both uint8 of their format's size.

        largest: float32 scalar, raised to the chunk's largest scale. The chunk is worthless, and must not be kept,
            unless that is at most `LARGEST_SCALE`; a chunk with an infinity or a NaN makes it one itself.
        """
        numbers, (codes, scales) = self._numbers(exact), self._codes(quantised)
        for first in range(0, self._planes, self._step):
            piece = slice(first, min(first + self._step, self._planes))
            count = piece.stop - first
            wide, scale, low = self._wide[:count], self._high[:count], self._low[:count]
            wide.copy_(numbers[piece])
            # Twice over memory at hand is many times faster on a CPU than torch's norm and aminmax. NaN stays NaN.
            torch.amax(wide, -1, out=scale)
            torch.amin(wide, -1, out=low)
            torch.maximum(scale, low.neg_(), out=scale).div_(_LARGEST_CODE[self._quantised.kind])
            torch.threshold_(scale, SMALLEST_SCALE, 0.0)
            scales[piece] = scale
            factor = scale.reciprocal_().nan_to_num_(nan=0.0, posinf=0.0)
            wide.mul_(factor.unsqueeze(-1))
            codes[piece] = wide.round_() if self._quantised.kind == "int8" else wide
        torch.maximum(largest, torch.amax(scales, (0, 1, 2), out=self._peak), out=largest)

    def decode(self, quantised: torch.Tensor, exact: torch.Tensor, first_token: int, last_token: int) -> None:
        """Fill these tokens' numbers (the last one excluded) from codes and scales."""
        tokens = slice(first_token, last_token)
        numbers, (codes, scales) = self._numbers(exact), self._codes(quantised)
        for first in range(0, self._planes, self._step):
            piece = slice(first, min(first + self._step, self._planes))
            wide = self._wide[: piece.stop - first, : last_token - first_token]
            wide.copy_(codes[piece, tokens])
            wide.mul_(scales[piece, tokens].unsqueeze(-1))
            numbers[piece, tokens] = wide

    def _numbers(self, exact: torch.Tensor) -> torch.Tensor:
        """[planes, tokens, heads, head_dim]"""
        described = self._exact
        shape = (self._planes, described.chunk_tokens, described.heads, described.head_dim)
        return exact.view(getattr(torch, described.dtype)).view(shape)

    def _codes(self, quantised: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[planes, tokens, heads, head_dim], [planes, tokens, heads]"""
        described = self._quantised
        planes = quantised.view(self._planes, described.layer_bytes)
        tokens_and_heads = (described.chunk_tokens, described.heads)
        codes = planes[:, : described.codes_bytes].view(getattr(torch, described.dtype))
        scales = planes[:, described.codes_bytes :].view(torch.float32)
        return codes.unflatten(1, (*tokens_and_heads, -1)), scales.unflatten(1, tokens_and_heads)  # type: ignore[no-untyped-call]
