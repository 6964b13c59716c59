"""The protocol between servers of several hosts: which chunks are there, fetching them, and which chunks engines there
hand over.

Frames and keys are those of `kv_remote.messages`. The connecting side begins, inside TLS unless both sides' settings
say that they are unprotected:

    PeerHello   ->  PeerWelcome
    PeerHolds   ->  PeerHeld
    Fetch   ->  for each key, in order, the size of a payload (`NOT_HERE` where the chunk is not there), the payload,
                and the chunk's header (docs/formats/chunk.md), which comes last so that its checksum is taken of bytes
                that are in the processor's cache, while they are sent
    staged Fetch   ->  Staging; then, unless that is empty, the same without the payloads, which are read by NIXL
                (`kv_remote.staging`), or `NOT_STAGED` where the buffer was full. They stay until the next request
    Follow  ->  Followed, as soon as there is something to report
    PeerReceived   ->  PeerHeld, of no keys
    Offer   ->  Offered: a server about to leave lists what may be fetched from it
    Sum     ->  Summed: checksums of what is here, for the directory (`directory`)
    List    ->  Listed: names of what is here, of some shards
    PeerStore   ->  PeerWanted; then the header and the payload of each chunk that is wanted, in order  ->  PeerStored
    PeerForget, PeerClear   ->  PeerHeld, of no keys

`PeerRefused` may come instead of `PeerWelcome`, and ends the conversation, as everything malformed does. A peer is
trusted no more than any medium: sizes are checked before use, and the lane that reads a chunk verifies its header and
bytes.
"""

import hmac
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from importlib.metadata import version
from math import inf
from typing import Annotated, Final, TypeVar

import msgspec
import xxhash
from kv_core.errors import InputError
from kv_core.keys import KEY_BYTES, TENANT_BYTES, ChunkKey
from kv_core.log import on_one_line
from kv_remote.messages import HEADER, Keys, Message, Name, Text, check_header, decoded, framed
from kv_remote.nixl import MAX_METADATA_BYTES
from kv_remote.timed_socket import TimedSocket
from kv_remote.tls_files import TlsFiles
from kv_tiers.tier import Write

from kv_server.directory.entries import NAME_BYTES, SHARDS, SUMS_BYTES
from kv_server.wire import Format, GroupBytes

VERSION: Final = 7
PACKAGE: Final = version("kv-tiers")
MAX_ASKED: Final = 1 << 14
"""Keys in one `PeerHolds`."""
MAX_FETCHED: Final = 1 << 8
"""Keys in one `Fetch`."""
_SLOWEST_BYTES_PER_S: Final = 1e6
MAX_REQUEST_BYTES: Final = MAX_ASKED * max(KEY_BYTES) + (1 << 10)
MAX_ANSWER_BYTES: Final = max(MAX_ASKED, MAX_METADATA_BYTES) + (1 << 13)
MAX_FOLLOWED_BYTES: Final = MAX_ASKED * (max(KEY_BYTES) + 32) + (1 << 10)
SUMMED_BYTES: Final = SUMS_BYTES + (1 << 10)
MAX_LISTED: Final = 1 << 17
"""Names in one `Listed`."""
MAX_LISTED_BYTES: Final = MAX_LISTED * NAME_BYTES + (1 << 10)
MAX_OFFERED: Final = 1 << 8
"""Chunks in one `Offer`."""
MAX_FOLLOW_S: Final = 5.0
"""How long a `Follow` may wait. Its answer may be empty."""
SIZE: Final = struct.Struct("<Q")
NOT_HERE: Final = (1 << 64) - 1
NOT_STAGED: Final = (1 << 64) - 2
_PIECE_BYTES: Final = 1 << 20
"""Fits a core's cache, so that each piece is checksummed while it is still there. Smaller pieces wake the reader more
often, which takes the core from the sender: a quarter of this size costs a tenth more processor time (Zen 4, 2
cores)."""
PROCESS: Final = secrets.token_bytes(16)
"""Identifies this process, which must not mistake itself for a peer."""
MAX_TOKEN_BYTES: Final = 512
_MAX_HELLO_BYTES: Final = 1 << 10
"""For a peer that has not been authenticated yet."""
_WAIT_S: Final = 0.1

ProcessId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Namespace = Annotated[str, msgspec.Meta(max_length=64)]


class PeerHello(Message, tag="hello"):
    """package: the version, for the log. token: of `PeerSecurity.token_file`; empty: none."""

    package: Name
    token: Annotated[bytes, msgspec.Meta(max_length=MAX_TOKEN_BYTES)]


class PeerWelcome(Message, tag="welcome"):
    """process: as for `PROCESS`."""

    package: Name
    process: ProcessId


class PeerHolds(Message, tag="holds"):
    """namespace: of `TierContext`. Without keys it only checks that the server answers."""

    namespace: Namespace
    keys: Keys


class PeerHeld(Message, tag="held"):
    """held: a byte per key, 1 if a fetch would find it.
    cleared_s: how long ago everything of this namespace was cleared there; None: never since the server started."""

    held: Annotated[bytes, msgspec.Meta(max_length=MAX_ASKED)]
    cleared_s: Annotated[float, msgspec.Meta(ge=0)] | None


class Fetch(Message, tag="fetch"):
    """staged: the payloads are read by NIXL, if that is possible."""

    namespace: Namespace
    keys: Keys
    staged: bool


Feed = Annotated[bytes, msgspec.Meta(max_length=16)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Staging(Message, tag="staging"):
    """metadata: of an agent of NIXL; empty: nothing is staged now, and nothing follows.
    address: of the first payload (`kv_remote.staging.next_place`)."""

    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
    address: Count


class Follow(Message, tag="follow"):
    """Requests what engines there have handed over since. Waits until there is something, or until the time is up.

    feed: the feed to which `after` belongs, from the last answer; empty at first.
    after: the number in that answer.
    """

    namespace: Namespace
    feed: Feed
    after: Count
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_FOLLOW_S)]


class Given(Message):
    """Chunks that a fetch would find.

    keys: of a prompt, from its first chunk up to the last of these.
    first: the place of the first of these. Not all the later ones need be there.
    hold_s: how long they are held there.
    """

    keys: Keys
    first: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ASKED)]
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Followed(Message, tag="followed"):
    """feed: empty if the server has no such cache.
    upto: where to continue.
    cleared_s: as for `PeerHeld`.
    """

    feed: Feed
    upto: Count
    given: Annotated[list[Given], msgspec.Meta(max_length=MAX_ASKED)]
    cleared_s: Annotated[float, msgspec.Meta(ge=0)] | None


class PeerReceived(Message, tag="received"):
    """These need no longer be held for the engine that they were handed over to."""

    namespace: Namespace
    keys: Keys


class Sum(Message, tag="sum"):
    """Requests the sum of each shard of what is here (`directory.entries`)."""

    namespace: Namespace


class Summed(Message, tag="summed"):
    """host: as in `entries.Entry`; empty: nothing of this namespace is listed in a directory.
    sequence: of the last change.
    sums: of each shard, 8 bytes.
    cleared_s: as for `PeerHeld`.
    """

    host: Feed
    sequence: Count
    sums: Annotated[bytes, msgspec.Meta(max_length=SUMS_BYTES)]
    cleared_s: Annotated[float, msgspec.Meta(ge=0)] | None


Shards = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=SHARDS)]], msgspec.Meta(max_length=SHARDS)]


class List(Message, tag="list"):
    """Requests all names in these shards, each of which is listed once."""

    namespace: Namespace
    shards: Shards


class Listed(Message, tag="listed"):
    """host, sequence: as for `Summed`.
    shards: how many of the requested ones are answered, from the first on.
    names: of these, 8 bytes each.
    """

    host: Feed
    sequence: Count
    shards: Annotated[int, msgspec.Meta(ge=0, le=SHARDS)]
    names: Annotated[bytes, msgspec.Meta(max_length=MAX_LISTED * NAME_BYTES)]


class Offer(Message, tag="offer"):
    """The sender is about to leave, and holds these: the peer may fetch them, subject to its own settings. Repeating
    the offer queries its progress.

    keys: of a prompt, from its first chunk up to the last of these.
    first: the place of the first of these. At most `MAX_OFFERED` are from there on.
    cleared_s: as for `PeerHeld`, of the sender.
    """

    namespace: Namespace
    keys: Keys
    first: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ASKED)]
    cleared_s: Annotated[float, msgspec.Meta(ge=0)] | None


class OfferFate(IntEnum):
    """The present state of an offered chunk."""

    NOT_TAKEN = 0
    COMING = 1
    HERE = 2
    DOUBTED = 3
    """Never taken from this sender: the peer was cleared of it since, and it may be older."""


class Offered(Message, tag="offered"):
    """fates: an `OfferFate` as a byte for each offered chunk. room: for how many more there is room."""

    fates: Annotated[bytes, msgspec.Meta(max_length=MAX_OFFERED)]
    room: Count


class PeerStore(Message, tag="store"):
    """The sender has these chunks of an engine, and stores those that the peer lacks. Without keys it only has their
    cache opened.

    group_bytes, fingerprint: the format of the chunks, of which the peer may have no cache yet.
    """

    group_bytes: GroupBytes
    fingerprint: Text
    keys: Keys

    @property
    def format(self) -> Format:
        return self.group_bytes, self.fingerprint


class PeerWanted(Message, tag="wanted"):
    """wanted: a byte per key, 1: send this chunk, 0: it is here already.
    refused: why the peer takes no chunk at all, and wants none; "" if it does."""

    wanted: Annotated[bytes, msgspec.Meta(max_length=MAX_FETCHED)]
    refused: Text


class StoreFate(IntEnum):
    """What became of a chunk that was sent."""

    REFUSED = 0
    STORED = 1
    UNSTORABLE = 2


class PeerStored(Message, tag="stored"):
    """fates: a `StoreFate` as a byte for each chunk that was sent. reason: why one is not stored; "" if all are."""

    fates: Annotated[bytes, msgspec.Meta(max_length=MAX_FETCHED)]
    reason: Text


class PeerForget(Message, tag="forget"):
    """Nobody may find these chunks any more."""

    namespace: Namespace
    keys: Keys


class PeerClear(Message, tag="clear"):
    """Nobody may find any chunk of this namespace any more. tenant: only those of this tenant's tag; empty: all."""

    namespace: Namespace
    tenant: Annotated[bytes, msgspec.Meta(max_length=TENANT_BYTES)]


class PeerRefused(Message, tag="refused"):
    text: Text


Request = (
    PeerHello | PeerHolds | Fetch | Follow | PeerReceived | Sum | List | Offer | PeerStore | PeerForget | PeerClear
)
Answer = PeerWelcome | PeerHeld | Staging | Followed | Summed | Listed | Offered | PeerWanted | PeerStored | PeerRefused

_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer)

A = TypeVar("A", PeerWelcome, PeerHeld, Staging, Followed, Summed, Listed, Offered, PeerWanted, PeerStored)


def frame(message: Request | Answer) -> bytes:
    """The message as it crosses the socket."""
    return framed(message, VERSION)


def deadline_for(payload_bytes: int, timeout_s: float) -> float:
    """Until when to wait for a payload, or for a piece of one, so that a host that is gone in its middle is noticed. A
    slow line is no fault; one on which hardly anything arrives is."""
    return time.monotonic() + timeout_s + payload_bytes / _SLOWEST_BYTES_PER_S


def unpack_keys(request: PeerHolds | Fetch | PeerReceived | Given | Offer | PeerStore | PeerForget) -> list[ChunkKey]:
    """Raises `InputError`: there are too many, or they are not keys of this release."""
    keys = request.keys.unpack()
    max_keys = MAX_FETCHED if isinstance(request, Fetch | PeerStore) else MAX_ASKED
    if len(keys) > max_keys:
        raise InputError(f"{len(keys)} keys in one request; at most {max_keys} are allowed")
    return keys


class PeerStream(TimedSocket):
    """A conversation. Every call may raise `OSError`, and `InputError` for anything that is not a message of this
    protocol."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _WAIT_S)

    def is_current(self, tls: TlsFiles | None) -> bool:
        """Whether the other side was admitted by the files as they are now: it may have been revoked since."""
        return tls is None or (isinstance(self._sock, ssl.SSLSocket) and self._sock.context is tls.current())

    def introduce(self, token: bytes, deadline: float) -> bytes:
        """The connecting side's handshake. Returns the listening process's identifier. Raises `PermissionError`: the
        peer refuses us.

        token: empty: none. It is sent, so the connection is inside TLS if there is one.
        """
        self.send_message(PeerHello(PACKAGE, token), deadline)
        return self.answer(PeerWelcome, deadline).process

    def admit(self, token: bytes, timeout_s: float) -> None:
        """The listening side's handshake. timeout_s: how long it may take in all. Raises `PermissionError`: the peer
        does not have our token."""
        deadline = time.monotonic() + timeout_s
        hello, _ = self.next_request(deadline, timeout_s, ends_by=deadline, max_bytes=_MAX_HELLO_BYTES)
        if not isinstance(hello, PeerHello):
            raise InputError("the first message is a hello")
        if not hmac.compare_digest(hello.token, token):
            raise PermissionError("this server is for peers that have its token")
        self.send_message(PeerWelcome(PACKAGE, PROCESS), deadline)

    def send_message(self, message: Request | Answer, deadline: float) -> None:
        self.send([frame(message)], deadline)

    def next_request(
        self, begins_by: float, timeout_s: float, *, ends_by: float = inf, max_bytes: int = MAX_REQUEST_BYTES
    ) -> tuple[Request, float]:
        """The next request, and the deadline of its answer.

        begins_by: the deadline of its first byte. timeout_s: the time from then on for the whole request and its
            answer. ends_by: the latest deadline of these.
        """
        first = memoryview(bytearray(HEADER.size))
        received = self.receive(first, begins_by)
        deadline = min(time.monotonic() + timeout_s, ends_by)
        self.fill(first[received:], deadline)
        body = self._body(first, max_bytes, deadline)
        return decoded(_REQUESTS, body, "not a message of a peer"), deadline

    def send_chunk(self, payload: memoryview, header: Callable[[bytes], bytes | bytearray], timeout_s: float) -> None:
        """header: makes the header to send after the payload, from its checksum (`kv_core.hashing`).
        timeout_s: as for `deadline_for`, of the payload and of each piece of it."""
        deadline = deadline_for(payload.nbytes, timeout_s)
        running = xxhash.xxh3_128()
        unsent: list[bytes | bytearray | memoryview] = [SIZE.pack(payload.nbytes)]
        for offset in range(0, payload.nbytes, _PIECE_BYTES):
            if offset:
                self.send(unsent, min(deadline, deadline_for(_PIECE_BYTES, timeout_s)))
                unsent.clear()
            piece = payload[offset : offset + _PIECE_BYTES]
            running.update(piece)
            unsent.append(piece)
        self.send([*unsent, header(running.digest())], min(deadline, deadline_for(_PIECE_BYTES, timeout_s)))

    def send_stored(self, write: Write, timeout_s: float, on_progress: Callable[[], object]) -> None:
        """The header and the payload of a chunk. Arguments as for `receive_chunk`."""
        deadline = deadline_for(write.stored_bytes, timeout_s)
        self.send([write.header], min(deadline, deadline_for(0, timeout_s)))
        for offset in range(0, write.stored_bytes, _PIECE_BYTES):
            piece = write.payload[offset : offset + _PIECE_BYTES]
            self.send([piece], min(deadline, deadline_for(piece.nbytes, timeout_s)))
            on_progress()

    def receive_chunk(self, into: memoryview, timeout_s: float, on_progress: Callable[[], object]) -> bytes:
        """Receive until `into` is full. Returns its checksum.

        timeout_s: as for `send_chunk`. on_progress: called whenever a piece has arrived.
        """
        deadline = deadline_for(into.nbytes, timeout_s)
        running = xxhash.xxh3_128()
        for offset in range(0, into.nbytes, _PIECE_BYTES):
            piece = into[offset : offset + _PIECE_BYTES]
            self.fill(piece, min(deadline, deadline_for(piece.nbytes, timeout_s)))
            on_progress()
            running.update(piece)
        return running.digest()

    def answer(self, wanted: type[A], deadline: float, *, max_bytes: int = MAX_ANSWER_BYTES) -> A:
        """The next message, of this kind. Raises `PermissionError`: the peer refuses, and says why."""
        header = memoryview(bytearray(HEADER.size))
        self.fill(header, deadline)
        message = decoded(_ANSWERS, self._body(header, max_bytes, deadline), "not a message of a peer")
        if isinstance(message, PeerRefused):
            raise PermissionError(on_one_line(message.text))  # said by whoever is there, before they prove anything
        if not isinstance(message, wanted):
            raise InputError(f"a {type(message).__name__} instead of a {wanted.__name__}")
        return message

    def _body(self, header: memoryview, max_bytes: int, deadline: float) -> bytearray:
        body = bytearray(check_header(header, version=VERSION, max_bytes=max_bytes))
        self.fill(memoryview(body), deadline)
        return body
