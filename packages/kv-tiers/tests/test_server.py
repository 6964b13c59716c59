"""The cache in another process: every promise of a `CacheService`, and what becomes of them when either side dies."""

import contextlib
import json
import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.clock import HandClock
from kv_core.errors import ConfigError, MisuseError
from kv_core.keys import ChunkKey
from kv_core.lookup import Ended
from kv_core.service import CacheService, LoadFailed, ReadLease, WriteLease
from kv_core.testing import key_chain
from kv_tiers import HostPool
from kv_tiers.config import HostConfig, ObserveConfig
from kv_tiers.events.bus import Occurred, Subscriber
from kv_tiers.events.events import BlocksAllocated
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.server import RemoteCache, ServerConfig, launch, wire
from kv_tiers.server import caches as caches_module
from kv_tiers.server import connections as clients_module
from kv_tiers.server import orphans as orphans_module
from kv_tiers.server import remote_cache as client_module
from kv_tiers.server import session as session_module
from kv_tiers.server.config import default_socket, read_config
from kv_tiers.server.connection import Connection, ask_server
from kv_tiers.server.launch import ServerProcess
from kv_tiers.server.mapped import MappedPool
from kv_tiers.server.report import Report
from kv_tiers.server.server import CacheServer
from kv_tiers.testing.contract import CHUNK_BYTES, ServiceContract, assert_adds_up, content
from kv_tiers.testing.model import ServiceMachine
from kv_tiers.testing.wait import joined, line, until
from kv_tiers.tier import TierContext
from kv_tiers.tiers.disk import bytes_for

SLOT_BYTES = slot_bytes_for(CHUNK_BYTES)


class Served:
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
        return RemoteCache(self.path, chunk_bytes=CHUNK_BYTES, fingerprint=fingerprint, **options)  # type: ignore[arg-type]

    def report(self) -> Report:
        return report(self.path)

    def raw(self, *requests: wire.Request | bytes) -> socket.socket:
        return raw(self.path, *requests)

    def close(self) -> None:
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.home.cleanup()


class TestThroughASocket(ServiceContract):
    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        self.teardown_method()
        self.served = Served(slots, clock)
        self.cache = self.served.join()
        return self.cache, self.cache.pool.view

    def teardown_method(self) -> None:
        if hasattr(self, "served"):
            self.cache.close()
            self.served.close()


class RemoteMachine(ServiceMachine):
    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        self.served = Served(slots, clock)
        self.cache = self.served.join()
        (self.behind,) = self.served.server.caches.values()
        return self.cache, self.cache.pool.view

    def resident(self) -> list[ChunkKey]:
        return self.behind.admin.resident_keys()

    def close(self) -> None:
        assert not self.behind._leases.holders()
        assert not any(self.behind._index._leases)
        self.cache.close()
        self.served.close()


TestRemoteCacheAgainstTheModel = RemoteMachine.TestCase
TestRemoteCacheAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def report(path: Path) -> Report:
    stated = ask_server(path, wire.Status())
    assert isinstance(stated, wire.Stated)
    return stated.report


def raw(path: Path, *requests: wire.Request | bytes) -> socket.socket:
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


def answers(connection: socket.socket) -> list[wire.Answer]:
    """All that come until the server hangs up."""
    frames, said = wire.Frames(wire.MAX_ANSWER_BYTES), []
    while data := hear(connection):
        frames.feed(data)
        while (body := frames.next()) is not None:
            said.append(wire.read_answer(body))
    return said


def hear(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""


def fill(cache: RemoteCache, lease: WriteLease) -> None:
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
    plan = cache.lookup(keys, "asker", wait_for_promotion=True)
    end = time.monotonic() + 10
    while plan.ended is Ended.PENDING:
        assert time.monotonic() < end
        plan = cache.lookup(keys, "asker", wait_for_promotion=True)
    cache.end("asker")
    return plan.chunks


# Sharing.


def test_engines_share_what_one_of_them_stored(served: Served) -> None:
    first, second, other = served.join(engine="a"), served.join(engine="b"), served.join("another model")
    keys = key_chain(4)
    store(first, keys)
    assert second.lookup(keys, "r").chunks == 4
    assert read(second, keys)
    assert other.lookup(keys, "r").chunks == 0
    second.forget(keys[3:])
    assert first.lookup(keys, "r").chunks == 3
    for cache in (first, second, other):
        cache.close()


def test_one_shard_each_and_a_chunk_counts_when_all_are_there(served: Served) -> None:
    ranks = [served.join(engine="tp", shards=2, facts={"rank": str(rank)}) for rank in range(2)]
    asker = served.join(engine="tp", shards=2)
    keys = key_chain(3, shards=2)
    store(ranks[0], keys[0::2])
    assert asker.lookup(keys, "r", keys_per_chunk=2).ended is Ended.INCOMPLETE
    store(ranks[1], keys[1::2])
    assert asker.lookup(keys, "r", keys_per_chunk=2).chunks == 3
    for cache in (*ranks, asker):
        cache.close()


def test_whoever_watches_the_server_hears_of_an_engines_blocks(served: Served) -> None:
    """Without a round trip; and a question right behind it is answered by its own answer."""
    heard: list[tuple[str, int]] = []

    class Ear(Subscriber):
        def take(self, occurred: Occurred) -> None:
            if isinstance(occurred.event, BlocksAllocated):
                heard.append((occurred.event.holder.partition("/")[2], occurred.event.blocks))

    served.server.bus.subscribe(Ear())
    cache = served.join()
    cache.allocated({"one": 5, "two": 0})
    assert cache.lookup(key_chain(2), "one").chunks == 0
    until(lambda: heard == [("one", 5), ("two", 0)])
    cache.close()


def test_where_nobody_watches_blocks_are_not_told() -> None:
    quiet = Served(observe=ObserveConfig(history_keys=0))
    cache = quiet.join()
    with mock.patch.object(Connection, "send", autospec=True, side_effect=Connection.send) as sent:
        cache.allocated({"one": 5})
        assert sent.call_count == 0
        cache.counts()
        assert sent.call_count == 1
    cache.close()
    quiet.close()


def test_an_engines_processes_find_what_its_workers_registered(served: Served) -> None:
    worker = served.join(engine="e", shards=2, facts={"space": "model@1"})
    stranger = served.join(engine="other")
    registered = ask_server(served.path, wire.Registered("e"))
    assert isinstance(registered, wire.Registrations)
    (found,) = registered.sessions
    assert (found.chunk_bytes, found.fingerprint, found.shards) == (CHUNK_BYTES, "f", 2)
    assert (found.facts, found.pid) == ({"space": "model@1"}, os.getpid())
    worker.close()
    assert ask_server(served.path, wire.Registered("e")) == wire.Registrations([])
    stranger.close()


def test_no_client_touches_what_is_anothers(served: Served) -> None:
    mine, yours = served.join(), served.join()
    keys = key_chain(2)
    writing = mine.begin_store(keys, "same name")
    with raw_session(served) as ask:
        for request in (wire.Commit(writing.id), wire.Release(writing.id, True), wire.Release(writing.id, False)):
            refused = ask(request)
            assert isinstance(refused, wire.Failed)
            assert refused.kind == "misuse"
        assert isinstance(ask(wire.Commit(999)), wire.Failed)
        assert ask(wire.Release(999, False)) == wire.Truth(False)
    yours.end("same name")
    fill(mine, writing)
    mine.commit(writing)
    mine.lookup(keys, "same name")
    yours.end("same name")
    assert mine.renew("same name")
    assert not yours.renew("same name")
    mine.close()
    assert yours.counts().read_leases == 0
    assert yours.lookup(keys, "r").chunks == 2
    yours.close()


@contextlib.contextmanager
def raw_session(served: Served) -> Iterator[Callable[[wire.Request], wire.Answer]]:
    """A registered client that says what no `RemoteCache` would."""
    with served.raw(wire.Hello("test"), register()) as connection:
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


def register(fingerprint: str = "f", resume: bytes = b"") -> wire.Register:
    return wire.Register("", CHUNK_BYTES, fingerprint, 1, {}, resume, [], wire.Keys(), False)


# A client that goes.


def test_a_closed_connection_gives_back_what_was_read_at_once(served: Served) -> None:
    stays = served.join()
    store(stays, key_chain(3))
    with raw_session(served) as ask:
        keys = wire.pack_keys(key_chain(3))
        for number in range(5):
            ask(wire.Lookup(keys, f"r{number}", 1, False))
        ask(wire.Load(keys, "l"))
        ask(wire.Load(keys, "never released"))
        assert stays.counts().read_leases == 7
    until(lambda: stays.counts().read_leases == 0)
    (behind,) = served.server.caches.values()
    assert not behind._leases.holders()
    stays.close()


def test_who_lost_only_the_connection_may_still_be_writing(served: Served) -> None:
    """Its slots are nobody else's until it says what it still has; then the copy goes on where it was."""
    writer, other = served.join(), served.join()
    keys = key_chain(5)
    kept, lost = writer.begin_store(keys[:3], "w"), writer.begin_store(keys, "x")
    assert writer._link.connection is not None
    writer._link.connection.close()  # as after a time-out
    until(lambda: served.report().orphans == 1)
    assert other.counts().write_leases == 2
    greedy = other.begin_store(key_chain(8, branch="greedy"), "g")
    assert len(greedy.keys) == 3
    assert set(greedy.extents).isdisjoint(kept.extents + lost.extents)
    fill(writer, kept)
    until(lambda: writer.lookup([], "r").ended is Ended.ALL_HELD)
    assert writer.generation == 0
    assert served.report().orphans == 0
    writer.end("x")
    assert other.counts().write_leases == 2
    writer.commit(kept)
    assert read(other, keys[:3])
    assert other.release(greedy)
    writer.close()
    assert other.counts().slots_used == 3
    other.close()


def test_what_was_given_up_while_away_is_given_back_at_the_return(served: Served) -> None:
    writer, other = served.join(), served.join()
    leases = [writer.begin_store(key_chain(2, branch=str(number)), f"w{number}") for number in range(4)]
    assert writer._link.connection is not None
    writer._link.connection.close()
    until(lambda: served.report().orphans == 1)
    writer._link.lose("for the test")
    writer._link.rest(1000)
    writer.commit(leases[0])
    assert not writer.release(leases[1])
    writer.end("w2")
    with pytest.raises(MisuseError, match="not open"):
        writer.commit(leases[2])
    writer._link.rest(0)
    until(lambda: writer.lookup([], "r").ended is Ended.ALL_HELD)
    assert other.counts().write_leases == 1
    fill(writer, leases[3])
    writer.commit(leases[3])
    assert held(other, leases[3].keys) == 2
    assert other.counts().slots_used == 2
    writer.close()
    other.close()


def test_without_a_pidfd_slots_wait_for_as_long_as_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "open_pidfd", lambda pid: -1)
    monkeypatch.setattr(orphans_module, "_LOOK_S", 0.01)
    served = Served()
    stays = served.join()
    with raw_session(served) as ask:
        ask(wire.BeginStore(wire.pack_keys(key_chain(3)), "w"))
    until(lambda: served.report().orphans == 1)
    served.clock.advance(299)
    assert stays.counts().write_leases == 1
    served.clock.advance(1)
    until(lambda: served.report().orphans == 0)
    assert stays.counts().slots_used == 0
    stays.close()
    served.close()


DEEDS = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["store", "lookup", "write", "end", "die", "leave"]),
    st.sampled_from("ab"),
    st.builds(lambda chunks, branch: key_chain(chunks, branch=branch), st.integers(1, 4), st.sampled_from("xyz")),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(DEEDS, max_size=25))
def test_what_is_held_is_what_living_clients_hold(deeds: list[tuple[int, str, str, list[ChunkKey]]]) -> None:
    """Whatever clients do and whenever they die, in any order."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(orphans_module, "is_gone", lambda pidfd: True)
        served = Served()
        judge = served.join()
        clients = [served.join() for _ in range(3)]
        reads: list[set[str]] = [set(), set(), set()]
        writes: list[list[str]] = [[], [], []]
        for who, deed, holder, keys in deeds:
            cache = clients[who]
            match deed:
                case "store":
                    store(cache, keys, holder)
                case "lookup":
                    reads[who].discard(holder)
                    if cache.lookup(keys, holder).chunks:
                        reads[who].add(holder)
                case "write":
                    cache.begin_store(keys, holder)
                    writes[who].append(holder)
                case "end":
                    cache.end(holder)
                    reads[who].discard(holder)
                    writes[who] = [writer for writer in writes[who] if writer != holder]
                case "die" | "leave":
                    if deed == "die":
                        assert cache._link.connection is not None
                        cache._link.connection.close()
                    else:
                        cache.close()
                    reads[who], writes[who] = set(), []
                    clients[who] = served.join()
                    until(lambda: len(served.report().sessions) == 4)
            counts = judge.counts()
            assert counts.read_leases == sum(map(len, reads))
            assert counts.write_leases == sum(map(len, writes))
            assert_adds_up(counts)
        for cache in clients:
            cache.close()
        counts = judge.counts()
        assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0
        assert counts.slots_used == counts.chunks_resident
        (behind,) = served.server.caches.values()
        assert not behind._leases.holders()
        judge.close()
        served.close()


def test_a_process_that_comes_and_goes_costs_one_descriptor(served: Served) -> None:
    stays = served.join()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(12):
        with raw_session(served) as ask:
            ask(wire.BeginStore(wire.pack_keys(key_chain(1, branch=str(number))), "w"))
        until(lambda: len(served.report().sessions) == 1)
    assert served.report().orphans == 8  # one for each slot; who got no room leaves nothing
    # The server closes its end of what asked it a moment after that was answered.
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
    stays.close()


def test_killed_at_any_moment() -> None:
    """Nothing of a killed client is left, and what it committed is whole."""
    done = subprocess.run([sys.executable, __file__, "kill", "150"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["kills"] == 150
    assert counted["writing"] > 5  # were in the middle of a store
    assert counted["verified"] > 100


def child_lives(path: Path, seed: int, writer: int) -> NoReturn:
    try:
        rng = random.Random(seed)
        cache = RemoteCache(path, chunk_bytes=CHUNK_BYTES, fingerprint="f")
        os.write(writer, b"r")
        while True:
            keys = key_chain(rng.randint(1, 6), branch=str(rng.randrange(8)))
            match rng.randrange(5):
                case 0:
                    cache.lookup(keys, f"r{rng.randrange(9)}")
                case 1:
                    cache.load(keys, "l")
                case 2:
                    fill(cache, cache.begin_store(keys, "left open"))
                    if rng.random() < 0.5:
                        cache.end("left open")
                case _:
                    store(cache, keys)
    finally:
        os._exit(1)  # not reached: it is killed


def kill_often(kills: int) -> dict[str, int]:
    """Run in a process of its own without threads, as it forks."""
    rng = random.Random(kills)
    counted = {"kills": kills, "writing": 0, "verified": 0}
    server = launch({"host": {"capacity_bytes": 32 * SLOT_BYTES}})
    stays = RemoteCache(server.socket, chunk_bytes=CHUNK_BYTES, fingerprint="f")
    for number in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            child_lives(server.socket, number, writer)
        os.close(writer)
        if rng.random() < 0.9:  # else while it connects
            assert select.select([reader], [], [], 60)[0] and os.read(reader, 1) == b"r"
        select.select([], [], [], rng.random() ** 2 * 0.02)
        os.kill(child, signal.SIGKILL)
        counted["writing"] += stays.counts().write_leases > 0
        ended = os.pidfd_open(child)
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"
        os.close(reader)
        until(lambda: len(report(server.socket).sessions) == 1 and not report(server.socket).orphans)
        counts = stays.counts()
        assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0, counts
        assert counts.slots_used == counts.chunks_resident, counts
        assert_adds_up(counts)
        for branch in range(8):
            keys = key_chain(6, branch=str(branch))
            keys = keys[: stays.lookup(keys, "r").chunks]
            assert read(stays, keys)
            counted["verified"] += len(keys)
        stays.end("r")
    assert stays.generation == 0
    stays.close()
    server.stop()
    return counted


# A server that goes.


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def settings_for(home: Path, slots: int = 8, *, disk: bool = False, write: str = "through") -> dict[str, object]:
    config: dict[str, object] = {"host": {"capacity_bytes": slots * SLOT_BYTES}}
    if disk:
        context = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
        tier = {
            "type": "disk",
            "directory": str(home / "disk"),
            "capacity_bytes": bytes_for(context, 200),
            "write": write,
        }
        config["tiers"] = [tier]
    return config


def start(home: Path, slots: int = 8, *, disk: bool = False) -> ServerProcess:
    return launch(settings_for(home, slots, disk=disk), socket=home / "s")


def join(home: Path, **options: object) -> RemoteCache:
    options.setdefault("timeout_s", 5.0)
    return RemoteCache(home / "s", chunk_bytes=CHUNK_BYTES, fingerprint="f", **options)  # type: ignore[arg-type]


def end(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.stop()


def test_a_killed_server_is_a_miss_and_nothing_else(home: Path) -> None:
    server = start(home)
    pools: list[MappedPool] = []
    cache = join(home, on_new_pool=pools.append)
    keys = key_chain(3)
    store(cache, keys)
    writing, given_up = cache.begin_store(key_chain(2, branch="new"), "w"), cache.begin_store(key_chain(1), "v")
    cache.lookup(keys, "r")
    lease = cache.load(keys, "l")
    assert isinstance(lease, ReadLease)
    old = cache.pool
    end(server)
    assert cache.load(keys, "l") == LoadFailed(tuple(keys), "the cache server is away")
    assert not cache.release(lease)
    assert not cache.renew("r")
    cache.commit(writing)
    assert not cache.release(given_up)
    plan = cache.lookup(keys, "r")
    assert (plan.chunks, plan.ended, plan.tiers) == (0, Ended.REFUSED, ())
    refused = cache.begin_store(keys, "w")
    assert (refused.keys, refused.extents) == ((), ())
    assert "away" in refused.refused
    assert cache.load(keys, "l") == LoadFailed(tuple(keys), "the cache server is away")
    cache.end("r")
    cache.end("l")
    cache.clear()
    assert cache.counts().slots_total == 0
    kept = cache.begin_store(keys, "kept")
    with pytest.raises(MisuseError, match="every chunk"):
        cache.lookup(keys, "r", keys_per_chunk=2)

    server = start(home)
    until(lambda: cache.lookup(keys, "r").ended is Ended.ABSENT)
    assert (cache.generation, pools) == (1, [cache.pool])
    assert cache.pool.name != old.name
    fresh = cache.begin_store(keys, "w")
    assert not cache.release(lease)
    cache.commit(kept)
    cache.commit(refused)
    assert cache.counts().write_leases == 1
    for key, extent in zip(writing.keys, writing.extents, strict=True):  # a copy that was under way
        old.view[extent.offset : extent.offset + extent.nbytes] = b"x" * extent.nbytes
        assert key
    fill(cache, fresh)
    cache.commit(fresh)
    assert read(cache, keys)
    cache.close()
    server.stop()


def test_killed_under_load_and_back_with_what_the_disk_has(home: Path) -> None:
    server = start(home, slots=16, disk=True)
    stems = [key_chain(4, branch=str(number)) for number in range(6)]
    keeper = join(home)
    for number, stem in enumerate(stems, 1):  # no faster than the disk takes them
        store(keeper, stem)
        until(lambda wanted=4 * number: report(home / "s").caches[0].tiers[0].chunks == wanted)
    failures: list[BaseException] = []
    hits = [0, 0, 0]
    phase = 0

    def work(number: int) -> None:
        rng = random.Random(number)
        cache = join(home)
        try:
            while phase < 3:
                keys = rng.choice(stems)
                chunks = cache.lookup(keys, f"r{number}", wait_for_promotion=True).chunks
                if chunks and read(cache, keys[:chunks], f"l{number}"):
                    hits[min(phase, 2)] += 1
                fresh = key_chain(2, branch=f"{number} {rng.randrange(10)}")
                store(cache, fresh, f"w{number}")
                cache.end(f"r{number}")
        except BaseException as error:  # noqa: BLE001  # carried to the test's own thread
            failures.append(error)
        finally:
            cache.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: hits[0] > 50 or bool(failures))
    end(server)
    phase = 1
    until(lambda: keeper.lookup(stems[0], "k").ended is Ended.REFUSED)
    server = start(home, slots=16, disk=True)
    phase = 2
    until(lambda: hits[2] > 50 or bool(failures))
    phase = 3
    for thread in threads:
        joined(thread)
    assert not failures
    until(lambda: keeper.lookup(stems[0], "k").ended is not Ended.REFUSED)
    keeper.end("k")
    assert [held(keeper, stem) for stem in stems] == [4] * 6
    counts = keeper.counts()
    assert counts.read_leases == counts.write_leases == 0
    keeper.close()
    server.stop()


def test_a_server_that_is_stopped_drains_and_its_successor_serves_everything(home: Path) -> None:
    server = start(home, slots=40, disk=True)
    cache = join(home)
    stems = [key_chain(5, branch=str(number)) for number in range(6)]
    for stem in stems:
        store(cache, stem)
    server.stop()
    assert not (home / "s").exists()
    server = start(home, slots=40, disk=True)
    again = join(home)
    for stem in stems:
        assert held(again, stem) == 5
        assert read(again, stem)
    again.close()
    cache.close()
    server.stop()


def test_a_server_that_hangs_costs_one_time_out_and_then_nothing(home: Path) -> None:
    server = start(home)
    cache = join(home, timeout_s=0.2)
    keys = key_chain(3)
    store(cache, keys[:2])
    writing = cache.begin_store(keys, "w")
    os.kill(server.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert cache.lookup(keys, "r").ended is Ended.REFUSED
    assert 0.15 < time.monotonic() - began < 2
    began = time.monotonic()
    for _ in range(50):
        assert cache.lookup(keys, "r").chunks == 0
    cache.forget(keys[1:2])
    assert time.monotonic() - began < 0.2
    os.kill(server.pid, signal.SIGCONT)
    until(lambda: cache.lookup(keys, "r").ended is not Ended.REFUSED)
    assert cache.lookup(keys, "r").chunks == 1  # what was forgotten meanwhile is not found
    assert cache.generation == 0
    fill(cache, writing)
    cache.commit(writing)
    assert read(cache, [keys[0], keys[2]])
    cache.close()
    server.stop()


@pytest.mark.parametrize("forgotten", [3, client_module.MAX_REPLAY + 1])
def test_what_is_forgotten_while_the_server_is_away_stays_forgotten(home: Path, forgotten: int) -> None:
    server = start(home, disk=True)
    cache = join(home)
    gone, kept = key_chain(3, branch="gone"), key_chain(2, branch="kept")
    store(cache, gone)
    store(cache, kept)
    server.stop()
    cache.forget([*key_chain(forgotten - 3, branch="many"), *gone])
    server = start(home, disk=True)
    until(lambda: cache.lookup([], "r").ended is Ended.ALL_HELD)
    assert held(cache, gone) == 0
    assert held(cache, kept) == (2 if forgotten == 3 else 0)
    store(cache, gone)
    assert held(cache, gone) == 3
    cache.close()
    server.stop()


def test_a_new_pool_that_is_of_no_use_is_tried_again(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = start(home)
    calls: list[str] = []

    def attach(pool: MappedPool) -> None:
        calls.append(pool.name)
        if len(calls) == 1:
            raise RuntimeError("no memory on the device")

    cache = join(home, on_new_pool=attach)
    end(server)
    server = start(home)
    with caplog.at_level(logging.CRITICAL):
        until(lambda: cache.lookup(key_chain(1), "r").ended is Ended.ABSENT)
    assert len(calls) == 2
    assert cache.generation == 1
    cache.close()
    server.stop()


def test_a_client_that_is_closed_says_so(served: Served) -> None:
    cache = served.join()
    writing = cache.begin_store(key_chain(2), "w")
    cache.close()
    cache.close()
    cache.end("w")
    assert not cache.release(writing)
    for call in (
        lambda: cache.lookup([], "r"),
        lambda: cache.commit(writing),
        cache.counts,
        lambda: cache.load([], "r"),
    ):
        with pytest.raises(MisuseError, match="closed"):
            call()
    assert served.report().sessions == []


def test_an_old_pool_is_unmapped_when_nobody_uses_it(home: Path) -> None:
    server = start(home)
    cache = join(home)
    name = cache.pool.name
    in_use = cache.pool.view[:10]
    end(server)
    server = start(home)
    until(lambda: cache.lookup([], "r").ended is Ended.ALL_HELD)
    assert name in Path("/proc/self/maps").read_text()
    in_use.release()
    maps = Path("/proc/self/maps").read_text()
    assert name not in maps
    assert cache.pool.name in maps
    cache.close()
    server.stop()


def test_an_interrupted_call_is_not_answered_by_the_next_ones_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = served.join()
    store(cache, key_chain(2))
    assert cache._link.connection is not None
    with monkeypatch.context() as interrupted:
        interrupted.setattr(cache._link.connection, "receive", lambda timeout_s: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            cache.lookup(key_chain(2), "r")
    assert not cache.renew("nobody")
    until(lambda: cache.lookup(key_chain(1), "r").ended is Ended.ALL_HELD)
    cache.close()


def test_a_return_whose_answer_was_never_read_may_be_repeated(served: Served) -> None:
    writer, other = served.join(), served.join()
    writing = writer.begin_store(key_chain(3), "w")
    assert writer._link.connection is not None
    writer._link.connection.close()
    with served.raw(wire.Hello("t"), writer._register()):
        until(lambda: not served.report().orphans and len(served.report().sessions) == 2)
    until(lambda: writer.lookup([], "r").ended is Ended.ALL_HELD)
    fill(writer, writing)
    writer.commit(writing)
    assert read(other, key_chain(3))
    assert served.report().orphans == 0
    writer.close()
    other.close()


def test_an_address_where_nobody_serves_is_refused_with_words(home: Path) -> None:
    with pytest.raises(ConfigError, match="no server answers"):
        join(home)


# Who is served.


def test_another_user_is_refused(served: Served) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    assert served.path.stat().st_mode & 0o777 == 0o600
    assert served.path.parent.stat().st_mode & 0o777 == 0o700
    served.path.parent.chmod(0o755)  # the kernel keeps others out already; see that we would
    served.path.chmod(0o666)
    code = (
        "import os, socket, sys\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "connection.settimeout(60)\n"
        "os.setgid(65534), os.setuid(65534)\n"
        "connection.connect(sys.argv[1])\n"
        "print(connection.recv(999))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(served.path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert "you are user 65534" in done.stdout, done.stderr
    assert ask_server(served.path, wire.Ping()) == wire.Done()


def test_one_owner_of_an_address(home: Path) -> None:
    config = ServerConfig(host=HostConfig(capacity_bytes=1 << 20), socket=str(home / "s"))
    first = CacheServer(config)
    with pytest.raises(ConfigError, match="another server listens"):
        CacheServer(config)
    assert (home / "s").exists()
    first.stop()
    first.serve()
    assert not (home / "s").exists()
    (home / "s").touch()  # left by one that was killed
    again = CacheServer(config)
    again.stop()
    again.serve()


def test_a_directory_open_to_others_is_no_place_for_a_socket(home: Path) -> None:
    config = ServerConfig(host=HostConfig(capacity_bytes=1 << 20), socket=str(home / "s"))
    home.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        CacheServer(config)


def test_so_many_sessions_and_formats_and_no_more() -> None:
    served = Served(max_sessions=3, max_formats=2)
    caches = [served.join("one"), served.join("two")]
    with pytest.raises(ConfigError, match="max_formats"):
        served.join("three")
    until(lambda: len(served.report().sessions) == 2)
    caches.append(served.join("one"))
    with pytest.raises(ConfigError, match="max_sessions"):
        served.join("one")
    for cache in caches:
        cache.close()
    served.close()


def test_settings_that_cannot_be_honoured_are_told_to_the_client() -> None:
    served = Served(tiers=[{"type": "dsik"}])
    with pytest.raises(ConfigError, match="dsik"):
        served.join()
    assert ask_server(served.path, wire.Ping()) == wire.Done()
    served.close()


def test_opening_a_new_models_tiers_delays_nobody_else(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, build = threading.Event(), caches_module.build_local_cache

    def slow(*args: object, **options: object) -> object:
        assert go_on.wait(10)
        return build(*args, **options)  # type: ignore[arg-type]

    before = served.join()
    monkeypatch.setattr(caches_module, "build_local_cache", slow)
    met: list[RemoteCache] = []
    threads = [threading.Thread(target=lambda: met.append(served.join("new"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(100):
        store(before, key_chain(2, branch=str(number)))
    assert met == []
    go_on.set()
    for thread in threads:
        joined(thread)
    assert len(met) == 2
    store(met[0], key_chain(2))
    assert read(met[1], key_chain(2))
    for cache in (before, *met):
        cache.close()


# Bounds.


def test_a_session_holds_so_much_and_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_KEYS_HELD", 10)
    cache, other = served.join(), served.join()
    keys = key_chain(3)
    store(cache, keys)
    for holder in ("a", "b", "c"):
        assert cache.lookup(keys, holder).chunks == 3
    assert cache.lookup(keys, "d").ended is Ended.REFUSED
    assert cache.load(keys, "d") == LoadFailed(tuple(keys), "this session holds as much as one may")
    refused = cache.begin_store(key_chain(2, branch="more"), "w")
    assert refused.keys == ()
    assert "as much as" in refused.refused
    cache.commit(refused)
    assert other.lookup(keys, "d").chunks == 3
    cache.end("a")
    assert cache.lookup(keys, "d").chunks == 3
    served.clock.advance(300)
    assert cache.lookup(keys, "a").chunks == 3
    assert cache.renew("a")
    monkeypatch.setattr(session_module, "MAX_WRITES", 0)
    assert cache.begin_store(keys, "w").refused
    cache.close()
    other.close()


def test_the_holder_not_heard_of_for_longest_goes_first(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_HOLDERS", 2)
    cache = served.join()
    store(cache, key_chain(1))
    for holder in ("a", "b", "c"):
        cache.lookup(key_chain(1), holder)
    assert [cache.renew(holder) for holder in ("a", "b", "c")] == [False, True, True]
    cache.close()


def test_a_question_too_long_for_one_message_is_answered_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(slots=20)
    cache = served.join()
    monkeypatch.setattr(wire, "MAX_KEYS", 6)
    keys = key_chain(10)
    assert "at most 6" in store(cache, keys).refused
    plan = cache.lookup(keys, "r")
    assert (plan.chunks, plan.ended) == (6, Ended.REFUSED)
    assert cache.lookup(keys, "r", keys_per_chunk=5).chunks == 1
    assert isinstance(cache.load(keys, "l"), LoadFailed)
    cache.forget(keys)
    assert held(cache, keys) == 0
    cache.close()
    served.close()


def test_who_does_not_read_is_dropped(served: Served) -> None:
    stays = served.join()
    with served.raw(wire.Hello("t"), register()) as deaf, pytest.raises((BrokenPipeError, ConnectionResetError)):
        deaf.sendall(wire.frame(wire.Status()) * 1_000_000)
    assert stays.counts().slots_total == 8
    assert len(served.report().sessions) == 1
    stays.close()


def test_who_floods_the_server_delays_nobody(served: Served) -> None:
    stays = served.join()
    store(stays, key_chain(3))
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
                served.raw(wire.Hello("t"), wire.frame(wire.Status()) * 1000).close()

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    answered = sum(held(stays, key_chain(3)) == 3 for _ in range(50))
    stop.set()
    for thread in threads:
        joined(thread)
    assert answered == 50
    stays.close()


# Hostile bytes.


@pytest.fixture(scope="module")
def sturdy() -> Iterator[ServerProcess]:
    """A server that hostile clients share: in a process of its own, so that its memory can be seen."""
    server = launch({"host": {"capacity_bytes": 64 * SLOT_BYTES}, "server": {"max_sessions": 64}}, log_level="error")
    yield server
    server.stop()


REQUESTS: list[wire.Request] = [
    wire.Hello("t"),
    register(),
    wire.Unregister(),
    wire.Registered("e"),
    wire.Ping(),
    wire.Status(),
    wire.Lookup(wire.pack_keys(key_chain(2)), "h", 1, True),
    wire.Renew("h"),
    wire.Load(wire.pack_keys(key_chain(2)), "h"),
    wire.BeginStore(wire.pack_keys(key_chain(2)), "h"),
    wire.Commit(1),
    wire.Release(1, True),
    wire.Forget(wire.pack_keys(key_chain(1))),
    wire.End("h"),
    wire.Clear(),
    wire.Counts(),
]


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """Requests in any order, some bent out of shape; or just bytes."""
    sent = b""
    for request in draw(st.lists(st.sampled_from(REQUESTS), max_size=6)):
        data = bytearray(wire.frame(request))
        match draw(st.sampled_from(["whole", "whole", "flip", "cut", "length", "body"])):
            case "flip":
                data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
            case "cut":
                del data[draw(st.integers(0, len(data))) :]
            case "length":
                data[:4] = draw(st.binary(min_size=4, max_size=4))
            case "body":
                body = draw(st.binary(max_size=40))
                data = bytearray(wire.HEADER.pack(len(body), wire.VERSION) + body)
        sent += bytes(data)
    return wire.frame(wire.Hello("t")) * draw(st.booleans()) + sent + draw(st.binary(max_size=20))


@settings(max_examples=400, deadline=None)
@given(hostile())
def test_hostile_bytes_neither_crash_nor_wedge_it(sturdy: ServerProcess, sent: bytes) -> None:
    with raw(sturdy.socket) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        for answer in answers(connection):
            assert not isinstance(answer, wire.Failed) or answer.kind != "fault"
    assert ask_server(sturdy.socket, wire.Ping(), timeout_s=10) == wire.Done()


def test_bent_messages_by_the_thousand() -> None:
    """By the million: `python test_server.py bend 1000000`, some two minutes; benchmarks/results has one run."""
    done = subprocess.run([sys.executable, __file__, "bend", "20000"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    counted = json.loads(done.stdout)
    assert counted["refused"] > 2000
    assert counted["grown_bytes"] < 8 << 20


def bend_often(messages: int) -> dict[str, int]:
    """Bent and cut requests, many to a connection, until it is ended: nothing must be left of them."""
    rng = random.Random(messages)
    server = launch({"host": {"capacity_bytes": 64 * SLOT_BYTES}}, log_level="error")
    stays = RemoteCache(server.socket, chunk_bytes=CHUNK_BYTES, fingerprint="f", timeout_s=30)
    whole = [wire.frame(request) for request in REQUESTS]
    sent = refused = connections = grown_from = 0
    while sent < messages:
        with contextlib.suppress(BrokenPipeError), raw(server.socket, whole[0], whole[1]) as connection:
            batch = b""
            for _ in range(6):
                data = bytearray(rng.choice(whole))
                for _ in range(rng.choice([0, 0, 1, 1, 2, 9])):
                    data[rng.randrange(5, max(6, len(data))) % len(data)] = rng.randrange(256)
                if rng.random() < 0.02:
                    del data[rng.randrange(len(data)) :]
                batch += bytes(data)
            sent += 6
            connections += 1
            connection.sendall(batch)
            connection.shutdown(socket.SHUT_WR)
            refused += any(isinstance(answer, wire.Failed) for answer in answers(connection))
        if connections == 100:
            grown_from = peak_rss_bytes(server.pid)
    until(lambda: len(report(server.socket).sessions) == 1)
    assert stays.counts().read_leases == 0
    assert_adds_up(stays.counts())
    grown = peak_rss_bytes(server.pid) - grown_from
    stays.close()
    server.stop()
    return {"sent": sent, "connections": connections, "refused": refused, "grown_bytes": grown}


def test_hostile_bytes_left_nothing_behind(sturdy: ServerProcess) -> None:
    until(lambda: not report(sturdy.socket).sessions)
    cache = RemoteCache(sturdy.socket, chunk_bytes=CHUNK_BYTES, fingerprint="f")
    until(lambda: cache.counts().write_leases == 0 or bool(report(sturdy.socket).orphans))
    assert cache.counts().read_leases == 0
    assert_adds_up(cache.counts())
    cache.close()


def test_lengths_that_are_lies_set_no_memory_aside(sturdy: ServerProcess) -> None:
    before = peak_rss_bytes(sturdy.pid)
    for nbytes in (wire.MAX_REQUEST_BYTES + 1, 2**32 - 1):
        with raw(sturdy.socket, wire.HEADER.pack(nbytes, wire.VERSION)) as connection:
            (refused,) = answers(connection)
            assert isinstance(refused, wire.Failed)
            assert "at most" in refused.text
    for body in (
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa6lookup\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\xc6\xff\xff\xff\xff",
    ):
        with raw(sturdy.socket, wire.HEADER.pack(len(body), wire.VERSION) + body) as connection:
            (refused,) = answers(connection)
            assert isinstance(refused, wire.Failed)
            assert refused.kind == "malformed"
    waiting = [raw(sturdy.socket, wire.HEADER.pack(wire.MAX_REQUEST_BYTES, 1), b"x" * 1000) for _ in range(30)]
    assert ask_server(sturdy.socket, wire.Ping()) == wire.Done()
    for connection in waiting:
        connection.close()
    assert peak_rss_bytes(sturdy.pid) - before < 16 << 20


def peak_rss_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_another_version_is_refused_and_told_which(served: Served) -> None:
    with served.raw(wire.HEADER.pack(1, wire.VERSION + 1) + b"x") as connection:
        (refused,) = answers(connection)
    assert isinstance(refused, wire.Failed)
    assert f"speaks version {wire.VERSION}" in refused.text


def test_a_server_of_another_version_is_refused_with_words(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "s"))
        listener.listen()
        listener.settimeout(60)

        def answer() -> None:
            accepted, _ = listener.accept()
            accepted.settimeout(60)
            with accepted:
                accepted.sendall(wire.HEADER.pack(3, 9) + b"abc")
                while accepted.recv(999):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="the other 9"):
            join(home)
        joined(thread)


def test_the_first_message_is_a_hello_and_caches_are_registered_once(served: Served) -> None:
    for sent, kind, text in (
        ([wire.Ping()], "malformed", "hello"),
        ([wire.Hello("t"), wire.Counts()], "misuse", "registered no cache"),
        ([wire.Hello("t"), register(), register()], "misuse", "already"),
    ):
        with served.raw(*sent) as connection:
            connection.shutdown(socket.SHUT_WR)
            said = answers(connection)
        assert isinstance(said[-1], wire.Failed)
        assert (said[-1].kind, text in said[-1].text) == (kind, True)


def test_a_bug_in_the_server_ends_one_session_only(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = served.join()
    (behind,) = served.server.caches.values()
    with monkeypatch.context() as broken:
        broken.setattr(behind, "lookup", lambda *args, **options: 1 / 0)
        assert cache.lookup(key_chain(1), "r").ended is Ended.REFUSED
    until(lambda: cache.lookup(key_chain(1), "r").ended is Ended.ABSENT)
    cache.close()


# Its process.


def test_it_is_ready_at_once_and_small(home: Path) -> None:
    """The pool is large and not touched; no torch, no plotting, no network library is loaded."""
    began = time.monotonic()
    server = launch({"host": {"capacity_bytes": "1GiB"}}, socket=home / "s")
    assert time.monotonic() - began < 1
    cache = join(home)
    store(cache, key_chain(4))
    assert peak_rss_bytes(server.pid) < 100 << 20
    cache.close()
    server.stop()
    code = "import sys, kv_tiers.server.cli; print(sorted(name for name in sys.modules if '.' not in name))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    for name in ("torch", "vllm", "matplotlib", "redis", "obstore", "asyncio", "pickle5"):
        assert f"'{name}'" not in loaded


def test_a_private_server_ends_with_whoever_started_it() -> None:
    code = (
        "import os, signal, sys\n"
        "from kv_tiers.server import launch\n"
        "server = launch({'host': {'capacity_bytes': '1MiB'}})\n"
        "print(server.pid, server.socket, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    pid, path = line(process.stdout).split()
    watched = os.pidfd_open(int(pid))
    process.kill()
    process.wait(60)
    process.stdout.close()
    process.stdin.close()
    assert select.select([watched], [], [], 10)[0]
    os.close(watched)
    assert not Path(path).parent.exists()


def test_a_detached_server_stores_what_was_to_be_written_back_after_its_engine_was_killed(home: Path) -> None:
    """It is no descendant and not in the session of whoever started it, which is how engines find what to kill."""
    code = (
        "import json, pathlib, sys\n"
        "from kv_tiers.server import launch\n"
        "server = launch(json.loads(sys.argv[1]), socket=pathlib.Path(sys.argv[2]), detached=True)\n"
        "print(server.pid, server.is_running(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    config = settings_for(home, slots=40, disk=True, write="back")
    command = [sys.executable, "-c", code, json.dumps(config), str(home / "s")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    pid, is_running = line(process.stdout).split()
    assert is_running == "True" and os.getsid(int(pid)) == int(pid) != process.pid
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) not in (process.pid, os.getpid())
    cache = join(home)
    store(cache, key_chain(5))
    watched = os.pidfd_open(int(pid))
    process.kill()
    process.wait(60)
    assert select.select([watched], [], [], 10)[0]
    os.close(watched)
    process.stdout.close()
    process.stdin.close()
    cache.close()
    server = start(home, slots=40, disk=True)
    again = join(home)
    assert held(again, key_chain(5)) == 5
    assert read(again, key_chain(5))
    again.close()
    server.stop()


def test_a_detached_server_is_stopped_like_a_child(home: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        server = launch(settings_for(home), socket=home / "s", detached=True)
        watched = os.pidfd_open(server.pid)
        assert server.is_running()
        if number == signal.SIGKILL:
            os.kill(server.pid, number)
        server.stop()
        assert select.select([watched], [], [], 10)[0] and not server.is_running()
        os.close(watched)
        server.stop()


def test_a_private_server_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="the cache server"):
        launch({"host": {"capacity_bytes": "1MiB"}, "teirs": []})
    assert "did you mean 'tiers'" in capfd.readouterr().err


def test_a_private_server_that_ended_can_be_stopped_twice() -> None:
    server = launch({"host": {"capacity_bytes": "1MiB"}})
    assert server.is_running()
    home = server.socket.parent
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    server.stop()
    assert not server.is_running()
    assert not home.exists()


def test_where_a_server_is_and_what_it_cannot_be(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    assert default_socket("x") == home / f"kv-tiers-{os.geteuid()}" / "x.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "nowhere"))
    assert default_socket("x").parent.parent == Path(tempfile.gettempdir())
    for wrong in (
        {"host": {"name": "n"}},
        {"server": {"max_formats": 0}},
        {"server": {"name": "a/b"}},
        {"server": {"socket": "/" + "a" * 120}},
        {"server": {"sokcet": "s"}},
    ):
        with pytest.raises(ConfigError):
            read_config(wrong)


def test_the_command_says_what_is_wrong(home: Path) -> None:
    for arguments in (["--config", str(home / "none")], ["--capacity", "lots"]):
        done = subprocess.run(
            [sys.executable, "-m", "kv_tiers.server", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 2
        assert done.stderr.startswith("kv-server: ")


# Its pool.


def test_a_shared_pool_cannot_be_cut_short() -> None:
    pool = HostPool.shared("s", CHUNK_BYTES, 4)
    seen = MappedPool("s", CHUNK_BYTES, 4, os.dup(pool.descriptor))
    slot = pool.allocate()
    assert slot is not None
    assert pool.back([slot]) == set()
    seen.view[:3] = b"abc"
    with pool.chunk(slot) as chunk:
        assert bytes(chunk[:3]) == b"abc"
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(pool.descriptor, 0)
    pool.close()
    assert bytes(seen.view[:3]) == b"abc"


def test_without_memfd_an_unlinked_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    pool = HostPool.shared("s", CHUNK_BYTES, 4)
    assert os.fstat(pool.descriptor).st_nlink == 0
    assert pool.back([0, 1]) == set()
    assert os.fstat(pool.descriptor).st_blocks * 512 == 2 * SLOT_BYTES
    pool.close()


def test_only_a_shared_pool_has_a_descriptor() -> None:
    pool = HostPool.anonymous("p", CHUNK_BYTES, 1)
    with pytest.raises(MisuseError, match="not shared"):
        _ = pool.descriptor
    pool.close()


if __name__ == "__main__":
    print(json.dumps({"kill": kill_often, "bend": bend_often}[sys.argv[1]](int(sys.argv[2]))))
