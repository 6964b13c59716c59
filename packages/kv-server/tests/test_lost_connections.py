"""Clients that go, however they go: what they held is given back, and only what nobody can be writing."""

import contextlib
import errno
import fcntl
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import MisuseError, TierDown
from kv_core.keys import ChunkKey
from kv_core.service import Ended, LoadFailed, ReadLease
from kv_core.testing import key_chain
from kv_server import RemoteCache, launch, wire
from kv_server import connection as connection_module
from kv_server import connections as clients_module
from kv_server import session as orphans_module
from kv_server.connection import Opening, ServerConnection, ask_server
from kv_server.remote_cache import MappedPool
from kv_testing.cache_servers import (
    SLOT_BYTES,
    ThreadedServer,
    die,
    fill,
    held,
    lose,
    raw_session,
    read,
    register,
    report_of,
    store,
)
from kv_testing.service_contract import CHUNK_BYTES, assert_adds_up
from kv_testing.wait import accepted, joined, until
from kv_tiers.pool.host_pool import HostPool


def test_a_closed_connection_gives_back_what_was_read_at_once(served: ThreadedServer) -> None:
    stays = served.join()
    store(stays, key_chain(3))
    with raw_session(served) as ask:
        keys = wire.pack_keys(key_chain(3))
        for number in range(5):
            ask(wire.Lookup(keys, f"r{number}", 1, ("all",), 1, {}))
        ask(wire.Load(keys, "l", False))
        ask(wire.Load(keys, "never released", False))
        assert stays.counts().read_leases == 7
    until(lambda: stays.counts().read_leases == 0)
    (behind,) = served.server.caches.values()
    assert not behind._leases.holders()
    stays.close()


def test_an_answer_that_has_come_counts_however_late_its_reader_runs(
    served: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = ServerConnection(served.path, 0.2)
    now_s = [0.0]
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    read = connection._read

    def read_late() -> bytes:
        data = read()
        now_s[0] += 1.0  # another thread had the processor
        return data

    monkeypatch.setattr(connection, "_read", read_late)
    with contextlib.closing(connection):
        assert isinstance(connection.receive(0.2), wire.Welcome)
        assert isinstance(connection.ask(wire.Status()), wire.Stated)


def test_what_is_asked_of_a_server_once_has_one_time_for_the_greeting_and_the_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server greets us when half a second is left of a day, half of the greeting in that, and answers nothing."""
    day_s, now_s = 86_400.0, [0.0]
    greeting = wire.frame(wire.Welcome("0", 1))
    parts = [(day_s - 0.5, greeting[:5]), (day_s + 1, greeting[5:])]

    def answer() -> None:
        with contextlib.suppress(ConnectionError), listener, accepted(listener) as connection:
            connection.recv(1 << 16)
            for at_s, part in parts:
                now_s[0] = at_s
                connection.sendall(part)
            connection.recv(1 << 16)  # the request, if any
            connection.recv(1 << 16)  # nothing: the client has gone

    listener = socket.create_server(str(home / "s"), family=socket.AF_UNIX)
    server = threading.Thread(target=answer, daemon=True)
    server.start()
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    failed: list[TierDown] = []

    def ask() -> None:
        with pytest.raises(TierDown, match="did not answer within 86400 s") as raised:
            ask_server(home / "s", wire.Ping(), timeout_s=day_s)
        failed.append(raised.value)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    joined(asking, server, within_s=10)
    assert failed


def test_a_client_that_may_open_no_more_descriptors_finds_nothing_until_it_may(
    served: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception would end up in the engine's hook, which turns the cache off for good."""
    cache, keys = served.join(), key_chain(2)
    store(cache, keys)

    def none_left(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(connection_module, "socket", SimpleNamespace(**{**vars(socket), "socket": none_left}))
        with cache._lock:
            cache._link.lose("for the test")
        for _ in range(2):
            assert cache.lookup(keys, "r").ended is Ended.REFUSED
        assert not cache.begin_store(key_chain(1, branch="new"), "w").keys
    until(lambda: cache.lookup(keys, "r").ended is Ended.ALL_HELD)
    cache.close()


def test_who_lost_only_the_connection_may_still_be_writing(served: ThreadedServer) -> None:
    """Its slots are nobody else's until it says what it still has; then the copy goes on where it was."""
    writer, other = served.join(), served.join()
    keys = key_chain(5)
    kept, lost = writer.begin_store(keys[:3], "w"), writer.begin_store(keys, "x")
    lose(writer)
    until(lambda: served.report().orphans == 1)
    assert other.counts().write_leases == 2
    greedy = other.begin_store(key_chain(8, branch="greedy"), "g")
    assert len(greedy.keys) == 3
    assert set(greedy.extents).isdisjoint(kept.extents + lost.extents)
    fill(writer, kept)
    writer._link.back_off(0)
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


@pytest.mark.parametrize("returns", [True, False])
def test_what_is_read_for_good_stays_in_place_without_a_connection(served: ThreadedServer, returns: bool) -> None:
    """A copy that cannot be taken back: no time ends its lease and nothing replaces its bytes, whatever becomes of the
    connection; only the reader itself gives it back."""
    reader, other = served.join(), served.join()
    keys = key_chain(3)
    store(other, keys)
    lease = reader.load(keys, "r", lasting=True)
    timed = reader.load(keys, "t")
    assert isinstance(lease, ReadLease) and isinstance(timed, ReadLease)
    before = [bytes(reader.pool.view[extent.offset :][: extent.nbytes]) for extent in lease.extents]
    lose(reader)
    until(lambda: served.report().orphans == 1)
    served.clock.advance(10_000)
    other.forget(keys[2:])
    greedy = other.begin_store(key_chain(8, branch="greedy"), "g")
    assert len(greedy.keys) == 5
    fill(other, greedy)
    assert [bytes(reader.pool.view[extent.offset :][: extent.nbytes]) for extent in lease.extents] == before
    if returns:
        reader._link.back_off(0)
        until(lambda: reader.lookup([], "r").ended is Ended.ALL_HELD)
        assert served.report().orphans == 0 and other.counts().read_leases == 1
        assert not reader.release(timed)
        assert not reader.release(lease)  # one of its chunks was forgotten, as the reader may know
    else:
        assert not reader.release(lease)
        reader._link.back_off(0)
        until(lambda: reader.lookup([], "r").ended is Ended.ALL_HELD)
    until(lambda: other.counts().read_leases == 0 and served.report().orphans == 0)
    assert other.release(greedy)
    assert len(other.begin_store(key_chain(8, branch="more"), "m").keys) == 8
    reader.close()
    other.close()


def test_nothing_is_reserved_for_one_whose_end_nobody_would_ever_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives no pidfd, and does not lock what is mapped."""
    monkeypatch.setattr(clients_module, "open_pidfd", lambda connection, pid: -1)
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 0x7FFF)
    with contextlib.closing(ThreadedServer()) as served, contextlib.closing(served.join()) as client:
        failed = client.load(key_chain(2), "r", lasting=True)
        assert isinstance(failed, LoadFailed) and "kernel" in failed.reason
        refused = client.begin_store(key_chain(2), "w")
        assert not refused.keys and "kernel" in refused.refused
        assert client.lookup(key_chain(2), "r").ended is Ended.ABSENT


def test_a_pidfd_is_enough_where_mappings_are_not_known(
    served: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 0x7FFF)
    stays, lost = served.join(), served.join()
    assert lost.begin_store(key_chain(3), "w").keys
    cut_off(lost)
    until(lambda: served.report().orphans == 1)
    served.clock.advance(100_000)
    served.server.submit(lambda: None).result(10)
    assert stays.counts().write_leases == 1
    monkeypatch.setattr(orphans_module, "is_gone", lambda pidfd: True)
    until(lambda: stays.counts().write_leases == 0)
    for cache in (stays, lost):
        cache.close()


def test_what_was_given_up_while_away_is_given_back_at_the_return(served: ThreadedServer) -> None:
    writer, other = served.join(), served.join()
    leases = [writer.begin_store(key_chain(2, branch=str(number)), f"w{number}") for number in range(4)]
    lose(writer)
    until(lambda: served.report().orphans == 1)
    writer.commit(leases[0])
    assert not writer.release(leases[1])
    writer.end("w2")
    with pytest.raises(MisuseError, match="not open"):
        writer.commit(leases[2])
    writer._link.back_off(0)
    until(lambda: writer.lookup([], "r").ended is Ended.ALL_HELD)
    assert other.counts().write_leases == 1
    fill(writer, leases[3])
    writer.commit(leases[3])
    assert held(other, leases[3].keys) == 2
    assert other.counts().slots_used == 2
    writer.close()
    other.close()


def cut_off(cache: RemoteCache) -> None:
    """Its connection is lost and it does not come back, though it lives and has the pool."""
    with cache._lock:
        cache._has_lasting_leases = False
        cache._link.lose("for the test")
        cache._link.back_off(1e9)


def test_without_a_pidfd_slots_wait_until_nobody_maps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes; and then for the devices of a process that may be ending."""
    monkeypatch.setattr(clients_module, "open_pidfd", lambda connection, pid: -1)
    monkeypatch.setattr(orphans_module, "_MAX_LOOK_S", 0.01)
    looks = looked(monkeypatch)
    with contextlib.closing(ThreadedServer()) as served, contextlib.closing(served.join()) as stays:
        lost = served.join()
        assert lost.begin_store(key_chain(3), "w").keys
        cut_off(lost)
        until(lambda: served.report().orphans == 1)
        child = os.fork()  # which could write there as well
        if child == 0:
            signal.pause()
        try:
            lost.pool.close()
            lost.pool.view.release()
            del lost
            gc.collect()
            for _ in range(2):
                served.clock.advance(3600)
                seen = len(looks)
                until(lambda: len(looks) > seen + 2)  # noqa: B023
                assert looks[-1] and stays.counts().write_leases == 1
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        until(lambda: not looks[-1])
        served.clock.advance(orphans_module.SETTLE_S - 0.1)
        seen = len(looks)
        until(lambda: len(looks) > seen + 2)
        assert stays.counts().write_leases == 1
        served.clock.advance(0.1)
        until(lambda: served.report().orphans == 0)
        assert stays.counts().slots_used == 0


def looked(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """What the server finds each time it looks whether a pool is still mapped."""
    looks: list[bool | None] = []
    is_lent = HostPool.is_lent

    def look(pool: HostPool, token: bytes) -> bool | None:
        looks.append(is_lent(pool, token))
        return looks[-1]

    monkeypatch.setattr(HostPool, "is_lent", look)
    return looks


def test_a_client_that_registers_anew_may_write_in_its_first_mapping(served: ThreadedServer) -> None:
    """It unregistered, and the pool is the one that it maps already; it need not map it again."""
    opening = Opening(served.path, 10, register())
    answer = opening.finish(10)
    assert answer is not None
    pool = MappedPool(answer.name, answer.group_bytes, answer.slots, opening.take_descriptor())
    assert isinstance(opening.ask(wire.Unregister()), wire.Done)
    again = opening.ask(register())
    assert isinstance(again, wire.Pool) and again.name == pool.name
    assert isinstance(opening.ask(wire.BeginStore(wire.pack_keys(key_chain(2)), "w", {})), wire.Answer)
    opening.close()
    until(lambda: served.report().orphans == 1)
    (cache,) = served.server.caches.values()
    assert cache.pool.is_lent(again.token)
    pool.close()
    pool.view.release()


DEEDS = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["store", "lookup", "load", "write", "end", "die", "leave"]),
    st.sampled_from("ab"),
    st.builds(lambda chunks, branch: key_chain(chunks, branch=branch), st.integers(1, 4), st.sampled_from("xyz")),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(DEEDS, max_size=25))
def test_what_is_held_is_what_living_clients_hold(deeds: list[tuple[int, str, str, list[ChunkKey]]]) -> None:
    """Whatever clients do and whenever they die, in any order."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(orphans_module, "is_gone", lambda pidfd: True)
        patched.setattr(HostPool, "is_lent", lambda pool, token: False)
        served = ThreadedServer()
        judge = served.join()
        clients = [served.join() for _ in range(3)]
        reads: list[set[str]] = [set(), set(), set()]
        loads: list[list[str]] = [[], [], []]
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
                case "load":
                    if isinstance(cache.load(keys, holder, lasting=True), ReadLease):
                        loads[who].append(holder)
                case "write":
                    cache.begin_store(keys, holder)
                    writes[who].append(holder)
                case "end":
                    cache.end(holder)
                    reads[who].discard(holder)
                    loads[who] = [reader for reader in loads[who] if reader != holder]
                    writes[who] = [writer for writer in writes[who] if writer != holder]
                case "die" | "leave":
                    if deed == "die":
                        die(cache)
                    else:
                        cache.close()
                    reads[who], loads[who], writes[who] = set(), [], []
                    clients[who] = served.join()
                    until(lambda: len(served.report().sessions) == 4)
            counts = judge.counts()
            assert counts.read_leases == sum(map(len, reads)) + sum(map(len, loads))
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


def test_a_process_that_comes_and_goes_costs_one_descriptor(served: ThreadedServer) -> None:
    stays = served.join()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(12):
        with raw_session(served) as ask:
            ask(wire.BeginStore(wire.pack_keys(key_chain(1, branch=str(number))), "w", {}))
        until(lambda: len(served.report().sessions) == 1)
    assert served.report().orphans == 8  # one for each slot; who got no room leaves nothing
    # The server closes its end of what asked it a moment after that was answered.
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
    stays.close()


def test_killed_at_any_moment() -> None:
    """Nothing of a killed client is left, and what it committed is whole."""
    done = subprocess.run([sys.executable, __file__, "150"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["kills"] == 150
    assert counted["writing"] > 5  # were in the middle of a store
    assert counted["verified"] > 100


def child_lives(path: Path, seed: int, writer: int) -> NoReturn:
    try:
        rng = random.Random(seed)
        cache = RemoteCache(path, group_bytes=(CHUNK_BYTES,), fingerprint="f")
        os.write(writer, b"r")
        while True:
            keys = key_chain(rng.randint(1, 6), branch=str(rng.randrange(8)))
            match rng.randrange(5):
                case 0:
                    cache.lookup(keys, f"r{rng.randrange(9)}")
                case 1:
                    cache.load(keys, "l", lasting=rng.random() < 0.5)
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
    stays = RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="f")
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
        until(lambda: len(report_of(server.socket).sessions) == 1 and not report_of(server.socket).orphans)
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


if __name__ == "__main__":
    print(json.dumps(kill_often(int(sys.argv[1]))))
