"""The protocol on the socket: a message for each verb of `CacheService` and its answer, and a few about the session.

Frames are those of `kv_remote.messages`. Lengths are checked before memory is allocated for them, and every field
against its type and bounds before it is used. `docs/formats/wire.md` specifies the protocol for other languages.

Chunks never cross the socket. Slot numbers do, of the pool whose descriptor was sent with `Pool`. Keys are sent as one
byte string, which is much cheaper to decode than an array.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Final, Literal

import msgspec
from kv_core.cost import Choice, Measured
from kv_core.coverage import ChunkShape, Coverage
from kv_core.errors import InputError
from kv_core.keys import KEY_BYTES, ChunkKey
from kv_core.service import CacheCounts, LookupOptions, StoreOptions
from kv_observe.chunk_state import ChunkState, GroupState
from kv_remote.messages import HEADER, MAX_KEYS, Keys, Message, Name, Text, check_header, decoded, framed, pack_keys
from kv_tiers.payload_sizes import MAX_GROUPS

from kv_server.report import DirectoryState, Registration, ReloadReport, Report

__all__ = ("HEADER", "MAX_KEYS", "Keys", "pack_keys")

VERSION: Final = 15
"""Of the protocol. Both sides must speak the same; the package's version may differ."""

MAX_EXPLAINED: Final = 1 << 12
"""Chunks of a prompt that are explained in one answer."""
MAX_EXPLAINED_PREFIXES: Final = 1 << 10
MAX_EXPLAINED_KEYS: Final = 1 << 18
"""For how many groups and shards of each of them a request may ask, and for how many keys in all."""
MAX_ALLOCATED: Final = 1 << 12
"""Requests whose blocks, or estimates whose outcomes, one message reports."""
MAX_REQUEST_BYTES: Final = MAX_KEYS * max(KEY_BYTES) + (1 << 20)
MAX_ANSWER_BYTES: Final = MAX_REQUEST_BYTES

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
GroupBytes = Annotated[
    tuple[Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)], ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)
]
"""By group, the size of its chunks."""
Format = tuple[tuple[int, ...], str]
"""The chunk size in bytes of each group of layers, and the fingerprint of what the bytes mean."""
CoverageText = Annotated[str, msgspec.Meta(max_length=32)]
Facts = Annotated[dict[Name, Text], msgspec.Meta(max_length=32)]

# The facts of a client that its server reads. All others are for the engine's own processes. A server ignores those
# that it does not know, so a new one needs no other version of the protocol.
CHUNK_TOKENS: Final = "chunk_tokens"
"""Tokens of its chunks, in decimal digits."""
MODEL_NAME: Final = "model_name"
"""Its model, as the engine was told: a directory or a hub's name."""
REPEATS_LOOKUPS: Final = "repeats_lookups"
"""Another process of the engine looks the same prompts up, as other ranks of SGLang do."""
READS_TOGETHER: Final = "reads_together"
"""Other processes of the engine read the same chunks. So no read of theirs ends a hold: one of them says when all have
read (`received`)."""
UNPINNED: Final = "unpinned"
"""It never registers the pool's memory with a device, so memory that is not in use may be freed."""


@lru_cache(64)
def _shape(chunk_tokens: int, coverages: tuple[str, ...], shards: int) -> ChunkShape:
    return ChunkShape(chunk_tokens, tuple(map(Coverage.parse, coverages)), shards)


# Requests: about the session.


class Hello(Message, tag="hello"):
    """The first message. package: the client's version, for the log."""

    package: Name


class Register(Message, tag="register"):
    """Declares the format of this session's chunks. Answered by `Pool`, together with the pool's descriptor.

    engine: the engine of this process. What follows may be requested by its other processes (`Registered`).
    group_bytes, fingerprint: the format of the chunks, with each group's size.
    shards: number of shards of each chunk.
    facts: opaque to the server, but for those above.
    resume: the token of this client's previous session, if any.
    lasting: the leases of that session that do not end with its connection and that the client still has: those to
        write, and lasting ones to read. The server releases all its others.
    forgotten: keys that were forgotten while the server was unreachable. Applied before this session's first lookup.
    is_cleared: the whole cache was cleared meanwhile.
    """

    engine: Name
    group_bytes: GroupBytes
    fingerprint: Text
    shards: Annotated[int, msgspec.Meta(gt=0, le=65535)]
    facts: Facts
    resume: Annotated[bytes, msgspec.Meta(max_length=16)]
    lasting: list[Number]
    forgotten: Keys
    is_cleared: bool

    @property
    def format(self) -> Format:
        return self.group_bytes, self.fingerprint


class Unregister(Message, tag="unregister"):
    """Releases everything of this session: the client holds nothing, and copies nothing any more."""


class Registered(Message, tag="registered"):
    """Which sessions an engine has registered; those of all engines if it is not named."""

    engine: Name


class Ping(Message, tag="ping"):
    pass


class Status(Message, tag="status"):
    pass


class Drain(Message, tag="drain"):
    """Have all caches offer their chunks to other hosts and take no new ones; or have them take new ones again.

    is_begun: True for the first, False for the second.
    timeout_s: how long it may take.
    max_bytes: how much may be moved, of each cache; None: all.
    """

    is_begun: bool
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    max_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None


class Freeze(Message, tag="freeze"):
    """Have all caches store nothing new and evict nothing, or do so again.

    is_begun: True for the first, False for the second.
    """

    is_begun: bool


class Reload(Message, tag="reload"):
    """Have the server read its settings again. take_over: have another process take over, with all of them; that ends
    this connection."""

    take_over: bool


class TakeOver(Message, tag="take_over"):
    """Have the server pass everything on to this process, which takes its place. `Done`: it is willing, and the
    connection has another protocol from now on (`kv_server.succession`).

    format: the version of what is passed on.
    """

    format: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    package: Name


class Explain(Message, tag="explain"):
    """Queries what happened to a prompt's chunks, in every key space and tenant that the caches remember.

    digest_bytes: size of one digest.
    digests: of its chunks from the first, concatenated.
    key_prefixes: what precedes the digest in their keys, one for each group and shard, if the client knows them.
    """

    digest_bytes: Literal[16, 32]
    digests: Annotated[bytes, msgspec.Meta(max_length=MAX_EXPLAINED * 32)]
    key_prefixes: Annotated[
        list[Annotated[bytes, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=MAX_EXPLAINED_PREFIXES)
    ]

    def unpack(self) -> tuple[list[bytes], list[bytes]]:
        """Digests and key prefixes. Raises `InputError`: they do not make keys of this release, or too many."""
        nbytes, joined = self.digest_bytes, self.digests
        if len(joined) % nbytes:
            raise InputError(f"{len(joined)} bytes are no digests of {nbytes} bytes")
        if (keys := len(joined) // nbytes * len(self.key_prefixes)) > MAX_EXPLAINED_KEYS:
            raise InputError(f"{keys} keys to explain; at most {MAX_EXPLAINED_KEYS} are allowed")
        for prefix in self.key_prefixes:
            ChunkKey.from_bytes(prefix + bytes(nbytes))
        return [joined[at : at + nbytes] for at in range(0, len(joined), nbytes)], self.key_prefixes


# Requests: the verbs of `CacheService`, with its words.


class Lookup(Message, tag="lookup"):
    """chunk_tokens, coverages, shards: a `ChunkShape`, with each group's `Coverage` as text."""

    keys: Keys
    holder: Name
    chunk_tokens: Annotated[int, msgspec.Meta(gt=0, lt=1 << 32)]
    coverages: Annotated[tuple[CoverageText, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    shards: Annotated[int, msgspec.Meta(gt=0, le=65535)]
    options: LookupOptions

    def shape(self) -> ChunkShape:
        """Raises `InputError`: there is no such coverage."""
        return _shape(self.chunk_tokens, self.coverages, self.shards)


class Renew(Message, tag="renew"):
    holder: Name


class Load(Message, tag="load"):
    """lasting: the lease does not end with time or with the connection."""

    keys: Keys
    holder: Name
    lasting: bool


class BeginStore(Message, tag="begin_store"):
    keys: Keys
    holder: Name
    options: StoreOptions


class Commit(Message, tag="commit"):
    lease: Number


class Release(Message, tag="release"):
    lease: Number


class Forget(Message, tag="forget"):
    keys: Keys


class End(Message, tag="end"):
    holder: Name


class Allocated(Message, tag="allocated"):
    """Blocks that the engine allocated, by holder. Not answered, like the next message."""

    blocks: Annotated[dict[Name, Number], msgspec.Meta(max_length=MAX_ALLOCATED)]


class MeasuredSamples(Message, tag="measured"):
    samples: Annotated[list[Measured], msgspec.Meta(max_length=MAX_ALLOCATED)]


class Received(Message, tag="received"):
    """Chunks that were held for another engine and are no longer needed. Not answered."""

    keys: Keys


class TurnEnded(Message, tag="turn_ended"):
    """Chunks of a prompt. Not answered."""

    keys: Keys


class Retainable(Message, tag="retainable"):
    """Chunks of a prompt."""

    keys: Keys


class Clear(Message, tag="clear"):
    pass


class Counts(Message, tag="counts"):
    pass


class ChangesSince(Message, tag="changes_since"):
    """What entered and left the pool. upto: from the last answer, 0 at first."""

    upto: Number


Watched = Allocated | MeasuredSamples
Stored = BeginStore | Commit | Release | Forget | Received | TurnEnded
Verb = Lookup | Renew | Load | Stored | Retainable | End | Watched | Clear | Counts | ChangesSince
Operation = Ping | Status | Drain | Freeze | Reload | TakeOver | Explain
Request = Hello | Register | Unregister | Registered | Operation | Verb

# Answers.


FailedKind = Literal["misuse", "refused", "malformed", "fault"]


class Failed(Message, tag="failed"):
    """misuse: a bug of the client; the session continues. Everything else ends it."""

    kind: FailedKind
    text: str


class Welcome(Message, tag="welcome"):
    package: Name
    pid: int


class Pool(Message, tag="pool"):
    """The answer to a registration.

    name: unique to this pool, never reused.
    group_bytes, slots: its dimensions.
    token: to resume this session.
    lasting: the leases that were resumed.
    is_watched: a subscriber wants to know about allocated blocks.
    tiers: the names of the cache's tiers, the pool first.
    lease_s: how long its leases last.
    """

    name: str
    group_bytes: GroupBytes
    slots: int
    token: bytes
    lasting: list[int]
    is_watched: bool
    tiers: tuple[str, ...]
    lease_s: float


class Done(Message, tag="done"):
    """Also the answer to a ping."""


class Truth(Message, tag="truth"):
    value: bool


class Planned(Message, tag="planned"):
    """A `LookupPlan`: with the name of its `Ended`."""

    chunks: int
    ended: str
    tiers: tuple[str, ...]
    prefix_chunks: int
    lacking: int
    choice: Choice | None


class ReadLeased(Message, tag="read_leased"):
    """A read lease, or none.

    lease: 0: the load has failed.
    slots: of the keys of the call, in their order.
    missing: the keys that are not held; empty if nothing was looked up, because this session holds as much as one may.
    reason: of the failure.
    """

    lease: int
    slots: list[int]
    missing: Keys
    reason: str


class WriteLeased(Message, tag="write_leased"):
    """A write lease, or none.

    lease: 0: there is none.
    places: which of the keys of the call got room.
    slots: where to write those.
    refused: why others got none.
    """

    lease: int
    places: list[int]
    slots: list[int]
    refused: str


class Fitting(Message, tag="fitting"):
    """How many leading keys."""

    keys: Number


class Counted(Message, tag="counted"):
    counts: CacheCounts


@dataclass(frozen=True, slots=True)
class Explained:
    """A prompt as chunks of one cache, key space and tenant. Listed only if something of it is held or remembered
    there.

    group_bytes, fingerprint: the cache's format.
    space, tenant: as in the chunks' keys, hex.
    engines: those that have registered this format.
    was_asked: the request's key prefixes have this space and tenant.
    shares: known number of groups and shards of each chunk.
    held: leading chunks that would hit, in whatever tier they are.
    prefix: leading chunks that are held for the groups that need the whole prefix.
    lacking: the groups that lack something for a hit of that length.
    remote_tiers_skipped: names of tiers that were not queried because they are remote.
    states: runs of chunks, of the groups that need the whole prefix; is_cut: the last ones are left out.
    choice: whether loading pays now, with the costs of the engine that looked up last.
    directories: what tiers with a directory know of other hosts, by the tier's name.
    """

    group_bytes: tuple[int, ...]
    fingerprint: str
    space: str
    tenant: str
    engines: list[str]
    was_asked: bool
    shares: int
    held: int
    prefix: int
    lacking: list[GroupState]
    remote_tiers_skipped: list[str]
    states: list[ChunkState]
    is_cut: bool
    choice: Choice | None
    directories: dict[str, DirectoryState] = field(default_factory=dict)


class Explanations(Message, tag="explanations"):
    """What is known about a prompt.

    caches: number of caches.
    history_keys: how many keys the history may remember; 0: there is none.
    remembered_s: age of the history.
    is_whole: nothing has been dropped from it since.
    explained: the caches, key spaces and tenants in which anything about the prompt is known.
    """

    caches: int
    history_keys: int
    remembered_s: float
    is_whole: bool
    explained: list[Explained]


class KeyChange(Message):
    """entered: whether these keys can be found from now on, or no longer. No keys: everything has left."""

    entered: bool
    keys: Keys


class Changed(Message, tag="changed"):
    """upto, is_whole, changes: as for `kv_tiers.events.changes.Changes`."""

    upto: int
    is_whole: bool
    changes: list[KeyChange]


class Registrations(Message, tag="registrations"):
    sessions: list[Registration]


class Stated(Message, tag="stated"):
    report: Report


class Reloaded(Message, tag="reloaded"):
    report: ReloadReport


Answer = (
    Failed
    | Welcome
    | Pool
    | Done
    | Truth
    | Planned
    | ReadLeased
    | WriteLeased
    | Fitting
    | Counted
    | Changed
    | Registrations
    | Stated
    | Reloaded
    | Explanations
)

_REQUESTS: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def frame(message: Request | Answer) -> bytes:
    """The message as it crosses the socket."""
    return framed(message, VERSION)


def read_request(body: bytes) -> Request:
    """Raises `InputError`: it is not one of the requests, within its bounds."""
    return decoded(_REQUESTS, body, "not a request")


def read_answer(body: bytes) -> Answer:
    """Raises `InputError`: it is not one of the answers."""
    return decoded(_ANSWERS, body, "not an answer")


class Frames:
    """Takes bytes as they arrive, and yields whole messages. Holds at most one frame of `max_bytes`, and the last
    read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arrived = bytearray()

    def feed(self, data: bytes) -> None:
        self._arrived += data

    @property
    def arrived(self) -> bytes:
        """What has arrived and was not read."""
        return bytes(self._arrived)

    def next(self) -> bytes | None:
        """The next message's body; None: it has not fully arrived. Raises `InputError`: another version of the
        protocol, or longer than is allowed."""
        if len(self._arrived) < HEADER.size:
            return None
        nbytes = check_header(self._arrived, version=VERSION, max_bytes=self._max_bytes)
        end = HEADER.size + nbytes
        if len(self._arrived) < end:
            return None
        body = bytes(memoryview(self._arrived)[HEADER.size : end])
        del self._arrived[:end]
        return body
