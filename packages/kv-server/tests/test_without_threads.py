"""A system may have no more threads for us: what needs one fails for now, and nothing ends or waits for good."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kv_core.clock import HandClock
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_remote.host_port import HostPort
from kv_remote.messages import pack_keys
from kv_server import ServerConfig, wire
from kv_server.caches import Caches
from kv_server.connection import ask_server
from kv_server.http.operation import Problem
from kv_server.http.relay import MAX_RUNNING, PrefixJobs
from kv_server.peers import tier as peer_following
from kv_server.peers.hosts import PeerHosts
from kv_server.peers.side import peer_side
from kv_server.peers.tier import PeersTier, make_peers_tier
from kv_server.peers.wire import Follow, Followed, Given, PeerHeld, PeerReceived, PeerStream, Request, unpack_keys
from kv_server.report import DrainState
from kv_server.server import CacheServer
from kv_server.wire import Format
from kv_testing.cache_servers import (
    SLOT_BYTES,
    ThreadedServer,
    join_at,
    join_server,
    kill_server,
    lose,
    report_of,
    start_server,
)
from kv_testing.peers import PATIENT, FakePeer
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.threads import threads_left
from kv_testing.wait import joined, until
from kv_tiers.config import HostConfig
from kv_tiers.events.bus import EventBus
from kv_tiers.tier import TierContext

pytestmark = pytest.mark.usefixtures("peers_in_process")
CONTEXT = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
LEASE_S = 300.0


def format_of(fingerprint: str) -> Format:
    return (CHUNK_BYTES,), fingerprint


def test_a_format_that_could_not_be_opened_can_be_later_and_one_that_could_not_be_closed_is_still_served(
    ending: ExitStack,
) -> None:
    clock = HandClock()
    config = ServerConfig(host=HostConfig(capacity_bytes=8 * SLOT_BYTES, lease_s=LEASE_S), max_formats=1)
    caches = Caches(config, clock, EventBus(), lambda: None, lambda _: None)
    ending.callback(caches.close)
    with threads_left(), pytest.raises(RuntimeError):
        caches.open(format_of("one"), [])
    assert not caches.opening
    assert caches.open(format_of("one"), [])
    until(caches.opened)
    one = caches.by_format().get(format_of("one"))
    assert one is not None
    clock.advance(2 * LEASE_S)
    with threads_left(), pytest.raises(RuntimeError):
        caches.open(format_of("two"), [])
    assert caches.by_format().get(format_of("one")) is one and one.counts().slots_total == 8
    assert caches.open(format_of("two"), [])
    until(caches.opened)
    assert caches.by_format().get(format_of("one")) is None and caches.by_format().get(format_of("two")) is not None


def test_a_format_that_is_opened_during_a_drain_is_served_though_nothing_of_it_is_offered(ending: ExitStack) -> None:
    config = ServerConfig(
        host=HostConfig(capacity_bytes=8 * SLOT_BYTES), tiers=[{"type": "peers", "hosts": ["127.0.0.1:1"], **PATIENT}]
    )
    woken = threading.Event()
    caches = Caches(config, HandClock(), EventBus(), woken.set, lambda _: None)
    ending.callback(caches.close)
    caches.drain(60.0, None)
    caches.open(format_of("one"), [])
    assert woken.wait(10)
    with threads_left():
        (opened,) = caches.opened()
    assert opened.cache is not None
    assert peer_side(opened.cache).drain.state() == DrainState("stopped", "can't start new thread")
    caches.drain(60.0, None)
    until(lambda: peer_side(opened.cache).drain.state() == DrainState("drained"))  # there is nothing to offer


def test_jobs_that_could_not_be_started_do_not_run_for_ever() -> None:
    jobs = PrefixJobs()
    for _ in range(MAX_RUNNING + 1):
        with threads_left(), pytest.raises(Problem) as problem:
            jobs.start("export", "name", lambda: (1, ""))
        assert problem.value.status == 503
    assert jobs.all() == []
    job = jobs.start("export", "name", lambda: (1, ""))
    until(lambda: jobs.find(job.id).state == "done")


def test_a_client_whose_server_is_gone_finds_nothing_and_raises_nothing(served: ThreadedServer) -> None:
    with closing(served.join()) as cache:
        lease = cache.begin_store(key_chain(1), "w")
        assert lease.keys
        served.close()
        with threads_left():
            assert cache.lookup(key_chain(1), "r").ended is Ended.REFUSED
            cache.commit(lease)


def test_a_client_that_could_start_no_thread_reconnects_by_its_calls_and_has_one_later(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(home)
    with threads_left():
        cache = join_server(home)
    assert "only the engine's calls will reconnect" in caplog.text
    assert not cache._reconnector.is_alive()
    kill_server(server)
    server = start_server(home)
    until(lambda: cache.lookup([], "r").ended is Ended.ALL_HELD)
    assert cache._reconnector.is_alive()
    kill_server(server)
    server = start_server(home)
    until(lambda: report_of(home / "s").sessions, 60)
    cache.close()
    server.stop()


def test_a_client_is_told_that_the_server_has_no_threads_and_is_served_once_it_has(ending: ExitStack) -> None:
    """A server's thread opens a cache: without it there is none, nor without the threads of the cache's tier."""
    served = ThreadedServer(tiers=[{"type": "dram", "capacity_bytes": SLOT_BYTES}])
    ending.callback(served.close)
    for count in (0, 1):
        with threads_left(count), pytest.raises(ConfigError, match=r"in this server no more threads .*ulimit -u"):
            served.join().close()
    served.join().close()


def test_a_client_finds_nothing_at_a_new_server_until_that_has_threads(
    home: Path, ending: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    def serve() -> Callable[[], None]:
        """What ends it."""
        server = CacheServer(ServerConfig(host=HostConfig(capacity_bytes=SLOT_BYTES), socket=str(home / "s")))
        thread = threading.Thread(target=server.serve)
        thread.start()

        def end() -> None:
            server.stop()
            joined(thread, within_s=30)

        ending.callback(end)
        return end

    end, clock = serve(), HandClock()
    with closing(join_at(home / "s", clock=clock)) as cache:
        lose(cache)  # it must not meet the successor while that has threads
        end()
        serve()

        def is_refused() -> bool:
            clock.advance(0.1)
            assert cache.lookup(key_chain(1), "r").ended is Ended.REFUSED
            return "still cannot be used" in caplog.text

        with threads_left():
            cache._link.back_off(0)
            until(is_refused)
        assert "in this server no more threads" in caplog.text

        def is_served() -> bool:
            clock.advance(0.1)
            return cache.lookup(key_chain(1), "r").ended is Ended.ABSENT

        until(is_served)


def test_a_prompt_is_explained_nevertheless(served: ThreadedServer) -> None:
    with threads_left():
        answer = ask_server(served.path, wire.Explain(16, bytes(16), []))
    assert isinstance(answer, wire.Explanations)


def test_names_of_peers_are_resolved_later(ending: ExitStack) -> None:
    hosts = PeerHosts([HostPort("localhost", 1)], token=b"", tls=None, resolve_s=1e6, connect_s=0.01)
    ending.callback(hosts.close)
    with threads_left():
        assert hosts.peers() == []
    until(hosts.peers)


def tier_of(ending: ExitStack, **options: object) -> PeersTier:
    tier = make_peers_tier({**PATIENT, **options}, CONTEXT)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    return tier


def test_a_directory_is_taken_part_in_later(ending: ExitStack) -> None:
    tier = tier_of(ending, directory={"url": "redis://127.0.0.1:1"})

    def why() -> str:
        tier.holds(key_chain(1))
        state = tier.directory_state()
        assert state is not None
        return state.why

    for count in (0, 1):
        with threads_left(count):
            assert tier.holds(key_chain(1)) == [False]
    until(why)  # nobody is there
    assert tier._directory is not None
    assert [thread.is_alive() for thread in tier._directory._threads] == [True, True]


def test_peers_are_followed_and_told_what_they_need_not_hold_later(
    ending: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_following, "_WAIT_S", 0.1)  # which closing may take
    monkeypatch.setattr(peer_following, "_POLL_S", 0.01)
    keys = key_chain(2)

    def answer(stream: PeerStream, request: Request) -> None:
        until_s = time.monotonic() + 10
        if isinstance(request, Follow):
            time.sleep(0.01)
            given = [] if request.after else [Given(pack_keys(keys), 0, 60.0)]
            stream.send_message(Followed(bytes(16), 1, given, None), until_s)
        else:
            stream.send_message(PeerHeld(b"", None), until_s)

    fake = FakePeer(answer)
    ending.callback(fake.close)
    tier = tier_of(ending, hosts=[fake.address], follow=True)
    handed_over: list[Sequence[ChunkKey]] = []
    refused = threading.Event()
    with threads_left(1, on_refusal=refused.set):  # that which follows all
        tier.follow(lambda chain, first, hold_s: handed_over.append(chain))
        assert refused.wait(10)
        tier.received(keys[:1])
    until(lambda: handed_over == [keys])
    tier.received(keys[1:])
    until(lambda: len([one for one in fake.asked if isinstance(one, PeerReceived)]) == 2)
    assert [unpack_keys(one) for one in fake.asked if isinstance(one, PeerReceived)] == [keys[:1], keys[1:]]
