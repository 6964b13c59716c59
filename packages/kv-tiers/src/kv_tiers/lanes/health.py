"""How a tier is doing, as its lane sees it: what it did, what it says, and what that makes together.

A tier that fails is rested, at first shortly and then twice as long each time, until a load brings something again: a
device whose probes succeed and whose reads do not would else be tried for ever at the shortest interval.

Nothing here locks or calls a tier: the lane does, and holds its one lock around every call.
"""

import traceback
from collections.abc import Collection
from enum import Enum
from typing import Final

from kv_core.clock import Clock


class Health(Enum):
    UP = "it answers"
    FULL = "it takes no more chunks, and serves those that it has"
    RESTING = "it failed, and is probed now and then"
    STUCK = "a call to it has not come back"
    CLOSED = "it is closed"

    @property
    def serves(self) -> bool:
        """Chunks may be asked of it, and stores tried."""
        return self is Health.UP or self is Health.FULL


_FIRST_THAT_HOLDS: Final = (
    Health.CLOSED,  # for good
    Health.RESTING,  # it said so itself, and is probed
    Health.STUCK,  # it says nothing; nothing can be asked of it, not even a probe
    Health.FULL,  # it serves, and takes nothing
    Health.UP,
)
"""What a tier's health is when several things are true of it."""


class HealthTracker:
    """Of one tier."""

    def __init__(self, *, rest_s: float, max_rest_s: float, stuck_s: float, clock: Clock) -> None:
        self._first_rest_s, self._max_rest_s, self._stuck_s = rest_s, max_rest_s, stuck_s
        self._clock = clock
        self._next_rest_s = rest_s
        self._why_down = ""
        self.rests_until_s: float | None = None
        self.is_probing = False
        self.is_closed = False
        self.full = ""
        """Why it takes no more chunks; empty where it does."""

    def now(self, running_since_s: Collection[float]) -> Health:
        """running_since_s: when each call that is under way began."""
        holds = {
            Health.CLOSED: self.is_closed,
            Health.RESTING: self.rests_until_s is not None,
            Health.STUCK: bool(running_since_s) and self._clock.now_s() - min(running_since_s) > self._stuck_s,
            Health.FULL: bool(self.full),
            Health.UP: True,
        }
        return next(health for health in _FIRST_THAT_HOLDS if holds[health])

    def why(self, health: Health) -> str:
        match health:
            case Health.RESTING:
                return self._why_down
            case Health.FULL:
                return self.full
            case _:
                return str(health.value)

    @property
    def last_failure(self) -> str:
        return self._why_down

    def failed(self, why: str) -> bool:
        """Rest it. False: it was resting already."""
        is_first = self.rests_until_s is None
        self.rests_until_s = self._clock.now_s() + self._next_rest_s
        self._next_rest_s = min(2 * self._next_rest_s, self._max_rest_s)
        self._why_down = why
        return is_first

    def probed(self) -> None:
        """A probe succeeded."""
        self.rests_until_s = None

    def loaded(self) -> None:
        """A load succeeded, so the next failure is a new one."""
        self._next_rest_s = self._first_rest_s

    def rest_left_s(self) -> float | None:
        """How long until it may be probed; None where nothing waits for that."""
        if self.rests_until_s is None or self.is_probing:
            return None
        return max(0.0, self.rests_until_s - self._clock.now_s())

    def may_probe(self) -> bool:
        return not self.is_probing and self.rest_left_s() == 0.0


def release_frames(error: BaseException) -> None:
    """Clear the local variables of the calls that the error came through, and of the errors behind it.

    They hold the memory that the tier was lent. An error that is part of a cycle (a frame in its own traceback holds
    it, which a helper that raises its argument is enough for) would keep that memory lent until the garbage collector
    comes by, and a pool cannot be unmapped while it is.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        pending += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
