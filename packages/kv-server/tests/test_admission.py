"""Who is served, and how much of it."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kv_core.clock import HandClock
from kv_core.errors import ConfigError
from kv_core.service import Ended, LoadFailed, ReadLease
from kv_core.testing import key_chain, keys_of
from kv_observe.explain import Explanation
from kv_server import RemoteCache, ServerConfig, wire
from kv_server import caches as caches_module
from kv_server import server as explain_module
from kv_server import session as session_module
from kv_server.caches import Caches
from kv_server.connection import ask_server
from kv_server.server import CacheServer
from kv_testing.cache_servers import (
    ThreadedServer,
    answers_on,
    held,
    read,
    register,
    store,
)
from kv_testing.wait import joined, until
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import HostConfig, PeersConfig
from kv_tiers.events.bus import EventBus


def test_another_user_is_refused(served: ThreadedServer) -> None:
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
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(home / "s"))  # and left there
    again = CacheServer(config)
    again.stop()
    again.serve()


def test_a_directory_open_to_others_is_no_place_for_a_socket(home: Path) -> None:
    config = ServerConfig(host=HostConfig(capacity_bytes=1 << 20), socket=str(home / "s"))
    home.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        CacheServer(config)


def test_so_many_sessions_and_formats_and_no_more() -> None:
    served = ThreadedServer(max_sessions=3, max_formats=2)
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


def test_a_format_that_nobody_has_used_for_a_leases_time_makes_room_for_another() -> None:
    """Else a server would refuse its fifth model for ever, and keep the memory of the first four."""
    clock = HandClock()
    served = ThreadedServer(clock=clock, max_formats=2)
    history = served.server._history
    assert history is not None
    one, two = served.join("one"), served.join("two")
    for cache in (one, two):
        store(cache, key_chain(2))
    one.close()
    until(lambda: len(served.report().sessions) == 1)
    with pytest.raises(ConfigError, match=r"max_formats.* used in the last 300 s"):
        served.join("three")  # the engine of the first may be starting again
    clock.advance(301)
    three = served.join("three")
    store(three, key_chain(2))
    assert [cache.fingerprint for cache in served.report().caches] == ["two", "three"]
    served.server.bus.flush()
    assert len(history._memories) == 2  # what `kv explain` remembers goes with its cache
    clock.advance(301)
    with pytest.raises(ConfigError, match="max_formats"):
        served.join("one")  # both have clients, however long these have been quiet
    assert read(two, key_chain(2)) and read(three, key_chain(2))
    three.close()
    until(lambda: len(served.report().sessions) == 1)
    clock.advance(301)
    again = served.join("one")
    assert held(again, key_chain(2)) == 0
    store(again, key_chain(2))
    assert read(again, key_chain(2))
    for cache in (two, again):
        cache.close()
    served.close()


def test_no_format_makes_room_where_other_hosts_read() -> None:
    clock = HandClock()
    served = ThreadedServer(clock=clock, max_formats=1, peers=PeersConfig(listen="127.0.0.1:0", unprotected=True))
    served.join("one").close()
    until(lambda: not served.report().sessions)
    clock.advance(301)
    with pytest.raises(ConfigError, match="open to peers"):
        served.join("two")
    served.close()


def test_settings_that_cannot_be_honoured_are_told_to_the_client() -> None:
    served = ThreadedServer(tiers=[{"type": "dsik"}])
    with pytest.raises(ConfigError, match="dsik"):
        served.join()
    assert ask_server(served.path, wire.Ping()) == wire.Done()
    served.close()


def test_opening_a_new_models_tiers_delays_nobody_else(served: ThreadedServer, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_starting_engine_waits_for_tiers_that_take_long_to_open(
    served: ThreadedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It failed, and its private server with it, so that the next start found nothing opened either."""
    go_on, build = threading.Event(), caches_module.build_local_cache

    def slow(*args: Any, **options: Any) -> LocalCache:
        assert go_on.wait(30)
        return build(*args, **options)

    monkeypatch.setattr(caches_module, "build_local_cache", slow)
    met: list[RemoteCache] = []
    engine = threading.Thread(target=lambda: met.append(served.join(connect_timeout_s=2.0)))
    engine.start()
    until(lambda: "is opening its tiers" in caplog.text)
    go_on.set()
    joined(engine)
    store(met[0], key_chain(2))
    met[0].close()


def test_who_gives_up_waiting_for_tiers_leaves_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose server is started again tries anew every few seconds, and a large disk takes minutes to open."""
    go_on, build = threading.Event(), caches_module.build_local_cache

    def slow(*args: Any, **options: Any) -> LocalCache:
        assert go_on.wait(30)
        return build(*args, **options)

    monkeypatch.setattr(caches_module, "build_local_cache", slow)
    served = ThreadedServer(max_sessions=3)
    for _ in range(8):
        with served.raw(wire.Hello("test"), register()):
            until(lambda: any(client.waiting for client in served.server._connections.all()))
        until(lambda: not served.server._connections.all())
    with served.raw(wire.Hello("test"), register()) as ahead:
        until(lambda: any(client.waiting for client in served.server._connections.all()))
        ahead.sendall(wire.frame(wire.Ping()))
        until(lambda: any(client.is_ahead for client in served.server._connections.all()))
        ahead.shutdown(socket.SHUT_WR)
        go_on.set()
        welcome, pool, done = answers_on(ahead)
    assert isinstance(welcome, wire.Welcome) and isinstance(pool, wire.Pool) and done == wire.Done()
    served.close()


def test_a_server_that_ends_does_not_wait_for_a_cache_that_takes_long_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of many terabytes takes minutes, and whoever stops a server kills it before."""
    go_on, build = threading.Event(), caches_module.build_local_cache
    built: list[LocalCache] = []

    def slow(*args: Any, **options: Any) -> LocalCache:
        assert go_on.wait(10)
        built.append(build(*args, **options))
        return built[0]

    monkeypatch.setattr(caches_module, "build_local_cache", slow)
    monkeypatch.setattr(caches_module, "_OPENING_S", 0.05)
    config = ServerConfig(host=HostConfig(capacity_bytes=1 << 20))
    caches = Caches(config, HandClock(), EventBus(), lambda: None, lambda _: None)
    assert caches.open(((4096,), "f"), [])
    caches.close()
    assert not built
    go_on.set()
    until(lambda: built and not built[0]._host.is_open)
    assert not caches.opened()


def test_explaining_a_prompt_delays_nobody_else(served: ThreadedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of chunks of many groups and shards take tenths of a second, in which no engine was answered."""
    began, go_on, explain = threading.Event(), threading.Event(), explain_module.explain

    def slow(*args: Any) -> Explanation:
        began.set()
        assert go_on.wait(30)
        return explain(*args)

    cache, keys = served.join(), key_chain(2)
    store(cache, keys)
    assert served.server.bus.flush()
    monkeypatch.setattr(explain_module, "explain", slow)
    question = wire.Explain(32, b"".join(key.digest for key in keys), [])
    with served.raw(wire.Hello("t"), question, wire.Ping()) as asks, served.raw(wire.Hello("t"), question) as leaves:
        try:
            assert began.wait(10)
            leaves.close()
            assert held(cache, keys) == 2
        finally:
            go_on.set()
        asks.shutdown(socket.SHUT_WR)
        _, explained, answered = answers_on(asks)  # in the order of the questions
    assert isinstance(explained, wire.Explanations)
    assert [one.held for one in explained.explained] == [2]
    assert answered == wire.Done()
    assert held(cache, keys) == 2
    cache.close()


def test_a_session_holds_so_much_and_no_more(served: ThreadedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_KEYS_HELD", 10)
    cache, other = served.join(), served.join()
    keys = key_chain(3)
    store(cache, keys)
    for holder in ("a", "b", "c"):
        assert cache.lookup(keys, holder).chunks == 3
    assert cache.lookup(keys, "d").ended is Ended.REFUSED
    assert cache.load(keys, "d") == LoadFailed(tuple(keys), "this session holds as much as a session may")
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
    monkeypatch.setattr(session_module, "MAX_LASTING", 0)
    assert cache.begin_store(keys, "w").refused
    assert isinstance(cache.load(keys, "r", lasting=True), LoadFailed)
    assert isinstance(cache.load(keys, "r"), ReadLease)
    monkeypatch.setattr(session_module, "MAX_TIMED", 2)
    assert cache.lookup(keys, "s").ended is Ended.REFUSED
    cache.close()
    other.close()


def test_a_question_too_long_for_one_message_is_answered_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = ThreadedServer(slots=20)
    cache = served.join()
    monkeypatch.setattr(wire, "MAX_KEYS", 6)
    keys = key_chain(10)
    assert "at most 6" in store(cache, keys).refused
    plan = cache.lookup(keys, "r")
    assert (plan.chunks, plan.ended) == (6, Ended.REFUSED)
    assert "its first 6 chunks only" in caplog.text
    assert cache.lookup(keys, "r", shape=keys_of(5)).chunks == 1
    assert isinstance(cache.load(keys, "l"), LoadFailed)
    cache.forget(keys)
    assert held(cache, keys) == 0
    cache.close()
    served.close()


@pytest.mark.slow
def test_all_of_a_million_tokens_is_found() -> None:
    """4,096 chunks of 4 groups in 8 shards: every verb takes all of their keys."""
    served = ThreadedServer(slots=4096 * 4 * 8)
    with contextlib.closing(served), contextlib.closing(served.join(timeout_s=60.0)) as cache:
        shape = keys_of(4 * 8)
        keys = key_chain(4096 * shape.keys_per_chunk)
        lease = cache.begin_store(keys, "w")
        assert lease.keys == tuple(keys) and not lease.refused
        cache.commit(lease)
        plan = cache.lookup(keys, "r", shape=shape)
        assert (plan.chunks, plan.ended) == (4096, Ended.ALL_HELD)
        read = cache.load(keys, "l")
        assert isinstance(read, ReadLease) and read.keys == tuple(keys)
        assert cache.release(read)
        cache.end("r")
        cache.received(keys)
        cache.forget(keys)
        failed = cache.load(keys, "l")
        assert isinstance(failed, LoadFailed) and failed.missing == tuple(keys)
        assert cache.lookup(keys, "r", shape=shape).chunks == 0
        assert cache.counts().slots_used == 0


def test_who_does_not_read_is_dropped(served: ThreadedServer) -> None:
    stays = served.join()
    with served.raw(wire.Hello("t"), register()) as deaf, pytest.raises((BrokenPipeError, ConnectionResetError)):
        deaf.sendall(wire.frame(wire.Status()) * 1_000_000)
    assert stays.counts().slots_total == 8
    assert len(served.report().sessions) == 1
    stays.close()


def test_who_floods_the_server_delays_nobody(served: ThreadedServer) -> None:
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
