"""The calls to a tier that are in progress, and which of them show by their duration whether it answers.

Removing the chunks of a tenant takes time in proportion to their number: minutes for a million files. As long as a
thread is left for other calls, these show whether the tier answers. So do bytes that move, if the tier reports them:
loading some chunks over a slow line takes longer than a call may take without moving a byte.
"""

from math import inf

from kv_core.clock import Clock

from kv_tiers.lanes.jobs import Job, Probe, Removal
from kv_tiers.tier import ShowsProgress, Tier


class Running:
    """The calls of one lane, under its lock. Times are by its clock."""

    def __init__(self, threads: int, tier: Tier, clock: Clock) -> None:
        """threads, tier, clock: those of the lane."""
        self._threads = threads
        self._clock = clock
        self._progressed_s = -inf
        if isinstance(tier, ShowsProgress):
            tier.on_progress = self._progressed
        self._others: dict[int, float] = {}  # job → when it began
        self._removals: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._others) + len(self._removals)

    def began(self, job: Job | Probe, now_s: float) -> None:
        (self._removals if isinstance(job, Removal) else self._others)[id(job)] = now_s

    def ended(self, job: Job | Probe) -> None:
        del (self._removals if isinstance(job, Removal) else self._others)[id(job)]

    def since_s(self) -> list[float]:
        """For each call that should return soon, when it began or, if later, when bytes last moved."""
        is_full = len(self._removals) >= self._threads
        began = [*self._others.values(), *(self._removals.values() if is_full else ())]
        return [max(began_s, self._progressed_s) for began_s in began]

    def _progressed(self) -> None:
        """Bytes have moved. Called on a thread of the tier, without the lock."""
        self._progressed_s = self._clock.now_s()
