"""Calibrates the codec `kvtc` for a model: `kv judge --calibrate`.

The codec turns keys back to position 0, so it must know how the model rotates them. This is not assumed but verified:
the same text is computed at other positions, and its keys, turned back, must be the same in every layer. Models may
rotate all elements of a key or the first ones, halves or neighbours, and layers may not rotate at all. A model to which
none of that applies is refused.

This verifies what transformers computes. An engine may store the elements of its keys in another order (vLLM's Llama 4
does); `kv_codecs.calibrated` compares the calibration with what the engine reports at start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from kv_core.errors import ConfigError
from numpy.typing import NDArray

from kv_codecs.calibration import Learning
from kv_codecs.judge.measure import Model, ThroughCodec
from kv_codecs.kvtc import KvtcCodec, make_kvtc_codec

CODEC: Final = "kvtc"
CONTEXT_TOKENS: Final = 1024
MOST_CONTEXTS: Final = 6
_SHOWN_TOKENS: Final = 64
_SHIFT_TOKENS: Final = 1000
_LARGEST_DIFFERENCE: Final = 0.02
"""Between keys at two positions, relative to their norm, for each pair of elements. A wrong frequency makes it about 1,
float32's rounding 0.0001."""
_SMALL_PAIR: Final = 0.05
"""As a fraction of a layer's usual pair of elements. Rounding errors may be as large as smaller pairs."""


@dataclass(frozen=True, slots=True)
class _Rotation:
    """frequencies: for each layer, [head_dim / 2], 0 for elements that are not turned.
    rotated, neighbours: as in `kv_codecs.calibration`.
    """

    frequencies: list[NDArray[np.float64]]
    rotated: int
    neighbours: bool


def calibrate(model: Model, text: Sequence[int], *, ranks: int = 1) -> Any:
    """The learnt calibration, a `kv_codecs.calibration.Learning`.

    text: tokens.
    ranks: the most that an engine may divide the model's heads between.

    Raises:
        ConfigError: the model rotates its keys in a way not known here, or has layers of several shapes, or there is
            too little text.
    """
    if len(text) < CONTEXT_TOKENS:
        raise ConfigError(f"--calibrate needs at least {CONTEXT_TOKENS} tokens of text")
    model.attended(text[:_SHOWN_TOKENS])  # first, because its error says what a model with other keys stores
    rotation = _find_rotation(model, text[:_SHOWN_TOKENS], _frequencies(model))
    learning: Learning | None = None
    for first in range(0, min(len(text) - CONTEXT_TOKENS + 1, MOST_CONTEXTS * CONTEXT_TOKENS), CONTEXT_TOKENS):
        layers = [(_rows(keys), _rows(values)) for keys, values in model.attended(text[first : first + CONTEXT_TOKENS])]
        if learning is None:
            _, heads, head_dim = layers[0][0].shape
            learning = Learning(
                model=model.name,
                dtype=str(model.kv_dtype).removeprefix("torch."),
                heads=heads,
                head_dim=head_dim,
                max_tokens=model.max_tokens,
                frequencies=[list(of_layer) for of_layer in rotation.frequencies],
                ranks=ranks,
                rotated=rotation.rotated,
                neighbours=rotation.neighbours,
            )
        learning.add(layers)
    return learning


def through_calibrated(path: str) -> ThroughCodec:
    """The round trip with this calibration, named after it.

    Raises:
        ConfigError: the file cannot be used.
    """
    codec = make_kvtc_codec({"calibration": path}, None)
    assert isinstance(codec, KvtcCodec)
    return ThroughCodec(codec.calibration.name, codec)


def _rows(part: torch.Tensor) -> NDArray[np.float32]:
    """[tokens, heads, head_dim] of one sequence's keys or values, [1, heads, tokens, head_dim]."""
    rows: NDArray[np.float32] = part[0].transpose(0, 1).float().cpu().numpy()
    return rows


def _frequencies(model: Model) -> list[NDArray[np.float64]]:
    """For each layer, radians per token of every pair of elements that the model reports as turned. Empty: no layer."""
    frequencies = []
    for cosines, sines in model.rotations(_SHOWN_TOKENS):
        cos, sin = _one_per_pair(cosines), _one_per_pair(sines)
        # YaRN makes all keys longer by one factor, which does not change their rotation.
        length = np.hypot(cos[0, 0], sin[0, 0])
        cos, sin = cos / length, sin / length
        rough = np.arctan2(sin[1], cos[1])
        # The model's own frequencies are exact, those from an angle's tangent are not.
        exact = [
            table
            for table in model.frequencies()
            if table.shape == rough.shape and np.allclose(table, rough, 1e-4, 1e-9)
        ]
        confirmed = exact[0] if exact else rough.astype(np.float64)
        angles = np.arange(_SHOWN_TOKENS)[:, None] * confirmed
        difference = max(np.abs(np.cos(angles) - cos).max(), np.abs(np.sin(angles) - sin).max())
        if difference > 1e-3:
            raise ConfigError(
                f"model {model.name} rotates its keys in a way that codec {CODEC} does not support: its cosines and "
                f"sines are up to {difference:.2g} from those of constant frequencies"
            )
        frequencies.append(confirmed)
    return frequencies


def _one_per_pair(table: NDArray[Any]) -> NDArray[Any]:
    """One cosine or sine for each pair of elements, from a table [tokens, elements]. Most models list each twice, for
    both elements that turn together: one half after the other, or as neighbours.
    """
    half = table.shape[1] // 2
    if np.array_equal(table[:, :half], table[:, half:]):
        return table[:, :half]
    if np.array_equal(table[:, ::2], table[:, 1::2]):
        return table[:, ::2]
    return table


def _find_rotation(model: Model, text: Sequence[int], frequencies: Sequence[NDArray[np.float64]]) -> _Rotation:
    """How the model rotates the keys of its layers, for which it reports these frequencies.

    Raises:
        ConfigError: with every rotation tried, keys that are turned back differ by their position.
    """
    keys, shifted_keys = (model.keys_at(text, first) for first in (0, _SHIFT_TOKENS))
    head_dim = keys[0].shape[-1]
    if any(layer_keys.shape[-1] != head_dim for layer_keys in keys):
        raise ConfigError(f"codec {CODEC} is for models whose layers all have the same number and size of heads")
    unrotated: NDArray[np.float64] = np.zeros(0)
    furthest = 0
    for neighbours in (False, True):
        chosen: list[NDArray[np.float64]] = []
        for layer_keys, shifted, reported in zip(
            keys, shifted_keys, frequencies or [unrotated] * len(keys), strict=True
        ):
            # A layer may not rotate, although the model has frequencies for it.
            confirmed = [
                candidate
                for candidate in (reported, unrotated)
                if _is_same_turned_back(layer_keys, shifted, candidate, neighbours)
            ]
            if not confirmed:
                break
            chosen.append(confirmed[0])
        furthest = max(furthest, len(chosen))
        rotated = {2 * len(of_layer) for of_layer in chosen} - {0}
        if len(chosen) == len(keys) and len(rotated) <= 1:
            padded = [np.concatenate([of_layer, np.zeros(head_dim // 2 - len(of_layer))]) for of_layer in chosen]
            return _Rotation(padded, rotated.pop() if rotated else head_dim, neighbours)
    if furthest == len(keys):
        raise ConfigError(f"model {model.name} rotates more of a key in some layers than in others")
    raise ConfigError(
        f"model {model.name} rotates the keys of layer {furthest} in a way that codec {CODEC} does not support"
    )


def _is_same_turned_back(
    keys: NDArray[Any], shifted_keys: NDArray[Any], frequencies: NDArray[np.float64], neighbours: bool
) -> bool:
    """Whether keys at two positions, [heads, tokens, head_dim], are the same when turned back this way.

    Compared pair by pair: where only a small part of a key is rotated, or a part with small numbers, the rest would
    hide a difference.
    """
    if 2 * len(frequencies) > keys.shape[-1]:
        return False
    base = _turned_back(keys, 0, frequencies, neighbours)
    shifted = _turned_back(shifted_keys, _SHIFT_TOKENS, frequencies, neighbours)
    differences, sizes = (np.linalg.norm(vectors, axis=(0, 1)) for vectors in (base - shifted, base))
    typical_size = np.sqrt(np.square(sizes).mean())
    return bool((differences <= _LARGEST_DIFFERENCE * np.maximum(sizes, _SMALL_PAIR * typical_size)).all())


def _turned_back(keys: NDArray[Any], first: int, frequencies: NDArray[np.float64], neighbours: bool) -> NDArray[Any]:
    """keys: [heads, tokens, head_dim], whose first elements are turned, as many as there are frequencies for."""
    count = len(frequencies)
    turned, others = keys[..., : 2 * count], keys[..., 2 * count :]
    first_halves, second_halves = (turned[..., ::2], turned[..., 1::2]) if neighbours else np.split(turned, 2, -1)
    angles = (first + np.arange(keys.shape[1]))[:, None] * frequencies
    points: NDArray[Any] = (first_halves + 1j * second_halves) * np.exp(-1j * angles)
    return np.concatenate([points, others], -1)
