"""What the kernels of the codec `kvtc` need from a calibration, as arrays."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kv_codecs.calibration import MATRIX_BITS, Calibration, Shape
from kv_codecs.rotation import Numbers

DTYPES: Final = ("", "bfloat16", "float16", "float32")
"""The dtypes, by their number in the kernels' description of a shape."""
TILE: Final = 64
"""Tokens that are processed at a time, and share the precision that their numbers are rounded to."""
FINEST, COARSEST = 4, -2
"""Numbers are rounded to 1 / 2 ** 4 of a step, or coarser, to 2 ** 2 steps, where one is far from its mean."""
LARGEST: Final = 7 << 10
"""The largest number after this rounding. It keeps sums of products below 2 ** 31, even with 256 channels."""
LARGEST_STEPS: Final = 32767
_ROW_LANES, _FAR_BYTES = 16, 12
"""Tokens of a vector, and the size of a number that is not a byte, in the kernels in C."""
assert MATRIX_BITS + COARSEST > 0


@dataclass(frozen=True)
class Transform:
    """A calibration's arrays, as the kernels take them.

    steps: the number of steps in a unit, [blocks].
    scales: factors for the results of `backward`, [planes, channels].
    forward: [blocks, components, channels], int16.
    backward: [blocks, channels, components], int16.
    small: the same as bytes, four components of every channel side by side, [blocks, components / 4, channels, 4]; the
        last components are padded with zeros.
    """

    shape: Shape
    tables: NDArray[np.int32]
    means: Numbers
    steps: Numbers
    scales: Numbers
    forward: NDArray[np.int16]
    backward: NDArray[np.int16]
    small: NDArray[np.int8]

    def described(self, tokens: int, exact: int) -> NDArray[np.int64]:
        """The sizes that the kernels in C take. exact: how many of the first tokens have no steps."""
        shape = self.shape
        sizes = (shape.layers, tokens, shape.heads, shape.head_dim, shape.block_channels, exact, 1 + max(shape.tables))
        return np.array([DTYPES.index(shape.dtype), *sizes], np.int64)

    def scratch_bytes(self, tokens: int) -> int:
        """What the kernels in C need to decode a chunk, as `scratch_of` divides it there."""
        shape = self.shape
        block, channels = shape.block_channels, shape.heads * shape.head_dim
        part = channels if block % shape.head_dim else block
        padded = -(-tokens // _ROW_LANES) * _ROW_LANES
        decoded = part // block * -(-block // 4) * 4 * padded
        turns = 4 * (1 + max(shape.tables)) * shape.head_dim * padded
        tiles = -(-tokens // TILE)
        return decoded + 4 * TILE + turns + 8 * TILE * part + 4 * tiles + _FAR_BYTES * decoded


def transform_of(calibration: Calibration) -> Transform:
    shape = calibration.shape
    channels, fours = shape.block_channels, -(-shape.block_channels // 4)
    padded = np.zeros((shape.blocks, channels, 4 * fours), np.int8)
    padded[:, :, :channels] = calibration.backward
    planes = (2 * shape.layers, -1)
    return Transform(
        shape,
        np.array(shape.tables, np.int32),
        np.ascontiguousarray(calibration.means, np.float32).reshape(planes),
        (np.float32(1) / calibration.widths).astype(np.float32),
        np.ascontiguousarray(calibration.scales, np.float32).reshape(planes),
        np.ascontiguousarray(calibration.forward, np.int16),
        calibration.backward.astype(np.int16),
        np.ascontiguousarray(padded.reshape(shape.blocks, channels, fours, 4).transpose(0, 2, 1, 3)),
    )


def wide(stored: NDArray[Any], dtype: str) -> Numbers:
    """The numbers of these words."""
    if dtype == "bfloat16":
        return (stored.astype("<u4") << 16).view(np.float32)
    return stored.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)
