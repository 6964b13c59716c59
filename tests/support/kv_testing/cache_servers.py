"""Cache servers for tests, on a thread of this process or in their own process, with clients that can send anything."""

import contextlib
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kv_core.clock import HandClock
from kv_core.keys import ChunkKey
from kv_core.service import Ended, LoadFailed, WriteLease
from kv_server import RemoteCache, ServerConfig, ServerProcess, launch, wire
from kv_server.connection import ask_server
from kv_server.report import Report
from kv_server.server import CacheServer
from kv_tiers.config import HostConfig
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.tier_contract import content
from kv_tiers.tier import TierContext
from kv_tiers.tiers.disk_chunks import bytes_for

from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import joined, until

SLOT_BYTES = slot_bytes_for(CHUNK_BYTES)


class ThreadedServer:
    """A server on a thread of this process, whose clock and caches a test can reach."""

    def __init__(self, slots: int = 8, clock: HandClock | None = None, **options: object) -> None:
        self.home = tempfile.TemporaryDirectory(prefix="kv-")
        self.path = Path(self.home.name) / "kv.sock"
        self.clock = clock or HandClock()
        host = HostConfig(capacity_bytes=slots * SLOT_BYTES)
        config = ServerConfig(host=host, socket=str(self.path), **options)  # type: ignore[arg-type]
        self.server = CacheServer(config, clock=self.clock)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()

    def join(self, fingerprint: str = "f", **options: object) -> RemoteCache:
        return join_at(self.path, fingerprint, **options)

    def report(self) -> Report:
        return report_of(self.path)

    def raw(self, *requests: wire.Request | bytes) -> socket.socket:
        return raw_connection(self.path, *requests)

    def close(self) -> None:
        self.server.stop()
        joined(self.thread, within_s=30)
        self.home.cleanup()


def settings_for(
    home: Path, slots: int = 8, *, disk: bool = False, disk_chunks: int = 200, write: str = "through"
) -> dict[str, object]:
    """Settings of a server with this many slots, and with a disk tier in `home` if wanted."""
    config: dict[str, object] = {"host": {"capacity_bytes": slots * SLOT_BYTES}}
    if disk:
        context = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
        tier = {
            "type": "disk",
            "directory": str(home / "disk"),
            "capacity_bytes": bytes_for(context, disk_chunks),
            "write": write,
        }
        config["tiers"] = [tier]
    return config


def start_server(home: Path, slots: int = 8, *, disk: bool = False) -> ServerProcess:
    """In a process of its own, at `home`'s socket."""
    return launch(settings_for(home, slots, disk=disk), socket=home / "s")


def join_server(home: Path, **options: object) -> RemoteCache:
    """A client of the server that `start_server` started."""
    return join_at(home / "s", "f", **options)


def join_at(path: Path, fingerprint: str = "f", **options: object) -> RemoteCache:
    """A client of the server at this socket."""
    options.setdefault("group_bytes", (CHUNK_BYTES,))
    options.setdefault("timeout_s", 5.0)  # a busy machine may be late
    options.setdefault("facts", {wire.UNPINNED: "true"})
    return RemoteCache(path, fingerprint=fingerprint, **options)  # type: ignore[arg-type]


def kill_server(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.stop()


def lose(cache: RemoteCache) -> None:
    """Its connection is lost, as after a time-out, and it does not connect again before `cache._link.back_off(0)`."""
    with cache._lock:
        cache._link.lose("for the test")
        cache._link.back_off(1000)


def die(cache: RemoteCache) -> None:
    """As if its process were killed. It must not be called any more."""
    cache._reconnector.stop()
    with cache._lock:
        cache._link.close()


def report_of(path: Path) -> Report:
    """The report of the server at this socket."""
    stated = ask_server(path, wire.Status())
    assert isinstance(stated, wire.Stated)
    return stated.report


def assert_nothing_is_leased(socket: Path) -> None:
    for cache in report_of(socket).caches:
        assert cache.counts.read_leases == cache.counts.write_leases == cache.handed_over == 0


def register(fingerprint: str = "f", resume: bytes = b"") -> wire.Register:
    return wire.Register("", (CHUNK_BYTES,), fingerprint, 1, {}, resume, [], wire.Keys(), False)


def raw_connection(path: Path, *requests: wire.Request | bytes) -> socket.socket:
    """A connection on which these were said."""
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(10)
        made.connect(str(path))
        for request in requests:
            made.sendall(request if isinstance(request, bytes) else wire.frame(request))
    except OSError:
        made.close()
        raise
    return made


def answers_on(connection: socket.socket) -> list[wire.Answer]:
    """All that come until the server hangs up."""
    frames, answers = wire.Frames(wire.MAX_ANSWER_BYTES), []
    while data := bytes_on(connection):
        frames.feed(data)
        while (body := frames.next()) is not None:
            answers.append(wire.read_answer(body))
    return answers


def bytes_on(connection: socket.socket) -> bytes:
    """Some; none once the server has hung up."""
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""


@contextlib.contextmanager
def raw_session(server: ThreadedServer) -> Iterator[Callable[[wire.Request], wire.Answer]]:
    """A registered client that says what no `RemoteCache` would."""
    with server.raw(wire.Hello("test"), register()) as connection:
        frames = wire.Frames(wire.MAX_ANSWER_BYTES)

        def next_answer() -> wire.Answer:
            while (body := frames.next()) is None:
                data = connection.recv(1 << 16)
                assert data
                frames.feed(data)
            return wire.read_answer(body)

        def ask(request: wire.Request) -> wire.Answer:
            connection.sendall(wire.frame(request))
            return next_answer()

        assert isinstance(next_answer(), wire.Welcome)
        assert isinstance(next_answer(), wire.Pool)
        yield ask


def fill(cache: RemoteCache, lease: WriteLease) -> None:
    """Write what `read` expects."""
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)


def store(cache: RemoteCache, keys: Sequence[ChunkKey], holder: str = "w") -> WriteLease:
    lease = cache.begin_store(keys, holder)
    fill(cache, lease)
    cache.commit(lease)
    return lease


def read(cache: RemoteCache, keys: Sequence[ChunkKey], holder: str = "l") -> bool:
    """Load these and see that they are what was stored. False: they could not be had, or did not stay put."""
    lease = cache.load(keys, holder)
    if isinstance(lease, LoadFailed):
        return False
    assert lease.keys == tuple(keys)
    pool = cache.pool
    copied = [bytes(pool.view[extent.offset : extent.offset + extent.nbytes]) for extent in lease.extents]
    if not cache.release(lease):
        return False
    assert copied == [content(key, CHUNK_BYTES) for key in keys]
    return True


def held(cache: RemoteCache, keys: Sequence[ChunkKey]) -> int:
    """How many can be had after all, from whatever tier."""
    plans = []

    def is_final() -> bool:
        plans.append(cache.lookup(keys, "asker", wait_for_promotion=True))
        return plans[-1].ended is not Ended.PENDING

    until(is_final)
    cache.end("asker")
    return plans[-1].chunks


def peak_rss_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
