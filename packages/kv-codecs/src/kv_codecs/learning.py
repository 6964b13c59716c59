"""Learns a `Calibration` from a model's keys and values, which `kv judge --calibrate` supplies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from kv_core.errors import ConfigError
from numpy.typing import NDArray

from kv_codecs.calibration import MATRIX_BITS, Calibration, Shape, block_channels
from kv_codecs.rotation import Numbers, turn_back, turns

SINKS: Final = 4
"""How many first tokens of a prompt draw attention whatever they are. They are unlike all others, and are stored
unchanged; four are as good as sixteen."""
_LARGEST_BYTE: Final = 127
_LEAST_DEVIATION: Final = 1e-6
"""The least standard deviation of a layer's numbers; with a smaller one, all of them count as the mean."""


class Learning:
    """Sums over contexts, from which components are computed. For one thread."""

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
            np.sqrt(variances).astype(np.float32),
            widths,
        )
