"""Keys and values as trained models have them, drawn: with a mean and few components, turned to their positions.

For tests of the codec `kvtc`, with what says how near its chunks come back.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from kv_codecs.calibration import Calibration, Learning
from kv_codecs.kvtc import KvtcCodec
from kv_codecs.rotation import turn, turns
from numpy.typing import NDArray

THETA = 100_000.0
DTYPES = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}


def frequencies(head_dim: int, theta: float = THETA) -> list[float]:
    return [theta ** (-2 * j / head_dim) for j in range(head_dim // 2)]


def as_stored(numbers: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype != "bfloat16":
        return numbers.astype(DTYPES[dtype])
    bits = numbers.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def as_numbers(chunk: bytes, dtype: str) -> NDArray[Any]:
    words = np.frombuffer(chunk, DTYPES[dtype])
    return (words.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else words.astype(np.float32)


class Drawn:
    """A model's keys and values. Each part of each layer has a mean, and components that fall off.

    thetas: of each layer's rotation, one behind the other and again from the first.
    """

    def __init__(
        self,
        layers: int = 2,
        heads: int = 2,
        head_dim: int = 32,
        dtype: str = "bfloat16",
        seed: int = 0,
        thetas: Sequence[float] = (THETA,),
    ) -> None:
        self.layers, self.heads, self.head_dim, self.dtype = layers, heads, head_dim, dtype
        self.frequencies = [frequencies(head_dim, thetas[layer % len(thetas)]) for layer in range(layers)]
        self.chance = np.random.default_rng(seed)
        channels = heads * head_dim
        self.means = self.chance.normal(0, 2, (2, layers, channels))
        scale = np.exp(-np.arange(channels) / (channels / 4))
        self.mixes = self.chance.normal(0, 1, (2, layers, channels, channels)) * scale[:, None]

    def context(self, first: int, tokens: int) -> NDArray[Any]:
        """[parts, layers, tokens, heads, head_dim], keys at their positions."""
        shape = (2, self.layers, tokens, self.heads * self.head_dim)
        flat = self.means[:, :, None] + self.chance.normal(0, 1, shape) @ self.mixes
        made = flat.reshape(2, self.layers, tokens, self.heads, self.head_dim).astype(np.float32)
        for layer, its in enumerate(self.frequencies):
            made[0, layer] = turn(made[0, layer], *turns(np.array(its), first, tokens))
        return made

    def chunk(self, first: int, tokens: int) -> bytes:
        return as_stored(self.context(first, tokens), self.dtype).tobytes()

    def learning(self, max_tokens: int = 8192, ranks: int = 1) -> Learning:
        return Learning(
            model="drawn",
            dtype=self.dtype,
            heads=self.heads,
            head_dim=self.head_dim,
            max_tokens=max_tokens,
            frequencies=self.frequencies,
            ranks=ranks,
        )

    def calibration(self, step: float = 0.4, max_tokens: int = 8192, ranks: int = 1) -> Calibration:
        learning = self.learning(max_tokens, ranks)
        for _ in range(2):
            parts = self.context(0, 1024)
            learning.add([(parts[0, layer], parts[1, layer]) for layer in range(self.layers)])
        return learning.learnt(step)


def encoded(codec: KvtcCodec, chunk: bytes, *, first: bool = False) -> bytes:
    out = memoryview(bytearray(len(chunk)))
    size = (codec.encode_first if first else codec.encode)(memoryview(chunk), out)
    assert size is not None
    return bytes(out[:size])


def decoded(codec: KvtcCodec, payload: bytes, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    codec.decode(memoryview(payload), memoryview(out))
    return bytes(out)


def position_in(payload: bytes) -> int:
    (position,) = struct.unpack_from("<I", payload, 4)
    return int(position)


def assert_within_the_bound(calibration: Calibration, chunk: bytes, back: bytes) -> None:
    """A number is rounded to 1/16 of a step, and a component to a whole one (docs/formats/kvtc.md); so a block of n
    numbers is off by no more than √n times half of both, and by what rounding to the chunk's type adds."""
    shape = calibration.shape
    exact, approximate = (
        as_numbers(one, shape.dtype).reshape(
            2 * shape.layers, -1, shape.blocks // (2 * shape.layers), shape.block_channels
        )
        for one in (chunk, back)
    )
    widths = calibration.widths.reshape(2 * shape.layers, 1, -1)
    error = np.linalg.norm((exact - approximate).astype(np.float64), axis=-1)
    rounding = 2.0**-8 if shape.dtype == "bfloat16" else 2.0**-10
    bound = np.sqrt(shape.block_channels) * widths * (1 + 1 / 16) / 2 + 2 * rounding * np.linalg.norm(exact, axis=-1)
    assert (error <= bound).all(), (error / bound).max()
