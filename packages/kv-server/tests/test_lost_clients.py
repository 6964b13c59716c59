"""Clients that live and are of no use: without their connection, without a greeting, or with nothing to ask."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from kv_core.errors import TierDown
from kv_core.testing import key_chain
from kv_server import RemoteCache, ServerConfig, ServerProcess, launch, wire
from kv_server import connections as connections_module
from kv_server import session as orphans_module
from kv_server.server import CacheServer
from kv_testing.cache_servers import join_at, lose, report_of
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import line, until
from kv_tiers.config import HostConfig
from kv_tiers.pool.host_pool import slot_bytes_for

SLOTS = 8

# Begins a store, loses its connection, and lives on; with `map` it has the pool in its memory, as who copies has.
LOST = """
import socket, sys
from kv_core.testing import key_chain
from kv_server import wire
from kv_server.connection import Opening
from kv_server.remote_cache import MappedPool
from pathlib import Path

path, does_map = Path(sys.argv[1]), sys.argv[2] == "map"
register = wire.Register("lost", (int(sys.argv[3]),), "f", 1, {}, b"", [], wire.Keys(), False)
opening = Opening(path, 10, register)
answer = opening.finish(10)
pool = None
if does_map:
    pool = MappedPool(answer.name, answer.group_bytes, answer.slots, opening.take_descriptor())
opening.drop_descriptors()
leased = opening.ask(wire.BeginStore(wire.pack_keys(key_chain(4)), "w", {}))
assert len(leased.slots) == 4
opening.close()
print("lost", flush=True)
sys.stdin.readline()
pool = None
print("unmapped", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    made = launch({"host": {"capacity_bytes": SLOTS * slot_bytes_for(CHUNK_BYTES)}, "server": {"max_sessions": 8}})
    yield made
    made.stop()


@contextlib.contextmanager
def lost_process(path: Path, does_map: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOST, str(path), does_map, str(CHUNK_BYTES)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def said(process: "subprocess.Popen[str]", word: str) -> None:
    assert line(process.stdout) == f"{word}\n"  # it ends its output when it ends


def test_a_client_that_has_nothing_more_to_do_gives_back_what_it_was_writing(server: ServerProcess) -> None:
    """It noticed when it wanted to commit, and nobody calls it again."""
    writer, other = join_at(server.socket), join_at(server.socket)
    lease = writer.begin_store(key_chain(SLOTS), "w")
    assert len(lease.keys) == SLOTS
    lose(writer)
    writer.commit(lease)
    with writer._lock:
        writer._link.back_off(0)
    until(lambda: other.counts().slots_used == 0)
    assert len(other.begin_store(key_chain(SLOTS, branch="x"), "w").keys) == SLOTS
    for cache in (writer, other):
        cache.close()


def test_what_a_call_reserved_whose_answer_was_lost_is_given_back(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That call had reconnected, and no other one follows."""
    writer, other = join_at(server.socket), join_at(server.socket)
    lose(writer)
    asked, catch_up = threading.Event(), writer._link._on_reconnected

    def receive(timeout_s: float) -> NoReturn:
        asked.set()
        raise TierDown("the answer is lost")

    def hear_nothing_more() -> None:
        catch_up()
        monkeypatch.setattr(writer._link.connection, "receive", receive)

    monkeypatch.setattr(writer._link, "_on_reconnected", hear_nothing_more)
    writer._link.back_off(0)

    def is_lost() -> bool:
        assert not writer.begin_store(key_chain(4), "w").keys
        return asked.is_set()

    until(is_lost)
    monkeypatch.undo()
    until(lambda: other.counts().chunks_reserved_ever == 4)
    until(lambda: other.counts().slots_used == 0)
    for cache in (writer, other):
        cache.close()


def test_what_it_still_writes_stays_its_own(server: ServerProcess) -> None:
    writer, other = join_at(server.socket), join_at(server.socket)
    given_up, writing = writer.begin_store(key_chain(3), "x"), writer.begin_store(key_chain(2, branch="y"), "y")
    lose(writer)
    assert not writer.release(given_up)
    with writer._lock:
        writer._link.back_off(0)
    until(lambda: other.counts().slots_used == 2)
    assert writer.generation == 0
    writer.commit(writing)
    assert other.lookup(key_chain(2, branch="y"), "r").chunks == 2
    for cache in (writer, other):
        cache.close()


def test_one_that_is_closed_without_its_connection_gives_everything_back(server: ServerProcess) -> None:
    writer, other = join_at(server.socket), join_at(server.socket)
    assert writer.begin_store(key_chain(SLOTS), "w").keys
    lose(writer)
    until(lambda: report_of(server.socket).orphans == 1)
    writer._link.back_off(0)
    writer.close()
    until(lambda: other.counts().slots_used == 0)
    other.close()


def test_another_server_is_not_met_behind_the_engines_back(tmp_path: Path) -> None:
    """It is registered with, but its pool is exchanged for the old one's only in a call, when nobody copies."""
    home = Path(tempfile.mkdtemp(dir=tmp_path)) / "s"
    settings = {"host": {"capacity_bytes": SLOTS * slot_bytes_for(CHUNK_BYTES)}}
    first = launch(settings, socket=home / "kv.sock")
    pools: list[str] = []
    cache = join_at(first.socket, on_new_pool=lambda pool: pools.append(pool.name))
    lease = cache.begin_store(key_chain(2), "w")
    os.kill(first.pid, 9)
    first.stop()
    cache.commit(lease)  # it notices
    second = launch(settings, socket=home / "kv.sock")
    until(lambda: report_of(second.socket).sessions, 30)
    until(lambda: cache._link.is_registered)
    assert not pools and cache.generation == 0
    assert cache.begin_store(key_chain(2), "w").keys
    assert len(pools) == cache.generation == 1
    cache.close()
    second.stop()


# Who does not say what it wants.


def silent(server: ServerProcess, data: bytes = b"") -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(20)
    made.connect(str(server.socket))
    made.sendall(data)
    return made


def refusal(connection: socket.socket) -> str:
    """Why the server hangs up, which it must within the socket's patience."""
    frames = wire.Frames(wire.MAX_ANSWER_BYTES)
    why = ""
    while data := connection.recv(1 << 16):
        frames.feed(data)
        while (body := frames.next()) is not None:
            if isinstance(answer := wire.read_answer(body), wire.Failed):
                why = answer.text
    return why


def test_a_greeting_that_does_not_come_is_not_waited_for(server: ServerProcess) -> None:
    part = wire.frame(wire.Hello("t"))[:5]
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(silent(server, sent)) for sent in [b"", part] * 4]
        until(lambda: is_served(server), 20)  # though as many had connected as may
        assert all("hello" in refusal(one) for one in held)


def is_served(server: ServerProcess) -> bool:
    with contextlib.suppress(Exception):
        join_at(server.socket).close()
        return True
    return False


@pytest.fixture
def within() -> Iterator[CacheServer]:
    """A server on a thread of this process, whose times a test can change."""
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        host = HostConfig(capacity_bytes=SLOTS * slot_bytes_for(CHUNK_BYTES), lease_s=0.5)
        made = CacheServer(ServerConfig(host=host, socket=str(Path(home) / "s" / "kv.sock")))
        thread = threading.Thread(target=made.serve)
        thread.start()
        yield made
        made.stop()
        thread.join(30)
        assert not thread.is_alive()


def test_a_process_that_has_let_go_of_the_pool_writes_nowhere(
    within: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans_module, "SETTLE_S", 0.2)
    other = join_at(within.socket_path)
    with lost_process(within.socket_path, "never") as process:
        said(process, "lost")
        until(lambda: other.counts().slots_used == 0, 30)
        assert process.poll() is None
    with lost_process(within.socket_path, "map") as process:
        said(process, "lost")
        with pytest.raises(AssertionError):  # it may be in the middle of a copy
            until(lambda: other.counts().slots_used < 4, 3)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        said(process, "unmapped")
        until(lambda: other.counts().slots_used == 0, 30)
        assert process.poll() is None
    other.close()


def test_who_registers_nothing_and_asks_nothing_is_not_kept(
    within: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "UNREGISTERED_S", 0.3)
    registered = RemoteCache(within.socket_path, group_bytes=(CHUNK_BYTES,), fingerprint="f")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(20)
        connection.connect(str(within.socket_path))
        connection.sendall(wire.frame(wire.Hello("t")))
        assert "no cache is registered" in refusal(connection)
    kept = registered._link.connection
    assert kept is not None
    assert registered.counts().slots_total == SLOTS
    assert registered._link.connection is kept
    registered.close()


def test_one_that_may_be_writing_still_is_named_in_the_log(
    within: CacheServer, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RemoteCache(within.socket_path, group_bytes=(CHUNK_BYTES,), fingerprint="f")
    assert len(writer.begin_store(key_chain(3), "w").keys) == 3
    lose(writer)
    until(lambda: "copying 3 chunks, and has not reconnected" in caplog.text, 30)
    assert f"process {os.getpid()} " in caplog.text
    assert len(within.submit(within.report).result(10).sessions) == 0
    writer._link.back_off(0)
    writer.close()
