"""What the kernels of the codec `kvtc` need from a calibration, as arrays."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_tiers.codecs.calibration import MATRIX_BITS, Calibration, Shape
from kv_tiers.codecs.rotation import Numbers

DTYPES: Final = ("", "bfloat16", "float16", "float32")
"""The dtypes, by their number in the kernels' description of a shape."""
TILE: Final = 64
"""Tokens that are processed at a time, and share the precision that their numbers are rounded to."""
FINEST, COARSEST = 4, -2
"""Numbers are rounded to 1 / 2 ** 4 of a step, or coarser, to 2 ** 2 steps, where one is far from its mean."""
LARGEST: Final = 7 << 10
"""The largest number after this rounding. It keeps sums of products below 2 ** 31, even with 256 channels."""
LARGEST_STEPS: Final = 32767
assert MATRIX_BITS + COARSEST > 0


@dataclass(frozen=True)
class Transform:
    """A calibration's arrays, as the kernels take them.

    steps: the number of steps in a unit, [blocks].
    scales: factors for the results of `backward`, [planes, channels].
    forward: [blocks, components, channels], int16.
    backward: [blocks, channels, components], int16.
    small: `backward` as bytes, each row padded with zeros to a multiple of four.
    places: the row of each component, [blocks, components], int32.
    """

    shape: Shape
    tables: NDArray[np.int32]
    means: Numbers
    steps: Numbers
    scales: Numbers
    forward: NDArray[np.int16]
    backward: NDArray[np.int16]
    small: NDArray[np.int8]
    places: NDArray[np.int32]

    def described(self, tokens: int, exact: int) -> NDArray[np.int64]:
        """The sizes that the kernels in C take. exact: how many of the first tokens have no steps."""
        shape = self.shape
        sizes = (shape.layers, tokens, shape.heads, shape.head_dim, shape.block_channels, exact, 1 + max(shape.tables))
        return np.array([DTYPES.index(shape.dtype), *sizes], np.int64)

    @property
    def scratch_bytes(self) -> int:
        return 8 * TILE * self.shape.heads * self.shape.head_dim


def transform_of(calibration: Calibration) -> Transform:
    shape = calibration.shape
    channels = shape.block_channels
    relative = (calibration.deviations / calibration.widths[:, None]).reshape(-1)
    places = np.empty(relative.size, np.int32)
    places[np.argsort(-relative, kind="stable")] = np.arange(relative.size, dtype=np.int32)
    small = np.zeros((shape.blocks, channels, -(-channels // 4) * 4), np.int8)
    small[:, :, :channels] = calibration.backward
    planes = (2 * shape.layers, -1)
    return Transform(
        shape,
        np.array(shape.tables, np.int32),
        np.ascontiguousarray(calibration.means, np.float32).reshape(planes),
        (np.float32(1) / calibration.widths).astype(np.float32),
        np.ascontiguousarray(calibration.scales, np.float32).reshape(planes),
        np.ascontiguousarray(calibration.forward, np.int16),
        calibration.backward.astype(np.int16),
        small,
        places.reshape(shape.blocks, -1),
    )
