"""Live upgrades: a server takes over from another one under load, and either dies at each step."""

import json
import socket
import threading
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from kv_core.errors import ConfigError
from kv_core.service import Ended, LoadFailed, ReadLease
from kv_core.testing import key_chain
from kv_server import launch, wire
from kv_server.connection import PACKAGE, ask_server
from kv_server.server import CacheServer
from kv_server.succession.channel import FORMAT
from kv_server.succession.upgrade import TakingOver
from kv_testing.cache_servers import (
    SLOT_BYTES,
    ThreadedServer,
    fill,
    held,
    join_server,
    read,
    report_of,
    settings_for,
    store,
)
from kv_testing.servers import free_port
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.upgrades import ENDS_SLOWLY, KILLED, Callers, Loads, UpgradedServers, end
from kv_testing.wait import joined, line, until
from kv_tiers.cache.local import LocalCache
from kv_tiers.testing.tier_contract import content


def upgraded(home: Path, slots: int = 64, **options: object) -> UpgradedServers:
    return UpgradedServers(home, settings_for(home, slots, disk=True, **options))  # type: ignore[arg-type]


def with_ports(home: Path, *, http: int = 0, peers: int = 0, **server: object) -> UpgradedServers:
    at = {"http": {"listen": f"127.0.0.1:{http}"}, "peers": {"listen": f"127.0.0.1:{peers}", "unprotected": True}}
    return UpgradedServers(home, settings_for(home, 64) | at | {"server": server})


def test_everything_goes_on_in_the_new_process(home: Path) -> None:
    servers = upgraded(home)
    cache, other = join_server(home), join_server(home)
    pool, old = cache.pool, report_of(home / "s").pid
    found, forgotten, cleared = key_chain(5), key_chain(3, branch="forgotten"), key_chain(2, branch="dropped")
    for keys in (found, forgotten, cleared):
        store(cache, keys)
    assert cache.changes_since(0).upto >= 0
    since = cache.changes_since(0).upto
    reading, lasting = cache.load(found, "reading"), other.load(found, "lasting", lasting=True)
    void = cache.load(forgotten, "void")
    assert isinstance(reading, ReadLease) and isinstance(lasting, ReadLease) and isinstance(void, ReadLease)
    writing, dropped = (
        cache.begin_store(key_chain(2, branch="new"), "w"),
        other.begin_store(key_chain(2, branch="x"), "w"),
    )
    cache.forget([*forgotten, *cleared, *dropped.keys])
    promised = cache.lookup(found, "promised")
    until(lambda: cache.counts().slots_used == 12)  # none is on its way to the disk any more
    before = cache.counts()

    servers.upgrade()

    assert report_of(home / "s").pid != old
    assert cache.counts() == before
    assert cache.renew("promised") and promised.chunks == 5
    assert cache.release(reading) and other.release(lasting)
    assert not cache.release(void)
    fill(cache, writing)
    cache.commit(writing)
    fill(other, dropped)
    other.commit(dropped)
    assert read(other, writing.keys) and read(cache, found)
    assert isinstance(cache.load(dropped.keys, "l"), LoadFailed)
    changes = cache.changes_since(since)
    assert changes.is_whole and {key for change in changes.changes for key in change.keys} >= set(writing.keys)
    assert (cache.generation, cache.pool) == (0, pool)
    assert [held(cache, keys) for keys in (forgotten, cleared)] == [0, 0]
    cache.end("promised")
    counts = cache.counts()
    assert (counts.read_leases, counts.write_leases, counts.slots_used) == (0, 0, 7)
    cache.close()
    other.close()
    servers.close()


def test_room_that_a_lost_client_may_be_writing_stays_reserved_until_it_is_back(home: Path) -> None:
    servers = upgraded(home, slots=4)
    cache, other = join_server(home), join_server(home)
    writing = cache.begin_store(key_chain(3, branch="copying"), "w")
    with cache._lock:
        cache._link.lose("for the test")
        cache._link.back_off(1000)
    until(lambda: report_of(home / "s").orphans == 1)
    servers.upgrade()
    assert report_of(home / "s").orphans == 1
    assert len(other.begin_store(key_chain(4, branch="other"), "w").keys) == 1
    with cache._lock:
        cache._link.back_off(0)
    until(lambda: cache.lookup(writing.keys, "r").ended is not Ended.REFUSED)
    fill(cache, writing)
    cache.commit(writing)
    assert (read(cache, writing.keys), cache.generation) == (True, 0)
    cache.close()
    other.close()
    servers.close()


def test_what_no_engine_has_asked_for_yet_and_chunks_below_the_pool_are_found_after_it(home: Path) -> None:
    servers = upgraded(home, slots=8)
    cache = join_server(home)
    stems = [key_chain(4, branch=str(number)) for number in range(6)]
    for number, stem in enumerate(stems, 1):
        store(cache, stem)
        until(lambda wanted=4 * number: report_of(home / "s").caches[0].tiers[0].usage.chunks == wanted)
    for _ in range(2):
        servers.upgrade()
    assert [held(cache, stem) for stem in stems] == [4] * 6
    assert cache.generation == 0
    cache.close()
    servers.close()


def test_under_load_nothing_is_lost_and_no_load_fails(home: Path) -> None:
    servers = upgraded(home, slots=48)
    loads = Loads(home / "s")
    for _ in range(4):
        rounds = sum(loads.rounds)
        until(lambda wanted=rounds + 50: sum(loads.rounds) > wanted or loads.failures, 60)
        servers.upgrade()
    rounds = sum(loads.rounds)
    until(lambda: sum(loads.rounds) > rounds + 50 or loads.failures, 60)
    loads.stop()
    assert not loads.failures
    assert {cache.generation for cache in loads.caches} == {0}
    assert len(servers.pauses_ms()) == 4
    counts = report_of(home / "s").caches[0].counts
    assert (counts.read_leases, counts.write_leases, counts.chunks_damaged) == (0, 0, 0)
    servers.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_upgrades_under_load(home: Path) -> None:
    servers = upgraded(home, slots=96, disk_chunks=400)
    stems = [key_chain(4, branch=f"kept {number}") for number in range(12)]
    keeper = join_server(home)
    for stem in stems:
        store(keeper, stem)
    loads = Loads(home / "s", prompts=40)
    for _ in range(200):
        servers.upgrade()
        assert not loads.failures
    loads.stop()
    assert not loads.failures
    assert keeper.generation == 0
    assert [held(keeper, stem) for stem in stems] == [4] * 12
    pauses_ms = sorted(servers.pauses_ms())
    assert len(pauses_ms) == 200
    print(f"pause: median {pauses_ms[100]} ms, p99 {pauses_ms[197]} ms, longest {pauses_ms[-1]} ms")
    keeper.close()
    servers.close()


@pytest.mark.parametrize("upgrades", [2, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_who_connects_to_its_ports_meanwhile_is_answered(home: Path, upgrades: int) -> None:
    servers = with_ports(home)
    ports = servers.ports()
    callers = Callers(*ports)
    for _ in range(upgrades):
        answered = list(callers.answered)
        servers.upgrade()
        assert servers.ports() == ports
        until(lambda before=answered: all(now > was for now, was in zip(callers.answered, before, strict=True)), 60)
    dying = servers.start("--take-over", program=(KILLED, "commit", "1", "before"))
    assert dying.wait(60) == -9  # and the old one goes on
    end(dying)
    answered = list(callers.answered)
    until(lambda: all(now > was + 5 for now, was in zip(callers.answered, answered, strict=True)), 60)
    callers.stop()
    assert not callers.failures
    servers.close()


@pytest.mark.slow
def test_a_client_that_keeps_its_connection_is_not_turned_away_while_programs_end(home: Path) -> None:
    lingers = ["sh", "-c", "trap 'sleep 2; exit' TERM; sleep 600 & wait"]
    servers = with_ports(home, programs=[lingers])
    client, statuses, ended = HTTPConnection("127.0.0.1", servers.ports()[0], timeout=30), [], threading.Event()

    def ask() -> None:
        while not ended.wait(0.1):
            try:
                client.request("GET", "/status")
                answer = client.getresponse()
            except (HTTPException, OSError):  # the old server has ended it while it was idle
                client.close()
                continue
            statuses.append(answer.status)
            answer.read()

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: statuses)
    servers.upgrade()
    ended.set()
    asking.join(30)
    assert set(statuses) == {200}
    client.close()
    servers.close()


def test_ports_follow_the_settings_of_the_new_server(home: Path) -> None:
    servers = with_ports(home)
    http, peers = servers.ports()
    settings = json.loads(servers.config.read_text())
    settings["http"]["listen"] = "localhost:0"
    del settings["peers"]
    servers.config.write_text(json.dumps(settings))
    servers.upgrade()
    assert "http://localhost:" in servers.ready and "peers=" not in servers.ready
    for port in (http, peers):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 10)
    servers.close()


@pytest.mark.parametrize("section", ["http", pytest.param("peers", marks=pytest.mark.slow)])
def test_nothing_is_taken_over_if_another_has_the_port(home: Path, section: str) -> None:
    servers = with_ports(home, http=free_port(), peers=free_port())
    was, settings = servers.ports(), json.loads(servers.config.read_text())
    with socket.create_server(("127.0.0.1", 0)) as another:
        settings[section]["listen"] = f"127.0.0.1:{another.getsockname()[1]}"
        servers.config.write_text(json.dumps(settings))
        refused = servers.start("--take-over")
        assert refused.wait(60) == 2
        end(refused)
        assert f"{section}: listen: cannot listen at 127.0.0.1:" in servers.log.read_text()
    for port in was:
        socket.create_connection(("127.0.0.1", port), 10).close()
    settings[section]["listen"] = f"localhost:{was[section == 'peers']}"  # only the old server has it
    servers.config.write_text(json.dumps(settings))
    servers.upgrade()
    assert f"localhost:{was[section == 'peers']}" in servers.ready
    servers.close()


def test_ports_that_only_the_old_server_has_are_taken_once_it_has_ended(home: Path) -> None:
    servers = with_ports(home)
    servers.close()
    servers.process = servers.start(program=[ENDS_SLOWLY])
    servers.ready = line(servers.process.stdout)
    settings = json.loads(servers.config.read_text())
    for section, port in zip(("http", "peers"), servers.ports(), strict=True):
        settings[section]["listen"] = f"localhost:{port}"
    servers.config.write_text(json.dumps(settings))
    servers.upgrade()
    assert "http://localhost:" in servers.ready and "peers=localhost:" in servers.ready
    servers.close()


@pytest.mark.parametrize("what", ["freeze", "quota"])
def test_what_is_set_while_the_new_server_opens_its_tiers_is_not_lost(served: ThreadedServer, what: str) -> None:
    """It was acknowledged: the old server goes on."""
    cache, tenant = served.join(), bytes(7)
    store(cache, key_chain(3))
    successor = TakingOver(served.path)
    if what == "freeze":
        assert ask_server(served.path, wire.Freeze(True)).report.frozen  # type: ignore[union-attr]
    else:
        served.server.submit(partial(served.server.formats.keep_quota, tenant, SLOT_BYTES, None)).result(30)
    new = CacheServer(served.server._config, clock=served.clock, succession=successor, ports=successor.ports)
    with pytest.raises(ConfigError, match="goes on"):
        new.take_over()
    assert held(cache, key_chain(3)) == 3
    assert report_of(served.path).frozen == (what == "freeze")
    cache.close()


@pytest.mark.parametrize("joins_again", [False, True])
def test_others_are_answered_while_a_client_clears_a_cache(
    served: ThreadedServer, monkeypatch: pytest.MonkeyPatch, joins_again: bool
) -> None:
    """That takes seconds with a hundred thousand chunks."""
    one, other = served.join(timeout_s=30.0), served.join()
    store(one, key_chain(3))
    begun, may_end = threading.Event(), threading.Event()
    clear = LocalCache.clear

    def slow(cache: LocalCache) -> None:
        begun.set()
        assert may_end.wait(30)
        clear(cache)

    def join_again() -> None:
        """As who has lost its connection, and has forgotten more meanwhile than it tells one by one."""
        one._is_cleared = True
        for connection in served.server._connections.all():
            if connection.session is not None and connection.session.name.endswith(".1"):
                served.server.submit(partial(served.server._connections.drop, connection)).result(30)
        until(lambda: held(one, key_chain(1, branch="any")) == 0 and one.generation == 0)

    monkeypatch.setattr(LocalCache, "clear", slow)
    clearing = threading.Thread(target=join_again if joins_again else one.clear)
    clearing.start()
    assert begun.wait(30)
    assert held(other, key_chain(3)) == 3
    may_end.set()
    joined(clearing)
    until(lambda: held(other, key_chain(3)) == 0)
    store(one, key_chain(2))
    assert held(other, key_chain(2)) == 2
    one.close()
    other.close()


NEW_DIES = [("send", 1), ("receive", 1), ("send", 2), ("receive", 2), ("commit", 1)]
OLD_DIES = [("receive", 1), ("send", 1), ("receive", 2), ("send", 2), ("is_taken", 1)]
QUICK = {
    ("receive", 1, "after"),
    ("send", 2, "before"),
    ("send", 2, "after"),
    ("commit", 1, "before"),
    ("is_taken", 1, "after"),
}
"""Where the last word changes hands; the other moments are slow tests."""


def moments(calls: list[tuple[str, int]]) -> list[Any]:
    """Before and after each of these calls."""
    each = [(*call, when) for call in calls for when in ("before", "after") if (call[0], when) != ("commit", "after")]
    return [pytest.param(*moment, marks=() if moment in QUICK else pytest.mark.slow) for moment in each]


@pytest.mark.parametrize(("method", "count", "when"), moments(NEW_DIES))
def test_the_old_server_goes_on_if_the_new_one_is_killed(home: Path, method: str, count: int, when: str) -> None:
    servers = upgraded(home)
    cache, keys = join_server(home), key_chain(4)
    store(cache, keys)
    until(lambda: report_of(home / "s").caches[0].tiers[0].usage.chunks == 4)
    reading, old = cache.load(keys, "reading"), report_of(home / "s").pid
    assert isinstance(reading, ReadLease)
    new = servers.start("--take-over", program=(KILLED, method, str(count), when))
    assert line(new.stdout) == ""
    assert new.wait(60) == -9
    assert cache.release(reading) and read(cache, keys)
    assert (report_of(home / "s").pid, cache.generation) == (old, 0)
    until(lambda: report_of(home / "s").caches[0].tiers[0].usage.chunks == 4)  # the disk is open again
    servers.upgrade()
    assert read(cache, keys) and cache.generation == 0
    end(new)
    cache.close()
    servers.close()


@pytest.mark.parametrize(("method", "count", "when"), moments(OLD_DIES))
def test_the_new_server_serves_if_the_old_one_is_killed(home: Path, method: str, count: int, when: str) -> None:
    """With everything, if it has it; otherwise with what is on the disk."""
    servers = upgraded(home)
    servers.close()
    servers.process = servers.start(program=(KILLED, method, str(count), when))
    assert line(servers.process.stdout).startswith("READY")
    cache, keys = join_server(home), key_chain(4)
    store(cache, keys)
    until(lambda: report_of(home / "s").caches[0].tiers[0].usage.chunks == 4)
    reading = cache.load(keys, "reading")
    assert isinstance(reading, ReadLease)
    new = servers.start("--take-over")
    assert line(new.stdout).startswith("READY")
    assert servers.process.wait(60) == -9
    has_everything = method == "is_taken" or (method, count, when) == ("send", 2, "after")
    assert cache.release(reading) == has_everything
    until(lambda: cache.lookup(keys, "r").ended is not Ended.REFUSED)
    assert cache.generation == (0 if has_everything else 1)
    assert held(cache, keys) == 4 and report_of(home / "s").pid == new.pid
    cache.close()
    end(servers.process)
    end(new)


def test_what_cannot_follow_says_so_before_anything_is_touched(home: Path) -> None:
    servers = upgraded(home)
    cache = join_server(home)
    store(cache, key_chain(2))
    refused = ask_server(home / "s", wire.TakeOver(FORMAT + 1, "9.9"))
    assert isinstance(refused, wire.Failed)
    assert f"format {FORMAT}" in refused.text and "9.9" in refused.text and PACKAGE in refused.text
    assert read(cache, key_chain(2)) and report_of(home / "s").caches[0].tiers[0].health.name == "UP"
    cache.close()
    servers.close()


def test_a_server_that_has_taken_over_may_refuse_to_be_replaced_too(home: Path) -> None:
    """Its socket was opened by a process that is gone; nobody may take it for that one, and start with empty pools."""
    servers = upgraded(home)
    servers.upgrade()
    cache = join_server(home)
    store(cache, key_chain(2))
    ask_server(home / "s", wire.Freeze(True))
    newer = servers.start("--take-over")
    assert newer.wait(60) == 2
    end(newer)
    log = servers.log.read_text()
    assert "is not taken over, and goes on: it is frozen" in log and "starts with empty pools" not in log
    answer = ask_server(home / "s", wire.Reload(True), timeout_s=60)
    assert isinstance(answer, wire.Reloaded) and "kv freeze --end" in answer.report.why
    assert read(cache, key_chain(2)) and cache.generation == 0
    cache.close()
    servers.close()


def test_a_private_server_is_not_taken_over(home: Path) -> None:
    server = launch(settings_for(home), socket=home / "s")
    refused = ask_server(home / "s", wire.TakeOver(FORMAT, PACKAGE))
    assert isinstance(refused, wire.Failed) and "private" in refused.text
    server.stop()


def test_settings_are_those_of_the_new_server(home: Path) -> None:
    """Tiers that come and go, and quotas; what does not fit a quota any more is evicted, and what is read stays."""
    servers = upgraded(home, slots=16)
    plain: dict[str, object] = {"host": {"capacity_bytes": 16 * SLOT_BYTES}}
    disk = json.loads(servers.config.read_text())
    small = {"name": "ann", "salt": "ann", "quota_bytes": 3 * SLOT_BYTES}
    cache, keys = join_server(home), key_chain(6, salt="ann")
    for _ in range(2):
        servers.config.write_text(json.dumps(plain | {"tenants": [small]}))
        store(cache, keys)
        lease = cache.load(key_chain(2, salt="ann"), "l")
        assert isinstance(lease, ReadLease)
        servers.upgrade()
        assert cache.release(lease)
        until(lambda: cache.lookup(keys, "r").chunks == 3)
        (report,) = report_of(home / "s").caches
        assert (report.tiers, report.tenants[0].quota_bytes, report.tenants[0].chunks) == ([], 3 * SLOT_BYTES, 3)
        servers.config.write_text(json.dumps(disk))
        servers.upgrade()
        store(cache, keys)
        assert read(cache, keys)
        (report,) = report_of(home / "s").caches
        assert (report.tiers[0].name, report.tenants[0].quota_bytes, report.tenants[0].chunks) == ("disk", None, 6)
        cache.end("r")
        cache.forget(keys)
    assert cache.generation == 0
    cache.close()
    servers.close()


def test_without_a_server_there_it_starts_as_usual(home: Path) -> None:
    servers = upgraded(home)
    servers.close()
    servers.process = servers.start("--take-over")
    assert line(servers.process.stdout).startswith("READY")
    cache = join_server(home)
    lease = store(cache, key_chain(1))
    extent = lease.extents[0]
    assert bytes(cache.pool.view[extent.offset : extent.offset + CHUNK_BYTES]) == content(lease.keys[0], CHUNK_BYTES)
    cache.close()
    servers.close()
