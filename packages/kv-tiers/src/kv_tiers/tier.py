"""The contract of a tier, which stores chunks below the host pool. Start here to write one.

A tier is called by its lane's threads, several at once. Its calls may block; it has no queue, and no threads of its own
unless its medium needs them. It owns no chunk's memory: it borrows pages of the host pool, page-aligned and locked in
place for the length of the call, and must not keep them.

It stores a header and a *payload* for each chunk. The payload is the chunk's bytes or their encoding by a codec. It is
never larger than the chunk and may have any smaller size, so a tier stores the size and returns it. Header and payload
are opaque: the lane encodes, builds headers, verifies payloads (`kv_tiers.chunk_header`) and decodes. A tier need not
detect damage; if it does notice some (a short file), it answers `Damaged`.

The outcome for one chunk is a value. A fault of the medium as a whole (unreachable, failing, gone) is raised as
`TierDown`, and the lane backs off from the tier for a while. Any other exception is a bug, and treated as `TierDown`
with a traceback in the log.

A failed read is a fault of the device and says nothing about the bytes: `ReadFailed` if other chunks of the same call
may have been read, else `TierDown`. Neither discards anything, and the lane backs off after either. Only bytes that
were read and proved wrong are `Damaged`. A medium that is full or read-only is not at fault: chunks are `Refused`, and
`usage` says why. (A tier that cannot do without writing, such as the disk, is down on a read-only medium.)

An error that one chunk causes says nothing about the medium. What cannot be stored because of its size or its name is
`Unstorable`, and what cannot be read because of what it is, is `Absent` or `Damaged`. Raising `TierDown` for it would
take all other chunks away: the probe succeeds, the chunk is offered again, and so on for ever. Where a medium's error
does not tell, ask it for something else: if it answers, the chunk is the cause.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, runtime_checkable

from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import LoadOutcome, Refused, StoreOutcome, Unstorable
from kv_core.transfer import FileExtent
from kv_eviction.coverage import BoundedGroups

from kv_tiers.chunk_header import VERSION, decoded_bytes_in, format_id
from kv_tiers.index.journal import Journal
from kv_tiers.tier_state import TierUsage as TierUsage  # noqa: PLC0414  # a part of the contract


@dataclass(frozen=True, slots=True)
class Write:
    """One chunk to store: its header, and its payload, the first `stored_bytes` of `pages`.

    key: the chunk's key.
    parent: the key of the chunk before it in the prompt. Without that chunk this one is worthless, so the parent should
        be evicted later.
    header: `chunk_header.HEADER_BYTES` bytes.
    pages: whole pages (a multiple of 4096 bytes, aligned to 4096), for tiers that bypass the page cache. Bytes beyond
        the payload are unspecified.
    stored_bytes: size of the payload, at most the chunk's.
    """

    key: ChunkKey
    parent: ChunkKey | None
    header: bytes
    pages: memoryview
    stored_bytes: int

    @property
    def payload(self) -> memoryview:
        return self.pages[: self.stored_bytes]


def encoded_bytes(write: Write) -> int:
    """Size of the chunk if the payload is its encoding, which may be cut; 0 if the chunk is stored unencoded."""
    decoded_bytes = decoded_bytes_in(write.header)
    return decoded_bytes if write.stored_bytes < decoded_bytes else 0


@dataclass(frozen=True, slots=True)
class Read:
    """One chunk to load: its header goes into `header`, its payload to the start of `pages`.

    The payload's size is in the answer (`Loaded`). Bytes of `pages` beyond the payload are unspecified afterwards, and
    so is all of it if the answer is not `Loaded`.

    key: the chunk's key.
    header: `chunk_header.HEADER_BYTES` bytes, writable.
    pages: whole pages with room for a chunk, writable.
    wanted_bytes: how many of the payload's first bytes to read, if it has as many. All of it: the largest chunk's size
        (`TierContext`). Less is requested only from `ReadsPrefixes`.
    chunk_bytes: for the lane: size of this chunk, which is the payload's size unless a codec encoded it. 0: the
        largest.
    as_stored: for the lane: return the payload verified but not decoded.
    from_bytes: for `ReadsRemainders`: how many of the payload's first bytes are in `pages` already, a multiple of 4096.
    """

    key: ChunkKey
    header: bytearray
    pages: memoryview
    wanted_bytes: int
    chunk_bytes: int = 0
    as_stored: bool = False
    from_bytes: int = 0

    @property
    def room(self) -> memoryview:
        return self.pages[: self.wanted_bytes]


def why_full(outcomes: Sequence[StoreOutcome]) -> str:
    """`TierUsage.full` after a store with these outcomes: why the medium refused a chunk that it could have taken."""
    refusals = (outcome for outcome in outcomes if isinstance(outcome, Refused) and not isinstance(outcome, Unstorable))
    return next((refusal.reason for refusal in refusals), "")


WhenFull = Literal["drop_chunks", "drop_parts"]
"""The option `when_full` of a tier that evicts: whether it drops the last parts of chunks before it evicts any.

What is left of a chunk is loaded as its first bytes: fewer than its header says, and as many as a reader of first parts
may request (`chunk_header.prefix_bytes`). Only the tiers of a cache that may hold approximations may drop parts
(`kv_tiers.approximate`)."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """What all chunks of a cache have in common, and what the user calls the tier.

    A tier may serve caches of several formats at one address. It must keep them apart: `namespace` differs for each.

    chunk_bytes: size of the largest chunk, and of the largest payload.
    slot_bytes: size of the pages that hold a chunk.
    fingerprint: identifies the format of the chunks' bytes.
    group_bytes: size of the chunks of each group of layers. Empty: unknown, or there is one.
    bounded: the groups of layers that do not need the whole prefix, as far as lookups have shown. For tiers that evict
        (`kv_eviction.coverage`).
    tenants: tags by name, for quotas.
    name: for messages of a tier while it is created; empty: it has none yet.
    """

    chunk_bytes: int
    slot_bytes: int
    fingerprint: str
    group_bytes: tuple[int, ...] = field(default=(), compare=False)
    bounded: BoundedGroups = field(default_factory=BoundedGroups, compare=False, repr=False)
    tenants: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)
    name: str = field(default="", compare=False, repr=False)

    @property
    def namespace(self) -> str:
        """32 hex digits for a directory or a key prefix. It depends on the header's version too, so chunks of another
        release are neither found nor touched. Codecs share a namespace, because each header names its codec.
        """
        return format_id(f"{VERSION} {self.chunk_bytes} {self.fingerprint}").hex()


ANY_CHUNKS: Final = TierContext(1, 4096, "")
"""The smallest possible context, for checking that options leave room for at least one chunk."""


class RemovalRefusedError(TierDown):
    """The medium works, but does not permit removals: we may only read, or read and add."""


class Tier(Protocol):
    """A place that stores chunks. Answers are parallel to the arguments, and every call may raise `TierDown`."""

    name: str
    """Its name in answers, logs and metrics."""

    holds_is_local: bool
    """`holds` answers from memory without waiting. Such a tier is queried on the engine's thread."""

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """For each key, whether a load would find it. It may have changed by the time of the load, which is then
        `Absent`.
        """

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        """Load headers and payloads. `Loaded` has the payload's size. A payload larger than a chunk is `Damaged`. One
        chunk's outcome (`Damaged`, `ReadFailed`) does not affect the others.
        """

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        """Store chunks. `Stored` acknowledges that the chunk is as durable as this tier ever makes it.

        A chunk that is already stored is `Stored` too; the tier chooses which copy to keep. Chunks are in the prompt's
        order: when space is short, the first are worth most. One that is `Unstorable` does not affect the others.
        """

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks. No `holds` or `load` that begins after this returns finds them. Like every call that removes,
        it may raise `RemovalRefusedError`.
        """

    def clear(self) -> None:
        """Remove everything in this namespace."""

    def probe(self) -> None:
        """Touch the medium: return if it works, raise `TierDown` if not. Called periodically while the tier is down."""

    def usage(self) -> TierUsage:
        """Current usage. Must be cheap and answer from memory."""

    def close(self) -> None:
        """Release everything. No other call is made during or after this one, except a second close."""


@runtime_checkable
class ClearsTenants(Protocol):
    """Optional capability of a `Tier`: clearing one tenant. A tier without it is cleared as a whole instead."""

    def clear_tenant(self, tenant: bytes) -> None:
        """Remove everything in this namespace whose keys have this tenant's tag (`ChunkKey.tenant`)."""


@runtime_checkable
class ReadOnly(Protocol):
    """Optional property of a `Tier` that others fill and we only read.

    Nothing is stored in it, whatever `write` says. Chunks that are discarded or cleared are no longer found by us, but
    stay where they are.
    """

    is_read_only: Literal[True]


@runtime_checkable
class ReadsPrefixes(Protocol):
    """Optional capability of a `Tier`: reading the beginning of a payload without the rest."""

    def load_prefixes(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        """Like `load`, with any `wanted_bytes`. `Loaded` says how many bytes were read, which is the payload's size if
        that is smaller.

        If `chunk_header.prefix_bytes` many are requested, the result can be verified (`chunk_header.verify_prefix`).
        """


@runtime_checkable
class ReadsRemainders(Protocol):
    """Optional capability of a `Tier` that `ReadsPrefixes`: resuming where an earlier read ended."""

    def load_remainders(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        """Like `load_prefixes`, but reads only the part of each payload behind its first `from_bytes` bytes, and no
        header.

        The bytes read earlier stay unchanged in `pages`, and `Loaded` counts them too. The rest may be of another
        payload, stored under the key since, so the caller has to verify the whole.
        """


@runtime_checkable
class NamesChunks(Protocol):
    """Optional capability of a `Tier`: naming chunks that it holds, so that it can be measured before a request needs
    one.
    """

    def some_keys(self, count: int) -> list[ChunkKey]:
        """Up to this many of the chunks held, in any order. It sends a few messages to the medium at most, so it may
        find none on a large one. Called when a cache starts, on a background thread. Raises `TierDown`: the medium
        cannot be reached, or does not list what it holds."""


@runtime_checkable
class ShowsProgress(Protocol):
    """Optional capability of a `Tier` that ends calls itself if no bytes move any more: reporting that bytes move, so
    that a long call on a slow line is not taken for one that hangs."""

    on_progress: Callable[[], object]
    """Set by the tier's lane, before any call. To be called when bytes of a load have arrived, or those of a store have
    been taken, on any thread."""


Removed = tuple[float | None, list[bytes], list[ChunkKey]]
"""What is not read from a tier any more: since when nothing that it had before, by the monotonic clock; the chunks of
these tenants; and these."""


@runtime_checkable
class RemembersRemoved(Protocol):
    """Optional capability of a `Tier` that others fill: what must not be read from it any more is known to it alone."""

    def removed(self) -> Removed:
        """To be passed to `remove` of the tier that takes the place of this one."""

    def remove(self, removed: Removed) -> None:
        """Before anything is read."""


@runtime_checkable
class TracksKeys(Protocol):
    """Optional capability of a `Tier` whose `holds` is local: reporting its contents, to announce them elsewhere."""

    def track(self, journal: Journal) -> None:
        """From now on record there every key that becomes findable, or stops being so."""

    def all_keys(self) -> list[ChunkKey]:
        """The keys of all chunks that are here or arriving."""


RankedChunk = tuple[ChunkKey, ChunkKey | None]
"""A chunk, and the one before it in its prompt, if that is known."""


@runtime_checkable
class RanksChunks(Protocol):
    """Optional capability of a `Tier` whose `holds` is local: ranking its chunks by how long it would retain them, so
    that a host that leaves can pass them on (docs/peers.md)."""

    def most_worth_first(self) -> list[RankedChunk]:
        """All chunks that are here, those that would be evicted last first, heads of prompts before their tails. It may
        take a second per million chunks; other calls are answered meanwhile."""


@dataclass(frozen=True, slots=True)
class FileLease:
    """Where chunks are in a tier's files. Until the lease ends, none of their bytes are replaced by another chunk's.

    It does not expire, because its holder may still be reading. The tier has not read the bytes: trust them only if
    their checksum is right.

    id: identifies the lease.
    extents: by key; None if the chunk is absent, encoded, or not contiguous. Use `load` for those.
    """

    id: int
    extents: tuple[FileExtent | None, ...]


@runtime_checkable
class SupportsFileExtents(Protocol):
    """Optional capability of a `Tier`: others may read the bytes in its files.

    Only chunks that are stored unencoded can be read this way; the others have no extent in a lease.

    Like `load`, every call may block and may raise `TierDown`. End leases before `close`.
    """

    def lease_extents(self, keys: Sequence[ChunkKey]) -> FileLease:
        """Locate chunks, with their checksums. If a chunk's bytes turn out to be wrong, `discard` it."""

    def end_lease(self, lease: FileLease, failed: Sequence[ChunkKey] = ()) -> None:
        """End the lease: its holder no longer reads these chunks. Raises `MisuseError`: it was ended before.

        failed: those that the device could not read, passed over for a while as after a `load` that failed.
        """


OptionsCheck = Callable[[Mapping[str, object]], object]
"""Raises `ConfigError` for invalid options. It leaves no medium changed and opens no connection, but may try out a
directory that exists or can be made."""

TierFactory = Callable[[Mapping[str, object], TierContext], Tier]
"""The object of an entry point in the group `kv_tiers.tiers`. Arguments: the options that the user wrote (without
`type`), and the context of the chunks. It raises `ConfigError` for invalid options, naming the nearest valid one."""


@dataclass(frozen=True, slots=True)
class CheckedFactory:
    """A `TierFactory` that can validate options before the format of the chunks is known.

    A server creates a tier when a client first registers its format. With `check`, wrong options already stop its
    start.
    """

    make: TierFactory
    check: OptionsCheck

    def __call__(self, options: Mapping[str, object], context: TierContext) -> Tier:
        return self.make(options, context)


def checked(check: OptionsCheck) -> Callable[[TierFactory], CheckedFactory]:
    """Decorate a factory with a check of its options."""
    return lambda make: CheckedFactory(make, check)
