"""Calibrates the codec `kvtc` for a model: `kv judge --calibrate`.

The codec turns keys back to position 0, so how the model rotates them must be known, and is not believed but shown: the
same text is computed at other positions, and its keys, turned back, must be the same in every layer. A model of which
that is not so, or whose rotation depends on the prompt's length, is refused.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from kv_core.errors import ConfigError
from numpy.typing import NDArray

from kv_cuda.judge.measure import Model
from kv_cuda.judge.roundtrip import ThroughCodec, plugin

CODEC: Final = "kvtc"
CONTEXT_TOKENS: Final = 1024
MOST_CONTEXTS: Final = 6
_SHOWN_TOKENS: Final = 64
_SHIFT_TOKENS: Final = 1000
_LARGEST_DIFFERENCE: Final = 0.02
"""Of keys at two positions, relative to their norm, in a model whose attention adds nothing up otherwise. A wrong
frequency makes it about 1, float32's rounding 0.0001."""


def calibrate(model: Model, text: Sequence[int], *, ranks: int = 1) -> Any:
    """What was learnt, a `kv_tiers.codecs.learning.Learning`.

    text: tokens.
    ranks: the most that an engine may divide the model's heads among.

    Raises:
        ConfigError: the model rotates its keys in a way not known here, or has layers of several shapes, or there is
            too little text.
    """
    if len(text) < CONTEXT_TOKENS:
        raise ConfigError(f"--calibrate takes {CONTEXT_TOKENS} tokens of text or more")
    frequencies = _frequencies(model)
    _show(model, text[:_SHOWN_TOKENS], frequencies)
    learning: Any = None
    for at in range(0, min(len(text) - CONTEXT_TOKENS + 1, MOST_CONTEXTS * CONTEXT_TOKENS), CONTEXT_TOKENS):
        layers = [
            tuple(one[0].transpose(0, 1).float().cpu().numpy() for one in layer)
            for layer in model.attended(text[at : at + CONTEXT_TOKENS])
        ]
        if learning is None:
            _, heads, head_dim = layers[0][0].shape
            learning = plugin("kv_tiers.calibrations", CODEC)(
                model=model.name,
                dtype=str(model.kv_dtype).removeprefix("torch."),
                heads=heads,
                head_dim=head_dim,
                max_tokens=model.max_tokens,
                frequencies=[list(one) for one in frequencies],
                ranks=ranks,
            )
        learning.add(layers)
    return learning


def through_calibrated(path: str) -> ThroughCodec:
    """The trip with this calibration, named after it.

    Raises:
        ConfigError: the file cannot be used.
    """
    codec = plugin("kv_tiers.codecs", CODEC)({"calibration": path}, None)
    return ThroughCodec(codec.calibration.name, codec)


def _frequencies(model: Model) -> list[NDArray[np.float64]]:
    """For each layer, radians a token [head_dim / 2]."""
    found = []
    for given in model.rotations(_SHOWN_TOKENS):
        half = given[0].shape[1] // 2
        # Most models have them twice, for each of two elements that turn together.
        is_twice = np.array_equal(given[0][:, :half], given[0][:, half:])
        # YaRN makes all keys longer by one factor, which changes nothing of how they turn.
        length = np.hypot(given[0][0, 0], given[1][0, 0])
        cos, sin = ((one[:, :half] if is_twice else one) / length for one in given)
        rough = np.arctan2(sin[1], cos[1])
        # What the model has is exact where an angle's tangent is not.
        exact = [one for one in model.frequencies() if one.shape == rough.shape and np.allclose(one, rough, 1e-4, 1e-9)]
        chosen = exact[0] if exact else rough.astype(np.float64)
        angles = np.arange(_SHOWN_TOKENS)[:, None] * chosen
        if np.abs(np.cos(angles) - cos).max() > 1e-3 or np.abs(np.sin(angles) - sin).max() > 1e-3:
            raise ConfigError(f"model {model.name} rotates its keys in a way that codec {CODEC} does not know")
        found.append(chosen)
    return found


def _show(model: Model, text: Sequence[int], frequencies: Sequence[NDArray[np.float64]]) -> None:
    """
    Raises:
        ConfigError: keys that are turned back differ by their position.
    """
    here, there = (model.keys_at(text, first) for first in (0, _SHIFT_TOKENS))
    for number, (one, other, its) in enumerate(zip(here, there, frequencies, strict=True)):
        if one.shape[-1] != 2 * len(its):
            raise ConfigError(f"model {model.name} rotates a part of its keys, which codec {CODEC} does not know")
        base, moved = _turned_back(one, 0, its), _turned_back(other, _SHIFT_TOKENS, its)
        if np.linalg.norm(base - moved) > _LARGEST_DIFFERENCE * np.linalg.norm(base):
            raise ConfigError(
                f"model {model.name} rotates the keys of layer {number} in a way that codec {CODEC} does not know"
            )


def _turned_back(keys: NDArray[Any], first: int, frequencies: NDArray[np.float64]) -> NDArray[Any]:
    """keys: [heads, tokens, head_dim]"""
    points = keys[..., : len(frequencies)] + 1j * keys[..., len(frequencies) :]
    turned: NDArray[Any] = points * np.exp(-1j * (first + np.arange(keys.shape[1]))[:, None] * frequencies)
    return turned
