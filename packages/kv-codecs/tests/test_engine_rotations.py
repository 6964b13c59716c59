"""A calibration is used only where the engine rotates keys as the calibrated model does."""

import numpy as np
import pytest
from kv_codecs.calibrated import EngineRotation, check_rotations
from kv_codecs.calibration import Calibration, Learning
from kv_core.errors import ConfigError
from numpy.typing import NDArray

HEAD_DIM = 8


def frequencies(base: float, rotated: int) -> NDArray[np.float64]:
    return 1 / base ** (np.arange(rotated // 2) / (rotated / 2))


def calibrated(*bases: float, rotated: int = HEAD_DIM, neighbours: bool = False) -> Calibration:
    """Of layers that rotate by these bases; 0: not at all."""
    layers = [
        np.concatenate([frequencies(base, rotated) if base else np.zeros(rotated // 2), np.zeros(HEAD_DIM // 2)])
        for base in bases
    ]
    learning = Learning(
        model="m",
        dtype="float32",
        heads=1,
        head_dim=HEAD_DIM,
        max_tokens=4096,
        frequencies=[list(layer[: HEAD_DIM // 2]) for layer in layers],
        rotated=rotated,
        neighbours=neighbours,
    )
    drawn = np.random.default_rng(1).normal(0, 1, (64, 1, HEAD_DIM))
    learning.add([(drawn, drawn)] * len(bases))
    return learning.learnt(0.4)


def made(base: float, rotated: int = HEAD_DIM, *, neighbours: bool = False, head_dim: int = HEAD_DIM) -> EngineRotation:
    return EngineRotation(head_dim, rotated, neighbours, frequencies(base, rotated))


@pytest.mark.parametrize(("rotated", "neighbours"), [(8, False), (8, True), (4, False), (4, True)])
def test_keys_in_another_order_are_refused_and_the_same_are_not(rotated: int, neighbours: bool) -> None:
    calibration = calibrated(1e4, 1e4, rotated=rotated, neighbours=neighbours)
    right = made(1e4, rotated, neighbours=neighbours)
    of_a_vision_tower = made(1e4, 4, head_dim=4)
    check_rotations(calibration, [of_a_vision_tower, right])
    for wrong in (made(1e4, rotated, neighbours=not neighbours), made(1e4, rotated - 2, neighbours=neighbours)):
        with pytest.raises(
            ConfigError, match=f"rotates {wrong.rotated} of 8 elements.* stores keys in a different order"
        ):
            check_rotations(calibration, [wrong, of_a_vision_tower])
    with pytest.raises(ConfigError, match="rotates nothing that it reports"):
        check_rotations(calibration, [of_a_vision_tower])


def test_every_base_must_be_the_engines_and_layers_without_rotation_ask_for_none() -> None:
    calibration = calibrated(1e4, 1e6, 0)
    check_rotations(calibration, [made(1e6), made(1e4)])
    with pytest.raises(ConfigError, match="different frequencies"):
        check_rotations(calibration, [made(1e4)])
    check_rotations(calibrated(0, 0), [])
    # An engine that does not say its frequencies is believed as to them.
    check_rotations(calibration, [EngineRotation(HEAD_DIM, HEAD_DIM, neighbours=False)])


def test_frequencies_in_bfloat16_are_the_same_and_one_pair_is_halves_and_neighbours() -> None:
    rough = EngineRotation(HEAD_DIM, HEAD_DIM, False, frequencies(1e4, HEAD_DIM) * (1 + 2**-8))
    check_rotations(calibrated(1e4), [rough])
    check_rotations(calibrated(1e4, rotated=2), [made(1e4, 2, neighbours=True)])


def test_a_stage_is_asked_for_its_own_layers() -> None:
    calibration = calibrated(1e4, 1e6)
    check_rotations(calibration, [made(1e6)], stage=1, stages=2)
    with pytest.raises(ConfigError, match="different frequencies"):
        check_rotations(calibration, [made(1e6)], stage=0, stages=2)
