"""Published formats, judged alongside ours: they are never stored, so each is a few lines of numpy that show what it
would cost in quality and in bytes.

`int8-channel`: keys in one byte with a scale for each channel of a chunk, values as in `int8`.
`kivi4`, `kivi2`: Liu et al., "KIVI", ICML 2024 (arXiv 2402.02750): keys by channel in groups of 64 tokens, values by
token in groups of 64 channels, each group with a float16 scale and zero.
`cachegen`: Liu et al., "CacheGen", SIGCOMM 2024 (arXiv 2310.07240): every tenth token an anchor of 8 bits, the others'
differences to it in bins of .5, 1 and 1.5 standard deviations by thirds of the layers.
`bf16m3`, `bf16m2`: 3 or 2 bits of the mantissa, the exponents entropy coded.
`uniform25`: one step for a layer's keys and one for its values, a quarter of the standard deviation.

The first four tokens, attention's sinks, stay exact in all but `int8-channel`, and count as 16 bits each. Where a paper
uses arithmetic coding, zstd is used here, and its bytes are counted. Speeds are not measured. Transform coding (KVTC)
is not here: it is the codec `kvtc` of tiers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from kv_core.errors import ConfigError
from numpy.typing import NDArray

from kv_codecs.judge.measure import CHUNK_TOKENS, Cost, Layers, replace_chunks

Numbers = NDArray[np.float32]
_SINKS: Final = 4
_GROUP: Final = 64
_ANCHOR_TOKENS: Final = 10
_CODED_CHANNELS: Final = 32
"""Channels that share a table of the entropy coder."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One chunk's keys or values in one layer.

    numbers: [tokens, heads × head_dim], float32.
    heads: the number of heads. first: the first token's position in the prompt.
    layer, layers: the layer's number, and the number of layers.
    """

    numbers: Numbers
    heads: int
    first: int
    layer: int
    layers: int
    is_keys: bool


Coder = Callable[[Plane], tuple[Numbers, int]]
"""The decoded plane, and its size in bytes."""


class Rival:
    """A `Trip` by a coder of planes."""

    def __init__(self, name: str, coder: Coder, sinks: int = _SINKS) -> None:
        """sinks: how many of the prompt's first tokens stay exact."""
        self.name, self.cost = name, Cost()
        self._coder, self._sinks = coder, sinks

    def layers(self, layers: Layers) -> Layers:
        restored = [(keys.clone(), values.clone()) for keys, values in layers]
        for number, layer in enumerate(restored):
            replace_chunks([layer], partial(self._chunk, number, len(restored)))
        return restored

    def _chunk(self, number: int, count: int, exact: torch.Tensor, first: int) -> torch.Tensor:
        decoded = exact.clone()
        for part, (exact_part, decoded_part) in enumerate(zip(exact[:, 0], decoded[:, 0], strict=True)):
            numbers = exact_part.flatten(1).float().cpu().numpy()
            plane = Plane(numbers, exact_part.shape[1], first, number, count, is_keys=not part)
            restored, stored_bytes = self._coder(plane)
            decoded_part.copy_(torch.from_numpy(np.ascontiguousarray(restored)).view(exact_part.shape))
            if not first:
                decoded_part[: self._sinks] = exact_part[: self._sinks]
                stored_bytes += exact_part[: self._sinks].numel() * exact_part.itemsize
            self.cost.add(exact_part, decoded_part, stored_bytes)
        return decoded


def rivals() -> list[Rival]:
    return [
        Rival("int8-channel", _int8_by_channel, sinks=0),
        Rival("kivi4", partial(_kivi, bits=4)),
        Rival("kivi2", partial(_kivi, bits=2)),
        Rival("cachegen", _cachegen),
        Rival("bf16m3", partial(_mantissa, bits=3)),
        Rival("bf16m2", partial(_mantissa, bits=2)),
        Rival("uniform25", partial(_uniform, step=0.25)),
    ]


def _int8_by_channel(plane: Plane) -> tuple[Numbers, int]:
    shape = plane.numbers.shape if plane.is_keys else (CHUNK_TOKENS, plane.heads, -1)
    rows = plane.numbers.reshape(shape)
    scales = np.abs(rows).max(0 if plane.is_keys else -1, keepdims=True) / 127 + 1e-30
    return (np.round(rows / scales) * scales).reshape(plane.numbers.shape), rows.size + 4 * scales.size


def _kivi(plane: Plane, bits: int) -> tuple[Numbers, int]:
    rows = plane.numbers.T if plane.is_keys else plane.numbers
    groups = rows.reshape(len(rows), -1, _GROUP)
    zeros = groups.min(-1, keepdims=True)
    scales = ((groups.max(-1, keepdims=True) - zeros) / (2**bits - 1)).astype(np.float16).astype(np.float32) + 1e-30
    decoded = (np.clip(np.round((groups - zeros) / scales), 0, 2**bits - 1) * scales + zeros).reshape(rows.shape)
    return decoded.T if plane.is_keys else decoded, rows.size * bits // 8 + 4 * zeros.size


def _cachegen(plane: Plane) -> tuple[Numbers, int]:
    scales = np.abs(plane.numbers).max(0) / 127 + 1e-30
    anchors = np.round(plane.numbers[::_ANCHOR_TOKENS] / scales) * scales
    near = np.repeat(anchors, _ANCHOR_TOKENS, 0)[:CHUNK_TOKENS]
    step = (0.5, 1.0, 1.5)[3 * plane.layer // plane.layers] * float((plane.numbers - near).std())
    bins = np.round((plane.numbers - near) / step)
    decoded = near + bins * step
    decoded[::_ANCHOR_TOKENS] = anchors
    others = np.delete(bins, np.s_[::_ANCHOR_TOKENS], 0)
    return decoded, anchors.size + 2 * scales.size + _coded_bytes(others)


def _mantissa(plane: Plane, bits: int) -> tuple[Numbers, int]:
    words = plane.numbers.view(np.uint32) >> 16
    rounded = words + (1 << 6 - bits) >> 7 - bits << 7 - bits
    exponents = _compressed_bytes((rounded >> 7).astype(np.uint8))
    return (rounded << 16).astype(np.uint32).view(np.float32), exponents + words.size * (bits + 1) // 8


def _uniform(plane: Plane, step: float) -> tuple[Numbers, int]:
    width = step * float(plane.numbers.std())
    symbols = np.round(plane.numbers / width)
    return (symbols * width).astype(np.float32), _coded_bytes(symbols)


def _coded_bytes(symbols: Numbers) -> int:
    """Coded size of integers [tokens, channels], with adjacent channels coded together."""
    integers = symbols.astype(np.int64).T
    zigzag = np.where(integers < 0, -1 - 2 * integers, 2 * integers)
    high = _compressed_bytes((zigzag >> 8).astype(np.uint8)) if zigzag.max() > 255 else 0
    low = (zigzag & 255).astype(np.uint8)
    return high + sum(
        _compressed_bytes(low[first : first + _CODED_CHANNELS]) for first in range(0, len(low), _CODED_CHANNELS)
    )


def _compressed_bytes(symbols: NDArray[np.uint8]) -> int:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("--compare needs the package zstandard; pip install 'kv-codecs[zstd]'") from error
    return len(zstandard.ZstdCompressor(level=3).compress(np.ascontiguousarray(symbols).tobytes()))
