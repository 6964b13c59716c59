"""When a lane reads the remainder of a payload: while there is nothing else to do, and otherwise a tenth of the time.

No request waits for a remainder (`LoadRemainder`), so other jobs come first. But a lane that is never idle, because one
prompt follows another, would leave its approximations as they are for good. So once `LEAST_S` have passed, and nine
times as long as the last step took, one step comes before the queued jobs.
"""

import math
from typing import Final

LEAST_S: Final = 0.1
_TIMES: Final = 9
"""If the lane is not idle, the wait for the next step is this many times as long as the last step took."""


class RemainderTurn:
    """Chosen in place of a job: `Lane.when_idle` is to be called for a remainder."""


class RemainderTurns:
    """The remainder turns of one lane, under its lock. Times are by its clock."""

    def __init__(self) -> None:
        self._are_wanted = self._is_asking = self._is_reading = False
        self._due_s = 0.0
        self._step_began_s: float | None = None

    def wanted(self, now_s: float) -> None:
        """There may be remainders to read."""
        if not (self._are_wanted or self._is_asking or self._is_reading):
            self._due_s = max(self._due_s, now_s + LEAST_S)
        self._are_wanted = True

    def may_ask(self, now_s: float, is_idle: bool) -> bool:
        """Whether to call `when_idle` now."""
        return self._are_wanted and not self._is_asking and not self._is_reading and (is_idle or now_s >= self._due_s)

    def asks(self) -> None:
        self._is_asking, self._are_wanted = True, False

    def answered(self, *, was_there: bool) -> None:
        """`when_idle` has returned. was_there: whether it returned a remainder, so that there may be more."""
        self._is_asking, self._are_wanted = False, self._are_wanted or was_there

    def begins(self) -> None:
        self._is_reading, self._step_began_s = True, None

    def may_step(self, now_s: float, is_idle: bool) -> bool:
        """Whether to read a step of the remainder now."""
        is_due = now_s >= self._due_s
        if is_due:
            self._due_s = math.inf  # until this remainder has ended
        if is_due or is_idle:
            self._step_began_s = now_s
        return is_due or is_idle

    def ended(self, now_s: float) -> None:
        self._is_reading = False
        if self._step_began_s is not None:
            self._due_s = now_s + max(LEAST_S, _TIMES * (now_s - self._step_began_s))
