"""Servers that go, hang or come back: a miss, and nothing else."""

import contextlib
import gc
import logging
import os
import random
import signal
import socket
import threading
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest
from kv_core.clock import HandClock
from kv_core.errors import ConfigError, MisuseError
from kv_core.service import Ended, LoadFailed, ReadLease
from kv_core.testing import key_chain, keys_of
from kv_server import launch, wire
from kv_server import remote_cache as client_module
from kv_server.connection import LOOK_S, MAX_BACK_OFF_S, Reconnector
from kv_server.remote_cache import MappedPool
from kv_testing.cache_servers import (
    ThreadedServer,
    fill,
    held,
    join_at,
    join_server,
    kill_server,
    lose,
    read,
    report_of,
    settings_for,
    start_server,
    store,
)
from kv_testing.wait import joined, until


def test_a_killed_server_is_a_miss_and_nothing_else(home: Path) -> None:
    server = start_server(home)
    pools: list[MappedPool] = []
    cache = join_server(home, on_new_pool=pools.append)
    keys = key_chain(3)
    store(cache, keys)
    writing, given_up = cache.begin_store(key_chain(2, branch="new"), "w"), cache.begin_store(key_chain(1), "v")
    cache.lookup(keys, "r")
    lease = cache.load(keys, "l")
    assert isinstance(lease, ReadLease)
    old = cache.pool
    kill_server(server)
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
        cache.lookup(keys, "r", shape=keys_of(2))

    server = start_server(home)
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
    server = start_server(home, slots=16, disk=True)
    stems = [key_chain(4, branch=str(number)) for number in range(6)]
    keeper = join_server(home)
    for number, stem in enumerate(stems, 1):  # no faster than the disk takes them
        store(keeper, stem)
        until(lambda wanted=4 * number: report_of(home / "s").caches[0].tiers[0].usage.chunks == wanted)
    failures: list[BaseException] = []
    hits = [0, 0, 0]
    phase = 0

    def work(number: int) -> None:
        rng = random.Random(number)
        cache = join_server(home)
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
    until(lambda: hits[0] > 50 or bool(failures), 60)
    kill_server(server)
    phase = 1
    until(lambda: keeper.lookup(stems[0], "k").ended is Ended.REFUSED)
    server = start_server(home, slots=16, disk=True)
    phase = 2
    until(lambda: hits[2] > 50 or bool(failures), 60)
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


def test_an_idle_client_is_back_within_a_second_however_long_the_server_was_away(home: Path) -> None:
    assert MAX_BACK_OFF_S + LOOK_S < 1
    server = start_server(home)
    cache = join_server(home, engine="idle")
    kill_server(server)
    until(lambda: cache._link._back_off_s == MAX_BACK_OFF_S)  # it will not try more rarely than now
    server = start_server(home)
    until(lambda: [session.engine for session in report_of(home / "s").sessions] == ["idle"], 60)
    cache.close()
    server.stop()


def test_an_idle_client_is_with_the_next_server_and_its_next_lookup_finds_what_the_disk_has(home: Path) -> None:
    """Nobody calls it while the server is killed and another one started: not the call that would find out."""
    server = start_server(home, disk=True)
    pools: list[MappedPool] = []
    cache = join_server(home, engine="idle", on_new_pool=pools.append)
    store(cache, key_chain(4))
    until(lambda: report_of(home / "s").caches[0].tiers[0].usage.chunks == 4)
    for generation in (1, 2):  # the second one is killed, too, before anything was asked of it
        kill_server(server)
        server = start_server(home, disk=True)
        until(lambda: [session.engine for session in report_of(home / "s").sessions] == ["idle"], 60)
        until(lambda: cache._link.is_registered, 60)
        assert not pools and cache.generation == 0, generation
    plan = cache.lookup(key_chain(4), "r", wait_for_promotion=True)
    assert plan.ended is Ended.PENDING, "the first lookup is answered by the server"
    assert pools == [cache.pool]
    assert held(cache, key_chain(4)) == 4 and read(cache, key_chain(4))
    cache.close()
    server.stop()


def test_a_client_that_nobody_closes_leaves_nothing_behind(served: ThreadedServer) -> None:
    """Neither a session at the server nor a thread, though that waits for the end of the connection."""
    cache = served.join()
    returning = cache._reconnector
    assert returning.is_alive() and len(served.report().sessions) == 1
    del cache

    def is_gone() -> bool:
        gc.collect()  # again: the thread may just be looking
        return not served.report().sessions

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Python's, of the socket that nobody closed
        until(is_gone)
    joined(returning)


def test_a_server_that_stays_away_is_tried_now_and_then() -> None:
    """Without a pause in between it would keep a processor busy. While there is a server, nothing is tried."""
    near, far = socket.socketpair()
    looks: list[float] = []
    waits: list[float] = []

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            return self.is_set()

    class Owner:
        def look(self) -> socket.socket | None:
            looks.append(len(waits))
            if len(looks) == 6:
                return near.dup()
            if len(looks) == 9:
                returning.stop()
            return None

    owner = Owner()
    returning = Reconnector(owner.look)
    returning._stopped = Stopped()
    returning.start()
    until(lambda: len(looks) == 6)
    assert waits == [LOOK_S] * 5
    assert returning.is_alive() and len(looks) == 6
    far.close()
    joined(returning)
    assert waits == [LOOK_S] * 8 and looks[6:] == [5, 6, 7]
    near.close()


def test_a_server_that_stays_away_is_connected_to_no_more_often_than_calls_do(home: Path) -> None:
    """By the client's own clock: looks in between try nothing."""
    server = start_server(home)
    clock = HandClock()
    cache = join_server(home, clock=clock)
    kill_server(server)
    until(lambda: not cache._link.is_registered)
    until(lambda: cache._link._retry_s > clock.now_s())  # one attempt has failed
    retry_s = cache._link._retry_s
    for _ in range(10):
        assert cache._look() is None
    assert cache._link._retry_s == retry_s
    server = start_server(home)
    assert cache._look() is None
    clock.advance(2.0)
    until(lambda: cache._link.is_registered, 60)
    assert cache.lookup([], "r").ended is Ended.ALL_HELD
    cache.close()
    server.stop()


def test_a_server_that_is_stopped_drains_and_its_successor_serves_everything(home: Path) -> None:
    server = start_server(home, slots=40, disk=True)
    cache = join_server(home)
    stems = [key_chain(5, branch=str(number)) for number in range(6)]
    for stem in stems:
        store(cache, stem)
    server.stop()
    assert not (home / "s").exists()
    server = start_server(home, slots=40, disk=True)
    again = join_server(home)
    for stem in stems:
        assert held(again, stem) == 5
        assert read(again, stem)
    again.close()
    cache.close()
    server.stop()


def test_a_server_that_cannot_remove_its_socket_stores_what_waits_nevertheless(home: Path) -> None:
    settings, keys = settings_for(home, slots=40, disk=True, write="back"), key_chain(5)
    server = launch(settings, socket=home / "s")
    cache = join_server(home)
    store(cache, keys)
    (home / "s").unlink()
    (home / "s").mkdir()
    server.stop()
    cache.close()
    server = launch(settings, socket=home / "another")
    cache = join_at(home / "another")
    assert held(cache, keys) == 5
    cache.close()
    server.stop()


def test_a_server_that_hangs_costs_one_time_out_and_then_nothing(home: Path) -> None:
    server = start_server(home)
    cache = join_server(home, timeout_s=0.2)
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
    server = start_server(home, disk=True)
    cache = join_server(home)
    gone, kept = key_chain(3, branch="gone"), key_chain(2, branch="kept")
    store(cache, gone)
    store(cache, kept)
    server.stop()
    cache.forget([*key_chain(forgotten - 3, branch="many"), *gone])
    server = start_server(home, disk=True)
    until(lambda: cache.lookup([], "r").ended is Ended.ALL_HELD)
    assert held(cache, gone) == 0
    assert held(cache, kept) == (2 if forgotten == 3 else 0)
    store(cache, gone)
    assert held(cache, gone) == 3
    cache.close()
    server.stop()


def test_a_new_pool_that_is_of_no_use_is_tried_again(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = start_server(home)
    calls: list[str] = []

    def attach(pool: MappedPool) -> None:
        calls.append(pool.name)
        if len(calls) == 1:
            raise RuntimeError("no memory on the device")

    cache = join_server(home, on_new_pool=attach)
    kill_server(server)
    server = start_server(home)
    with caplog.at_level(logging.CRITICAL):
        until(lambda: cache.lookup(key_chain(1), "r").ended is Ended.ABSENT)
    assert len(calls) == 2
    assert cache.generation == 1
    cache.close()
    server.stop()


def test_a_successor_of_another_version_is_named_in_the_log(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that runs while its server is upgraded goes on without a cache, and says why, once."""
    server = start_server(home)
    cache = join_server(home)
    kill_server(server)
    (home / "s").unlink(missing_ok=True)
    with closing(socket.socket(socket.AF_UNIX)) as upgraded:
        upgraded.bind(str(home / "s"))
        upgraded.listen()
        # Not ended by a shutdown: accept would then fail again and again until its time is up.
        upgraded.settimeout(0.1)
        over = threading.Event()

        def answer() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    client, _ = upgraded.accept()
                    with client:
                        client.sendall(wire.HEADER.pack(4, wire.VERSION + 1) + bytes(4))

        thread = threading.Thread(target=answer)
        thread.start()

        def tries() -> int:
            assert cache.lookup(key_chain(1), "r").ended is not Ended.PENDING
            return sum("still cannot be used" in record.message for record in caplog.records)

        with caplog.at_level(logging.DEBUG, "kv_server.connection"):
            until(lambda: tries() > 2)
        over.set()
        joined(thread)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len([line for line in said if f"the other {wire.VERSION + 1}" in line]) == 1, said
    cache.close()


def test_a_new_pool_waits_for_copies_that_cannot_be_taken_back(home: Path) -> None:
    """While one reads for good from the old pool, the new server is away, and the old pool's bytes are there."""
    server = start_server(home)
    pools: list[str] = []
    cache = join_server(home, on_new_pool=lambda pool: pools.append(pool.name))
    keys = key_chain(2)
    store(cache, keys)
    lease = cache.load(keys, "r", lasting=True)
    assert isinstance(lease, ReadLease)
    before = [bytes(cache.pool.view[extent.offset :][: extent.nbytes]) for extent in lease.extents]
    kill_server(server)
    server = start_server(home)
    for _ in range(20):
        assert cache.lookup(keys, "other").ended is Ended.REFUSED
        assert isinstance(cache.load(keys, "other", lasting=True), LoadFailed)
        cache._link.back_off(0)
    assert [bytes(cache.pool.view[extent.offset :][: extent.nbytes]) for extent in lease.extents] == before
    assert not pools
    assert not cache.release(lease)
    until(lambda: cache.lookup(keys, "other").ended is Ended.ABSENT)
    assert len(pools) == 1
    cache.close()
    server.stop()


def test_a_client_that_is_closed_says_so(served: ThreadedServer) -> None:
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
    server = start_server(home)
    cache = join_server(home)
    name = cache.pool.name
    in_use = cache.pool.view[:10]
    kill_server(server)
    server = start_server(home)
    until(lambda: cache.lookup([], "r").ended is Ended.ALL_HELD)
    assert name in Path("/proc/self/maps").read_text()
    in_use.release()
    maps = Path("/proc/self/maps").read_text()
    assert name not in maps
    assert cache.pool.name in maps
    cache.close()
    server.stop()


def test_an_interrupted_call_is_not_answered_by_the_next_ones_answer(
    served: ThreadedServer, monkeypatch: pytest.MonkeyPatch
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


def test_a_return_whose_answer_was_never_read_may_be_repeated(served: ThreadedServer) -> None:
    writer, other = served.join(), served.join()
    writing = writer.begin_store(key_chain(3), "w")
    lose(writer)
    with served.raw(wire.Hello("t"), writer._register()):
        until(lambda: not served.report().orphans and len(served.report().sessions) == 2)
    writer._link.back_off(0)
    until(lambda: writer.lookup([], "r").ended is Ended.ALL_HELD)
    fill(writer, writing)
    writer.commit(writing)
    assert read(other, key_chain(3))
    assert served.report().orphans == 0
    writer.close()
    other.close()


def test_an_address_where_nobody_serves_is_refused_with_words(home: Path) -> None:
    with pytest.raises(ConfigError, match="no server answers"):
        join_server(home)
