"""The outcome of an operation on one chunk. Expected outcomes are values to match, not exceptions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loaded:
    """The chunk is in the lent buffer and was whole."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Absent:
    """Nobody holds the chunk. Not a fault: it may have left since the lookup."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """Bytes were found and proved wrong (length, header or checksum). They have been discarded already."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The device gave an error. Nothing is known of the bytes, and nothing was discarded: they may be read later."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stored:
    """The chunk is held from now on."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The chunk was not taken, and nothing of it remains."""

    reason: str


LoadOutcome = Loaded | Absent | Damaged | ReadFailed
StoreOutcome = Stored | Refused
