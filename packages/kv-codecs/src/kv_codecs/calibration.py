"""What the codec `kvtc` needs from a model: principal components of its keys and values, and how it rotates keys.

`kv judge --calibrate` writes it as a file, which settings name. docs/formats/kvtc.md specifies the bytes. Nothing in
the file is executed, and every size is checked before anything is allocated. Its hash is its name: it is in every
payload, and in the fingerprint of a cache whose tiers use it, so chunks of differently calibrated caches never mix.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from kv_core.errors import ConfigError
from numpy.typing import NDArray

from kv_codecs.rotation import Frequencies, Numbers, turn_back, turns


@dataclass(frozen=True, slots=True)
class ChannelOrder:
    """Which elements of a head are turned together, as an order of its channels that puts them where kernels expect it.

    Kernels turn element j with element j + head_dim / 2, as Llama does. Some models rotate only the first elements of a
    key (a *part*), and some turn neighbours. For these the channels of keys are reordered: the first elements of the
    pairs that are turned, half of the elements that are not turned, the second elements of the pairs, the other half.
    Elements that are not turned have the frequency 0.

    rotated: how many of a head's first elements are turned; even.
    neighbours: whether element 2 j is turned with 2 j + 1, and not j with j + rotated / 2.
    """

    head_dim: int
    rotated: int
    neighbours: bool

    @property
    def is_usual(self) -> bool:
        """Whether kernels take such keys without reordering."""
        return self.rotated == self.head_dim and not self.neighbours

    def ordered(self, stored: NDArray[Any], out: NDArray[Any]) -> None:
        """Copy channels from the model's order to that of kernels. Both [..., head_dim]."""
        for kernel, model in self._channel_runs():
            out[..., kernel] = stored[..., model]

    def restored(self, ordered: NDArray[Any], out: NDArray[Any]) -> None:
        """The reverse of `ordered`."""
        for kernel, model in self._channel_runs():
            out[..., model] = ordered[..., kernel]

    def _channel_runs(self) -> list[tuple[slice, slice]]:
        """Where runs of channels are in the order of kernels, and where in the model's order."""
        half, turned, end = self.head_dim // 2, self.rotated // 2, self.head_dim
        middle = self.rotated + half - turned
        first_elements, second_elements = slice(0, turned), slice(turned, self.rotated)
        if self.neighbours:
            first_elements, second_elements = slice(0, self.rotated, 2), slice(1, self.rotated, 2)
        return [
            (slice(0, turned), first_elements),
            (slice(turned, half), slice(self.rotated, middle)),
            (slice(half, half + turned), second_elements),
            (slice(half + turned, end), slice(middle, end)),
        ]


_MAGIC: Final = b"kv-kvtc\n"
VERSION: Final = 5
_HEAD: Final = struct.Struct("<8sII")
_DIGEST_BYTES: Final = 32
ID_BYTES: Final = 8
PARTS: Final = 2
"""Keys, then values."""
ITEMSIZES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
BLOCK_CHANNELS: Final = 192
"""The most channels that are transformed together: more would gain a few per cent, and time grows with them."""
_MOST_CHANNELS: Final = 256
"""The most channels of a block of one head, because its halves apart take 5 % more bytes at a third more divergence."""
MATRIX_BITS: Final = 14
"""Fractional bits of the forward matrices."""
_LARGEST_ROW: Final = 1.125
"""The largest norm of a forward matrix's row. It keeps sums of products within 32 bits, because numbers are at most
7 × 2 ** 10: with 256 channels they are at most 1.125 × 2 ** 14 × 16 × 7 × 2 ** 10."""
_LIMITS: Final = {"layers": 1024, "heads": 1024, "head_dim": 1024, "max_tokens": 1 << 27, "tables": 1024}
_MAX_DESCRIPTION_BYTES: Final = 1 << 16


def block_channels(heads: int, head_dim: int) -> int:
    """The largest worthwhile block of a plane with these heads, or of a rank's share of one."""
    channels = heads * head_dim
    max_channels = min(max(BLOCK_CHANNELS, head_dim), _MOST_CHANNELS, channels)
    return max(count for count in range(2, max_channels + 1, 2) if channels % count == 0)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a calibration is for.

    model: the model's name.
    dtype: the dtype of the stored KV.
    heads, head_dim: the shape of keys and of values, in every layer.
    max_tokens: the longest prompt.
    step: the step of a symbol, in standard deviations of all of a layer's keys, or values.
    tables: for each layer, which frequencies rotate its keys.
    block_channels: how many adjacent channels of a plane are transformed together: an even divisor of their number. 0:
        as many as are worthwhile.
    rotated, neighbours: as in `ChannelOrder`; 0: whole heads.
    """

    model: str
    dtype: str
    layers: int
    heads: int
    head_dim: int
    max_tokens: int
    step: float
    tables: tuple[int, ...]
    block_channels: int = 0
    rotated: int = 0
    neighbours: bool = False

    def __post_init__(self) -> None:
        if not self.rotated:
            object.__setattr__(self, "rotated", self.head_dim)
        if not self.block_channels:
            object.__setattr__(self, "block_channels", block_channels(self.heads, self.head_dim))

    @property
    def order(self) -> ChannelOrder:
        """The order of the channels of a key's head."""
        return ChannelOrder(self.head_dim, self.rotated, self.neighbours)

    @property
    def blocks(self) -> int:
        """How many blocks there are in all: [parts, layers, blocks of a layer], in this order."""
        return PARTS * self.layers * (self.heads * self.head_dim // self.block_channels)

    def planes(self, words: NDArray[Any]) -> NDArray[Any]:
        """The words of a chunk, [planes, tokens, heads, head_dim]. A plane is one layer's keys, or its values."""
        return words.reshape(PARTS * self.layers, -1, self.heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of a chunk, in all layers."""
        return PARTS * self.layers * self.heads * self.head_dim * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class Calibration:
    """A model's principal components.

    shape: what the calibration is for.
    frequencies: radians per token, [tables, head_dim / 2].
    means: the means of keys at position 0 and of values, [blocks, channels].
    forward: channels to components, in units of 2 ** -`MATRIX_BITS`, [blocks, components, channels], int16.
    backward: the inverse of `forward`, [blocks, channels, components], int8.
    scales: for each channel of `backward`, the factor by which whole steps become numbers, [blocks, channels].
    widths: the width of a step, [blocks].
    """

    shape: Shape
    frequencies: Frequencies
    means: Numbers
    forward: NDArray[np.int16]
    backward: NDArray[np.int8]
    scales: Numbers
    widths: Numbers

    @property
    def content(self) -> bytes:
        """The file, without the digest at its end."""
        description = {name: getattr(self.shape, name) for name in Shape.__slots__}
        text = json.dumps(description, separators=(",", ":"), sort_keys=True).encode()
        arrays = (self.frequencies, *self._by_block)
        types = _layout(self.shape)
        packed = [np.ascontiguousarray(array, dtype) for array, (dtype, _) in zip(arrays, types, strict=True)]
        assert [array.shape for array in packed] == [shape for _, shape in types]
        head = _HEAD.pack(_MAGIC, VERSION, len(text))
        return b"".join([head, text, *(array.tobytes() for array in packed)])

    @cached_property
    def id(self) -> bytes:
        return hashlib.sha256(self.content).digest()[:ID_BYTES]

    @property
    def name(self) -> str:
        """The calibration's name in fingerprints and in the judge's findings."""
        return f"kvtc-{self.id.hex()}"

    def write(self, path: Path) -> None:
        """
        Raises:
            OSError: the file cannot be written.
        """
        content = self.content
        path.write_bytes(content + hashlib.sha256(content).digest())

    @property
    def _by_block(self) -> tuple[NDArray[Any], ...]:
        """The arrays whose first axis is the blocks of all parts and layers, in the file's order."""
        return self.means, self.forward, self.backward, self.scales, self.widths

    def part(self, layers: Sequence[int], heads: range) -> "Calibration":
        """The part for some layers, in this order, and some heads: a calibration like any other, with its own name.

        Raises:
            ConfigError: channels of other heads are transformed together with channels of these.
        """
        shape = self.shape
        if tuple(layers) == tuple(range(shape.layers)) and heads == range(shape.heads):
            return self
        channels = shape.block_channels
        first, end = heads.start * shape.head_dim, heads.stop * shape.head_dim
        if first % channels or end % channels:
            raise ConfigError(
                f"codec kvtc: the calibration transforms {channels} channels together, and a rank's {len(heads)} "
                f"heads of {shape.head_dim} are not a whole number of those: write it again with `kv judge "
                "--calibrate --ranks`"
            )
        tables = [shape.tables[layer] for layer in layers]
        used_tables = list(dict.fromkeys(tables))
        blocks = slice(first // channels, end // channels)
        cuts = [
            array.reshape(PARTS, shape.layers, -1, *array.shape[1:])[:, list(layers), blocks]
            for array in self._by_block
        ]
        part_shape = replace(
            shape,
            layers=len(tables),
            heads=len(heads),
            tables=tuple(used_tables.index(table) for table in tables),
            block_channels=channels,
        )
        return Calibration(
            part_shape,
            self.frequencies[used_tables],
            *(
                cut.reshape(part_shape.blocks, *array.shape[1:])
                for cut, array in zip(cuts, self._by_block, strict=True)
            ),
        )


def read_calibration(path: str | Path) -> Calibration:
    """
    Raises:
        ConfigError: there is no such file, or it is damaged or not written by `kv judge`.
    """
    label = f"calibration {path}"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise ConfigError(f"{label}: it is not a file of `kv judge --calibrate`")
            magic, version, text_bytes = _HEAD.unpack(head)
            if magic != _MAGIC or text_bytes > _MAX_DESCRIPTION_BYTES:
                raise ConfigError(f"{label}: it is not a file of `kv judge --calibrate`")
            if version != VERSION:
                raise ConfigError(
                    f"{label}: version {version}; this release reads version {VERSION}: write it again with `kv judge`"
                )
            text = file.read(text_bytes)
            shape = _shape(text, label)
            layout = _layout(shape)
            expected_bytes = _HEAD.size + text_bytes + sum(_nbytes(*spec) for spec in layout) + _DIGEST_BYTES
            if size != expected_bytes:
                raise ConfigError(f"{label}: it has {size} bytes instead of {expected_bytes}")
            body = file.read(expected_bytes)
    except OSError as error:
        raise ConfigError(f"{label}: {error.strerror}") from error
    digest = hashlib.sha256(head + text + body[:-_DIGEST_BYTES]).digest()
    if digest != body[-_DIGEST_BYTES:]:
        raise ConfigError(f"{label}: its checksum is wrong; it is damaged")
    arrays: list[Any] = []
    offset = 0
    for dtype, dimensions in layout:
        arrays.append(np.frombuffer(body, dtype, math.prod(dimensions), offset).reshape(dimensions))
        offset += _nbytes(dtype, dimensions)
    calibration = Calibration(shape, *arrays)
    if not all(np.isfinite(array).all() for array in arrays) or not (calibration.widths > 0).all():
        raise ConfigError(f"{label}: it has numbers that are not finite, or widths that are not positive")
    norms = np.square(calibration.forward.astype(np.float64)).sum(2).max()
    if norms > (_LARGEST_ROW * (1 << MATRIX_BITS)) ** 2:
        raise ConfigError(f"{label}: its components are not close to orthonormal")
    return calibration


def _layout(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """Type and dimensions of the arrays, in their order."""
    channels = shape.block_channels
    return [
        ("<f8", (1 + max(shape.tables), shape.head_dim // 2)),
        ("<f4", (shape.blocks, channels)),
        ("<i2", (shape.blocks, channels, channels)),
        ("|i1", (shape.blocks, channels, channels)),
        ("<f4", (shape.blocks, channels)),
        ("<f4", (shape.blocks,)),
    ]


def _nbytes(dtype: str, dimensions: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(dimensions)


def _shape(text: bytes, label: str) -> Shape:
    try:
        fields: Any = json.loads(text)
        shape = Shape(**{**fields, "tables": tuple(fields["tables"])})
        if len(fields) < len(Shape.__slots__) or not fields["rotated"] or not fields["block_channels"]:
            raise ValueError("what it does not say")
        sizes = {name: getattr(shape, name) for name in ("layers", "heads", "head_dim", "max_tokens")}
        sizes |= {"tables": len(shape.tables)}
        if not all(type(value) is int and 0 < value <= _LIMITS[name] for name, value in sizes.items()):
            raise ValueError(f"sizes {sizes}")
        if not all(type(table) is int and 0 <= table < len(shape.tables) for table in shape.tables):
            raise ValueError("tables")
        if shape.dtype not in ITEMSIZES or shape.head_dim % 2 or len(shape.tables) != shape.layers:
            raise ValueError("shape")
        rotated, neighbours = shape.rotated, shape.neighbours
        if type(rotated) is not int or not 0 < rotated <= shape.head_dim or rotated % 2 or type(neighbours) is not bool:
            raise ValueError("rotated")
        block = shape.block_channels
        is_even_part = type(block) is int and 0 < block <= _MOST_CHANNELS and block % 2 == 0
        if not is_even_part or shape.heads * shape.head_dim % block:
            raise ValueError("block_channels")
        if type(shape.step) is not float or not 0 < shape.step < 1000 or not isinstance(shape.model, str):
            raise ValueError("step")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{label}: it is not a file of `kv judge --calibrate`: {error!r}") from error
    return shape


SINKS: Final = 4
"""How many first tokens of a prompt draw attention whatever they are. They are unlike all others, and are stored
unchanged; four are as good as sixteen."""
_LARGEST_BYTE: Final = 127
_LEAST_DEVIATION: Final = 1e-6
"""The least standard deviation of a layer's numbers; with a smaller one, all of them count as the mean."""


class Learning:
    """Learns a `Calibration` from a model's keys and values, which `kv judge --calibrate` supplies: sums over contexts,
    from which components are computed. For one thread."""

    def __init__(
        self,
        *,
        model: str,
        dtype: str,
        heads: int,
        head_dim: int,
        max_tokens: int,
        frequencies: Sequence[Sequence[float]],
        ranks: int = 1,
        rotated: int = 0,
        neighbours: bool = False,
    ) -> None:
        """
        frequencies: for each layer, the frequencies by which it rotates keys, in radians per token, [head_dim / 2], in
            the order of `ChannelOrder`.
        ranks: among how many ranks a model's heads may be divided: no component spans the heads of two ranks.
        rotated, neighbours: as in `Shape`.

        Raises:
            ConfigError: heads cannot be divided this way.
        """
        if ranks < 1 or (heads % ranks and ranks % heads):
            raise ConfigError(f"{ranks} ranks cannot have equal parts of {heads} heads")
        by_layer = [tuple(float(frequency) for frequency in layer) for layer in frequencies]
        tables = list(dict.fromkeys(by_layer))
        self._frequencies = np.array(tables, np.float64)
        self._shape = Shape(
            model=model,
            dtype=dtype,
            layers=len(by_layer),
            heads=heads,
            head_dim=head_dim,
            max_tokens=max_tokens,
            step=1.0,
            tables=tuple(tables.index(layer) for layer in by_layer),
            block_channels=block_channels(max(1, heads // ranks), head_dim),
            rotated=rotated,
            neighbours=neighbours,
        )
        blocks, channels = self._shape.blocks, self._shape.block_channels
        self._tokens = 0
        self._sums = np.zeros((blocks, channels), np.float64)
        self._products = np.zeros((blocks, channels, channels), np.float64)

    def add(self, layers: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> None:
        """Add a context, from its first token on. layers: keys as stored, and values, [tokens, heads, head_dim].

        Raises:
            ConfigError: the arrays have another shape, or numbers that are not finite.
        """
        shape = self._shape
        tokens = len(layers[0][0])
        if len(layers) != shape.layers or any(
            array.shape != (tokens, shape.heads, shape.head_dim) for layer in layers for array in layer
        ):
            raise ConfigError("codec kvtc is for models whose layers all have the same number and size of heads")
        tables = [turns(frequencies, 0, tokens) for frequencies in self._frequencies]
        channels = shape.block_channels
        blocks_per_layer = shape.heads * shape.head_dim // channels
        for number, pair in enumerate(layers):
            for part, numbers in enumerate(pair):
                wide = np.ascontiguousarray(numbers, np.float32)
                if not np.isfinite(wide).all():
                    raise ConfigError(
                        f"the {'values' if part else 'keys'} of layer {number} contain NaN or infinity: check whether "
                        "the model computes with its own dtype here"
                    )
                if not part:
                    keys = np.empty_like(wide)
                    shape.order.ordered(wide, keys)
                    wide = turn_back(keys, *tables[shape.tables[number]])
                plane = wide[SINKS:].reshape(tokens - SINKS, -1).astype(np.float64)
                for index in range(blocks_per_layer):
                    flat = plane[:, index * channels : (index + 1) * channels]
                    block = (part * shape.layers + number) * blocks_per_layer + index
                    self._sums[block] += flat.sum(0)
                    self._products[block] += flat.T @ flat
        self._tokens += tokens - SINKS

    @staticmethod
    def check_step(step: float) -> None:
        """
        Raises:
            ConfigError: the step is out of range for `learnt`.
        """
        if not 0.01 <= step <= 4:
            raise ConfigError(f"a step of {step:g} standard deviations; choose one of 0.01 to 4, such as 0.4")

    def learnt(self, step: float) -> Calibration:
        """The calibration. step: the step of a symbol, in standard deviations of all of a layer's keys, or values.

        Raises:
            ConfigError: too few tokens were added, or the step is out of range.
        """
        shape = self._shape
        if self._tokens < 2 * shape.block_channels:
            raise ConfigError(f"calibration needs at least {2 * shape.block_channels + SINKS} tokens of text")
        self.check_step(step)
        means = self._sums / self._tokens
        covariances = self._products / self._tokens - means[:, :, None] * means[:, None, :]
        variances, bases = np.linalg.eigh(covariances)
        variances, bases = np.maximum(variances[:, ::-1], 0), bases[:, :, ::-1]
        deviations = np.sqrt(variances.reshape(2 * shape.layers, -1).mean(1)).repeat(shape.blocks // (2 * shape.layers))
        widths: Numbers = (step * np.maximum(deviations, _LEAST_DEVIATION)).astype(np.float32)
        scales = np.abs(bases).max(2, keepdims=True) / _LARGEST_BYTE
        backward = np.rint(bases / scales)
        # The inverse of the decoding matrix as rounded to bytes, so that this rounding adds no error to the steps'.
        forward = np.linalg.inv(backward * scales) * (1 << MATRIX_BITS)
        return Calibration(
            replace(shape, step=float(step)),
            self._frequencies,
            means.astype(np.float32),
            np.rint(forward).astype(np.int16),
            backward.astype(np.int8),
            (scales[:, :, 0] * widths[:, None]).astype(np.float32),
            widths,
        )
