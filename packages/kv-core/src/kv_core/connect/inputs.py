"""What an engine reports about its requests: when it asks for a match, and when it has scheduled them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.connect.controls import NO_CONTROLS, Controls
from kv_core.sequence import Item


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """What the engine knows of a request when it asks.

    request_id: the engine's.
    tokens: all of them, the generated ones too: after a preemption those are a prompt like any other.
    keep_tokens: how many of them may be stored (the prompt's; all of them where decoded tokens are kept as well).
    salt: what keeps its chunks apart from other tenants'.
    lora: the name of its adapter's content.
    items: what the model reads besides tokens.
    controls: what it asked for itself.
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
        """How many of its tokens may be stored. Tokens beyond those that are known are guesses (speculation, or a step
        scheduled ahead), and not kept."""
        return self.controls.storable(min(self.keep_tokens, len(self.tokens)))


@dataclass(frozen=True, slots=True)
class EngineState:
    """A state of linear layers that the engine hands over.

    table: which of its block tables has it.
    block: where it is after this step's forward pass.
    boundary: it is that of the request's first so many tokens.
    """

    table: int
    block: int
    boundary: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in this step.

    request: as it was when it asked.
    computed_tokens: how many of its first tokens are computed after the forward pass.
    blocks: its block tables.
    states: what the engine hands over of it.
    """

    request: RequestTokens
    computed_tokens: int
    blocks: tuple[Sequence[int], ...]
    states: tuple[EngineState, ...] = ()
