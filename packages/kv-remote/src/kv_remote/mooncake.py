"""Chunks in a Mooncake Store: memory of many hosts behind one master, over TCP or RDMA, by Mooncake's own client.

    <prefix>/<namespace>/<the key's path>       the header, then the payload

One object holds one chunk. The store evicts by its own rules, so a stored chunk may be gone: a miss. Nor can every
object that the master lists be read: when a node dies, the master still lists its objects for some seconds, and each
read of one takes a second to fail. So a node that has failed is excluded for a while: its chunks are absent at once,
and those of other nodes are served.

Mooncake's client may only write to memory that is registered with it. Chunks therefore pass through buffers of this
tier, one copy more than the network needs, instead of registering the host pool where every holder of its descriptors
could write.

https://kvcache-ai.github.io/Mooncake/ has the store's design and how to start a master.
"""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, Refused, Stored, StoreOutcome, Unstorable
from kv_tiers.chunk_header import HEADER_BYTES
from kv_tiers.config import SomeSeconds, Timeout
from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.tier import Read, TierContext, TierUsage, Write, why_full
from numpy.typing import NDArray

from kv_remote.factories import factory_of
from kv_remote.host_port import read_host_port

# Mooncake's error codes (mooncake-store/include/types.h) that are handled specially here.
_NO_ROOM: Final = -200
_INVALID: Final = -600  # also of a buffer that is too small for what is read
_NOT_FOUND: Final = -704
_EXISTS: Final = -705
_TRANSFER_FAILED: Final = -800
_QUOTA: Final = -1700
_OF_ONE_OBJECT: Final = range(-799, -699)
"""Codes of one object's state: not there, being written or moved, leased."""

_LOCAL_BUFFER_BYTES: Final = 16 << 20
"""Memory that Mooncake's client allocates for itself; we read and write through our own buffers."""
_BUFFERS_S: Final = 30.0
"""How long a call waits for other transfers to end."""


class MooncakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which store, and what this process adds to it."""

    master: str
    """host:port of `mooncake_master`."""
    prefix: str = "kv"
    metadata: str = "P2PHANDSHAKE"
    """How nodes find each other: addresses in their own messages, or the URL of a metadata server."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    rdma_devices: str = ""
    """Names, separated by commas; empty: Mooncake chooses."""
    local_host: str = ""
    """The name or address by which other nodes reach this host; empty: the address from which the master is reached."""
    contribute_bytes: int = 0
    """Memory that this process contributes to the store."""
    transfers: int = 8
    """Chunks in flight at once, over all calls. Each has a buffer of a chunk's size."""
    connect_timeout_s: Timeout = 2.0
    dead_node_s: SomeSeconds = 30.0
    """How long a node that did not answer is excluded."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", self.prefix):
            raise ValueError("prefix must be a path of names of letters, digits, _ and -")
        if self.transfers < 1 or self.contribute_bytes < 0:
            raise ValueError("transfers must be positive, and contribute_bytes not negative")


_Buffer = NDArray[np.uint8]
"""Room for one object, registered with Mooncake: header and payload, [HEADER_BYTES + chunk_bytes]."""


@dataclass(slots=True)
class _Joined:
    """A client that has joined the store, and the buffers registered with it that are free. calls: that use it now; the
    last of them closes one that was left."""

    client: Any
    free: list[_Buffer]
    calls: int = 0
    is_left: bool = False


class MooncakeTier:
    """Safe to call from any thread. Nothing is connected before the first call."""

    name = "mooncake"
    holds_is_local = False

    def __init__(self, config: MooncakeConfig, context: TierContext) -> None:
        """Raises `ConfigError`."""
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise ConfigError(
                f"mooncake: a Mooncake Store needs Mooncake's client ({error}); pip install 'kv-remote[mooncake]', and "
                "on Debian apt install libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1"
            ) from error
        self._make_client: Callable[[], Any] = MooncakeDistributedStore
        self._placement: Any = ReplicateConfig()
        self._config = config
        self._master = read_host_port(config.master, "mooncake: master")
        self._prefix = f"{config.prefix}/{context.namespace}"
        self._object_bytes = HEADER_BYTES + context.chunk_bytes
        self._connecting = threading.Lock()
        self._current: _Joined | None = None
        self._buffers_changed = threading.Condition()
        self._excluded: dict[str, float] = {}  # nodes that failed, and when each is retried
        self._no_stores_until = 0.0
        self._full = ""

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if not keys:
            return []
        names = [self._name(key) for key in keys]
        codes = self._call("batch_is_exist", names)
        are_there = [code not in _OF_ONE_OBJECT and _checked(code) == 1 for code in codes]
        lost = self._lost([name for name, is_there in zip(names, are_there, strict=True) if is_there])
        return [is_there and name not in lost for name, is_there in zip(names, are_there, strict=True)]

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        outcomes: list[LoadOutcome] = []
        while len(outcomes) < len(reads):
            remaining = reads[len(outcomes) :]
            with self._borrow_buffers(len(remaining)) as (client, buffers):
                outcomes += self._load(client, remaining[: len(buffers)], buffers)
        return outcomes

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        outcomes: list[StoreOutcome] = []
        while len(outcomes) < len(writes):
            remaining = writes[len(outcomes) :]
            with self._borrow_buffers(len(remaining)) as (client, buffers):
                outcomes += self._store(client, remaining[: len(buffers)], buffers)
        if outcomes:
            self._full = why_full(outcomes)
        return outcomes

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        self._remove([self._name(key) for key in keys])

    def clear(self) -> None:
        self._remove_below(self._prefix)

    def clear_tenant(self, tenant: bytes) -> None:
        self._remove_below(f"{self._prefix}/[^/]+/{tenant.hex()}")

    def probe(self) -> None:
        # A restarted master has forgotten this client, so a connection that failed is replaced.
        self._reach_master()
        with self._joined() as joined:
            has_failed = joined.client.batch_is_exist([f"{self._prefix}/probe"])[0] < 0
        if has_failed:
            with self._connecting:
                if self._current is joined:
                    self._leave()
            raise TierDown("the master does not answer")

    def usage(self) -> TierUsage:
        return TierUsage(full=self._full)

    def close(self) -> None:
        with self._connecting:
            self._leave()

    def _name(self, key: ChunkKey) -> str:
        return f"{self._prefix}/{key.path()}"

    def _load(self, client: Any, reads: Sequence[Read], buffers: Sequence[_Buffer]) -> list[LoadOutcome]:
        names = [self._name(read.key) for read in reads]
        lost = self._lost(names)
        wanted = [(name, buffer) for name, buffer in zip(names, buffers, strict=True) if name not in lost]
        addresses = [buffer.ctypes.data for _, buffer in wanted]
        answers = client.batch_get_into([name for name, _ in wanted], addresses, [self._object_bytes] * len(wanted))
        sizes: dict[str, int] = dict(zip((name for name, _ in wanted), answers, strict=True))
        self._exclude_nodes([name for name, size in sizes.items() if size == _TRANSFER_FAILED])
        return [
            self._received(read, name, sizes.get(name, _NOT_FOUND), buffer)
            for read, name, buffer in zip(reads, names, buffers, strict=True)
        ]

    def _received(self, read: Read, name: str, size: int, buffer: _Buffer) -> LoadOutcome:
        if size in _OF_ONE_OBJECT or size == _TRANSFER_FAILED:
            return Absent()
        if size == _INVALID or 0 <= size <= HEADER_BYTES:
            self._remove([name])
            return Damaged("an object whose size cannot be a chunk's")
        payload_bytes = min(_checked(size) - HEADER_BYTES, read.wanted_bytes)
        read.header[:] = bytes(buffer[:HEADER_BYTES])
        # Does not hold the interpreter's lock, which assigning to a memoryview would.
        np.copyto(
            np.frombuffer(read.pages, np.uint8)[:payload_bytes],
            buffer[HEADER_BYTES : HEADER_BYTES + payload_bytes],
        )
        return Loaded(payload_bytes)

    def _store(self, client: Any, writes: Sequence[Write], buffers: Sequence[_Buffer]) -> list[StoreOutcome]:
        if time.monotonic() < self._no_stores_until:
            return [Refused("a node of the store does not answer")] * len(writes)
        for write, buffer in zip(writes, buffers, strict=True):
            buffer[:HEADER_BYTES] = np.frombuffer(write.header, np.uint8)
            np.copyto(buffer[HEADER_BYTES : HEADER_BYTES + write.stored_bytes], np.frombuffer(write.payload, np.uint8))
        answers = client.batch_put_from(
            [self._name(write.key) for write in writes],
            [buffer.ctypes.data for buffer in buffers[: len(writes)]],
            [HEADER_BYTES + write.stored_bytes for write in writes],
            self._placement,
        )
        return [self._stored(code) for code in answers]

    def _stored(self, code: int) -> StoreOutcome:
        if code == _TRANSFER_FAILED:
            # The master forgets a dead node only after some seconds, and assigns new objects to it until then.
            self._no_stores_until = time.monotonic() + self._config.dead_node_s / 3
            return Refused("a node of the store does not answer")
        if code in (_NO_ROOM, _QUOTA):
            return Refused("the store has no room")
        if code == _INVALID or (code in _OF_ONE_OBJECT and code != _EXISTS):
            return Unstorable(f"the store does not take an object of up to {self._object_bytes} bytes: error {code}")
        if code != _EXISTS:
            _checked(code)
        return Stored()

    def _remove(self, names: Sequence[str]) -> None:
        if names:
            for code in self._call("batch_remove", list(names), True):  # True: even if it was read recently
                if code != _NOT_FOUND:
                    _checked(code)

    def _remove_below(self, path: str) -> None:
        _checked(self._call("remove_by_regex", f"^{path}/.*", True))

    # Nodes that do not answer.

    def _lost(self, names: Sequence[str]) -> set[str]:
        """Those of the names whose copies are all on excluded nodes. No round trip while no node is excluded."""
        now = time.monotonic()
        dead = {node for node, until in list(self._excluded.items()) if now < until}
        if not dead or not names:
            return set()
        copies = self._call("batch_get_replica_desc", list(names))
        return {name for name, replicas in copies.items() if _nodes(replicas) and _nodes(replicas) <= dead}

    def _exclude_nodes(self, names: Sequence[str]) -> None:
        """Exclude the nodes that hold these: a transfer from them has just failed."""
        if names:
            now = time.monotonic()
            until = now + self._config.dead_node_s
            for replicas in self._call("batch_get_replica_desc", list(names)).values():
                self._excluded |= dict.fromkeys(_nodes(replicas), until)
            # A restarted node counts as a new one, so entries of former nodes are dropped when their time is over.
            self._excluded = {node: retry_at for node, retry_at in list(self._excluded.items()) if now < retry_at}

    # The connection.

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._joined() as joined:
            return getattr(joined.client, method)(*arguments)

    @contextmanager
    def _joined(self) -> Iterator[_Joined]:
        """The client of now, which is not closed meanwhile: Mooncake's crashes if it is."""
        with self._connecting:
            joined = self._current = self._current or self._join()
            joined.calls += 1
        try:
            yield joined
        finally:
            with self._connecting:
                joined.calls -= 1
                self._close_if_left(joined)

    def _leave(self) -> None:
        """Under the lock. The next call joins again."""
        left, self._current = self._current, None
        if left is not None:
            with self._buffers_changed:
                left.is_left = True
                self._buffers_changed.notify_all()
            self._close_if_left(left)

    def _close_if_left(self, joined: _Joined) -> None:
        if joined.is_left and not joined.calls:
            joined.client.close()

    def _join(self) -> _Joined:
        config = self._config
        # Mooncake's client tries for a minute and a half to reach a master that is not there.
        address = self._reach_master()
        client = self._make_client()
        code = client.setup(
            config.local_host or address,
            config.metadata,
            config.contribute_bytes,
            _LOCAL_BUFFER_BYTES,
            config.protocol,
            config.rdma_devices,
            config.master,
        )
        if code:
            raise TierDown(f"Mooncake's client could not join the store at {config.master}: error {code}")
        buffers = []
        for _ in range(config.transfers):
            buffer = np.frombuffer(chunk_memory(self._object_bytes), np.uint8)
            if code := client.register_buffer(buffer.ctypes.data, self._object_bytes):
                client.close()
                raise TierDown(f"Mooncake's client could not register a buffer of {self._object_bytes} bytes: {code}")
            buffers.append(buffer)
        return _Joined(client, buffers)

    def _reach_master(self) -> str:
        """The address of this host from which the master is reached."""
        try:
            master = (self._master.host, self._master.port)
            with socket.create_connection(master, timeout=self._config.connect_timeout_s) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            raise TierDown(f"no master at {self._config.master}: {error}") from error

    @contextmanager
    def _borrow_buffers(self, max_buffers: int) -> Iterator[tuple[Any, list[_Buffer]]]:
        """A client, and at least one and at most this many of its buffers."""
        while True:
            with self._joined() as joined:
                with self._buffers_changed:
                    if not self._buffers_changed.wait_for(lambda: joined.free or joined.is_left, _BUFFERS_S):
                        raise TierDown(f"no transfer has ended for {_BUFFERS_S:.0f} s")
                    if joined.is_left:
                        continue
                    buffers = joined.free[:max_buffers]
                    del joined.free[:max_buffers]
                try:
                    yield joined.client, buffers
                finally:
                    with self._buffers_changed:
                        joined.free += buffers
                        self._buffers_changed.notify_all()
                return


make_mooncake_tier = factory_of(MooncakeTier, MooncakeConfig, "mooncake")
"""The factory of the tier type `mooncake`."""


def _checked(code: int) -> int:
    """Raises `TierDown`: it is an error that does not concern one object."""
    if code < 0:
        raise TierDown(f"Mooncake's client answers with error {code}")
    return code


def _nodes(copies: Sequence[Any]) -> set[str]:
    """The nodes that have copies of an object in memory."""
    return {
        copy.get_memory_descriptor().buffer_descriptor.transport_endpoint for copy in copies if copy.is_memory_replica()
    }
