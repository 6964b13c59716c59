"""The phases of a server that passes everything on, and their order, as a table."""

from enum import Enum, auto
from typing import Final

from kv_core.errors import MisuseError


class PassingPhase(Enum):
    SERVING = auto()
    CLOSING = auto()
    """It serves, and its tiers are being closed."""
    OPENING = auto()
    """It serves without tiers, which the new process opens."""
    STOPPED = auto()
    """It does nothing, and waits for the new process to say that it has taken over."""
    RETURNING = auto()
    """It serves, and its tiers are being opened again."""
    OVER = auto()
    """The new process serves."""


class PhaseEvent(Enum):
    ASKED = auto()
    CLOSED = auto()
    """The tiers are closed, and what is in the pools has been sent."""
    READY = auto()
    """The new process lacks only what has changed since."""
    TAKEN = auto()
    LOST = auto()
    """The new process has died or given up, is too slow, or cannot be given something."""
    REOPENED = auto()


_NEXT: Final = {
    (PassingPhase.SERVING, PhaseEvent.ASKED): PassingPhase.CLOSING,
    (PassingPhase.CLOSING, PhaseEvent.CLOSED): PassingPhase.OPENING,
    (PassingPhase.CLOSING, PhaseEvent.LOST): PassingPhase.RETURNING,
    (PassingPhase.OPENING, PhaseEvent.READY): PassingPhase.STOPPED,
    (PassingPhase.OPENING, PhaseEvent.LOST): PassingPhase.RETURNING,
    (PassingPhase.STOPPED, PhaseEvent.TAKEN): PassingPhase.OVER,
    (PassingPhase.STOPPED, PhaseEvent.LOST): PassingPhase.RETURNING,
    (PassingPhase.RETURNING, PhaseEvent.REOPENED): PassingPhase.SERVING,
}


def next_phase(phase: PassingPhase, event: PhaseEvent) -> PassingPhase:
    """
    Raises:
        MisuseError: this does not happen in this phase.
    """
    try:
        return _NEXT[phase, event]
    except KeyError:
        raise MisuseError(f"a server that is {phase.name} cannot meet {event.name}") from None
