"""What a lane counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class LaneCounts:
    """All but `queued` only grow.

    queued: chunks to be loaded or stored, and questions, at the moment of the snapshot.
    loaded, absent, damaged, read_failed: chunks that were to be loaded, by what became of them.
    stored, refused: chunks that were to be stored, by what became of them.
    approximate: of those loaded, the chunks of which a first part was read.
    discarded: chunks.
    downs: how often the tier failed after it had served.
    seconds_loading, seconds_storing: in the tier's calls, those of all threads together.
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
