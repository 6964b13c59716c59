"""How each layer of an SGLang model rotates its keys.

Each attention layer's own module computes keys of the same drawn hidden states at two positions, and is stopped where
it hands them to SGLang's attention. So no request, no block and no other rank takes part.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from kv_blend.rotary import Rotation
from kv_blend.rotations import DISTANCE, PROBE_TOKENS, CannotMoveError, proven_rotations


class _KeysSeenError(Exception):
    """The keys are there."""


@torch.inference_mode()
def prove_rotations(model: torch.nn.Module, *, hidden_size: int, max_position: int) -> list[Rotation]:
    """The rotation of each attention layer, in the order of the layers.

    Raises:
        CannotMoveError: a layer's keys depend on positions in another way, or cannot be computed by themselves.
    """
    layers: dict[str, RadixAttention] = {}
    parents: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            if isinstance(child, RadixAttention):
                layers[f"{name}.{child_name}"], parents[f"{name}.{child_name}"] = child, module
    if not layers:
        raise CannotMoveError("the model has no attention layer of SGLang's ordinary kind")
    weights = next(model.parameters())
    probe = torch.randn(PROBE_TOKENS, hidden_size, generator=torch.Generator().manual_seed(0))
    probe = probe.to(weights.device, next(p.dtype for p in model.parameters() if p.is_floating_point()))
    distance = min(DISTANCE, max_position - PROBE_TOKENS)

    def keys_at(position: int) -> dict[str, torch.Tensor]:
        positions = torch.arange(position, position + PROBE_TOKENS, device=weights.device)
        return {name: _keys(parents[name], layer, positions, probe) for name, layer in layers.items()}

    found = proven_rotations(model, layers, keys_at(0), keys_at(distance), distance)
    return [found[name] for name in sorted(layers, key=lambda name: layers[name].layer_id)]


def _keys(parent: torch.nn.Module, layer: Any, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    given = {"positions": positions, "hidden_states": hidden.clone(), "forward_batch": None}
    with _stopped_at(layer) as found:
        try:
            parent(**{name: value for name, value in given.items() if name in _parameters(parent)})
        except _KeysSeenError:
            pass
        except Exception as error:  # the model's own code, which may raise anything
            raise CannotMoveError(f"{type(parent).__name__} does not compute its keys by itself: {error}") from error
    if not found:
        raise CannotMoveError(f"{type(parent).__name__} gives its attention no keys")
    return found[0].reshape(len(positions), -1, layer.qk_head_dim).clone()


def _parameters(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


@contextmanager
def _stopped_at(layer: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Stop what computes in the body where it calls this layer. Gives the keys that it was given."""
    found: list[torch.Tensor] = []

    def record(_layer: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[1])
        raise _KeysSeenError

    hook = layer.register_forward_pre_hook(record)
    try:
        yield found
    finally:
        hook.remove()
