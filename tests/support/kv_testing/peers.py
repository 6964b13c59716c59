"""Peers for tests: real servers that other hosts may read, and a fake one that answers as a test tells it."""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import pytest
from kv_core.errors import InputError
from kv_core.keys import ChunkKey
from kv_server.directory.entries import SUMS_BYTES
from kv_server.peers import hosts as peer_hosts
from kv_server.peers.wire import Listed, PeerHeld, PeerHolds, PeerStream, Request, Sum, Summed, unpack_keys
from kv_server.report import PeersServed
from kv_tiers.cache.local import LocalCache
from kv_tiers.chunk_header import HEADER_BYTES, check, format_id
from kv_tiers.config import PeersConfig
from kv_tiers.testing.tier_contract import aligned_pages, content
from kv_tiers.tier import Read, TierContext

from kv_testing.cache_servers import ThreadedServer
from kv_testing.wait import joined

PATIENT: Final = {"connect_timeout_s": 10.0, "answer_timeout_s": 10.0, "unprotected": True}
"""Settings of a peers tier without certificates, on a busy machine, where an answer may take longer than the default of
half a second."""


def own_nobody(patch: pytest.MonkeyPatch) -> None:
    """Let tiers of this process treat servers of this process as peers."""
    patch.setattr(peer_hosts, "PROCESS", bytes(16))


def listening(slots: int = 8, *, peers: Mapping[str, object] | None = None, **options: object) -> ThreadedServer:
    """A server on a thread that peers may ask, at a free port. peers: settings of that section."""
    config = PeersConfig(**{"listen": "127.0.0.1:0", "unprotected": True, **(peers or {})})  # type: ignore[arg-type]
    return ThreadedServer(slots, peers=config, **options)  # type: ignore[arg-type]


def address_of(server: ThreadedServer) -> str:
    return str(server.server.peers_address)


def served_by(server: ThreadedServer) -> PeersServed:
    """The server's counts of what it served to peers."""
    served = server.report().peers
    assert served is not None
    return served


def reads_of(context: TierContext, keys: Sequence[ChunkKey]) -> list[Read]:
    """Reads as a lane makes them."""
    return [
        Read(key, bytearray(HEADER_BYTES), aligned_pages(context.slot_bytes), context.chunk_bytes, context.chunk_bytes)
        for key in keys
    ]


def is_whole(context: TierContext, read: Read) -> bool:
    """Whether what arrived is what `content` makes for the key, and its header says so."""
    chunk = read.pages[: context.chunk_bytes]
    damage = check(read.header, chunk, key=read.key, format_id=format_id(context.fingerprint))
    return damage is None and chunk == content(read.key, context.chunk_bytes)


def promoted(cache: LocalCache, keys: Sequence[ChunkKey]) -> int:
    """How many chunks are promoted into the pool; each has the bytes that `content` makes for its key."""
    chunks = cache.admin.warm_up(keys, "test", timeout_s=10.0)
    cache.admin.unpin("test")
    for key in keys[:chunks]:
        slot = cache._index.find(key)
        assert slot is not None
        nbytes = cache.pool.sizes.of(key)
        assert cache.pool.chunk(slot, nbytes) == content(key, nbytes)
    return chunks


class FakePeer:
    """Says of every chunk that it has it, and then what `answer` says: it gets each request that is no `Holds`."""

    def __init__(self, answer: Callable[[PeerStream, Request], None]) -> None:
        self._answer = answer
        self.asked: list[Request] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hold(self, request: PeerHolds) -> bytes:
        """What it answers: one byte per key."""
        return b"\1" * len(unpack_keys(request))

    def close(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        joined(*self._threads)
        for sock in self._sockets:
            sock.close()

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._sockets.append(sock)
                self._run(self._converse_on, sock)

    def _converse_on(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, InputError):
            self._converse(PeerStream(sock))

    def _converse(self, stream: PeerStream) -> None:
        stream.admit(b"", 10)
        while True:
            request, deadline = stream.next_request(time.monotonic() + 60, 60)
            self.asked.append(request)
            if isinstance(request, PeerHolds):
                stream.send_message(PeerHeld(self.hold(request), None), deadline)
            else:
                self._answer(stream, request)


def slow_lister(host: bytes) -> FakePeer:
    """A peer of which all differs from what is known, and which lists it one shard at a time: each of its answers comes
    in time, and there would be thousands.

    host: its id in the directory.
    """

    def answer(stream: PeerStream, request: Request) -> None:
        time.sleep(0.01)
        is_sum = isinstance(request, Sum)
        says = Summed(host, 5, b"\1" * SUMS_BYTES, None) if is_sum else Listed(host, 5, 1, b"")
        stream.send_message(says, time.monotonic() + 5)

    return FakePeer(answer)
