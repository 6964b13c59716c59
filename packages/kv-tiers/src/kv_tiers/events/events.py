"""The events of a cache, as records: one per call, never one per chunk.

An event refers to the keys of the call without copying them: treat them as read-only. It carries neither a time nor the
name of its cache, which the bus adds (`kv_tiers.events.bus.Occurred`). Times in it are durations in seconds. Things
that are counted anyway (`LocalCache.counts`) have no event.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from kv_core.cost import Choice, Measured
from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey
from kv_core.service import Holder

EvictedFor = Literal["store", "promotion", "watermark", "quota", "upgrade"]
"""Why room was needed: for a store, for a promotion, for the slots that `write: back` keeps free, for a tenant's quota,
or for better bytes of a chunk that is an approximation."""

LoadEnding = Literal["released", "forgotten", "ended"]


class LookedUp(msgspec.Struct, frozen=True):
    """A lookup was answered.

    holder: the holder that made it.
    keys: all keys of the lookup, from the prompt's first, chunk-major.
    shape: which keys a chunk has, and what a hit needs of them.
    chunks_hit: how many leading chunks are a hit.
    tiers: the tier that each of those came from, as in `LookupPlan`.
    ended: the name of an `Ended`; after `PENDING` the same holder looks up again.
    choice: whether loading pays, with both estimates; None: the lookup came without costs.
    own_chunks: how many leading chunks the engine has in its own blocks.
    """

    holder: Holder
    keys: Sequence[ChunkKey]
    shape: ChunkShape
    chunks_hit: int
    tiers: tuple[str, ...]
    ended: str
    choice: Choice | None = None
    own_chunks: int = 0

    @property
    def chunks_asked(self) -> int:
        """Beyond those that the engine has."""
        return max(0, len(self.keys) // self.shape.keys_per_chunk - self.own_chunks)

    @property
    def tiers_hit(self) -> tuple[str, ...]:
        """Those of `tiers` beyond the chunks that the engine has."""
        return self.tiers[self.own_chunks :]


class LoadBegun(msgspec.Struct, frozen=True):
    """A load was requested.

    lease: the read lease; 0 if chunks are missing.
    keys: of all chunks of the load.
    missing: number of these that are not held; if any, nothing is loaded.
    """

    holder: Holder
    lease: int
    keys: Sequence[ChunkKey]
    missing: int


class LoadEnded(msgspec.Struct, frozen=True):
    """A read lease ended before its deadline.

    chunks: how many chunks it was on.
    nbytes: how many bytes those are.
    seconds: how long it lasted.
    how: `released`: its bytes stayed as they were; `forgotten`: some of its chunks were forgotten meanwhile, so nothing
        was delivered; `ended`: its holder ended.
    """

    holder: Holder
    lease: int
    chunks: int
    nbytes: int
    seconds: float
    how: LoadEnding


class LeaseExpired(msgspec.Struct, frozen=True):
    """A lease reached its deadline without a call from its holder.

    chunks: number of chunks leased.
    kind: the promise of a lookup, or the lease of a load.
    """

    holder: Holder
    lease: int
    chunks: int
    kind: Literal["promise", "load"]


class StoreBegun(msgspec.Struct, frozen=True):
    """A store of a prompt was begun.

    chain: all its keys.
    reserved: those that got room.
    refused: those that got none. All others are held already.
    why: the reason of the refusal, else empty.
    """

    holder: Holder
    lease: int
    chain: Sequence[ChunkKey]
    reserved: Sequence[ChunkKey]
    refused: Sequence[ChunkKey]
    why: str


class Committed(msgspec.Struct, frozen=True):
    """From now on chunks can be found in the pool.

    seconds: since their slots were reserved.
    """

    holder: Holder
    lease: int
    keys: Sequence[ChunkKey]
    seconds: float


class Aborted(msgspec.Struct, frozen=True):
    """Reserved slots were freed: these chunks will not be committed."""

    holder: Holder
    lease: int
    keys: Sequence[ChunkKey]


class HolderEnded(msgspec.Struct, frozen=True):
    """All leases of a holder ended: its request is over."""

    holder: Holder


class Evicted(msgspec.Struct, frozen=True):
    """Chunks left a tier to make room.

    cause: what the room was for.
    holder: whose chunks needed it, if known, else empty.
    policy: the name of the policy that chose them.
    """

    tier: str
    keys: Sequence[ChunkKey]
    cause: EvictedFor
    holder: Holder
    policy: str


class Forgotten(msgspec.Struct, frozen=True):
    """Chunks were removed from all tiers on request.

    keys: of these chunks.
    everything: all others too; `keys` is then empty.
    """

    keys: Sequence[ChunkKey]
    everything: bool = False


class DamageFound(msgspec.Struct, frozen=True):
    """Chunks had wrong bytes and were discarded from this tier."""

    tier: str
    keys: Sequence[ChunkKey]
    reason: str


class Promoted(msgspec.Struct, frozen=True):
    """Chunks were promoted from a lower tier.

    keys: of those that can be found in the pool now: they arrived, and were not forgotten meanwhile.
    missing: number of those requested that did not arrive.
    nbytes: size of those that can be found.
    seconds: from the request to the arrival.
    estimated_s: the estimate of that; None: there was none.
    """

    holder: Holder
    tier: str
    keys: Sequence[ChunkKey]
    missing: int
    nbytes: int
    seconds: float
    estimated_s: float | None = None


class Upgraded(msgspec.Struct, frozen=True):
    """From now on chunks in the pool that were approximations have better bytes, usually the exact ones.

    tier: where those came from.
    keys: of these chunks.
    nbytes: size of these chunks.
    seconds: since the reading of the missing bytes began.
    """

    tier: str
    keys: Sequence[ChunkKey]
    nbytes: int
    seconds: float


class Spilled(msgspec.Struct, frozen=True):
    """Chunks were written to a lower tier.

    keys: of those that are stored there now.
    refused: how many are not.
    retried: whether these are queued again and written later.
    nbytes: how many bytes are stored there now.
    seconds: from the submission to the acknowledgement.
    """

    tier: str
    keys: Sequence[ChunkKey]
    refused: int
    retried: bool
    nbytes: int
    seconds: float


class TierHealth(msgspec.Struct, frozen=True):
    """The health of a tier changed.

    was, now: names of a `Health`.
    why: the reason, for an operator.
    """

    tier: str
    was: str
    now: str
    why: str


class BlocksAllocated(msgspec.Struct, frozen=True):
    """An engine allocated blocks to a request. Reported by the engine; a cache has no blocks."""

    holder: Holder
    blocks: int


class EngineMeasured(msgspec.Struct, frozen=True):
    """How an engine's own estimates compare with what was measured. Reported by the engine."""

    samples: Sequence[Measured]


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
    | DamageFound
    | Promoted
    | Upgraded
    | Spilled
    | TierHealth
    | BlocksAllocated
    | EngineMeasured
)
