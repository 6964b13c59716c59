"""The state of the pool and of each tier below it: what is there, how that goes, and a tier's health."""

import traceback
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kv_core.clock import Clock


@dataclass(frozen=True, slots=True)
class TierQuota:
    """What a tenant has for itself in a tier. tenant: its tag, in hex."""

    tenant: str
    used_bytes: int
    quota_bytes: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Current usage. None: the medium does not report it.

    chunks: number of chunks stored, every group and shard counted separately.
    used_bytes: space that they take, as stored.
    capacity_bytes: space that they may take.
    full: why the medium refuses chunks (no space, read-only), as of the last store or probe; "" if it accepts them. A
        tier that evicts to make room is not full.
    by_group: chunks of each group of layers, each once, however many of its shards are stored; empty if the medium does
        not report that, or stores nothing.
    cut_chunks: those of `chunks` of which only first parts are left (`WhenFull`).
    quotas: of tenants that have one here, at most 64, which use most: a server may have ten thousand.
    """

    chunks: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    full: str = ""
    by_group: tuple[int, ...] = ()
    cut_chunks: int = 0
    quotas: tuple[TierQuota, ...] = ()


class Health(Enum):
    """UP: it answers. FULL: it takes no more chunks, but serves those that it has. DOWN: it failed, and is probed
    periodically. STUCK: a call to it has not returned. CLOSED: it is closed."""

    UP = "UP"
    FULL = "FULL"
    DOWN = "DOWN"
    STUCK = "STUCK"
    CLOSED = "CLOSED"


SERVING: Final = (Health.UP, Health.FULL)
"""Loads and stores are sent to a tier with such health."""


@dataclass(slots=True)
class LaneCounts:
    """A snapshot. All counts but `queued` only grow.

    queued: chunks to be loaded or stored, and queries, at the moment of the snapshot.
    loaded, absent, damaged, read_failed: chunks that were to be loaded, by outcome.
    stored, refused: chunks that were to be stored, by outcome.
    approximate: loaded chunks of which only first parts were read.
    discarded: chunks that the tier discarded.
    downs: how often the tier failed after it had served.
    seconds_loading, seconds_storing: time in the tier's calls, summed over all threads.
    """

    queued: int = 0
    loaded: int = 0
    absent: int = 0
    damaged: int = 0
    read_failed: int = 0
    stored: int = 0
    refused: int = 0
    approximate: int = 0
    discarded: int = 0
    downs: int = 0
    seconds_loading: float = 0.0
    seconds_storing: float = 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """The chunks that lookups can find.

    chunks: each counted once, however many of its groups and shards are held: the count of the group that has most.
    payload_bytes: of all groups and shards.
    by_group: chunks of each group of layers.
    """

    chunks: int
    payload_bytes: int
    by_group: tuple[int, ...]


@dataclass(slots=True)
class SpillCounts:
    """Counts of spilling to one tier, in chunks. The last three only grow.

    waiting: not submitted to the lane yet, at the time of the snapshot.
    under_way: being stored now.
    stored: stored by the tier.
    refused: refused by the tier.
    lost: evicted from the pool before they could be stored.
    """

    waiting: int = 0
    under_way: int = 0
    stored: int = 0
    refused: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class TierState:
    """The current state of one tier.

    name: as configured.
    health, why: of its lane.
    usage: as reported by the tier.
    lane: the counters of its lane.
    spill: the counters of spilling to it.
    load_cost: seconds per load, and seconds per byte, as measured; None: not known yet.
    upgraded: how often a chunk in the pool that came from it got better bytes from it.
    """

    name: str
    health: Health
    why: str
    usage: TierUsage
    lane: LaneCounts
    spill: SpillCounts
    load_cost: tuple[float, float] | None = None
    upgraded: int = 0


# The health of a tier as its lane sees it: from the outcomes of calls and from what the tier reports.
#
# A tier that fails is down, and the lane backs off, briefly at first and then twice as long each time up to a limit,
# until a load succeeds. Waiting for a load rather than a probe matters for a device whose probes succeed and whose
# reads fail: it would otherwise be retried for ever at the shortest interval.
#
# Nothing here locks or calls a tier: the lane does, and holds its one lock around every call.


class HealthTracker:
    """The health of one tier."""

    def __init__(self, *, backoff_s: float, max_backoff_s: float, stuck_s: float, clock: Clock) -> None:
        self._first_backoff_s, self._max_backoff_s, self._stuck_s = backoff_s, max_backoff_s, stuck_s
        self._clock = clock
        self._next_backoff_s = backoff_s
        self.last_failure = ""
        self.retry_at_s: float | None = None
        self.is_probing = False
        self.is_closed = False
        self.full = ""
        """Why it takes no more chunks; empty if it does."""

    def now(self, running_since_s: Collection[float]) -> Health:
        """running_since_s: when each call in progress began."""
        if self.is_closed:
            return Health.CLOSED
        if self.retry_at_s is not None:
            return Health.DOWN
        if self.hangs(running_since_s):  # such a tier cannot even be probed
            return Health.STUCK
        return Health.FULL if self.full else Health.UP

    def hangs(self, running_since_s: Collection[float]) -> bool:
        """Whether a call has not returned for too long. running_since_s: as for `now`."""
        return bool(running_since_s) and self._clock.now_s() - min(running_since_s) > self._stuck_s

    def why(self, health: Health) -> str:
        """The reason if it is not `UP`."""
        match health:
            case Health.DOWN:
                return self.last_failure
            case Health.FULL:
                return self.full
            case Health.STUCK:
                return "a call to it has not returned"
            case Health.CLOSED:
                return "it is closed"
            case Health.UP:
                return ""

    def failed(self, why: str) -> bool:
        """A call failed: the tier is down and backs off. False: it was down already."""
        is_first = self.retry_at_s is None
        self.retry_at_s = self._clock.now_s() + self._next_backoff_s
        self._next_backoff_s = min(2 * self._next_backoff_s, self._max_backoff_s)
        self.last_failure = why
        return is_first

    def probed(self) -> None:
        """A probe succeeded."""
        self.retry_at_s = None

    def loaded(self) -> None:
        """A load succeeded, so the next failure is a new one."""
        self._next_backoff_s = self._first_backoff_s

    def probe_due_in_s(self) -> float | None:
        """Seconds until the tier may be probed; None if it is not down, or is being probed."""
        if self.retry_at_s is None or self.is_probing:
            return None
        return max(0.0, self.retry_at_s - self._clock.now_s())

    def may_probe(self) -> bool:
        return self.probe_due_in_s() == 0.0


def release_frames(error: BaseException) -> None:
    """Clear the local variables of the frames that the exception passed through, and of the exceptions that caused it.

    They refer to the memory that the tier borrowed. An exception that is part of a reference cycle (a frame in its own
    traceback refers to it, as in a helper that raises its argument) would keep that memory in use until the garbage
    collector runs, and a pool cannot be unmapped until then.
    """
    pending: list[BaseException | None] = [error]
    seen_ids: set[int] = set()
    while pending:
        exception = pending.pop()
        if exception is None or id(exception) in seen_ids:
            continue
        seen_ids.add(id(exception))
        traceback.clear_frames(exception.__traceback__)
        pending += (exception.__cause__, exception.__context__)
        if isinstance(exception, BaseExceptionGroup):
            pending += exception.exceptions
