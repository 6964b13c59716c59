"""What the two engines of a hand-over tell each other, as the frames of a message.

SGLang names a request by the number of its room, which a later request may be given while messages about the first are
still on their way: a router may repeat a request with the same number. So the decode engine draws an attempt for each
request, and every message about the request has it. What comes with another attempt is about an earlier request.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortNotification

STATUS: Final = b"KV_STATUS"
READY: Final = b"KV_READY"
PAGES: Final = b"KV_PAGES"
ABORTED: Final = b"KV_ABORTED"
_STATUS_FRAMES: Final = 5
"""SGLang's own: tag, room, status, rank, reason. The attempt follows them."""


def new_attempt() -> bytes:
    """One that no other request has."""
    return secrets.token_bytes(8)


@dataclass(slots=True)
class DecodePeer:
    """A rank of a decode engine that waits for a request. The names are those that SGLang's classes look for.

    prefix_tokens: those that it has already.
    attempt: its latest.
    """

    endpoint: str
    dst_port: int
    prefix_tokens: int
    is_dummy: bool
    attempt: bytes

    @property
    def address(self) -> str:
        return f"{self.endpoint}:{self.dst_port}"


@dataclass(frozen=True, slots=True)
class DecodeReady:
    """A decode engine has blocks for a prompt. required: how many of its ranks say so."""

    room: int
    required: int
    peer: DecodePeer

    def frames(self) -> list[bytes]:
        peer = self.peer
        numbers = peer.dst_port, peer.prefix_tokens, self.required, peer.is_dummy
        return [
            READY,
            b"%d" % self.room,
            peer.attempt,
            peer.endpoint.encode("ascii"),
            *(b"%d" % each for each in numbers),
        ]

    @classmethod
    def read(cls, message: Sequence[bytes]) -> "DecodeReady":
        _, room, attempt, endpoint, port, prefix, required, dummy = message
        peer = DecodePeer(endpoint.decode("ascii"), int(port), int(prefix), dummy == b"1", attempt)
        return cls(int(room), int(required), peer)


@dataclass(frozen=True, slots=True)
class DecodeAborted:
    """A rank of a decode engine has given up a request. address: its own. attempt: None: not known."""

    room: int
    address: str
    attempt: bytes | None

    @classmethod
    def read(cls, message: Sequence[bytes]) -> "DecodeAborted | None":
        """None: it is another message."""
        if message[0] == ABORT_TAG:  # SGLang's own, where it does not ask the receiver for it
            abort = AbortNotification.from_zmq(list(message))
            return None if abort is None else cls(abort.room, f"{abort.decode_ip}:{abort.decode_port}", None)
        if message[0] != ABORTED:
            return None
        _, room, attempt, address = message
        return cls(int(room), address.decode("ascii"), attempt)

    def frames(self) -> list[bytes]:
        assert self.attempt is not None
        return [ABORTED, b"%d" % self.room, self.attempt, self.address.encode("ascii")]


@dataclass(frozen=True, slots=True)
class PagesStored:
    """What a rank of a prefill engine says of a prompt.

    pages: how many of its pages are in the cache.
    last: the name of the last of them.
    weights: the revision of the weights with which they were computed.
    metadata: SGLang's, with the last page.
    """

    room: int
    attempt: bytes
    rank: int
    pages: int
    last: str
    weights: str
    metadata: Sequence[bytes]

    def frames(self) -> list[bytes]:
        numbers = [b"%d" % each for each in (self.rank, self.pages)]
        names = self.last.encode("ascii"), self.weights.encode()
        return [PAGES, b"%d" % self.room, self.attempt, *numbers, *names, *self.metadata]

    @classmethod
    def read(cls, message: Sequence[bytes]) -> "PagesStored":
        _, room, attempt, rank, pages, last, weights, *metadata = message
        return cls(int(room), attempt, int(rank), int(pages), last.decode("ascii"), weights.decode(), metadata)


def attempt_of_status(message: Sequence[bytes]) -> bytes:
    """The attempt that SGLang's message of a status is about; empty if it does not say."""
    return message[_STATUS_FRAMES] if len(message) > _STATUS_FRAMES else b""
