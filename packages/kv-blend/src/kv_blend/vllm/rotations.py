"""How each layer of a vLLM model rotates its keys: a probe computed alone at two positions by the model itself."""

from collections.abc import Mapping, Sequence

import torch

from kv_blend.rotary import Rotation
from kv_blend.rotations import DISTANCE, proven_rotations
from kv_blend.vllm.forward import BatchEntry, EngineForward, keys_of


def prove_rotations(
    forward: EngineForward,
    layers: Mapping[str, torch.nn.Module],
    head_dim: int,
    probe: tuple[Sequence[int], Sequence[int]],
    *,
    distance: int = DISTANCE,
) -> dict[str, Rotation]:
    """The rotation of each of these attention layers.

    probe: blocks that may be overwritten, and PROBE_TOKENS tokens.
    distance: between the two positions.

    Raises:
        CannotMoveError: a layer's keys depend on positions in another way.
    """
    blocks, tokens = probe

    def keys_at(position: int) -> dict[str, torch.Tensor]:
        with keys_of(layers) as measured:
            forward.compute([BatchEntry(blocks, tokens, 0, position)])
        return {name: keys.reshape(len(tokens), -1, head_dim).clone() for name, keys in measured.items()}

    return proven_rotations(forward.model, layers, keys_at(0), keys_at(distance), distance)
