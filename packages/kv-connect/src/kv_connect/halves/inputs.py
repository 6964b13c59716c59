"""What an engine reports about its requests: when it asks for a match, and when it has scheduled them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.hashing import Item

from kv_connect.halves.controls import NO_CONTROLS, Controls


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """What the engine knows of a request when it asks for a match.

    tokens: all its tokens, including generated ones: after a preemption they are a prompt like any other.
    keep_tokens: how many of them may be stored (the prompt's; all of them if decoded tokens are stored too).
    salt: separates its chunks from other tenants'.
    lora: the identity of its adapter.
    items: inputs of the model besides tokens.
    """

    request_id: str
    tokens: Sequence[int]
    keep_tokens: int
    salt: str | None = None
    lora: str | None = None
    items: tuple[Item, ...] = ()
    controls: Controls = NO_CONTROLS

    @property
    def kept_tokens(self) -> int:
        """How many of its tokens may be stored. Tokens beyond the known ones are guesses (speculation, or a step
        scheduled ahead) and are not stored."""
        return self.controls.storable(min(self.keep_tokens, len(self.tokens)))


@dataclass(frozen=True, slots=True)
class EngineState:
    """A state of linear layers that the engine hands over.

    table: the block table that contains it.
    block: the block where the state is after this step's forward pass.
    boundary: the number of the request's tokens after which the state was taken.
    """

    table: int
    block: int
    boundary: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in this step.

    request: the request as it was looked up.
    computed_tokens: how many of its first tokens are computed after the forward pass.
    blocks: its block tables.
    states: its states that the engine hands over.
    """

    request: RequestTokens
    computed_tokens: int
    blocks: tuple[Sequence[int], ...]
    states: tuple[EngineState, ...] = ()
