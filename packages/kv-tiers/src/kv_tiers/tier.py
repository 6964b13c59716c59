"""The contract of a tier: one place below the host pool that keeps chunks. Start here to write one.

A tier is called by its lane's threads, several at once, and may take its time: it blocks, it has no queue and no thread
of its own unless its medium needs one. It owns no chunk's memory: it is lent pages of the host pool, aligned to the
machine's pages and locked in place for the length of the call, and may keep nothing of them afterwards.

What it keeps of a chunk is a header and a *payload*: the chunk's bytes, or what a codec made of them. A payload is
never larger than a chunk, and may be of any size below, so a tier keeps its size and tells it. Header and payload are
opaque to it: the lane encodes, makes headers, checks payloads against them (`kv_tiers.chunk_header`) and decodes, so a
tier need not detect damage; where it does notice (a short file), it says `Damaged`.

What became of a chunk is a value. What is wrong with the medium as a whole (unreachable, full of errors, gone) is
raised as `TierDown`: the lane then rests the tier for a while. Anything else that is raised is a bug, and treated as
`TierDown` with a traceback in the log.

A read that fails is a fault of the device and says nothing of the bytes: `ReadFailed` where others of the same call may
have come, else `TierDown`. Neither discards anything, and both rest the tier. Only bytes that were read and proved
wrong are `Damaged`. A medium that is full, or may only be read, is no fault: chunks are `Refused`, and `usage` says
why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, runtime_checkable

from kv_core.extent import FileExtent
from kv_core.keys import ChunkKey
from kv_core.outcome import LoadOutcome, StoreOutcome

from kv_tiers.chunk_header import VERSION, format_id
from kv_tiers.eviction.coverage import BoundedGroups


@dataclass(frozen=True, slots=True)
class Write:
    """One chunk to keep: its header, and its payload, the first `stored_bytes` of `pages`.

    key: the chunk's name.
    parent: the chunk before it in the prompt: worthless without it, so it should leave later.
    header: `chunk_header.HEADER_BYTES` bytes.
    pages: whole pages (multiples of 4096 bytes at an address that is one), for tiers that write past the page cache.
        What lies beyond the payload means nothing.
    stored_bytes: size of the payload, at most a chunk's.
    """

    key: ChunkKey
    parent: ChunkKey | None
    header: bytes
    pages: memoryview
    stored_bytes: int

    @property
    def payload(self) -> memoryview:
        return self.pages[: self.stored_bytes]


@dataclass(frozen=True, slots=True)
class Read:
    """One chunk to bring: its header into `header`, its payload to the start of `pages`. The answer says its size
    (`Loaded`). What the rest of `pages`, and all of it unless the answer is `Loaded`, holds afterwards means nothing.

    key: the chunk's name.
    header: `chunk_header.HEADER_BYTES` bytes, writable.
    pages: whole pages with room for a chunk, writable.
    wanted_bytes: how many of the payload's first bytes are wanted, if it has so many: the largest chunk's size
        (`TierContext`) for all of it; less only for `ReadsPrefixes`.
    chunk_bytes: the size of this chunk, which is its payload's unless a codec made that; for the lane. 0: the largest.
    as_stored: the payload is wanted as it is kept, checked and not decoded; for the lane.
    """

    key: ChunkKey
    header: bytearray
    pages: memoryview
    wanted_bytes: int
    chunk_bytes: int = 0
    as_stored: bool = False

    @property
    def room(self) -> memoryview:
        return self.pages[: self.wanted_bytes]


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Present values. None: the medium does not say.

    chunks: how many are kept.
    used_bytes: what they take, as they are stored.
    capacity_bytes: what they may take.
    full: why the medium takes no more chunks (it has no room, or may only be read), as of the last store or probe;
        "" where it does. A tier that evicts for what comes is not full for that.
    """

    chunks: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    full: str = ""


@dataclass(frozen=True, slots=True)
class TierContext:
    """What every chunk of this cache has in common. A tier may serve caches of several formats at one address, and
    must keep what it stores for one from being found by another: `namespace` is different for each.

    chunk_bytes: size of the largest chunk, and the most that a payload has.
    slot_bytes: size of the pages that hold one.
    fingerprint: what a chunk's bytes mean.
    bounded: the groups of layers that do not need the whole prefix, as far as lookups have said so yet. For a tier that
        chooses what leaves (`kv_tiers.eviction.coverage`).
    """

    chunk_bytes: int
    slot_bytes: int
    fingerprint: str
    bounded: BoundedGroups = field(default_factory=BoundedGroups, compare=False, repr=False)

    @property
    def namespace(self) -> str:
        """32 hex digits for a directory or a key's prefix. Another for each version of the header too, so what another
        release stored is neither found nor touched. Codecs share it, as each header names its own."""
        return format_id(f"{VERSION} {self.chunk_bytes} {self.fingerprint}").hex()


ANY_CHUNKS: Final = TierContext(1, 4096, "")
"""The smallest there can be: what options must at least have room for."""


class Tier(Protocol):
    """One place that keeps chunks. Answers are parallel to what was asked, and every call may raise `TierDown`."""

    name: str
    """What it is called in answers, logs and metrics."""

    holds_is_local: bool
    """`holds` never waits: a dictionary and no round trip. Such a tier is asked on the engine's thread."""

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of these a load would find. It may be wrong by the time of the load, which is then `Absent`."""

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        """Bring headers and payloads; `Loaded` says how many bytes a payload has. One that is larger than a chunk is
        `Damaged`. What is wrong with one (`Damaged`, `ReadFailed`) does not spoil its neighbours."""

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        """Keep chunks. `Stored` is an acknowledgement: as durable as this tier ever makes anything.

        A chunk that is kept already is `Stored` too; which of the two copies stays is the tier's choice. In the
        prompt's order, so when room is short the first are worth most.
        """

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        """No `holds` or `load` that begins after this returns finds these."""

    def clear(self) -> None:
        """Discard everything of this namespace."""

    def probe(self) -> None:
        """Touch the medium: return if it works, raise `TierDown` if not. Asked now and then of a tier that rests."""

    def usage(self) -> TierUsage:
        """Cheap; from memory."""

    def close(self) -> None:
        """Let go of everything. No other call comes during or after it, but a second close."""


@runtime_checkable
class ClearsTenants(Protocol):
    """What a `Tier` may do besides. One that does not is cleared whole when a tenant is to be cleared."""

    def clear_tenant(self, tenant: bytes) -> None:
        """Discard everything of this namespace whose keys have this tenant's tag (`ChunkKey.tenant`)."""


@runtime_checkable
class ReadOnly(Protocol):
    """What a `Tier` may say besides: others store here, and we only read. Nothing is stored, whatever `write` says, and
    what is discarded or cleared is not found any more by us, wherever it stays."""

    is_read_only: Literal[True]


@runtime_checkable
class ReadsPrefixes(Protocol):
    """What a `Tier` may do besides: bring the beginning of a payload without the rest."""

    def load_prefixes(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        """As `load`, with any `wanted_bytes`: `Loaded` says how many bytes came, the payload's size where that is less.

        Whoever asks for `chunk_header.prefix_bytes` can check what came (`chunk_header.verify_prefix`).
        """


@dataclass(frozen=True, slots=True)
class FileLease:
    """Where chunks lie in a tier's files. Until the lease is ended, no byte of them is replaced by another chunk's. It
    does not expire by time, as its holder may still be reading. The tier has not looked at the bytes: believe them
    when their checksum is right.

    id: names the lease.
    extents: by key; None where the chunk is not here, is encoded, or does not lie in one piece. `load` brings those.
    """

    id: int
    extents: tuple[FileExtent | None, ...]


@dataclass(frozen=True, slots=True)
class FileReservation:
    """Room in a tier's files for chunks that it does not hold. Nobody finds these chunks, nor anything that was there
    before, until they are committed. What has been written by then, and that only, is theirs; a reservation does not
    expire either.

    id: names the reservation.
    extents: by key; None where there is no room in one piece, or no need of it.
    """

    id: int
    extents: tuple[FileExtent | None, ...]


@runtime_checkable
class SupportsFileExtents(Protocol):
    """What a `Tier` may do besides: let others move the bytes between its files and wherever they want them. Only
    chunks that are stored as they are can travel so; of the others a lease has no extent.

    As `load` and `store`, every call may block and may raise `TierDown`. End leases and commit reservations before
    `close`.
    """

    def lease_extents(self, keys: Sequence[ChunkKey]) -> FileLease:
        """Say where these are, with their checksums. A chunk whose bytes turn out wrong: `discard` it."""

    def end_lease(self, lease: FileLease) -> None:
        """Nobody reads these any more.

        Raises:
            MisuseError: it was ended before.
        """

    def reserve_extents(self, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> FileReservation:
        """Room for those of the keys that are neither here nor arriving, as far as there is any; it is not waited for.

        keys: in the prompt's order, each the parent of the next. parent: the first one's.
        """

    def commit_extents(self, reservation: FileReservation, checksums: Sequence[bytes | None]) -> list[StoreOutcome]:
        """The bytes are written: keep the chunks as `store` does, with its promise.

        checksums: `kv_core.checksum` of each chunk's bytes; None for one that was not written, whose room is given
        back, and where there was no room. Of these the answer is `Refused`.

        Raises:
            MisuseError: it was committed before.
        """


OptionsCheck = Callable[[Mapping[str, object]], object]
"""Raises `ConfigError` for options that cannot be honoured. It touches no medium: directories are not made, nobody is
connected to."""

TierFactory = Callable[[Mapping[str, object], TierContext], Tier]
"""What an entry point of the group `kv_tiers.tiers` names: the options that the user wrote (without `type`), and what
the chunks are. It raises `ConfigError` for options that cannot be honoured, naming the nearest valid one."""


@dataclass(frozen=True, slots=True)
class CheckedFactory:
    """A `TierFactory` that can say whether options are right before it is known what the chunks are.

    A server makes a tier when a client first registers its format. With `check`, wrong options end its start instead.
    """

    make: TierFactory
    check: OptionsCheck

    def __call__(self, options: Mapping[str, object], context: TierContext) -> Tier:
        return self.make(options, context)


def checked(check: OptionsCheck) -> Callable[[TierFactory], CheckedFactory]:
    """Of a factory, as a decorator."""
    return lambda make: CheckedFactory(make, check)
