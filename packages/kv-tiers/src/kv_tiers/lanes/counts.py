"""The counters of a lane."""

from dataclasses import dataclass


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
