"""`CacheService`: the only interface to a cache. An engine's halves use it and cannot tell in which process the cache
runs.

Nothing here blocks, and no chunk bytes pass through it. A lease names extents of a pool that both sides map; the worker
copies there and reports when it is done. A lookup's answer is a promise: the chunks that it names are leased to its
holder at once. A `Holder` is a request or a worker; all of its leases can be released in one call when it ends, however
it ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NewType, Protocol, TypedDict, Unpack

from kv_core.cost import Choice, Costs, Measured
from kv_core.coverage import PLAIN, ChunkShape
from kv_core.keys import ChunkKey
from kv_core.transfer import FileExtent, HostExtent

# Lookup plans: how many leading chunks can be served, from which tier, and why the run ended.


class Ended(Enum):
    """Why the hit is not longer."""

    ALL_HELD = "every requested chunk is held"
    ABSENT = "the next chunk is not held"
    INCOMPLETE = "the next chunk is held by some shards or groups but not by all"
    REFUSED = "the cache grants no new leases at present"
    PENDING = "more is being promoted or looked up in a lower tier: ask again"


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """The leading chunks that `holder` may now load. They stay where they are until its lease ends or expires.

    holder: the owner of the lease.
    chunks: number of leading chunks that hit: every group has all that it needs of them, in every shard.
    ended: why the hit is not longer.
    tiers: for each of these chunks, the slowest tier that a needed key comes from.
    prefix_chunks: number of leading chunks held by the groups that need the whole prefix. If it exceeds `chunks`, other
        prompts diverge from this one there while a window or a state is missing. Without such groups: `chunks`.
    lacking: the group that ended the hit before `prefix_chunks`; -1 if none did.
    choice: whether loading pays, if the lookup came with costs.
    files: where the last of these chunks are in a tier's files, if they are to be read there instead of in the pool.
    """

    holder: str
    chunks: int
    ended: Ended
    tiers: tuple[str, ...]
    prefix_chunks: int = 0
    lacking: int = -1
    choice: Choice | None = None
    files: tuple[FileExtent, ...] = ()

    def after(self, own_chunks: int) -> "LookupPlan":
        """The plan of a prompt of which so many chunks, which the engine has itself, came before those looked up."""
        if not own_chunks:
            return self
        choice = None if self.choice is None else replace(self.choice, chunks=self.choice.chunks + own_chunks)
        return replace(
            self,
            chunks=own_chunks + self.chunks,
            prefix_chunks=own_chunks + self.prefix_chunks,
            tiers=("",) * own_chunks + self.tiers,
            choice=choice,
        )


Holder = str
LeaseId = NewType("LeaseId", int)


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A lease for reading. The chunks stay in the pool until it is released or expires.

    Copy, then release: `release` says whether the copy may be used. If a chunk is forgotten meanwhile, its bytes stay
    but the lease is void.

    id: identifies the lease for `release`.
    keys: the chunks, in the order of the call.
    extents: where each chunk's bytes are.
    """

    id: LeaseId
    keys: tuple[ChunkKey, ...]
    extents: tuple[HostExtent, ...]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """At least one of the chunks is not held; nothing is leased.

    missing: the chunks that are not held.
    reason: why, as text for a log.
    """

    missing: tuple[ChunkKey, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class WriteLease:
    """Slots for chunks that are not held yet: write, then commit. Until then lookups do not find them.

    id: identifies the lease for `commit` and `release`.
    keys: the chunks that got slots, in the order of the call.
    extents: where to write each chunk's bytes.
    refused: why others got no slot, or "" if all did. A refused chunk is just not stored.
    """

    id: LeaseId
    keys: tuple[ChunkKey, ...]
    extents: tuple[HostExtent, ...]
    refused: str


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """A snapshot of the counters. Slots, resident, reserved and leases are current values; the others only grow.

    When the cache is idle, `read_leases == write_leases == 0`, `slots_used == chunks_resident`, and `chunks_committed +
    chunks_adopted == chunks_resident + chunks_evicted + chunks_forgotten + chunks_damaged`.

    slots_total, slots_used: slots of the pool, all and used ones.
    chunks_resident: chunks that lookups can find.
    chunks_reserved: chunks whose bytes are still to come.
    read_leases, write_leases: open leases; reads include promises.
    lookups: lookups answered, without those answered `PENDING`.
    chunks_asked, chunks_hit: chunks in those lookups, without those that the engines had in their own blocks.
    chunks_reserved_ever: chunks that got a slot.
    chunks_committed, chunks_aborted: chunks among these whose store was committed, and aborted.
    chunks_evicted: chunks evicted to make room.
    chunks_forgotten: chunks removed on request.
    chunks_adopted: chunks taken over from an earlier process with a named pool.
    chunks_refused: chunks that got no slot: there was no room, or they were worth less than what is held.
    chunks_damaged: chunks with a wrong checksum.
    leases_expired: leases that were not released in time.
    tokens_saved: tokens of those hits that the engines were advised to load: neither computed nor in their own blocks.
    bytes_loaded: bytes that the engines have read of the pool.
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
    tokens_saved: int = 0
    bytes_loaded: int = 0


def check_options(options: Mapping[str, object], kind: type) -> None:
    """For a service that passes options on without naming them.

    kind: `LookupOptions` or `StoreOptions`.

    Raises:
        TypeError: an option that this kind does not have.
    """
    if unknown := options.keys() - kind.__annotations__.keys():
        raise TypeError(f"{kind.__name__} have no {', '.join(sorted(unknown))}")


class LookupOptions(TypedDict, total=False):
    """Keyword arguments of a lookup. They pass through sessions and nodes as they are.

    wait_for_promotion: promote what lower tiers hold. While waiting for that is worthwhile, the answer is `PENDING`,
        with what can be promised already: ask again soon with the same keys. The cache bounds this time, from the
        holder's first lookup to its end. False, the default: only what can be promised now, and nothing is promoted.
    costs: the engine's. With them, only chunks that are estimated to arrive sooner than they are computed are waited
        for, and the answer says whether loading pays. None, the default: use whatever is held.
    tiers: the tiers that may be read for the holder, besides the pool. They stay the same until the holder ends. None,
        the default: all.
    reads_files: whether the engine reads those chunks itself that the answer has in files, instead of having them
        promoted. False, the default: everything passes through the pool.
    """

    wait_for_promotion: bool
    costs: Costs | None
    tiers: Sequence[str] | None
    reads_files: bool


class StoreOptions(TypedDict, total=False):
    """Keyword arguments of a store, like those of a lookup.

    hold_s: if positive, the chunks of the chain that are held or that this lease commits stay in the pool for this time
        or until they have been read once, even if the holder ends: they are for another engine. Holds are limited to
        half of the pool; chunks beyond that may be evicted as usual.
    retain_s: the same, but however often they are read, in at most a quarter of the pool.
    leaves_first: the chunks of the chain are the first to be evicted from the pool, until they are used again.
    tiers: the tiers that these chunks may be spilled to; None, the default: all. A chunk that is held already may now
        be spilled to those, too: one request cannot forbid another's chunks.
    """

    hold_s: float
    retain_s: float
    leaves_first: bool
    tiers: Sequence[str] | None


class CacheService(Protocol):
    """What an engine can do with a cache. Every call returns at once."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of its tiers, hottest first. The first is the pool."""

    @property
    def lease_s(self) -> float:
        """How long a promise lasts that is not renewed, and a lease to read unless it is `lasting`."""

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        holder: Holder,
        *,
        shape: ChunkShape = PLAIN,
        **options: Unpack[LookupOptions],
    ) -> LookupPlan:
        """Find the longest hit among these chunks, lease it to `holder`, and return its length (`kv_core.coverage`).

        Only what the hit needs is leased. A holder has one promise: looking up again replaces it and restarts its
        deadline, so the call may be repeated freely.

        keys: chunk-major from the first chunk of the prompt, `shape.keys_per_chunk` for each.
        shape: which keys make up a chunk, and which of them a hit needs.
        """

    def renew(self, holder: Holder) -> bool:
        """Restart the deadline of the holder's promise. False if it has none, or if chunks of it were forgotten: look
        up again.
        """

    def load(self, keys: Sequence[ChunkKey], holder: Holder, *, lasting: bool = False) -> ReadLease | LoadFailed:
        """Lease exactly these chunks for reading, with a separate lease in addition to the holder's promise.

        lasting: the lease does not expire, like one for writing. It ends by `release`, with its holder, or with this
            process, so the bytes stay in place even if the cache is in another process and the connection is lost. For
            copies that cannot be withdrawn afterwards. `LoadFailed` where that cannot be promised.
        """

    def begin_store(self, keys: Sequence[ChunkKey], holder: Holder, **options: Unpack[StoreOptions]) -> WriteLease:
        """Reserve room for those of `keys` that are not held, in order, until room runs out.

        Chunks already held are touched, and never evicted to make room for their own descendants. A write lease does
        not expire, because its writer may still be writing. It ends by `commit`, by `release`, or with its holder.

        keys: keys of one shard and all groups of layers: first the groups that need the whole prefix, chunk by chunk
            from the prompt's first, then what the engine has of the others, group by group.
        """

    def commit(self, lease: WriteLease) -> None:
        """Make the chunks visible to lookups, now that their bytes are written.

        Raises:
            MisuseError: the lease is not open.
        """

    def release(self, lease: ReadLease | WriteLease) -> bool:
        """End a read lease, or give up a write lease (its chunks are aborted).

        False if a read lease had expired, so that the bytes may have been replaced while they were read, or if any of
        its chunks was forgotten or cleared since the lease began, even if the bytes were intact: a forgotten chunk is
        not delivered afterwards. In either case do not use what was copied. Releasing twice returns False and changes
        nothing.
        """

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks from all tiers: lookups no longer find them.

        Open leases keep their bytes until they end, and their release is False, so a load in progress is not delivered.
        Pins of these chunks end. A chunk that is being written is forgotten too: its commit publishes nothing.
        """

    def end(self, holder: Holder) -> None:
        """Release everything that `holder` has: its promise, its read leases, its unfinished stores. Idempotent."""

    def allocated(self, blocks: Mapping[Holder, int]) -> None:
        """Publish to subscribers how many of its blocks the engine allocated to which holders. Changes nothing."""

    def measured(self, samples: Sequence[Measured]) -> None:
        """Publish to subscribers how the engine's estimates compare with its measurements. Changes nothing."""

    def received(self, keys: Sequence[ChunkKey]) -> None:
        """The request for which these chunks were handed over has a lease on those that it loads: end the holds that
        `begin_store` put on them, here and on other hosts. A hint: if it is lost, the holds end by their deadline.
        """

    def turn_ended(self, keys: Sequence[ChunkKey]) -> None:
        """A request with this prompt was answered without a call of a tool, so the next one comes when its user has
        read. A hint for the pool's policy, which takes others to come back within seconds.
        """

    def retainable(self, keys: Sequence[ChunkKey]) -> int | None:
        """How many of these leading chunks of a tenant `retain_s` would keep now, beside what is held of its other
        prompts. None: it is not known, because the cache does not answer.
        """

    def clear(self) -> None:
        """Forget every chunk, as `forget` does."""

    def counts(self) -> CacheCounts: ...
