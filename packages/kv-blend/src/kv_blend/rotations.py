"""How each attention layer of a model rotates its keys, proven on keys that the layer itself computed at two positions.

The frequencies come from the layers' own rotary modules. Whether they describe what a layer does is measured: its keys
of the first position, moved, must be those of the second. That also finds layers that do not rotate, and refuses
whatever depends on positions otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

Pairing = Literal["none", "halves", "neighbours"]
PROBE_TOKENS: Final = 16
DISTANCE: Final = 1000
"""Between the two positions, unless the model has fewer."""
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Of the relative error of moved keys: far below what a wrong rotation gives, which is about 1."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How one layer rotates its keys.

    pairing: which dimensions form a plane: d and d + n/2 of the rotated n (`halves`, GPT-NeoX), or 2d and 2d + 1
        (`neighbours`, GPT-J). `none`: keys do not depend on positions.
    frequencies: float32 of n/2, radians per position.
    """

    pairing: Pairing
    frequencies: torch.Tensor

    def moved(self, keys: torch.Tensor, distance: int, begin: int = 0) -> torch.Tensor:
        """keys: [tokens, heads, head_dim]. distance: by how many positions all of them move. begin: the first rotated
        dimension. The result has the keys' dtype."""
        if self.pairing == "none" or not distance:
            return keys
        angles = distance * self.frequencies.to(torch.float64)  # in float32 a long distance would lose digits
        cosine, sine = angles.cos().float(), angles.sin().float()
        end = begin + 2 * self.frequencies.numel()
        planes = keys[..., begin:end].float()
        first, second = planes.chunk(2, -1) if self.pairing == "halves" else (planes[..., ::2], planes[..., 1::2])
        turned = (first * cosine - second * sine, first * sine + second * cosine)
        joined = torch.cat(turned, -1) if self.pairing == "halves" else torch.stack(turned, -1).flatten(-2)
        return torch.cat((keys[..., :begin], joined.to(keys.dtype), keys[..., end:]), -1)


UNROTATED = Rotation("none", torch.empty(0))


Keys = Mapping[str, torch.Tensor]
"""Of each layer: [tokens, heads, head_dim]."""


class CannotMoveError(Exception):
    """Keys of this model cannot be moved; the text says why."""


def proven_rotations(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], here: Keys, there: Keys, distance: int
) -> dict[str, Rotation]:
    """The rotation of each of these attention layers of a model.

    here, there: the layers' keys of the same tokens, the second `distance` positions further on.

    Raises:
        CannotMoveError: a layer's keys depend on positions in another way.
    """
    found = {}
    candidates: dict[int, list[Rotation]] = {}  # layers share rotary modules
    for name, rotary in _rotary_of(model, layers).items():
        if id(rotary) not in candidates:
            candidates[id(rotary)] = [UNROTATED, *_candidates(rotary, next(iter(here.values())).device)]

        def error(rotation: Rotation, before: torch.Tensor = here[name], after: torch.Tensor = there[name]) -> float:
            return float((rotation.moved(before, distance).float() - after.float()).norm() / after.float().norm())

        found[name] = min(candidates[id(rotary)], key=error)
        if not error(found[name]) <= _TOLERANCE.get(here[name].dtype, 1e-3):
            raise CannotMoveError(
                f"keys of layer {name} ({'no rotary embedding' if rotary is None else type(rotary).__name__}) do not "
                "move from one position to another by a rotation that is known here"
            )
    return found


def _rotary_of(model: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module | None]:
    """The rotary module beside each attention layer."""
    names = {id(layer): name for name, layer in layers.items()}
    found: dict[str, torch.nn.Module | None] = dict.fromkeys(layers)
    for parent in model.modules():
        children = list(parent.children())
        rotary = next((child for child in children if hasattr(child, "rotary_dim")), None)
        for child in children:
            if rotary is not None and id(child) in names:
                found[names[id(child)]] = rotary
    return found


def _candidates(rotary: torch.nn.Module | None, device: torch.device) -> list[Rotation]:
    frequencies = None if rotary is None else _frequencies(rotary)
    if frequencies is None:
        return []
    pairing: Pairing = "halves" if getattr(rotary, "is_neox_style", True) else "neighbours"
    return [Rotation(pairing, frequencies.to(device))]


def _frequencies(rotary: torch.nn.Module) -> torch.Tensor | None:
    """Radians per position, float32, from the first step of the module's table, computed anew: the one in use is
    rounded to the model's dtype. A scale in it, as YaRN's, cancels out. None: it has no such table."""
    compute = getattr(rotary, "_compute_cos_sin_cache", None)
    try:
        cosine, sine = compute()[1].float().chunk(2)  # type: ignore[misc]
    except (TypeError, ValueError, IndexError):
        return None
    return torch.atan2(sine, cosine)
