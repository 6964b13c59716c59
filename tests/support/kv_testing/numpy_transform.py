"""Converts keys and values to whole steps of their components and back, in numpy: does what `transform.c` does.

Products with matrices are of whole numbers, in float64, which holds their sums exactly whatever the order of addition.
Everything else is done to single numbers, one rounded operation after another. So the bytes are the same from both
implementations, and on every processor.
"""

from typing import Any, Final

import numpy as np
from kv_codecs.calibration import MATRIX_BITS
from kv_codecs.kernels import TILE, Rows, Transform, Words, wide
from kv_codecs.rotation import Numbers, turn, turn_back
from numpy.typing import NDArray

FINEST, COARSEST = 4, -2
"""Numbers are rounded to 1 / 2 ** 4 of a step, or coarser, to 2 ** 2 steps, where one is far from its mean."""
LARGEST: Final = 7 << 10
"""The largest number after this rounding. It keeps sums of products below 2 ** 31, even with 256 channels."""
LARGEST_STEPS: Final = 32767
_LARGEST_FLOAT16: Final = 65504.0


def project(transform: Transform, words: Words, turns: Numbers, rows: Rows, exact: int) -> bool:
    """Like `Kernels.project`."""
    shape = transform.shape
    channels = shape.block_channels
    for plane, stored in enumerate(shape.planes(words)):
        numbers = wide(stored, shape.dtype)
        if plane < shape.layers:
            numbers = turn_back(numbers, *_tables(turns, shape.tables[plane], len(stored)))
        flat = numbers.reshape(len(numbers), -1) - transform.means[plane]
        for index, block in enumerate(_blocks(transform, plane)):
            scaled = flat[:, index * channels : (index + 1) * channels] * transform.steps[block]
            scaled[:exact] = 0
            bits = _precision(scaled)
            if bits is None:
                return False
            rounded = np.rint(np.ldexp(scaled, bits)).astype(np.float64)
            sums = (rounded @ transform.forward[block].T.astype(np.float64)).astype(np.int64)
            shift = MATRIX_BITS + bits
            whole_steps = (sums + (1 << (shift - 1))) >> shift
            if np.abs(whole_steps).max() > LARGEST_STEPS:
                return False
            rows[block * channels : (block + 1) * channels] = whole_steps.T
    return True


def project_back(transform: Transform, rows: Rows, turns: Numbers, words: Words) -> None:
    """The reverse of `project`."""
    shape = transform.shape
    channels = shape.block_channels
    for plane, stored in enumerate(shape.planes(words)):
        sums = [
            rows[block * channels : (block + 1) * channels].T.astype(np.float64)
            @ transform.backward[block].T.astype(np.float64)
            for block in _blocks(transform, plane)
        ]
        numbers = np.concatenate(sums, 1).astype(np.float32) * transform.scales[plane] + transform.means[plane]
        numbers = numbers.reshape(stored.shape)
        if plane < shape.layers:
            numbers = turn(numbers, *_tables(turns, shape.tables[plane], len(stored)))
        _narrow(numbers, stored, shape.dtype)


def _narrow(numbers: Numbers, stored: NDArray[Any], dtype: str) -> None:
    """The reverse of `wide`, rounded to the nearest."""
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        stored[:] = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    elif dtype == "float16":
        # Rounding a larger number could make it infinite.
        stored.view("<f2")[:] = np.clip(numbers, -_LARGEST_FLOAT16, _LARGEST_FLOAT16)
    else:
        stored.view("<f4")[:] = numbers


def _blocks(transform: Transform, plane: int) -> range:
    of_plane = transform.shape.blocks // (2 * transform.shape.layers)
    return range(plane * of_plane, (plane + 1) * of_plane)


def _tables(turns: Numbers, table: int, tokens: int) -> tuple[Numbers, Numbers]:
    """Cosines and sines, [tokens, 1, head_dim / 2]."""
    cos, sin = turns[table, :, :, :tokens]
    return cos.T[:, None], sin.T[:, None]


def _precision(numbers: Numbers) -> NDArray[np.int64] | None:
    """The bits below a step that each token's numbers are rounded to, [tokens, 1]; None: one is too far off."""
    peaks = np.abs(numbers).max(1)
    peaks = np.where(np.isnan(peaks), np.float32(np.inf), peaks)
    tiles = np.maximum.reduceat(peaks, range(0, len(peaks), TILE))
    bits = np.full(len(tiles), FINEST, np.int64)
    for finer in range(FINEST, COARSEST, -1):
        bits[np.ldexp(tiles, finer) > LARGEST] = finer - 1
    if not (np.ldexp(tiles, bits) <= LARGEST).all():
        return None
    return bits.repeat(TILE)[: len(peaks), None]
