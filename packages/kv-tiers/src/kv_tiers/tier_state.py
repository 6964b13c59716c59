"""What is in the pool and in each tier below it, and how that goes, as data: for metrics and reports."""

from dataclasses import dataclass
from enum import Enum
from typing import Final


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
    """

    chunks: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    full: str = ""
    by_group: tuple[int, ...] = ()
    cut_chunks: int = 0


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
