"""What the two processes of a live upgrade tell each other, once the new one has asked at the server's socket.

Messages are whole, and come with open descriptors. Both are processes of one user and hold the same FORMAT; so messages
are not bounded here.
"""

import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TypeVar

import msgspec
from kv_core.errors import TierDown

from kv_server import wire
from kv_server.session import OrphanImage
from kv_server.succession.image import CacheImage, PoolImage
from kv_server.wire import Format

FORMAT: Final = 8
"""The version of all that is passed on: these messages, and what is in them."""

_HEADER: Final = struct.Struct("<QI")
_AT_ONCE: Final = 128
"""Descriptors in one system call; Linux allows 253."""
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=bytes)  # of keys
_TAKEN: Final = b"T"
_REFUSED: Final = b"N"

M = TypeVar("M")


class Channel:
    """For one thread. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = (), *, within_s: float = 30.0) -> None:
        """The other process gets descriptors of its own. Raises `TierDown`: the other process has ended, or does not
        read."""
        body = encoded(message)
        try:
            self._socket.settimeout(within_s)
            self._socket.sendall(_HEADER.pack(len(body), len(descriptors)))
            for at in range(0, len(descriptors), _AT_ONCE):
                socket.send_fds(self._socket, [b"d"], descriptors[at : at + _AT_ONCE])
            self._socket.sendall(body)
        except OSError as error:
            raise TierDown(f"the other process cannot be sent anything: {error}") from None

    def receive(self, kind: type[M], *, within_s: float | None = None) -> tuple[M, list[int]]:
        """The next message, and its descriptors, which are the caller's. within_s: None: however long it takes. Raises
        `TierDown`: it does not come: the other process has ended, or says why in another message."""
        until_s = None if within_s is None else time.monotonic() + within_s
        descriptors: list[int] = []
        try:
            nbytes, count = _HEADER.unpack(self._read(_HEADER.size, until_s))
            while len(descriptors) < count:
                self._wait(until_s)
                data, some, _, _ = socket.recv_fds(self._socket, 1, _AT_ONCE)
                if not data:
                    raise TierDown("the other process has ended")
                descriptors += some
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            return decoded(self._read(nbytes, until_s), kind), descriptors
        except (OSError, TierDown, msgspec.DecodeError, UnicodeDecodeError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise TierDown(str(error) or "the other process has ended") from None

    def commit(self) -> bool:
        """Take over, unless the other process has refused it meanwhile: the kernel delivers one byte or none. False:
        it goes on serving. If it has died since its last message, without going on, this is True."""
        try:
            self._socket.settimeout(None)
            self._socket.send(_TAKEN)
        except OSError:
            with suppress(OSError):
                return self._socket.recv(1) != _REFUSED
        return True

    def is_taken(self, *, within_s: float) -> bool:
        """Wait for the other side's `commit`. False: it has not come, and fails from now on."""
        taken = b""
        with suppress(OSError):
            self._socket.settimeout(max(0.001, within_s))
            taken = self._socket.recv(1)
        if taken:
            return True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # what was delivered before can still be read
            self._socket.setblocking(False)
            taken = self._socket.recv(1)
        if not taken:
            with suppress(OSError):  # it has died, or cannot have read what it needs
                self._socket.send(_REFUSED)
        return bool(taken)

    def wait_for_end(self) -> None:
        """Wait until the other process has closed its side, which it does with its end."""
        with suppress(OSError):
            self._socket.settimeout(None)
            while self._socket.recv(1 << 10):
                pass

    def close(self) -> None:
        self._socket.close()

    def _wait(self, until_s: float | None) -> None:
        self._socket.settimeout(None if until_s is None else max(0.001, until_s - time.monotonic()))

    def _read(self, nbytes: int, until_s: float | None) -> bytes:
        data, at = memoryview(bytearray(nbytes)), 0
        while at < nbytes:
            self._wait(until_s)
            count = self._socket.recv_into(data[at:])
            if not count:
                raise TierDown("the other process has ended")
            at += count
        return bytes(data)


def encoded(message: msgspec.Struct) -> bytes:
    """With keys in it."""
    return _ENCODER.encode(message)


def decoded(body: bytes, kind: type[M]) -> M:
    """Raises `msgspec.DecodeError` and `UnicodeDecodeError`: it is not of this kind."""
    return msgspec.msgpack.decode(body, type=kind, dec_hook=lambda wanted, value: wanted(value))


QuotasSet = dict[tuple[Format | None, bytes], int | None]
"""Quotas in bytes by format (None: all) and tenant."""


class Begin(msgspec.Struct):
    """The new process has read that the old one is willing."""


class Prepared(msgspec.Struct):
    """Descriptors: of the listening socket, of its lock, of each pool and of each port.

    quotas: those that differ from the settings.
    ports: where it listens, as in its settings, by their section.
    """

    pools: list[PoolImage]
    quotas: list[tuple[Format | None, bytes, int | None]]
    ports: dict[str, str]

    def quotas_set(self) -> QuotasSet:
        return {(wanted, tenant): quota for wanted, tenant, quota in self.quotas}


class TakerReady(msgspec.Struct):
    """The new process has opened its tiers and lacks only the last part."""


class ClientImage(msgspec.Struct):
    """A client's connection. Descriptors: of the socket, and the pidfd if `has_pidfd`.

    session: its name; empty: it has none. waiting: a request that was being answered. frames: what has arrived of the
    next. unsent: what has not left.
    """

    number: int
    pid: int
    has_pidfd: bool
    is_greeted: bool
    waiting: wire.Register | wire.Explain | wire.Clear | None
    register: wire.Register | None
    session: str
    token: bytes
    frames: bytes
    unsent: bytes
    last_seen_s: float


class Remainder(msgspec.Struct):
    """The last part. The old process does nothing from here on, unless it refuses.

    caches: in the order of `Prepared.pools`. last_number: of a client. stopped_s: since when, by the monotonic clock.
    """

    caches: list[CacheImage]
    clients: list[ClientImage]
    orphans: list[OrphanImage]
    last_number: int
    stopped_s: float
