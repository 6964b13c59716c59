"""What engines of another host hand over is fetched while they still compute it, and is kept there no longer than
needed. Whatever becomes of the peer, only what had not come is missing."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_remote.messages import pack_keys
from kv_server import RemoteCache, launch
from kv_server.peers import tier as peer_following
from kv_server.peers.tier import PeersTier, make_peers_tier
from kv_server.peers.wire import (
    NOT_HERE,
    SIZE,
    Fetch,
    Follow,
    Followed,
    Given,
    PeerHeld,
    PeerReceived,
    PeerStream,
    Request,
    unpack_keys,
)
from kv_testing.cache_servers import SLOT_BYTES, ThreadedServer, join_at
from kv_testing.peers import PATIENT, FakePeer, address_of, listening, own_nobody
from kv_testing.servers import Proxy
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import joined, until
from kv_tiers.build import build_local_cache
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import HostConfig
from kv_tiers.testing.tier_contract import content
from kv_tiers.tier import TierContext

KEYS = key_chain(4)


@pytest.fixture(autouse=True)
def _own_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    own_nobody(monkeypatch)
    monkeypatch.setattr(peer_following, "_WAIT_S", 0.1)  # which closing may take


@pytest.fixture
def peer(ending: ExitStack) -> ThreadedServer:
    server = listening(16)
    ending.callback(server.close)
    return server


@pytest.fixture
def writer(ending: ExitStack, peer: ThreadedServer) -> RemoteCache:
    """The engine that computes."""
    cache = join_at(peer.path)
    ending.callback(cache.close)
    return cache


def reader(ending: ExitStack, host: str, *, follow: bool = True, slots: int = 16, **options: object) -> LocalCache:
    """The cache of the host that decodes."""
    tier = {"type": "peers", "hosts": [host], "follow": follow, **PATIENT}
    cache = build_local_cache(
        HostConfig(capacity_bytes=slots * SLOT_BYTES),
        group_bytes=(CHUNK_BYTES,),
        fingerprint="f",
        tiers=[{**tier, **options}],
    )
    ending.callback(cache.close)
    return cache


def hand_over(cache: RemoteCache, keys: Sequence[ChunkKey], hold_s: float = 60.0) -> None:
    lease = cache.begin_store(keys, "w", hold_s=hold_s)
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
    cache.commit(lease)


def has(cache: LocalCache, keys: Sequence[ChunkKey]) -> int:
    """How many of these are in the pool; each is right."""
    slots = [slot for key in keys if (slot := cache._index.find(key)) is not None]
    for slot in slots:
        assert cache.pool.chunk(slot, CHUNK_BYTES) == content(cache._index.key_at(slot) or KEYS[0], CHUNK_BYTES)
    return len(slots)


def kept(peer: ThreadedServer) -> int:
    (cache,) = peer.server.caches.values()
    return cache.holds.chunks


def test_each_step_of_a_prompt_is_fetched_before_anybody_asks_and_is_kept_here_instead_of_there(
    ending: ExitStack, peer: ThreadedServer, writer: RemoteCache
) -> None:
    cache = reader(ending, address_of(peer))
    for chunks in range(1, 5):
        hand_over(writer, KEYS[:chunks])
        until(lambda chunks=chunks: has(cache, KEYS) == chunks)  # type: ignore[misc]
    assert cache.counts().lookups == 0
    until(lambda: kept(peer) == 0)
    assert cache.holds.chunks == 4
    lane = cache.lower.states()[0].lane
    assert (lane.loaded, lane.absent) == (4, 0)
    plan = cache.lookup(KEYS, "request")
    assert plan.chunks == 4 and set(plan.tiers) == {"peers"}
    cache.received(KEYS)
    assert cache.holds.chunks == 0


def test_what_was_handed_over_before_anybody_followed_is_fetched_too_and_who_does_not_follow_fetches_nothing(
    ending: ExitStack, peer: ThreadedServer, writer: RemoteCache
) -> None:
    hand_over(writer, KEYS)
    other = reader(ending, address_of(peer), follow=False)
    cache = reader(ending, address_of(peer))
    until(lambda: has(cache, KEYS) == 4)
    assert has(other, KEYS) == 0 and other.lower.states()[0].lane.loaded == 0


def test_what_is_only_stored_is_not_fetched(ending: ExitStack, peer: ThreadedServer, writer: RemoteCache) -> None:
    cache = reader(ending, address_of(peer))
    hand_over(writer, KEYS, hold_s=0.0)
    hand_over(writer, other := key_chain(1, branch="handed over"))
    until(lambda: has(cache, other) == 1)
    assert has(cache, KEYS) == 0


def test_what_the_reader_needs_no_more_is_kept_no_longer_whether_it_follows_or_not(
    ending: ExitStack, peer: ThreadedServer, writer: RemoteCache
) -> None:
    cache = reader(ending, address_of(peer), follow=False)
    hand_over(writer, KEYS)
    assert kept(peer) == 4
    cache.received(KEYS[:3])
    until(lambda: kept(peer) == 1)
    assert has(cache, KEYS) == 0


def test_peers_that_are_slow_to_hear_what_is_not_needed_delay_no_lookup(ending: ExitStack) -> None:
    """They may be more than there are threads."""
    over = threading.Event()

    def hears_late(stream: PeerStream, request: Request) -> None:
        assert isinstance(request, PeerReceived)
        assert over.wait(60)
        stream.send_message(PeerHeld(b"", None), time.monotonic() + 10)

    peers = [FakePeer(hears_late) for _ in range(20)]
    for peer in peers:
        ending.callback(peer.close)
    context = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
    hosts = [peer.address for peer in peers]
    tier = make_peers_tier({"hosts": hosts, **PATIENT, "answer_timeout_s": 60.0}, context)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    ending.callback(over.set)
    tier.received(KEYS)
    until(lambda: sum(any(isinstance(request, PeerReceived) for request in peer.asked) for peer in peers) > 16)
    found: list[list[bool]] = []
    lookup = threading.Thread(target=lambda: found.append(tier.holds(KEYS)), daemon=True)
    lookup.start()
    joined(lookup, within_s=30)
    assert found == [[True] * len(KEYS)]


def test_a_lookup_that_comes_while_a_chunk_is_on_its_way_waits_for_it_and_loads_it_once(
    ending: ExitStack, peer: ThreadedServer, writer: RemoteCache
) -> None:
    line = Proxy(int(address_of(peer).rpartition(":")[2]))
    ending.callback(line.close)
    cache = reader(ending, f"127.0.0.1:{line.port}")
    hand_over(writer, KEYS[:1])
    until(lambda: has(cache, KEYS) == 1)
    gate = threading.Event()

    def hold_back(data: bytes) -> bytes:
        if content(KEYS[1], CHUNK_BYTES) in data:
            assert gate.wait(30)
        return data

    line.spoil = hold_back
    hand_over(writer, KEYS[:2])
    until(lambda: cache.counts().chunks_reserved == 1)
    assert cache.lookup(KEYS[:2], "request", wait_for_promotion=True).ended.name == "PENDING"
    gate.set()
    until(lambda: cache.lookup(KEYS[:2], "request", wait_for_promotion=True).chunks == 2)
    assert cache.lower.states()[0].lane.loaded == 2


def test_after_a_clear_nothing_is_fetched_from_a_peer_that_was_not_cleared_later(
    ending: ExitStack, peer: ThreadedServer, writer: RemoteCache
) -> None:
    """What it hands over may be of the weights before."""
    cache = reader(ending, address_of(peer))
    hand_over(writer, KEYS[:1])
    until(lambda: has(cache, KEYS) == 1)
    loaded = cache.lower.states()[0].lane.loaded
    tier = cache._promotions._lanes[0].tier
    cache.clear()
    until(lambda: getattr(tier, "_cleared_s", None) is not None)
    hand_over(writer, KEYS)
    writer.clear()
    until(lambda: kept(peer) == 0)

    def is_fetched() -> bool:
        hand_over(writer, key_chain(1, branch=str(time.monotonic_ns())))
        return cache.lower.states()[0].lane.loaded > loaded

    # What answers a question of before the peer was cleared counts as of before.
    until(is_fetched)
    assert has(cache, KEYS) == 0


def test_a_clear_in_the_middle_of_an_answer_counts_for_the_rest_of_it(ending: ExitStack) -> None:
    chains = [key_chain(2, branch=str(number)) for number in range(3)]

    def answer(stream: PeerStream, request: Request) -> None:
        assert isinstance(request, Follow)
        time.sleep(0.01)
        given = [] if request.after else [Given(pack_keys(chain), 0, 60.0) for chain in chains]
        stream.send_message(Followed(b"f" * 16, 3, given, None), time.monotonic() + 10)

    fake = FakePeer(answer)
    ending.callback(fake.close)
    context = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
    tier = make_peers_tier({"hosts": [fake.address], "follow": True, **PATIENT}, context)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    announced: list[list[ChunkKey]] = []

    def on_handed_over(chain: Sequence[ChunkKey], first: int, hold_s: float) -> bool:
        announced.append(list(chain))
        tier.clear()
        return True

    tier.follow(on_handed_over)
    until(lambda: len(fake.asked) > 2)
    assert announced == chains[:1]


def test_what_was_forgotten_here_is_not_fetched_again(
    ending: ExitStack, peer: ThreadedServer, writer: RemoteCache
) -> None:
    cache = reader(ending, address_of(peer))
    cache.forget(KEYS[:1])
    until(lambda: cache.lower.states()[0].lane.discarded == 1)
    hand_over(writer, KEYS)
    hand_over(writer, other := key_chain(1, branch="other"))
    until(lambda: has(cache, other) == 1)
    assert has(cache, KEYS) == 0


def test_half_of_the_readers_pool_is_kept_at_most_and_an_abundance_of_announcements_evicts_no_lease(
    ending: ExitStack, peer: ThreadedServer, writer: RemoteCache
) -> None:
    cache = reader(ending, address_of(peer), slots=4)
    for number in range(6):
        hand_over(writer, key_chain(2, branch=str(number)))
        until(lambda number=number: cache.lower.states()[0].lane.loaded >= 2 * number)  # type: ignore[misc]
    until(lambda: cache.holds.chunks == 2)
    assert cache.counts().chunks_reserved == 0


def test_a_peer_that_lies_about_what_it_hands_over_costs_a_miss(ending: ExitStack) -> None:
    said: list[Followed] = []

    def answer(stream: PeerStream, request: Request) -> None:
        if isinstance(request, Follow):
            given = [] if said else [Given(pack_keys(KEYS), 1, 3600.0), Given(pack_keys(KEYS[:1]), 9, 0.0)]
            said.append(Followed(b"f" * 16, 2, given, None))
            time.sleep(0.05)
            stream.send_message(said[-1], time.monotonic() + 10)
        else:
            assert isinstance(request, Fetch)
            for _ in unpack_keys(request):
                stream.send([SIZE.pack(NOT_HERE)], time.monotonic() + 10)

    fake = FakePeer(answer)
    ending.callback(fake.close)
    cache = reader(ending, fake.address)
    until(lambda: cache.lower.states()[0].lane.absent == 3)
    until(lambda: len(said) > 2)
    until(lambda: cache.counts().chunks_reserved == 0)
    assert cache.holds.chunks == 0 and cache.counts().slots_used == 0
    assert {request.after for request in fake.asked if isinstance(request, Follow)} == {0, 2}


@pytest.mark.parametrize("killed_at", [0, 2])
def test_a_peer_that_is_killed_in_the_middle_of_a_prompt_costs_what_had_not_come(
    ending: ExitStack, tmp_path: Path, killed_at: int
) -> None:
    home = tmp_path / "private"
    home.mkdir(mode=0o700)
    config = {"host": {"capacity_bytes": 8 * SLOT_BYTES}, "peers": {"listen": "127.0.0.1:0", "unprotected": True}}
    server = launch(config, socket=home / "s")
    ending.callback(server.stop)
    engine = join_at(home / "s")
    ending.callback(engine.close)
    cache = reader(ending, server.peers)
    for chunks in range(1, killed_at + 1):
        hand_over(engine, KEYS[:chunks])
    until(lambda: has(cache, KEYS) == killed_at)
    os.kill(server.pid, signal.SIGKILL)
    hand_over(engine, KEYS)  # into a pool that nobody serves any more
    until(lambda: cache.lookup(KEYS, "request", wait_for_promotion=True).ended.name != "PENDING")
    assert cache.lookup(KEYS, "request").chunks == killed_at
    assert cache.counts().chunks_reserved == 0
    # The next server there is another feed, and is followed from its beginning.
    config["peers"]["listen"] = server.peers  # type: ignore[index]
    again = launch(config, socket=home / "s")
    ending.callback(again.stop)
    other = join_at(home / "s")
    ending.callback(other.close)
    hand_over(other, one := key_chain(1, branch="of the next server"))
    until(lambda: has(cache, one) == 1, within_s=30)


@pytest.mark.parametrize("given", [False, True], ids=["nothing", "the same chunk"])
def test_a_peer_that_always_answers_at_once_is_not_asked_without_a_pause(ending: ExitStack, given: bool) -> None:
    """Otherwise it would keep a core of ours busy, with tens of thousands of questions a second."""
    said = [Given(pack_keys(KEYS[:1]), 0, 1.0)] if given else []

    def answer(stream: PeerStream, request: Request) -> None:
        if isinstance(request, Follow):
            stream.send_message(Followed(bytes(16), request.after + 1, said, None), time.monotonic() + 10)
        elif isinstance(request, Fetch):
            stream.send([SIZE.pack(NOT_HERE)] * len(unpack_keys(request)), time.monotonic() + 10)

    busy = FakePeer(answer)
    ending.callback(busy.close)
    began_s = time.monotonic()
    reader(ending, busy.address)

    def questions() -> int:
        return sum(isinstance(one, Follow) for one in busy.asked)

    until(lambda: questions() > 10)
    least_s = peer_following._MIN_INTERVAL_S if given else peer_following._RETRY_S
    assert questions() <= 1 + (time.monotonic() - began_s) / least_s
