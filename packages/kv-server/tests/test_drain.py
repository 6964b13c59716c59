"""A host that is to leave: its peers fetch what is worth moving, and whatever fails costs misses and no more."""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from kv_core.errors import MisuseError
from kv_core.keys import KEY_BYTES, ChunkKey
from kv_core.testing import key_chain
from kv_core.tools.cli import main
from kv_server import RemoteCache, launch, wire
from kv_server import caches as caches_module
from kv_server.connection import ask_server
from kv_server.peers import drain
from kv_server.peers.drain import _STALL_S, _DrainJob, _Offer
from kv_server.peers.metrics import drain_families
from kv_server.peers.side import directories_of, peer_side
from kv_server.peers.tier import _SURELY_EARLIER_S
from kv_server.peers.wire import (
    NOT_HERE,
    SIZE,
    Fetch,
    Offer,
    Offered,
    OfferFate,
    PeerHolds,
    PeerRefused,
    PeerStream,
    Request,
)
from kv_server.process import ServerProcess
from kv_server.report import DrainState
from kv_testing.cache_servers import (
    held,
    join_at,
    join_server,
    kill_server,
    read,
    report_of,
    settings_for,
    store,
)
from kv_testing.disk_box import flip
from kv_testing.http import Served
from kv_testing.peers import PATIENT, FakePeer, listening
from kv_testing.redis_servers import end_all, running
from kv_testing.servers import Answering, Proxy, free_port
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import joined, until
from kv_tiers.cache.local import LocalCache
from kv_tiers.testing.tier_contract import content

pytestmark = pytest.mark.usefixtures("peers_in_process")
PROMPTS = [key_chain(4, branch=str(number)) for number in range(6)]


def peers_at(*addresses: str, **options: object) -> list[dict[str, object]]:
    return [{"type": "peers", "hosts": list(addresses), **PATIENT, "resolve_s": 0.2, **options}]


def serve(
    ending: ExitStack,
    home: Path,
    port: int,
    *others: int,
    slots: int = 32,
    disk: bool = False,
    disk_chunks: int = 200,
    **options: object,
) -> ServerProcess:
    """A server in its own process, whose peers are at these ports."""
    home.mkdir(mode=0o700, exist_ok=True)
    config = settings_for(home, slots, disk=disk, disk_chunks=disk_chunks)
    tiers = [*config.get("tiers", ()), *peers_at(*(f"127.0.0.1:{other}" for other in others))]  # type: ignore[misc]
    settings = {**config, "tiers": tiers, "peers": {"listen": f"127.0.0.1:{port}", "unprotected": True, **options}}
    server = launch(settings, socket=home / "s")
    ending.callback(server.stop)
    return server


def pair(
    ending: ExitStack,
    tmp_path: Path,
    *,
    ports: tuple[int, int] | None = None,
    first: Mapping[str, Any] = MappingProxyType({}),
    second: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Path, Path, ServerProcess, RemoteCache]:
    """Two servers that are each other's peers: their homes, the first one, and a client of the second.

    first, second: as for `serve`.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    here, there = ports or (free_port(), free_port())
    leaving = serve(ending, one, here, there, **first)
    serve(ending, two, there, here, **second)
    other = join_server(two)
    ending.callback(other.close)
    return one, two, leaving, other


def begin(home: Path, *, timeout_s: float = 60.0, max_bytes: int | None = None) -> None:
    ask_server(home / "s", wire.Drain(True, timeout_s, max_bytes), timeout_s=10.0)


def state_of(home: Path) -> DrainState:
    (cache,) = report_of(home / "s").caches
    assert cache.drain is not None
    return cache.drain


def ended(home: Path) -> DrainState:
    until(lambda: state_of(home).phase != "draining", within_s=60)
    return state_of(home)


def drained(home: Path, **options: object) -> DrainState:
    begin(home, **options)  # type: ignore[arg-type]
    return ended(home)


def in_pool(home: Path) -> int:
    return sum(cache.held.chunks for cache in report_of(home / "s").caches)


def on_disk(home: Path) -> int | None:
    (cache,) = report_of(home / "s").caches
    return next(tier.usage.chunks for tier in cache.tiers if tier.name == "disk")


def spoil(directory: Path, key: ChunkKey) -> None:
    """Change a byte of this chunk where a disk tier has it."""
    places = [(path, path.read_bytes().find(content(key, CHUNK_BYTES))) for path in directory.rglob("slab-*")]
    (found,) = [(path, at) for path, at in places if at >= 0]
    flip(*found, 0)


def filled(ending: ExitStack, home: Path, prompts: Sequence[Sequence[ChunkKey]]) -> None:
    cache = join_server(home)
    ending.callback(cache.close)
    for keys in prompts:
        store(cache, keys)


def filled_to_disk(ending: ExitStack, home: Path, prompts: Sequence[Sequence[ChunkKey]]) -> None:
    """One after the other, as the pool may have no room for all."""
    stored = 0
    for keys in prompts:
        filled(ending, home, [keys])
        stored += len(keys)
        until(partial(lambda chunks: on_disk(home) == chunks, stored))


def test_what_a_host_had_is_read_at_its_peer_when_it_is_gone(ending: ExitStack, tmp_path: Path) -> None:
    one, _two, leaving, other = pair(ending, tmp_path, second={"slots": 64})
    filled(ending, one, PROMPTS)
    assert held(other, PROMPTS[0]) == 4
    assert drained(one) == DrainState("drained", chunks=24, elsewhere=4, moved=20, moved_bytes=20 * CHUNK_BYTES)
    leaving.stop()
    for keys in PROMPTS:
        assert held(other, keys) == 4
        assert read(other, keys)


def test_what_engines_with_different_algorithms_stored_is_moved_together(ending: ExitStack, tmp_path: Path) -> None:
    """Their keys differ in length, and one message has keys of one length."""
    one, _two, _, other = pair(ending, tmp_path)
    short = [ChunkKey(key[: KEY_BYTES[0]]) for key in PROMPTS[1]]
    filled(ending, one, [PROMPTS[0], short])
    assert drained(one) == DrainState("drained", chunks=8, moved=8, moved_bytes=8 * CHUNK_BYTES)
    assert read(other, PROMPTS[0]) and read(other, short)


def test_a_host_that_leaves_stores_nothing_new_and_serves_what_it_has(ending: ExitStack, tmp_path: Path) -> None:
    one, two, _, other = pair(ending, tmp_path)
    cache = join_server(one)
    ending.callback(cache.close)
    store(cache, PROMPTS[0])
    assert drained(one).moved == 4
    lease = cache.begin_store(PROMPTS[1], "w")
    assert lease.keys == () and "drained" in lease.refused
    assert held(cache, PROMPTS[0]) == 4 and read(cache, PROMPTS[0])
    # Nor does it take what another one offers, and what it has is not safe there.
    store(other, PROMPTS[2])
    refused = drained(two)
    assert refused.moved == refused.elsewhere == 0 and refused.refused == 8 and "leaves as well" in refused.why
    # Until it is to stay after all.
    ask_server(one / "s", wire.Drain(False, 1.0, None), timeout_s=10.0)
    assert report_of(one / "s").caches[0].drain is None
    assert store(cache, PROMPTS[3]).keys == tuple(PROMPTS[3])
    assert read(cache, PROMPTS[3])


def clear_later(cache: RemoteCache) -> None:
    """By more than messages may take: clears that are closer together are not told apart."""
    time.sleep(2 * _SURELY_EARLIER_S)
    cache.clear()


@pytest.mark.slow
def test_servers_that_were_each_cleared_alone_take_nothing_of_one_cleared_earlier_and_say_so(
    ending: ExitStack, tmp_path: Path
) -> None:
    """What it has may be older than their clear, which they cannot tell: the drain ends long before its time."""
    ports = free_port(), free_port()
    one, two, _, other = pair(ending, tmp_path, ports=ports)
    cache = join_server(one)
    ending.callback(cache.close)
    store(cache, PROMPTS[1])
    store(other, PROMPTS[1])
    cache.clear()
    clear_later(other)
    store(cache, PROMPTS[0])
    store(other, PROMPTS[1])
    began_s = time.monotonic()
    state = drained(one)
    assert time.monotonic() - began_s < 20 < _STALL_S and state.moved == state.elsewhere == 0
    assert f"127.0.0.1:{ports[1]}: it was cleared after this host" in state.why
    # The other way round nothing is older.
    ask_server(one / "s", wire.Drain(False, 1.0, None), timeout_s=10.0)
    assert drained(two).moved == 4 and read(cache, PROMPTS[1])
    # Nor is it once the first one is cleared again.
    ask_server(two / "s", wire.Drain(False, 1.0, None), timeout_s=10.0)
    clear_later(cache)
    store(cache, PROMPTS[2])
    assert drained(one).moved == 4 and read(other, PROMPTS[2])


def test_of_two_hosts_that_leave_at_once_neither_counts_on_the_other(ending: ExitStack, tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("one", "two", "three")]
    ports = [free_port() for _ in homes]
    servers = [
        serve(ending, home, port, *(other for other in ports if other != port), slots=64)
        for home, port in zip(homes, ports, strict=True)
    ]
    staying = join_server(homes[2])
    ending.callback(staying.close)
    for home in homes[:2]:
        filled(ending, home, PROMPTS[:2])
    assert drained(homes[0]).elsewhere == 8
    assert drained(homes[1]) == DrainState("drained", chunks=8, moved=8, moved_bytes=8 * CHUNK_BYTES)
    for server in servers[:2]:
        server.stop()
    for keys in PROMPTS[:2]:
        assert held(staying, keys) == 4 and read(staying, keys)


def test_the_most_recent_are_moved_where_a_peer_has_room_for_a_part_or_bytes_are_few(
    ending: ExitStack, tmp_path: Path
) -> None:
    """A peer takes half of its pool; and what it uses itself stays there. Of a prompt its head is moved first."""
    one, two, _, other = pair(ending, tmp_path, second={"slots": 16})
    own = [key_chain(4, branch=f"own {number}") for number in range(4)]
    for keys in own:
        store(other, keys)
    filled(ending, one, PROMPTS)
    few = drained(one, max_bytes=6 * CHUNK_BYTES + 1)
    assert few.moved == 6 and few.moved_bytes == 6 * CHUNK_BYTES and few.left == 18 and few.phase == "stopped"
    full = drained(one)
    assert full.moved + full.elsewhere == 8 and full.refused == 16 and "no more room" in full.why
    assert in_pool(two) == 16
    assert held(other, own[-1]) == 4
    ask_server(one / "s", wire.Drain(False, 1.0, None), timeout_s=10.0)
    (cache,) = report_of(two / "s").caches
    assert cache.counts.chunks_evicted == 8  # the two prompts of its own that were used least recently


def test_a_peer_with_a_disk_takes_more_than_half_of_its_pool(ending: ExitStack, tmp_path: Path) -> None:
    """Through half of its pool onto its disk. What it uses itself stays in the pool."""
    one, two, leaving, other = pair(ending, tmp_path, second={"slots": 8, "disk": True})
    own = key_chain(4, branch="own")
    store(other, own)
    filled(ending, one, PROMPTS)
    assert drained(one) == DrainState("drained", chunks=24, moved=24, moved_bytes=24 * CHUNK_BYTES)
    assert other.lookup(own, "asker").chunks == 4, "without a promotion"
    other.end("asker")
    leaving.stop()
    until(lambda: on_disk(two) == 28)
    for keys in PROMPTS:
        assert held(other, keys) == 4 and read(other, keys)


def test_a_peer_whose_disk_is_full_takes_half_of_its_pool(ending: ExitStack, tmp_path: Path) -> None:
    """Else what is on the disk would have to leave it. Its own chunk that is only there is still found."""
    one, two, _, other = pair(ending, tmp_path, second={"slots": 8, "disk": True, "disk_chunks": 16})
    own = [key_chain(4, branch=f"own {number}") for number in range(5)]
    for number, keys in enumerate(own, 1):
        store(other, keys)
        until(partial(lambda chunks: on_disk(two) == chunks, min(16, 4 * number)))
    filled(ending, one, PROMPTS)
    state = drained(one)
    assert state.moved == 4 and state.refused == 20 and "no more room" in state.why
    assert held(other, own[-1]) == held(other, own[-2]) == 4


def test_what_only_its_disk_has_is_moved_after_the_pool(ending: ExitStack, tmp_path: Path) -> None:
    """The pool has room for two prompts, the disk has all six; after a restart the pool has none."""
    ports = free_port(), free_port()
    one, two, leaving, other = pair(
        ending, tmp_path, ports=ports, first={"slots": 8, "disk": True}, second={"slots": 64}
    )
    filled_to_disk(ending, one, PROMPTS)
    first = drained(one, max_bytes=8 * CHUNK_BYTES + 1)
    assert first.moved == 8 and in_pool(two) == 8
    resident = [other.lookup(keys, "asker").chunks for keys in PROMPTS]
    other.end("asker")
    assert resident == [0, 0, 0, 0, 4, 4]  # what the pool had
    leaving.stop()
    again = serve(ending, one, ports[0], ports[1], slots=8, disk=True)
    ending.callback(join_server(one).close)
    until(lambda: on_disk(one) == 24)
    rest = drained(one)
    assert rest == DrainState("drained", chunks=24, elsewhere=8, moved=16, moved_bytes=16 * CHUNK_BYTES)
    again.stop()
    for keys in PROMPTS:
        assert held(other, keys) == 4 and read(other, keys)


def test_a_chunk_that_the_disk_has_lost_is_refused_and_the_rest_moved(ending: ExitStack, tmp_path: Path) -> None:
    one, _two, _, other = pair(ending, tmp_path, first={"slots": 4, "disk": True}, second={"slots": 64})
    filled_to_disk(ending, one, PROMPTS[:3])
    spoil(one / "disk", PROMPTS[0][2])
    state = drained(one)
    assert state.moved == 11 and state.moved + state.refused + state.gone == state.chunks == 12
    assert [held(other, keys) for keys in PROMPTS[:3]] == [2, 4, 4]
    assert all(read(other, keys) for keys in PROMPTS[1:3])


def test_a_peer_that_refuses_offers_is_left_alone(ending: ExitStack, tmp_path: Path) -> None:
    one, two, _, other = pair(ending, tmp_path, second={"take_offers": False})
    filled(ending, one, PROMPTS[:1])
    assert drained(one).refused == 4
    assert in_pool(two) == 0
    assert held(other, PROMPTS[0]) == 4  # and reads as ever


def test_without_peers_nothing_is_offered_and_stores_go_on(
    ending: ExitStack, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command says so, and the server's log does not."""
    home = tmp_path / "one"
    home.mkdir(mode=0o700)
    server = launch(settings_for(home, 8), socket=home / "s")
    ending.callback(server.stop)
    filled(ending, home, PROMPTS[:1])
    assert main(["drain", "--socket", str(home / "s")]) == 2
    said = capfd.readouterr().err
    assert "no tier of type peers" in said and "WARNING" not in said
    assert report_of(home / "s").caches[0].drain is None  # which would be shown for ever
    filled(ending, home, PROMPTS[1:2])
    assert in_pool(home) == 8


@pytest.mark.slow
def test_what_one_of_two_peers_does_not_bring_home_the_other_does(ending: ExitStack, tmp_path: Path) -> None:
    """It is killed while it fetches."""
    homes = [tmp_path / name for name in ("one", "two", "three")]
    ports = [free_port() for _ in homes]
    line = Proxy(ports[0])  # through which the second reads
    ending.callback(line.close)
    serve(ending, homes[0], ports[0], ports[1], ports[2], slots=64)
    dying = serve(ending, homes[1], ports[1], line.port, slots=64)
    serve(ending, homes[2], ports[2], ports[0], slots=64)
    others = [join_server(home) for home in homes[1:]]
    for other in others:
        ending.callback(other.close)
    filled(ending, homes[0], PROMPTS)
    line.stall()
    begin(homes[0])
    until(lambda: state_of(homes[0]).moved > 0)
    kill_server(dying)
    state = ended(homes[0])
    assert state.phase == "drained" and state.moved == 24 and state.refused == 0
    for keys in PROMPTS:
        assert held(others[1], keys) == 4 and read(others[1], keys)


@pytest.mark.slow
def test_a_host_that_is_killed_while_it_is_drained_leaves_whole_chunks_and_no_leases(
    ending: ExitStack, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ports = free_port(), free_port()
    line = Proxy(ports[0])  # through which the other reads
    ending.callback(line.close)
    leaving = serve(ending, one, ports[0], ports[1], slots=64)
    serve(ending, two, ports[1], line.port, slots=64)
    other = join_server(two)
    ending.callback(other.close)
    filled(ending, one, PROMPTS)
    crossed = 0

    def stall_in_a_chunk(data: bytes) -> bytes:
        nonlocal crossed
        crossed += len(data)
        if crossed > 6.5 * CHUNK_BYTES:
            line.stall()
        return data

    line.spoil = stall_in_a_chunk
    begin(one)
    until(lambda: state_of(one).moved >= 1)
    kill_server(leaving)
    line.spoil = lambda data: None
    line.flow()
    until(lambda: report_of(two / "s").caches[0].counts.chunks_reserved == 0)
    came = 0
    for keys in PROMPTS:
        came += (found := held(other, keys))
        assert not found or read(other, keys[:found])
    assert 1 <= came < 24
    counts = report_of(two / "s").caches[0].counts
    assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0


def test_with_a_directory_hosts_are_known_from_it_and_what_it_lists_is_elsewhere(ending: ExitStack) -> None:
    ending.callback(end_all)
    directory = {"url": running("drained").url, "interval_s": 0.02, "lease_s": 5.0}
    servers = [listening(64, tiers=[{"type": "peers", "directory": directory, **PATIENT}]) for _ in range(2)]
    caches = []
    for server in servers:
        ending.callback(server.close)
        caches.append(join_at(server.path))
        ending.callback(caches[-1].close)
    for keys in PROMPTS[:3]:
        store(caches[0], keys)
    store(caches[1], PROMPTS[0])
    leaving, staying = (next(iter(server.server.caches.values())) for server in servers)
    # Each knows what the other holds; before that all would be offered, and nobody but the host itself could be asked.
    until(lambda: [state.names for state in directories_of(leaving).values()] == [4])
    until(lambda: [state.names for state in directories_of(staying).values()] == [12])
    peer_side(leaving).drain.begin(30.0)
    until(lambda: (state := peer_side(leaving).drain.state()) is not None and state.phase != "draining", within_s=40)
    assert peer_side(leaving).drain.state() == DrainState(
        "drained", chunks=12, elsewhere=4, moved=8, moved_bytes=8 * CHUNK_BYTES
    )
    servers[0].close()
    for keys in PROMPTS[:3]:
        assert held(caches[1], keys) == 4 and read(caches[1], keys)


def beside(answer: Callable[[PeerStream, Request], None], ending: ExitStack) -> tuple[RemoteCache, LocalCache]:
    """A client of a server that holds a prompt, and that server's cache. Its only peer holds nothing and answers so."""
    peer = FakePeer(answer)
    ending.callback(peer.close)
    peer.hold = lambda request: bytes(len(request.keys.unpack()))  # type: ignore[method-assign]
    server = listening(tiers=peers_at(peer.address))
    ending.callback(server.close)
    cache = join_at(server.path)
    ending.callback(cache.close)
    store(cache, PROMPTS[0])
    (local,) = server.server.caches.values()
    return cache, local


def fetches_nothing(stream: PeerStream, request: Request) -> None:
    """A peer's answer to offers: everything is coming."""
    assert isinstance(request, Offer)
    offered = len(request.keys.unpack()) - request.first
    stream.send_message(Offered(b"\1" * offered, 100), time.monotonic() + 10)


def test_the_time_of_a_drain_ends_and_nothing_stays_leased(ending: ExitStack) -> None:
    cache, local = beside(fetches_nothing, ending)
    peer_side(local).drain.begin(0.3)
    until(lambda: (state := peer_side(local).drain.state()) is not None and state.phase != "draining")
    assert peer_side(local).drain.state() == DrainState("stopped", "the time is up", chunks=4, left=4)
    assert not any(local._index.is_leased(slot) for slot in range(local.pool.slots))
    peer_side(local).drain.end()
    assert store(cache, PROMPTS[1]).keys == tuple(PROMPTS[1])  # in the place of the first, whose order is whole again
    assert store(cache, PROMPTS[2]).keys == tuple(PROMPTS[2])


def test_a_bug_is_not_reported_as_a_cache_that_is_closed(
    ending: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, local = beside(fetches_nothing, ending)

    def confuse(work: drain._DrainJob) -> None:
        raise MisuseError("a chunk that is ABSENT cannot EVICT")

    monkeypatch.setattr(drain._DrainJob, "_round", confuse)
    peer_side(local).drain.begin(20)
    until(lambda: (state := peer_side(local).drain.state()) is not None and state.phase != "draining", within_s=30)
    state = peer_side(local).drain.state()
    assert state is not None and state.why == "a bug, which is in the log: a chunk that is ABSENT cannot EVICT"
    assert "a drain hit a bug" in caplog.text


@pytest.mark.parametrize("fates", [b"", b"\7\7\7\7", b"\2\2\2\2\2"])
def test_a_peer_that_answers_nonsense_has_taken_nothing(ending: ExitStack, fates: bytes) -> None:
    def answer(stream: PeerStream, request: Request) -> None:
        stream.send_message(Offered(fates, 100), time.monotonic() + 10)

    _, local = beside(answer, ending)
    peer_side(local).drain.begin(20)
    until(lambda: (state := peer_side(local).drain.state()) is not None and state.phase != "draining", within_s=30)
    state = peer_side(local).drain.state()
    assert state is not None and state.moved == 0


def holding_all(*hosts: str, ending: ExitStack, **options: object) -> LocalCache:
    """The cache of a server that holds all prompts and has peers at these addresses."""
    server = listening(32, tiers=[{**peers_at(*hosts)[0], **options}])
    ending.callback(server.close)
    cache = join_at(server.path)
    ending.callback(cache.close)
    for keys in PROMPTS:
        store(cache, keys)
    (local,) = server.server.caches.values()
    return local


def has_all(stream: PeerStream, request: Request) -> None:
    """The answer of a peer that has what it is offered."""
    assert isinstance(request, Offer)
    offered = len(request.keys.unpack()) - request.first
    stream.send_message(Offered(b"\2" * offered, 100), time.monotonic() + 10)


def has_gone(stream: PeerStream, request: Request) -> None:
    raise ConnectionError("it closes the connection")


def holds_nothing(request: PeerHolds) -> bytes:
    return bytes(len(request.keys.unpack()))


def test_a_peer_that_does_not_say_what_it_holds_ends_no_drain(
    ending: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for, longer than peers have to take something."""
    monkeypatch.setattr(drain, "_FULL_S", 0.5)
    over = threading.Event()

    def says_nothing(request: PeerHolds) -> bytes:
        over.wait(60)
        return holds_nothing(request)

    silent, good = FakePeer(has_gone), FakePeer(has_all)
    for peer in (silent, good):
        ending.callback(peer.close)
    silent.hold, good.hold = says_nothing, holds_nothing  # type: ignore[method-assign]
    ending.callback(over.set)
    local = holding_all(good.address, silent.address, ending=ending, answer_timeout_s=1.0)
    peer_side(local).drain.begin(30)
    until(lambda: (state := peer_side(local).drain.state()) is not None and state.phase != "draining", within_s=40)
    assert peer_side(local).drain.state() == DrainState("drained", chunks=24, elsewhere=24)


def test_a_peer_that_fails_is_not_offered_more_while_it_is_not_contacted(ending: ExitStack) -> None:
    """Each offer to a host that is gone would be waited for, while the others have nothing to do."""
    failing, good = FakePeer(has_gone), FakePeer(has_all)
    for peer in (failing, good):
        ending.callback(peer.close)
        peer.hold = holds_nothing  # type: ignore[method-assign]
    local = holding_all(failing.address, good.address, ending=ending)
    peer_side(local).drain.begin(30)
    until(lambda: (state := peer_side(local).drain.state()) is not None and state.phase != "draining", within_s=40)
    assert peer_side(local).drain.state() == DrainState("drained", chunks=24, elsewhere=24)
    # Once on the connection of the question before, which might have been dead, and once on a new one.
    assert sum(isinstance(request, Offer) for request in failing.asked) <= 2


def test_an_offer_of_what_nobody_holds_costs_reads_that_find_nothing(ending: ExitStack) -> None:
    """A peer can have us ask our peers, and reserve half of the pool for a moment, no more."""

    def answer(stream: PeerStream, request: Request) -> None:
        assert isinstance(request, Fetch)
        stream.send([SIZE.pack(NOT_HERE)] * len(request.keys.unpack()), time.monotonic() + 10)

    liar = FakePeer(answer)
    ending.callback(liar.close)
    server = listening(8, tiers=peers_at(liar.address))
    ending.callback(server.close)
    cache = join_at(server.path)
    ending.callback(cache.close)
    store(cache, PROMPTS[0])
    (local,) = server.server.caches.values()
    taken = peer_side(local).offers.take(key_chain(100, branch="nowhere"), 0)
    assert sum(fate == 1 for fate in taken.fates) <= 4 and taken.room == 0
    until(lambda: local.counts().chunks_reserved == 0)
    assert held(cache, PROMPTS[0]) == 4
    again = peer_side(local).offers.take(PROMPTS[0], 2)
    assert [int(fate) for fate in again.fates] == [2, 2]
    until(lambda: peer_side(local).offers.take(PROMPTS[0], 0).room == 4)


def test_how_far_a_drain_is_is_shown_in_metrics(ending: ExitStack) -> None:
    served = Served(tiers=({"type": "peers", "hosts": ["127.0.0.1:9"], "unprotected": True},))
    ending.callback(served.close)
    cache = served.join()
    ending.callback(cache.close)
    assert "kv_drain" not in served.get("/metrics").text
    ask_server(served.path, wire.Drain(True, 60.0, None), timeout_s=10.0)
    # It has ended, as there is nothing to offer; what HTTP shows may be some tenths of a second old.
    until(lambda: re.search(r'kv_drain_under_way\{cache="[^"]+"\} 0.0', served.get("/metrics").text))
    state = DrainState("draining", chunks=15, elsewhere=1, moved=2, moved_bytes=2000, refused=3, gone=4, left=5)
    under_way, chunks, moved = drain_families([("c", state)])
    assert [sample.value for sample in (*under_way.samples, *moved.samples)] == [1, 2000]
    values = {sample.labels["state"]: sample.value for sample in chunks.samples}
    assert values == {"moved": 2, "elsewhere": 1, "refused": 3, "gone": 4, "left": 5}


def test_the_command_waits_for_its_end_and_says_how_it_was(
    ending: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ports = free_port(), free_port()
    serve(ending, one, ports[0], ports[1])
    serve(ending, two, ports[1], ports[0], slots=16)
    filled(ending, two, [])
    filled(ending, one, PROMPTS[:1])
    socket = ["--socket", str(one / "s")]
    assert main(["drain", *socket]) == 0
    said = f"drained: of 4 chunks 4 chunks ({4 * CHUNK_BYTES} bytes) moved, 0 on other hosts already\n"
    assert capsys.readouterr().out == said
    assert main(["drain", *socket, "--end", "--json"]) == 0
    filled(ending, one, PROMPTS[1:])  # more than the other has room for
    assert main(["drain", *socket, "--json", "--timeout", "30"]) == 1
    (line,) = capsys.readouterr().out.splitlines()  # nothing else, so that it can be read by a program
    told = json.loads(line)
    assert told["elsewhere"] == 4 and told["moved"] == 4 and told["refused"] == 16
    assert main(["drain", *socket, "--no-wait"]) == 0
    assert main(["drain", "--socket", str(tmp_path / "nobody")]) == 2
    assert main(["drain", *socket, "--timeout", "-1"]) == 2
    assert main(["drain", *socket, "--max-bytes", "many"]) == 2


def test_the_command_fails_when_another_one_has_ended_the_drain(
    ending: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, local = beside(fetches_nothing, ending)
    statuses: list[int] = []
    command = threading.Thread(target=lambda: statuses.append(main(["drain", "--socket", str(cache.socket)])))
    command.start()
    until(lambda: "draining: of 4 chunks" in capsys.readouterr().err)  # it waits
    peer_side(local).drain.end()
    joined(command)
    assert statuses == [1]
    told = capsys.readouterr()
    assert "another command has ended it" in told.err and not told.out


def test_the_command_waits_for_caches_that_are_being_opened(
    ending: ExitStack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tiers may hold what is to be moved."""
    served = Served(tiers=({"type": "peers", "hosts": ["127.0.0.1:9"], "unprotected": True},))
    ending.callback(served.close)
    go_on, build = threading.Event(), caches_module.build_local_cache

    def slow(*args: object, **options: object) -> object:
        assert go_on.wait(30)
        return build(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(caches_module, "build_local_cache", slow)
    joining = threading.Thread(target=lambda: served.join().close())
    joining.start()
    until(lambda: served.get("/status").json()["opening"] == 1)
    statuses: list[int] = []
    command = threading.Thread(target=lambda: statuses.append(main(["drain", "--socket", str(served.path)])))
    command.start()
    until(lambda: served.server.formats.drained is not None)  # it has been asked for
    go_on.set()
    joined(joining, command)
    assert statuses == [0] and capsys.readouterr().out.startswith("drained: of 0 chunks")
    assert main(["drain", "--socket", str(served.path), "--end"]) == 0


@pytest.mark.parametrize("command", [["drain"], ["drain", "--json"], ["top", "--once"], ["top", "--once", "--json"]])
def test_a_peers_text_does_not_reach_the_operators_terminal_as_it_is(
    ending: ExitStack, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Anybody who is at a peer's address may send a text: a title, a cleared screen, lines that look like ours."""
    text = "\x1b]0;title\x07\x1b[2J\x9b2J\x7f\nkv: all is well"
    graffiti = Answering(lambda sock: PeerStream(sock).send_message(PeerRefused(text), time.monotonic() + 10))
    ending.callback(graffiti.close)
    home = tmp_path / "one"
    serve(ending, home, free_port(), graffiti.port)
    cache = join_server(home)
    ending.callback(cache.close)
    store(cache, PROMPTS[0])
    until(lambda: held(cache, PROMPTS[1]) or report_of(home / "s").caches[0].tiers[0].why)
    capfd.readouterr()
    main(
        [*command, "--socket", str(home / "s"), *(["--timeout", "60"] if command[0] == "drain" else ["--every", "0.1"])]
    )
    said = capfd.readouterr()
    lines = (said.out + said.err).split("\n")
    assert all(line.isprintable() for line in lines), lines
    assert not any(line.startswith("kv: all") for line in lines)
    assert "all is well" in said.out + said.err, "it is told what the peer said"
    for line in said.out.split("\n") if "--json" in command else ():
        assert not line or json.loads(line)


def test_a_drain_before_any_engine_has_spoken_does_not_pass_for_one_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hook before a host's end must not take a restarted server for empty: it does not know what its disk holds."""
    peers = {"type": "peers", "hosts": ["127.0.0.1:9"], "unprotected": True}
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    for tiers, status, said in (
        ((peers, disk), 1, "does not know what disk may hold"),
        ((peers,), 0, "nothing is held"),
    ):
        served = Served(tiers=tiers)
        assert main(["drain", "--socket", str(served.path)]) == status
        told = capsys.readouterr()
        assert said in told.err + told.out
        served.close()


def test_a_peer_that_is_full_is_no_peer_that_may_lack_an_engine() -> None:
    """Of three possible reasons two are excluded once it has taken a chunk."""
    for had_room, says in ((True, "half of its pool"), (False, "no engine has registered")):
        job = object.__new__(_DrainJob)
        job._host, job._failed, job._moved_s, job._silent = None, {}, {}, set()  # type: ignore[assignment]
        job._had_room = {"b"} if had_room else set()
        job._give_up = lambda *_: None  # type: ignore[method-assign]
        key = key_chain(1)[0]

        class Full:
            name = "b"

            def offer(self, chain: Sequence[ChunkKey], first: int) -> Offered:
                return Offered(bytes([OfferFate.NOT_TAKEN] * (len(chain) - first)), 0)

        assert not job._offer(Full(), _Offer([key], 0, {key}), is_repeated=False)
        assert says in job._failed["b"]
