"""Calibrates the codec `kvtc` for a model: `kv judge --calibrate`.

The codec turns keys back to position 0, so how the model rotates them must be known, and is not believed but shown: the
same text is computed at other positions, and its keys, turned back, must be the same in every layer. Models may rotate
the first elements of a key alone, halves of it or neighbours, and layers may not rotate at all. A model of which none
of that is so, or whose rotation depends on the prompt's length, is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Rotation:
    """frequencies: for each layer, [head_dim / 2], 0 of what is not turned.
    rotated, neighbours: as of `ChannelOrder`."""

    frequencies: list[NDArray[np.float64]]
    rotated: int
    neighbours: bool


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
    rotation = _shown(model, text[:_SHOWN_TOKENS], _frequencies(model))
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
                frequencies=[list(one) for one in rotation.frequencies],
                ranks=ranks,
                rotated=rotation.rotated,
                neighbours=rotation.neighbours,
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
    """For each layer, radians a token, of as many pairs of elements as are said to be turned. Empty: of no layer."""
    found = []
    for given in model.rotations(_SHOWN_TOKENS):
        half = given[0].shape[1] // 2
        # Most models have them twice, for each of two elements that turn together.
        is_twice = np.array_equal(given[0][:, :half], given[0][:, half:])
        if not is_twice and np.array_equal(given[0][:, ::2], given[0][:, 1::2]):
            given, half, is_twice = tuple(one[:, ::2] for one in given), half, True
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


def _shown(model: Model, text: Sequence[int], frequencies: Sequence[NDArray[np.float64]]) -> _Rotation:
    """How the model rotates the keys of its layers, of which these frequencies are what it says.

    Raises:
        ConfigError: whatever is tried, keys that are turned back differ by their position.
    """
    here, there = (model.keys_at(text, first) for first in (0, _SHIFT_TOKENS))
    head_dim = here[0].shape[-1]
    unknown = 0
    for neighbours in (False, True):
        found = []
        rotated = set()
        for number, (one, other) in enumerate(zip(here, there, strict=True)):
            its = frequencies[number] if frequencies else np.zeros(0)
            known = [any_of for any_of in (its, np.zeros(0)) if _is_shown(one, other, any_of, neighbours)]
            if not known or one.shape[-1] != head_dim:
                unknown = max(unknown, number)
                break
            found.append(known[0])
            rotated.update({2 * len(known[0])} - {0})
        if len(found) < len(here) or len(rotated) > 1:
            continue
        turned = rotated.pop() if rotated else head_dim
        padded = [np.concatenate([one, np.zeros(head_dim // 2 - len(one))]) for one in found]
        return _Rotation(padded, turned, neighbours and turned > 0)
    raise ConfigError(
        f"model {model.name} rotates the keys of layer {unknown} in a way that codec {CODEC} does not know"
    )


def _is_shown(here: NDArray[Any], there: NDArray[Any], frequencies: NDArray[np.float64], neighbours: bool) -> bool:
    """Whether keys at two positions, [heads, tokens, head_dim], are the same when they are turned back so."""
    if 2 * len(frequencies) > here.shape[-1]:
        return False
    base = _turned_back(here, 0, frequencies, neighbours)
    moved = _turned_back(there, _SHIFT_TOKENS, frequencies, neighbours)
    return bool(np.linalg.norm(base - moved) <= _LARGEST_DIFFERENCE * np.linalg.norm(base))


def _turned_back(keys: NDArray[Any], first: int, frequencies: NDArray[np.float64], neighbours: bool) -> NDArray[Any]:
    """keys: [heads, tokens, head_dim], of which the first elements are turned, as many as there are frequencies for."""
    count = len(frequencies)
    turned, others = keys[..., : 2 * count], keys[..., 2 * count :]
    firsts, seconds = (turned[..., ::2], turned[..., 1::2]) if neighbours else np.split(turned, 2, -1)
    angles = (first + np.arange(keys.shape[1]))[:, None] * frequencies
    points: NDArray[Any] = (firsts + 1j * seconds) * np.exp(-1j * angles)
    return np.concatenate([points, others], -1)
