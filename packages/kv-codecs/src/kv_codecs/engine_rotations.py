"""Compares how a model rotates its keys according to a calibration with how the engine does.

`kv judge --calibrate` sees the keys that transformers computes. An engine may store the same keys with their elements
in another order: vLLM permutes Llama 4's weights so that halves turn together instead of neighbours. It may also be
configured with other frequencies. Components that were learnt on other keys would make no larger errors but much larger
payloads, and the verdict would not apply to what is stored. So such an engine does not start.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from kv_core.errors import ConfigError
from numpy.typing import NDArray

from kv_codecs.calibration import Calibration
from kv_codecs.channel_order import ChannelOrder

_TOLERANCE: Final = 0.01
"""Relative, of a frequency: some engines hold cosines and sines in bfloat16."""
_SLOWEST: Final = 1e-7
"""Radians per token that make no difference in any prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineRotation(ChannelOrder):
    """One of the rotary embeddings that an engine has created.

    frequencies: radians per token, [rotated / 2]; None: the engine does not reveal them.
    """

    frequencies: NDArray[np.float64] | None = None


def check_rotations(
    calibration: Calibration, rotations: Iterable[EngineRotation], *, stage: int = 0, stages: int = 1
) -> None:
    """
    rotations: all of the engine's. Unrelated ones may be among them, of a vision tower for example.
    stage: the pipeline stage whose layers are checked.

    Raises:
        ConfigError: a layer's keys are rotated in a way that none of the engine's rotations does.
    """
    shape = calibration.shape
    stage_layers = shape.layers // stages
    tables = sorted(set(shape.tables[stage * stage_layers : (stage + 1) * stage_layers]))
    rotating = [table for table in map(calibration.frequencies.__getitem__, tables) if table.any()]
    candidates = [rotation for rotation in rotations if rotation.head_dim == shape.head_dim]
    matching = [rotation for rotation in candidates if _pairs(rotation) == _pairs(shape.order)]
    for table in rotating:
        if not matching:
            others = "; ".join(sorted({_spelled(rotation) for rotation in candidates})) or "nothing that it reports"
            raise ConfigError(
                f"codec kvtc: the calibration of {shape.model} is for keys of which the model rotates "
                f"{_spelled(shape.order)}, and this engine rotates {others}: it stores keys in a different order from "
                "the one that `kv judge` saw, so the codec cannot be used with it"
            )
        if not any(_is_alike(table, rotation.frequencies) for rotation in matching):
            raise ConfigError(
                "codec kvtc: this engine rotates keys with different frequencies from those in the calibration of "
                f"{shape.model}: write one for the model as the engine is configured"
            )


def _pairs(order: ChannelOrder) -> tuple[int, bool]:
    """Equal for orders in which the same elements turn together: one pair is halves and neighbours alike."""
    return order.rotated, order.neighbours and order.rotated > 2


def _is_alike(table: NDArray[np.float64], frequencies: NDArray[np.float64] | None) -> bool:
    if frequencies is None:
        return True
    return bool(np.allclose(table[: len(frequencies)], frequencies, _TOLERANCE, _SLOWEST))


def _spelled(order: ChannelOrder) -> str:
    pairs = "neighbours" if order.neighbours else "halves"
    return f"{order.rotated} of {order.head_dim} elements, {pairs} together"
