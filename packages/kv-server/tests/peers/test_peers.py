"""Other hosts' servers as a tier: what they hold comes back whole, and whatever they do wrong is a miss."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import KEY_BYTES, ChunkKey, tenant_tag
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, Refused
from kv_core.testing import key_chain
from kv_remote.host_port import HostPort, read_host_port
from kv_server import launch
from kv_server.peers.hosts import PeerHosts
from kv_server.peers.tier import PeersTier, make_peers_tier
from kv_server.peers.wire import HEADER, NOT_HERE, SIZE, VERSION, Fetch, PeerHolds, PeerStream, Request, unpack_keys
from kv_testing.cache_servers import SLOT_BYTES, ThreadedServer, join_at, kill_server, store
from kv_testing.peers import (
    PATIENT,
    FakePeer,
    address_of,
    is_whole,
    listening,
    own_nobody,
    promoted,
    reads_of,
    served_by,
)
from kv_testing.servers import Proxy
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import joined, until
from kv_tiers import chunk_header
from kv_tiers.build import build_lane, build_local_cache, check_settings
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import ColdConfig, HostConfig
from kv_tiers.lanes.jobs import Arrival
from kv_tiers.testing.tier_contract import ReadOnlyTierContract, aligned_pages, content
from kv_tiers.tier import Read, ShowsProgress, Tier, TierContext

CONTEXT = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")


@pytest.fixture(autouse=True)
def _own_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    own_nobody(monkeypatch)


@pytest.fixture
def peer(ending: ExitStack) -> ThreadedServer:
    server = listening()
    ending.callback(server.close)
    return server


def tier_of(ending: ExitStack, *hosts: str, **options: object) -> PeersTier:
    tier = make_peers_tier({"hosts": list(hosts), **PATIENT, **options}, CONTEXT)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    return tier


def put(server: ThreadedServer, keys: Sequence[ChunkKey], fingerprint: str = "f", **options: object) -> None:
    cache = server.join(fingerprint, **options)
    store(cache, keys)
    cache.close()


class TestPeers(ReadOnlyTierContract):
    def make(self, context: TierContext, chunks: int) -> Tier:
        self.server = listening(-(-chunks * context.slot_bytes // SLOT_BYTES))
        self.cache = self.server.join(context.fingerprint, group_bytes=(context.chunk_bytes,))
        return make_peers_tier({"hosts": [address_of(self.server)], **PATIENT}, context)

    def put(self, keys: Sequence[ChunkKey]) -> None:
        lease = self.cache.begin_store(keys, "w")
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            self.cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
        self.cache.commit(lease)

    def use(self, context: TierContext, chunks: int) -> Tier:
        self.end()
        return super().use(context, chunks)

    def teardown_method(self) -> None:
        super().teardown_method()
        self.end()

    def end(self) -> None:
        self.cache.close()
        self.server.close()


def lanes_cache(ending: ExitStack, *hosts: str, **options: object) -> LocalCache:
    """A cache of another host, with these peers below."""
    cache = build_local_cache(
        HostConfig(capacity_bytes=16 * SLOT_BYTES),
        group_bytes=(CHUNK_BYTES,),
        fingerprint="f",
        tiers=[{"type": "peers", "hosts": list(hosts), **PATIENT, **options}],
        cold=ColdConfig(wait_s=20.0),
    )
    ending.callback(cache.close)
    return cache


def test_what_a_peer_holds_comes_up_into_the_own_pool_and_is_priced(ending: ExitStack, peer: ThreadedServer) -> None:
    keys = [key_chain(4, branch=str(turn)) for turn in range(2)]
    for chain in keys:
        put(peer, chain)
    cache = lanes_cache(ending, address_of(peer))
    assert [promoted(cache, chain) for chain in keys] == [4, 4]
    (state,) = cache.lower.states()
    assert (state.name, state.health.name, state.lane.loaded) == ("peers", "UP", 8)
    # Three loads are enough for an estimate: the way costs are known is every lane's.
    assert promoted(cache, key_chain(1, branch="nobody's")) == 0
    put(peer, one := key_chain(1, branch="one more"))
    assert promoted(cache, one) == 1
    assert cache.lower.states()[0].load_cost is not None


def wait_until_stored(peer: ThreadedServer, key: ChunkKey) -> None:
    """In the tier below the peer's pool."""
    (cache,) = peer.server.caches.values()
    until(lambda: cache.lower.locate([key]) == ["dram"])


def test_what_left_a_peers_pool_comes_from_its_own_tiers_as_it_is_stored_there(ending: ExitStack) -> None:
    dram = {"type": "dram", "capacity_bytes": 64 * SLOT_BYTES}
    peer = listening(2, tiers=[dram])
    ending.callback(peer.close)
    keys = [key_chain(1, branch=str(number))[0] for number in range(6)]
    for key in keys:
        put(peer, [key])
        wait_until_stored(peer, key)
    (pooled,) = peer.server.caches.values()
    assert len(pooled.admin.resident_keys()) == 2
    tier = tier_of(ending, address_of(peer))
    assert tier.holds(keys) == [True] * 6
    reads = reads_of(CONTEXT, keys)
    assert tier.load(reads) == [Loaded(CHUNK_BYTES)] * 6
    assert all(is_whole(CONTEXT, read) for read in reads)


def test_an_encoded_payload_travels_encoded_and_is_decoded_by_the_reader(ending: ExitStack) -> None:
    nbytes = 64 << 10
    dram = {"type": "dram", "capacity_bytes": 8 * nbytes, "codec": "zstd"}
    peer = listening(-(-nbytes // SLOT_BYTES), tiers=[dram])
    ending.callback(peer.close)
    cache = peer.join(group_bytes=(nbytes,))
    ending.callback(cache.close)
    keys = [key_chain(1, branch=str(number))[0] for number in range(3)]
    for key in keys:
        lease = cache.begin_store([key], "w")
        extent = lease.extents[0]
        cache.pool.view[extent.offset : extent.offset + nbytes] = bytes(key[-8:]) * (nbytes // 8)
        cache.commit(lease)
        wait_until_stored(peer, key)
    context = TierContext(nbytes, nbytes, "f")
    lane, write = build_lane({"type": "peers", "hosts": [address_of(peer)], **PATIENT}, context, where="here")
    ending.callback(lane.close)
    assert write == "never"
    pages = aligned_pages(nbytes)
    arrived: list[Arrival] = []
    read = Read(keys[0], bytearray(chunk_header.HEADER_BYTES), pages, nbytes, nbytes)
    assert lane.load([read], arrived.extend)
    until(lambda: arrived)
    assert arrived[0].outcome == Loaded(nbytes)
    assert pages == bytes(keys[0][-8:]) * (nbytes // 8)
    header = chunk_header.read_header(bytes(read.header))
    assert isinstance(header, chunk_header.Header) and header.codec == "zstd" and header.stored_bytes < nbytes // 8


def test_another_models_and_another_tenants_chunks_do_not_match(ending: ExitStack, peer: ThreadedServer) -> None:
    keys = key_chain(3, salt="one")
    put(peer, keys, "another")
    put(peer, keys)
    assert tier_of(ending, address_of(peer)).holds(keys) == [True] * 3
    assert tier_of(ending, address_of(peer)).holds(key_chain(3, salt="two")) == [False] * 3
    assert tier_of(ending, address_of(peer)).holds(key_chain(3)) == [False] * 3
    strange = make_peers_tier({"hosts": [address_of(peer)], **PATIENT}, TierContext(CHUNK_BYTES, SLOT_BYTES, "a third"))
    ending.callback(strange.close)
    assert strange.holds(keys) == [False] * 3
    assert strange.load(reads_of(CONTEXT, keys)) == [Absent()] * 3


def test_nothing_is_stored_at_a_peer(ending: ExitStack, peer: ThreadedServer) -> None:
    keys = key_chain(2)
    put(peer, key_chain(1, branch="so that there is a cache"))
    cache = lanes_cache(ending, address_of(peer))
    lease = cache.begin_store(keys, "w")
    cache.commit(lease)
    cache.lower.drain(5.0)
    (theirs,) = peer.server.caches.values()
    assert len(theirs.admin.resident_keys()) == 1
    assert cache.lower.states()[0].spill.waiting == 0
    with pytest.raises(ConfigError, match="leave out write"):
        lanes_cache(ending, address_of(peer), write="through")
    tier = tier_of(ending, address_of(peer))
    assert all(isinstance(outcome, Refused) for outcome in tier.store([None]))  # type: ignore[list-item]


def test_two_that_ask_each_other_make_no_loop(ending: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [free.getsockname()[1] for free in (one, other)]
    servers = [
        listening(
            peers={"listen": f"127.0.0.1:{mine}", "unprotected": True},
            tiers=[{"type": "peers", "hosts": [f"127.0.0.1:{theirs}"], **PATIENT}],
            cold=ColdConfig(wait_s=20.0),
        )
        for mine, theirs in (ports, ports[::-1])
    ]
    for server in servers:
        ending.callback(server.close)
        put(server, key_chain(1, branch="so that there is a cache"))
    caches = [cache for server in servers for cache in server.server.caches.values()]
    assert promoted(caches[0], key_chain(3, branch="nobody's")) == 0
    counts = [served_by(server) for server in servers]
    assert counts[0].asked == 0 and counts[1].asked > 0


def test_what_was_cleared_here_counts_again_when_the_peer_was_cleared_later(
    ending: ExitStack, peer: ThreadedServer
) -> None:
    keys = key_chain(2)
    put(peer, keys)
    tier = tier_of(ending, address_of(peer))
    assert tier.holds(keys) == [True, True]
    tier.clear()
    assert tier.holds(keys) == [False, False]
    assert tier.load(reads_of(CONTEXT, keys)) == [Absent(), Absent()]
    (theirs,) = peer.server.caches.values()
    theirs.clear()
    put(peer, keys)
    assert tier.holds(keys) == [True, True]
    assert tier.load(reads_of(CONTEXT, keys)) == [Loaded(CHUNK_BYTES)] * 2
    peer.clock.advance(3600.0)
    tier.clear()
    assert tier.holds(keys) == [False, False]


def test_what_takes_a_tiers_place_reads_no_more_than_it_did(ending: ExitStack, peer: ThreadedServer) -> None:
    """After a live upgrade, or one that came to nothing. Once all hosts are cleared, those too that have been restarted
    since, and never cleared, are read again."""
    old, alone = key_chain(2), key_chain(1, branch="alone")
    ours, theirs = key_chain(1, salt="ours"), key_chain(1, salt="theirs")
    for keys in (old, alone, ours, theirs):
        put(peer, keys)
    everything = [*alone, *ours, *theirs]
    tier = tier_of(ending, address_of(peer))
    assert all(tier.holds([*old, *everything]))
    tier.discard(alone)
    tier.clear_tenant(ours[0].tenant)
    later = tier_of(ending, address_of(peer))
    later.remove(tier.removed())
    assert later.holds(everything) == [False, False, True]
    tier.clear()
    last = tier_of(ending, address_of(peer))
    last.remove(tier.removed())
    assert not any(last.holds([*old, *everything]))
    last.all_cleared(set(), [])
    assert last.holds(old) == [True, True]


def test_a_host_whose_word_cannot_be_told_from_our_clear_is_doubted_at_once(
    ending: ExitStack, peer: ThreadedServer
) -> None:
    """What it says when it offers was true when it said so. Our own query would not believe it."""
    keys = key_chain(2)
    tier = tier_of(ending, address_of(peer))
    assert tier.doubted(keys, None) == set()
    tier.clear()
    assert tier.doubted(keys, 0.0) == set(keys)
    until(lambda: tier.doubted(keys, 0.0) == set())


def test_a_tenant_that_was_cleared_is_found_at_no_peer(ending: ExitStack, peer: ThreadedServer) -> None:
    one, two = key_chain(2, salt="one"), key_chain(2, salt="two")
    put(peer, one)
    put(peer, two)
    tier = tier_of(ending, address_of(peer))
    assert tier.holds(one + two) == [True] * 4
    tier.clear_tenant(tenant_tag("one"))
    assert tier.holds(one + two) == [False] * 2 + [True] * 2
    assert tier.load(reads_of(CONTEXT, one)) == [Absent()] * 2


def test_keys_of_two_algorithms_are_asked_for_in_one_call(ending: ExitStack, peer: ThreadedServer) -> None:
    """Of a host whose engines name prefixes by sha256 and by xxh3_128, all are, when it is drained."""
    long, short = key_chain(2), [ChunkKey(key[: KEY_BYTES[0]]) for key in key_chain(2, branch="short")]
    put(peer, long)
    put(peer, short)
    unknown = key_chain(1, branch="nobody's")
    asked = [long[0], short[0], *unknown, long[1], short[1]]
    assert tier_of(ending, address_of(peer)).holds(asked) == [True, True, False, True, True]


def test_what_is_discarded_while_a_peer_is_asked_is_not_found(ending: ExitStack) -> None:
    keys = key_chain(3)
    discard: list[Callable[[], None]] = []

    class Discarding(FakePeer):
        def hold(self, request: PeerHolds) -> bytes:
            for one in discard:
                one()
            return super().hold(request)

    fake = Discarding(nothing_after_all)
    ending.callback(fake.close)
    for forget, expected in (
        (lambda tier: tier.discard(keys[:1]), [False, True, True]),
        (lambda tier: tier.clear(), [False] * 3),
        (lambda tier: tier.clear_tenant(keys[0].tenant), [False] * 3),
    ):
        tier = tier_of(ending, fake.address)
        discard[:] = [partial(forget, tier)]
        assert tier.holds(keys) == expected
        discard.clear()
        assert tier.holds(keys) == expected


# What peers do wrong.


def flipped(data: bytes) -> bytes:
    """A bit of the payload in a piece that is long enough to have one."""
    at = SIZE.size + CHUNK_BYTES // 2
    return data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :] if len(data) > chunk_header.HEADER_BYTES else data


def test_a_flipped_bit_is_damage_and_a_miss_and_not_asked_for_again(ending: ExitStack, peer: ThreadedServer) -> None:
    keys = key_chain(1)
    put(peer, keys)
    line = Proxy(int(address_of(peer).rpartition(":")[2]))
    ending.callback(line.close)
    cache = lanes_cache(ending, f"127.0.0.1:{line.port}")
    line.spoil = flipped
    assert promoted(cache, keys) == 0
    line.spoil = lambda data: data
    lane = cache.lower.states()[0].lane
    assert (lane.damaged, lane.loaded) == (1, 0)
    assert promoted(cache, keys) == 0
    assert cache.lower.states()[0].health.name == "UP"


def test_a_peer_that_dies_in_the_middle_of_a_chunk_costs_what_had_not_come(ending: ExitStack) -> None:
    def half(stream: PeerStream, request: Request) -> None:
        assert isinstance(request, Fetch)
        first, second = unpack_keys(request)[:2]
        chunk = memoryview(bytearray(content(first, CHUNK_BYTES)))
        header = chunk_header.pack_header(first, None, chunk, chunk_header.format_id("f"))
        stream.send([SIZE.pack(CHUNK_BYTES), chunk, header], time.monotonic() + 10)
        stream.send([SIZE.pack(CHUNK_BYTES), content(second, CHUNK_BYTES // 2)], time.monotonic() + 10)
        raise ConnectionError("it dies")

    fake = FakePeer(half)
    ending.callback(fake.close)
    tier = tier_of(ending, fake.address)
    reads = reads_of(CONTEXT, key_chain(3))
    assert tier.load(reads) == [Loaded(CHUNK_BYTES), Absent(), Absent()]
    assert is_whole(CONTEXT, reads[0])


def test_a_large_chunk_may_take_its_time_but_not_without_a_piece_of_it(ending: ExitStack) -> None:
    """Of the peers' tier itself; its lane does not take a call for one that hangs while pieces arrive."""
    nbytes, piece = 64 << 20, bytes(1 << 20)
    is_over = threading.Event()

    def stop(stream: PeerStream, _: Request) -> None:
        stream.send([SIZE.pack(nbytes), *[piece] * 3, piece[1:]], time.monotonic() + 10)
        is_over.wait(100)  # a minute is the time of the whole chunk

    fake = FakePeer(stop)
    ending.callback(fake.close)
    ending.callback(is_over.set)
    tier = tier_of(ending, fake.address, timeout_s=1.0)
    assert isinstance(tier, ShowsProgress)
    arrived: list[int] = []
    tier.on_progress = lambda: arrived.append(1)
    reads = reads_of(TierContext(nbytes, nbytes, "f"), key_chain(1))
    outcomes: list[LoadOutcome] = []
    loading = threading.Thread(target=lambda: outcomes.extend(tier.load(reads)), daemon=True)
    loading.start()
    joined(loading, within_s=30)
    assert outcomes == [Absent()] and len(arrived) == 3


def test_a_killed_peer_is_a_miss_and_is_found_again_when_it_is_back(ending: ExitStack, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {"host": {"capacity_bytes": 8 * SLOT_BYTES}, "peers": {"listen": address, "unprotected": True}}
    server = launch(config, socket=home / "s")
    ending.callback(server.stop)
    assert server.peers == address
    keys = key_chain(3)
    cache = join_at(home / "s")
    store(cache, keys)
    ending.callback(cache.close)
    tier = tier_of(ending, address, timeout_s=0.5)
    assert tier.holds(keys) == [True] * 3
    os.kill(server.pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert tier.load(reads_of(CONTEXT, keys[:1])) == [Absent()]
    kill_server(server)
    assert tier.load(reads_of(CONTEXT, keys)) == [Absent()] * 3
    with pytest.raises(TierDown, match=address):
        tier.probe()
    again = launch(config, socket=home / "s")
    ending.callback(again.stop)
    tier.probe()
    assert tier.holds(keys) == [False] * 3


@pytest.mark.parametrize("after_bytes", [1, 5 << 20, 20 << 20])
def test_a_peer_that_is_killed_while_it_sends_costs_what_had_not_come(
    ending: ExitStack, home: Path, after_bytes: int
) -> None:
    nbytes, keys = 2 << 20, key_chain(16)
    context = TierContext(nbytes, nbytes, "f")
    server = launch(
        {"host": {"capacity_bytes": 16 * nbytes}, "peers": {"listen": "127.0.0.1:0", "unprotected": True}},
        socket=home / "s",
    )
    ending.callback(server.stop)
    cache = join_at(home / "s", group_bytes=(nbytes,))
    ending.callback(cache.close)
    lease = cache.begin_store(keys, "w")
    for key, extent in zip(keys, lease.extents, strict=True):
        cache.pool.view[extent.offset : extent.offset + nbytes] = content(key, nbytes)
    cache.commit(lease)
    line = Proxy(int(server.peers.rpartition(":")[2]))
    ending.callback(line.close)
    tier = make_peers_tier({"hosts": [f"127.0.0.1:{line.port}"], **PATIENT}, context)
    ending.callback(tier.close)
    assert tier.holds(keys) == [True] * 16
    passed = [0]

    def kill(data: bytes) -> bytes:
        passed[0] += len(data)
        if passed[0] >= after_bytes:
            os.kill(server.pid, signal.SIGKILL)
        return data

    line.spoil = kill
    reads = reads_of(context, keys)
    outcomes = tier.load(reads)
    came = [isinstance(outcome, Loaded) for outcome in outcomes]
    assert came == sorted(came, reverse=True) and False in came
    assert sum(came) >= after_bytes // nbytes - 1
    assert all(is_whole(context, read) for read, is_here in zip(reads, came, strict=True) if is_here)
    with pytest.raises(TierDown):
        tier.probe()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_peer_that_never_answers_holds_up_no_other(ending: ExitStack, peer: ThreadedServer) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # the kernel accepts, and nobody says anything
    ending.callback(silent.close)
    mute = f"127.0.0.1:{silent.getsockname()[1]}"
    keys = key_chain(3)
    put(peer, keys)
    tier = tier_of(ending, mute, address_of(peer), connect_timeout_s=1.0)
    assert tier.holds(keys) == [True] * 3
    reads = reads_of(CONTEXT, keys)
    assert tier.load(reads) == [Loaded(CHUNK_BYTES)] * 3
    alone = tier_of(ending, mute, connect_timeout_s=0.2)
    with pytest.raises(TierDown, match=r"127\.0\.0\.1.*in time"):
        alone.holds(keys)


def lies_about_the_size(stream: PeerStream, request: Request) -> None:
    assert isinstance(request, Fetch)
    for key in unpack_keys(request):
        stream.send([SIZE.pack(1 << 50), content(key, 2 * CHUNK_BYTES)], time.monotonic() + 10)


def another_chunk(stream: PeerStream, request: Request) -> None:
    for _ in unpack_keys(request):  # type: ignore[arg-type]
        (other,) = key_chain(1, branch="other")
        chunk = memoryview(bytearray(content(other, CHUNK_BYTES)))
        header = chunk_header.pack_header(other, None, chunk, chunk_header.format_id("f"))
        stream.send([SIZE.pack(len(chunk)), chunk, header], time.monotonic() + 10)


def nothing_after_all(stream: PeerStream, request: Request) -> None:
    for _ in unpack_keys(request):  # type: ignore[arg-type]
        stream.send([SIZE.pack(NOT_HERE)], time.monotonic() + 10)


@pytest.mark.parametrize(
    ("lie", "outcome", "damaged"),
    [(lies_about_the_size, Damaged, 1), (another_chunk, Loaded, 2), (nothing_after_all, Absent, 0)],
)
def test_a_peer_that_lies_about_size_identity_or_presence_is_a_miss(
    ending: ExitStack, lie: Callable[[PeerStream, Request], None], outcome: type, damaged: int
) -> None:
    fake = FakePeer(lie)
    ending.callback(fake.close)
    keys = key_chain(2)
    reads = reads_of(CONTEXT, keys)
    for read in reads:
        read.pages[CHUNK_BYTES:] = b"\xa5" * (len(read.pages) - CHUNK_BYTES)
    assert isinstance(tier_of(ending, fake.address).load(reads)[0], outcome)
    for read in reads:  # nothing is written past the room
        assert set(read.pages[CHUNK_BYTES:]) == {0xA5}
    cache = lanes_cache(ending, fake.address)
    assert promoted(cache, keys) == 0
    assert cache.lower.states()[0].lane.damaged == damaged


def test_an_answer_to_another_number_of_questions_is_no_answer(ending: ExitStack) -> None:
    class Miscounting(FakePeer):
        def hold(self, request: PeerHolds) -> bytes:
            return super().hold(request) + b"\1"

    fake = Miscounting(nothing_after_all)
    ending.callback(fake.close)
    with pytest.raises(TierDown, match="3 answers to 2 questions"):
        tier_of(ending, fake.address).holds(key_chain(2))


def test_a_peer_of_another_release_is_down_and_says_what_to_do(ending: ExitStack) -> None:
    class Newer(FakePeer):
        def _converse_on(self, sock: socket.socket) -> None:
            with sock, suppress(OSError):
                sock.sendall(HEADER.pack(3, VERSION + 1) + b"new")
                while sock.recv(1 << 12):
                    pass

    fake = Newer(nothing_after_all)
    ending.callback(fake.close)
    said = f"speaks version {VERSION} of the protocol, the other {VERSION + 1}: run the same release"
    with pytest.raises(TierDown, match=said):
        tier_of(ending, fake.address).holds(key_chain(2))


# Who the peers are.


def test_a_name_with_several_addresses_is_several_peers_and_is_looked_up_again(
    ending: ExitStack, peer: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(address_of(peer).rpartition(":")[2])
    second = listening(peers={"listen": f"127.0.0.2:{port}", "unprotected": True})
    ending.callback(second.close)
    first_keys, second_keys = key_chain(2, branch="first"), key_chain(2, branch="second")
    put(peer, first_keys)
    put(second, second_keys)
    addresses = ["127.0.0.1"]
    failed: list[bool] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: int, **options: int) -> object:
        if host != "peers.internal":
            return real(host, port, *args, **options)
        if not addresses:
            failed.append(True)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    tier = tier_of(ending, f"peers.internal:{port}", resolve_s=0.01)
    assert tier.holds(first_keys + second_keys) == [True, True, False, False]
    addresses.append("127.0.0.2")
    until(lambda: tier.holds(first_keys + second_keys) == [True] * 4)
    reads = reads_of(CONTEXT, first_keys + second_keys)
    assert tier.load(reads) == [Loaded(CHUNK_BYTES)] * 4
    assert all(is_whole(CONTEXT, read) for read in reads)
    addresses.remove("127.0.0.1")
    until(lambda: tier.holds(first_keys + second_keys) == [False, False, True, True])
    addresses.clear()  # names that cannot be looked up now are where they were
    until(lambda: tier.holds(second_keys) and failed)
    assert tier.holds(first_keys + second_keys) == [False, False, True, True]


@pytest.fixture
def names_that_hang(ending: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The resolver does not answer for names that begin with `dead`, until the test ends. Returns which it was asked
    for."""
    real, over = socket.getaddrinfo, threading.Event()
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *args: int, **options: int) -> object:
        if host.startswith("dead"):
            asked.append(host)
            over.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    ending.callback(over.set)
    return lambda: list(asked)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_name_that_cannot_be_resolved_delays_no_other(
    ending: ExitStack, peer: ThreadedServer, names_that_hang: Callable[[], list[str]], host: str
) -> None:
    keys = key_chain(2)
    put(peer, keys)
    dead = [f"dead-{number}:1" for number in range(12)]
    port = address_of(peer).rpartition(":")[2]
    tier = tier_of(ending, *dead, f"{host}:{port}", connect_timeout_s=0.2)
    until(lambda: tier.holds(keys) == [True, True], within_s=5)
    assert len(names_that_hang()) == 12, "and they are all being resolved"


def test_a_host_that_is_new_counts_at_once_whatever_others_take(
    ending: ExitStack, peer: ThreadedServer, names_that_hang: Callable[[], list[str]]
) -> None:
    """As when a directory names one: more names than are resolved at once hang already."""
    hosts = PeerHosts([], token=b"", tls=None, resolve_s=30.0, connect_s=0.2)
    ending.callback(hosts.close)
    dead = [HostPort(f"dead-{number}", 1) for number in range(40)]
    hosts.set_hosts(dead)
    until(lambda: len(names_that_hang()) >= 10)
    here = read_host_port(address_of(peer), "")
    hosts.set_hosts([*dead, here])
    assert [one.host for one in hosts.at(here)] == [here]
    hosts.set_hosts(dead)
    assert hosts.at(here) == [] and hosts.peers() == []


def test_this_process_is_no_peer_of_itself(
    ending: ExitStack, peer: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    keys = key_chain(1)
    put(peer, keys)
    tier = tier_of(ending, address_of(peer))
    assert tier.holds(keys) == [False]
    tier.probe()
    assert served_by(peer).asked == 0


def test_copies_at_several_peers_share_the_work(ending: ExitStack, peer: ThreadedServer) -> None:
    second = listening()
    ending.callback(second.close)
    keys = key_chain(6)
    put(peer, keys)
    put(second, keys)
    tier = tier_of(ending, address_of(peer), address_of(second))
    assert tier.load(reads_of(CONTEXT, keys)) == [Loaded(CHUNK_BYTES)] * 6
    until(lambda: [served_by(server).sent for server in (peer, second)] == [3, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": ["h:1"]}, "did you mean 'hosts'"),
        ({"hosts": []}, "hosts is empty"),
        ({"hosts": ["h"]}, "write a host and a port"),
        ({"hosts": ["h\0:9400"]}, "write a host and a port"),
        ({"hosts": [f"{'x' * 64}.example:9400"]}, "whose host is no name of one: .*too long"),
        ({"hosts": ["a..b:9400"]}, "whose host is no name of one: .*empty"),
        ({"hosts": ["127.0.0.1:1"]}, "`kv peers init` makes"),
        ({"hosts": ["127.0.0.1:1"], "tls_ca_file": "/x"}, "go together"),
        ({"hosts": ["127.0.0.1:1"], "token_file": "/nowhere", "unprotected": True}, "inside TLS only"),
        ({"hosts": ["127.0.0.1:1"], "tls_ca_file": "/x", "token_file": "/nowhere"}, "/nowhere cannot be read"),
        ({"hosts": ["127.0.0.1:1"], "timeout_s": 0}, "timeout_s"),
    ],
)
def test_options_that_cannot_be_honoured_end_a_servers_start(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(HostConfig(), [{"type": "peers", **options}])
