"""`CacheService`: the only interface to a cache. An engine's halves use it and cannot tell in which process the cache
runs.

Nothing here blocks, and no chunk bytes pass through it. A lease names extents of a pool that both sides map; the worker
copies there and reports when it is done. A lookup's answer is a promise: the chunks that it names are leased to its
holder at once. A `Holder` is a request or a worker; all of its leases can be released in one call when it ends, however
it ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kv_core.cost import Costs, Measured
from kv_core.coverage import PLAIN, ChunkShape
from kv_core.extent import HostExtent
from kv_core.keys import ChunkKey
from kv_core.lookup import LookupPlan

Holder = str
LeaseId = NewType("LeaseId", int)


@dataclass(frozen=True, slots=True)
class ReadLease:
    """The chunks are in the pool and stay there until the lease is released or expires. Copy, then release: `release`
    says whether the bytes stayed put. Forgotten meanwhile, they stay and the lease is void.

    id: what a release names.
    keys: the chunks, in the order of the call.
    extents: where the whole bytes of each are.
    """

    id: LeaseId
    keys: tuple[ChunkKey, ...]
    extents: tuple[HostExtent, ...]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """At least one of the chunks cannot be had; nothing is leased.

    missing: those that are not held.
    reason: for a log.
    """

    missing: tuple[ChunkKey, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class WriteLease:
    """Room for chunks that are not held yet: write, then commit. No lookup sees them before.

    id: what a commit or a release names.
    keys: the chunks that got room, in the order of the call.
    extents: where to write the whole bytes of each.
    refused: why others that are not held got none, or "" when all did. What is refused costs nothing.
    """

    id: LeaseId
    keys: tuple[ChunkKey, ...]
    extents: tuple[HostExtent, ...]
    refused: str


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """A snapshot. Slots, residents, reserved and leases are present values; the rest only grow.

    At rest `read_leases == write_leases == 0`, `slots_used == chunks_resident`, and
    `chunks_committed + chunks_adopted == chunks_resident + chunks_evicted + chunks_forgotten + chunks_damaged`.

    slots_total, slots_used: of the pool.
    chunks_resident: that a lookup could find.
    chunks_reserved: whose bytes are still to come.
    read_leases, write_leases: that are open, promises among the reads.
    lookups: that were answered for good, and not `PENDING`.
    chunks_asked, chunks_hit: in those lookups.
    chunks_reserved_ever: that got room.
    chunks_committed, chunks_aborted: of those, by what became of them.
    chunks_evicted: to make room.
    chunks_forgotten: because somebody said so.
    chunks_adopted: of an earlier process, from a named pool.
    chunks_refused: that got no room.
    chunks_damaged: whose checksum was wrong.
    leases_expired: that were not given back in time.
    """

    slots_total: int
    slots_used: int
    chunks_resident: int
    chunks_reserved: int
    read_leases: int
    write_leases: int
    lookups: int
    chunks_asked: int
    chunks_hit: int
    chunks_reserved_ever: int
    chunks_committed: int
    chunks_aborted: int
    chunks_evicted: int
    chunks_forgotten: int
    chunks_adopted: int
    chunks_refused: int
    chunks_damaged: int
    leases_expired: int


class CacheService(Protocol):
    """Everything an engine may ask of a cache. Every call returns at once."""

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        holder: Holder,
        *,
        shape: ChunkShape = PLAIN,
        wait_for_promotion: bool = False,
        costs: Costs | None = None,
    ) -> LookupPlan:
        """Lease the longest hit among these chunks to `holder` and say how long it is (`kv_core.coverage`).

        keys: chunk-major from the first chunk of the prompt, `shape.keys_per_chunk` for each. What the hit needs is
        leased, and nothing else. Asking again replaces what the holder was promised before and starts its time anew, so
        the call may be repeated without counting: one holder has one promise.

        wait_for_promotion: what slower tiers hold is brought up, and while waiting for it is worthwhile the answer is
            `PENDING`, with what can be promised already: ask again soon, with the same keys. The cache bounds that
            time, from the holder's first question to its end. False: what can be promised now; nothing is brought up.
        costs: of the engine. With them only that is waited for which is estimated to be quicker than computing, and the
            answer says whether loading pays. None: whatever is held is to be used.
        """

    def renew(self, holder: Holder) -> bool:
        """Start the promise's time anew. False if the holder has none (any more), or chunks of it were forgotten since:
        look up again."""

    def load(self, keys: Sequence[ChunkKey], holder: Holder) -> ReadLease | LoadFailed:
        """Lease exactly these chunks for reading, on a lease of their own beside the holder's promise."""

    def begin_store(self, keys: Sequence[ChunkKey], holder: Holder, *, hold_s: float = 0.0) -> WriteLease:
        """Reserve room for those of `keys` that are not held, in order, until room runs out.

        keys: of one group and shard, the whole chain from the prompt's first chunk; of a group that does not need the
        whole prefix, what of it the engine has. Chunks already held are touched, and never evicted to make room for
        their own descendants. A write lease does not expire by time: a writer that lives may still be
        writing. It ends by `commit`, `release`, or with its holder.

        hold_s: what of the chain is held, and what this lease commits, stays in the pool for so long or until it has
            been read once, whatever becomes of the holder: another engine was told of it. All that is kept so is half
            of the pool at most; beyond that chunks may leave like any other.
        """

    def commit(self, lease: WriteLease) -> None:
        """The bytes are written; lookups see these chunks from now.

        Raises:
            MisuseError: the lease is not open.
        """

    def release(self, lease: ReadLease | WriteLease) -> bool:
        """Done reading, or gave up writing (what was reserved is aborted).

        False if a read lease had expired: the bytes may have been replaced while they were being read. False, too, if
        any of its chunks was forgotten or cleared since the lease began, even if the bytes were intact: what is
        forgotten is not delivered afterwards. Either way what was copied must not be used. Releasing twice is False
        as well, and changes nothing.
        """

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        """No lookup finds these chunks from now, on any tier. Open leases keep their bytes until they end, and their
        release is False: a load under way is not delivered. Pins of them end.

        A chunk that is being written is forgotten too: its commit then publishes nothing.
        """

    def end(self, holder: Holder) -> None:
        """Give back everything `holder` has: its promise, its read leases, its unfinished stores. Idempotent."""

    def allocated(self, blocks: Mapping[Holder, int]) -> None:
        """Publish how many of its blocks the engine gave to which holders, for subscribers. Changes nothing."""

    def measured(self, samples: Sequence[Measured]) -> None:
        """Publish how the engine's estimates compare with what was measured, for subscribers. Changes nothing."""

    def clear(self) -> None:
        """Forget every chunk that is held, as `forget` does."""

    def counts(self) -> CacheCounts: ...
