"""The outcome of an operation on one chunk. Expected outcomes are values to match, not exceptions."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Loaded:
    """The chunk is in the caller's buffer, complete.

    checksum: the bytes' checksum (`kv_core.hashing`), if computed while they were read; empty: still to be computed.
    """

    nbytes: int
    checksum: bytes = field(default=b"", compare=False)


@dataclass(frozen=True, slots=True)
class Absent:
    """The chunk is not there. Not a fault: it may have left since the lookup."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """Bytes were found and proved wrong (length, header or checksum). They have already been discarded."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The device returned an error. Nothing is known about the bytes, and nothing was discarded: a later read may
    succeed.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Stored:
    """The chunk is stored."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The chunk was not stored, and no part of it remains."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unstorable(Refused):
    """The medium does not accept this chunk for what it is, such as too large a value or too long a name.

    It is neither full nor at fault: it serves and takes other chunks. The reason says what to set.
    """


LoadOutcome = Loaded | Absent | Damaged | ReadFailed
StoreOutcome = Stored | Refused
