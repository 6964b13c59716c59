"""What a cache tells of itself: one event a call, never one a chunk.

An event refers to the keys that the call was about and copies none of them, so treat them as read-only. It carries no
time and no name of the cache it came from: the bus adds both (`kv_tiers.events.bus.Occurred`). Times in it are spans,
in seconds. What is counted anyway (`LocalCache.counts`) has no event of its own.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from kv_core.keys import ChunkKey
from kv_core.service import Holder

EvictedFor = Literal["store", "promotion", "watermark", "quota"]
"""Why there had to be room: a chunk to store; one on its way up; the free slots that `write: back` keeps; a tenant's
bound."""

LoadEnding = Literal["released", "forgotten", "ended"]


class LookedUp(msgspec.Struct, frozen=True):
    """A lookup was answered. keys: all that were asked for, `keys_per_chunk` a chunk, from the prompt's first.

    tiers: where each chunk that is held came from, as of `LookupPlan`. ended: the name of an `Ended`; after `PENDING`
    the same holder asks again.
    """

    holder: Holder
    keys: Sequence[ChunkKey]
    keys_per_chunk: int
    chunks_hit: int
    tiers: tuple[str, ...]
    ended: str

    @property
    def chunks_asked(self) -> int:
        return len(self.keys) // self.keys_per_chunk


class LoadBegun(msgspec.Struct, frozen=True):
    """Chunks were asked for. missing: how many of them are not held; then there is no lease and nothing is loaded."""

    holder: Holder
    lease: int
    keys: Sequence[ChunkKey]
    missing: int


class LoadEnded(msgspec.Struct, frozen=True):
    """A read lease ended before its time was over, `seconds` after it was given.

    how: released, with its bytes as they were; forgotten: some of its chunks were, so nothing was delivered; ended: its
        holder has.
    """

    holder: Holder
    lease: int
    chunks: int
    seconds: float
    how: LoadEnding


class LeaseExpired(msgspec.Struct, frozen=True):
    """A promise or a read lease is over because nothing was heard of its holder in time."""

    holder: Holder
    lease: int
    chunks: int
    kind: Literal["promise", "load"]


class StoreBegun(msgspec.Struct, frozen=True):
    """A prompt is to be stored. reserved, refused: those of its keys that got room, and none; all others are held."""

    holder: Holder
    lease: int
    chain: Sequence[ChunkKey]
    reserved: Sequence[ChunkKey]
    refused: Sequence[ChunkKey]
    why: str


class Committed(msgspec.Struct, frozen=True):
    """These can be found in the pool, `seconds` after their slots were reserved."""

    holder: Holder
    lease: int
    keys: Sequence[ChunkKey]
    seconds: float


class Aborted(msgspec.Struct, frozen=True):
    """Reserved places were given back, and nothing came of these."""

    holder: Holder
    lease: int
    keys: Sequence[ChunkKey]


class HolderEnded(msgspec.Struct, frozen=True):
    """A holder gave back all it had: its request is over."""

    holder: Holder


class Evicted(msgspec.Struct, frozen=True):
    """These left a tier to make room. holder: for whom, where there is somebody. policy: what chose them."""

    tier: str
    keys: Sequence[ChunkKey]
    cause: EvictedFor
    holder: Holder
    policy: str


class Forgotten(msgspec.Struct, frozen=True):
    """Somebody asked that these be found nowhere. everything: so is all else that the cache held."""

    keys: Sequence[ChunkKey]
    everything: bool = False


class Damaged(msgspec.Struct, frozen=True):
    """Bytes of these were wrong and were discarded in that tier."""

    tier: str
    keys: Sequence[ChunkKey]
    reason: str


class Promoted(msgspec.Struct, frozen=True):
    """Chunks came up from a tier, or `missing` of those asked for did not. seconds: from the asking to the arrival.

    nbytes: of those that arrived.
    """

    holder: Holder
    tier: str
    keys: Sequence[ChunkKey]
    missing: int
    nbytes: int
    seconds: float


class Spilled(msgspec.Struct, frozen=True):
    """Chunks went down to a tier, but for `refused` of them. seconds: from the handing over to the acknowledgement.

    keys, nbytes: of those that are stored there now. retried: what was refused waits and goes down later.
    """

    tier: str
    keys: Sequence[ChunkKey]
    refused: int
    retried: bool
    nbytes: int
    seconds: float


class TierHealth(msgspec.Struct, frozen=True):
    """A tier is doing better or worse. was, now: names of a `Health`."""

    tier: str
    was: str
    now: str
    why: str


class BlocksAllocated(msgspec.Struct, frozen=True):
    """An engine gave a request so many of its blocks. The engine says so; a cache knows of no blocks."""

    holder: Holder
    blocks: int


Event = (
    LookedUp
    | LoadBegun
    | LoadEnded
    | LeaseExpired
    | StoreBegun
    | Committed
    | Aborted
    | HolderEnded
    | Evicted
    | Forgotten
    | Damaged
    | Promoted
    | Spilled
    | TierHealth
    | BlocksAllocated
)
