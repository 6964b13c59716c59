"""Moving keys: a key that was rotated for one position is rotated on to another (RoFormer, arXiv 2104.09864).

Rotations of one plane add up, so a key at position p becomes one at position q by a rotation through (q - p) times its
plane's frequency. It is always the stored key that is moved, in float32: a key moved twice in bfloat16 would lose more.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Pairing = Literal["none", "halves", "neighbours"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """How one layer rotates its keys.

    pairing: which dimensions form a plane: d and d + n/2 of the rotated n (`halves`, GPT-NeoX), or 2d and 2d + 1
        (`neighbours`, GPT-J). `none`: keys do not depend on positions.
    frequencies: float32 of n/2, radians per position.
    """

    pairing: Pairing
    frequencies: torch.Tensor

    def moved(self, keys: torch.Tensor, distance: int) -> torch.Tensor:
        """keys: [tokens, heads, head_dim], rotated dimensions first. distance: by how many positions all of them move.
        The result has the keys' dtype."""
        if self.pairing == "none" or not distance:
            return keys
        angles = distance * self.frequencies.to(torch.float64)  # in float32 a long distance would lose digits
        cosine, sine = angles.cos().float(), angles.sin().float()
        rotated = 2 * self.frequencies.numel()
        planes = keys[..., :rotated].float()
        first, second = planes.chunk(2, -1) if self.pairing == "halves" else (planes[..., ::2], planes[..., 1::2])
        turned = (first * cosine - second * sine, first * sine + second * cosine)
        joined = torch.cat(turned, -1) if self.pairing == "halves" else torch.stack(turned, -1).flatten(-2)
        return torch.cat((joined.to(keys.dtype), keys[..., rotated:]), -1)


UNROTATED = Rotation("none", torch.empty(0))
