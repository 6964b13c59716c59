"""A server that keeps the chunks of engines on other hosts: what they store is there for all, and what lies is not."""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import ConfigError, InputError, TierDown
from kv_core.keys import ChunkKey, tenant_tag
from kv_core.outcome import Absent, Loaded, Refused, Stored, Unstorable
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_remote.messages import pack_keys
from kv_server.peers import stores as stores_module
from kv_server.peers.tier import PeersTier, PeersTierConfig, make_peers_tier
from kv_server.peers.wire import (
    MAX_FETCHED,
    PeerClear,
    PeerForget,
    PeerHeld,
    PeerStore,
    PeerStored,
    PeerStream,
    PeerWanted,
    Request,
    StoreFate,
    unpack_keys,
)
from kv_testing.cache_servers import SLOT_BYTES, ThreadedServer, join_at
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
from kv_testing.wait import until
from kv_tiers import chunk_header
from kv_tiers.build import build_local_cache
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import ColdConfig, HostConfig
from kv_tiers.testing.tier_contract import TierContract, aligned_pages, content
from kv_tiers.tier import Tier, TierContext, Write

CONTEXT = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
FORMAT_ID = chunk_header.format_id("f")


@pytest.fixture(autouse=True)
def _own_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    own_nobody(monkeypatch)


@pytest.fixture
def keeper(ending: ExitStack) -> ThreadedServer:
    server = listening(16, peers={"take_stores": True})
    ending.callback(server.close)
    return server


def tier_of(ending: ExitStack, host: str, context: TierContext = CONTEXT, **options: object) -> PeersTier:
    tier = make_peers_tier({"hosts": [host], "stores": True, **PATIENT, **options}, context)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    return tier


def writes_of(keys: Sequence[ChunkKey], context: TierContext = CONTEXT) -> list[Write]:
    writes = []
    for parent, key in pairwise([None, *keys]):
        assert key is not None
        pages = aligned_pages(context.slot_bytes)
        pages[: context.chunk_bytes] = content(key, context.chunk_bytes)
        fields = key, parent, pages[: context.chunk_bytes], chunk_header.format_id(context.fingerprint)
        writes.append(Write(key, parent, chunk_header.pack_header(*fields), pages, context.chunk_bytes))
    return writes


def engine(ending: ExitStack, host: str) -> LocalCache:
    """The cache of an engine whose host has no server."""
    cache = build_local_cache(
        HostConfig(capacity_bytes=8 * SLOT_BYTES),
        group_bytes=(CHUNK_BYTES,),
        fingerprint="f",
        tiers=[{"type": "peers", "hosts": [host], "stores": True, **PATIENT}],
        cold=ColdConfig(wait_s=20.0),
    )
    ending.callback(cache.close)
    return cache


def store(cache: LocalCache, keys: Sequence[ChunkKey]) -> None:
    lease = cache.begin_store(keys, "w")
    assert lease.keys == tuple(keys), lease.refused
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
    cache.commit(lease)
    cache.lower.drain(20.0)


class TestStores(TierContract):
    def make(self, context: TierContext, chunks: int) -> Tier:
        self.server = listening(-(-chunks * context.slot_bytes // SLOT_BYTES), peers={"take_stores": True})
        return make_peers_tier({"hosts": [address_of(self.server)], "stores": True, **PATIENT}, context)

    def use(self, context: TierContext, chunks: int) -> Tier:
        self.server.close()
        return super().use(context, chunks)

    def teardown_method(self) -> None:
        super().teardown_method()
        self.server.close()

    def test_payloads_of_any_size_come_back_with_their_size(self) -> None:
        """The server's pool has chunks as they are."""
        (key,) = key_chain(1)
        (outcome,) = self.tier.store([self.write(key, stored_bytes=4096)])
        assert isinstance(outcome, Unstorable) and "leave codec out" in outcome.reason
        assert self.tier.holds([key]) == [False]

    test_a_chunk_that_is_stored_again_in_another_size_is_one_of_the_two = None  # type: ignore[assignment]


# Engines whose cache is elsewhere.


def test_what_one_engine_stores_another_one_finds_and_a_restarted_one(
    ending: ExitStack, keeper: ThreadedServer
) -> None:
    keys = key_chain(4)
    with ExitStack() as first:
        store(engine(first, address_of(keeper)), keys)
    assert promoted(engine(ending, address_of(keeper)), keys) == 4
    until(lambda: (served_by(keeper).stored, served_by(keeper).stored_bytes) == (4, 4 * CHUNK_BYTES))
    local = join_at(keeper.path)  # an engine of the server's own host
    ending.callback(local.close)
    assert local.lookup(keys, "r").chunks == 4


def test_what_the_server_has_is_not_sent_again(ending: ExitStack, keeper: ThreadedServer) -> None:
    keys = key_chain(3)
    tier = tier_of(ending, address_of(keeper))
    assert tier.store(writes_of(keys[:2])) == [Stored()] * 2
    assert tier_of(ending, address_of(keeper)).store(writes_of(keys)) == [Stored()] * 3
    until(lambda: served_by(keeper).stored == 3)  # it is counted once it has been answered


def test_the_tail_of_a_prompt_is_evicted_before_its_head(ending: ExitStack) -> None:
    """The server knows which chunk follows which, though they arrive one by one."""
    server = listening(4, peers={"take_stores": True})
    ending.callback(server.close)
    tier, keys = tier_of(ending, address_of(server)), key_chain(4)
    tier.store(writes_of(keys))
    tier.store(writes_of(key_chain(2, branch="another prompt")))
    assert tier.holds(keys) == [True, True, False, False]


def test_tenants_and_models_stay_apart(ending: ExitStack, keeper: ThreadedServer) -> None:
    other = TierContext(CHUNK_BYTES, SLOT_BYTES, "another model")
    keys = key_chain(2, salt="one")
    tier_of(ending, address_of(keeper)).store(writes_of(keys))
    stranger = tier_of(ending, address_of(keeper), other)
    assert stranger.holds(keys) == [False] * 2
    assert stranger.store(writes_of(keys, other)) == [Stored()] * 2
    assert len(keeper.server.caches) == 2
    assert stranger.holds(key_chain(2, salt="two")) == [False] * 2


def test_removals_are_for_all(ending: ExitStack, keeper: ThreadedServer) -> None:
    one, two = key_chain(3, salt="one"), key_chain(3, salt="two")
    tier, another = (tier_of(ending, address_of(keeper)) for _ in range(2))
    tier.store([*writes_of(one), *writes_of(two)])
    tier.discard(one[:1])
    assert another.holds(one) == [False, True, True]
    tier.clear_tenant(tenant_tag("one"))
    assert another.holds(one + two) == [False] * 3 + [True] * 3
    tier.clear()
    assert another.holds(two) == [False] * 3
    assert tier.store(writes_of(two)) == [Stored()] * 3
    assert tier.holds(two) == [True] * 3
    assert tier.load(reads_of(CONTEXT, two)) == [Loaded(CHUNK_BYTES)] * 3


def test_what_could_not_be_removed_there_is_hidden_here(ending: ExitStack, keeper: ThreadedServer) -> None:
    keys = key_chain(3)
    line = Proxy(int(address_of(keeper).rpartition(":")[2]))
    ending.callback(line.close)
    tier = tier_of(ending, f"127.0.0.1:{line.port}", answer_timeout_s=0.2)
    tier.store(writes_of(keys))
    line.spoil_questions = lambda _: None
    tier.discard(keys[:1])
    line.spoil_questions = lambda data: data
    until(lambda: _tried(lambda: tier.holds(keys) == [False, True, True]))
    assert tier_of(ending, address_of(keeper)).holds(keys) == [True] * 3


def _tried(is_so: Callable[[], bool]) -> bool:
    try:
        return is_so()
    except TierDown:
        return False


def test_a_server_that_is_full_says_so(ending: ExitStack) -> None:
    server = listening(4, peers={"take_stores": True})
    ending.callback(server.close)
    keys = key_chain(4)
    tier = tier_of(ending, address_of(server))
    assert tier.store(writes_of(keys)) == [Stored()] * 4
    (cache,) = server.server.caches.values()
    assert cache.lookup(keys, "copying").chunks == 4
    reading = cache.load(keys, "copying", lasting=True)
    assert isinstance(reading, ReadLease)
    (outcome,) = tier.store(writes_of(key_chain(1, branch="more")))
    assert isinstance(outcome, Refused) and "no room" in outcome.reason
    assert "no room" in tier.usage().full
    cache.release(reading)
    cache.end("copying")
    assert tier.store(writes_of(key_chain(1, branch="more"))) == [Stored()]
    assert tier.usage().full == ""


def test_a_frozen_server_says_so_before_anything_is_sent(ending: ExitStack, keeper: ThreadedServer) -> None:
    held, new = key_chain(2), key_chain(2, branch="new")
    tier = tier_of(ending, address_of(keeper))
    tier.store(writes_of(held))
    keeper.server.submit(lambda: keeper.server.formats.freeze(True)).result(10)
    assert tier.store(writes_of(held)) == [Stored()] * 2
    answer = announced(connected(ending, keeper), [*held, *new])
    assert answer.wanted == bytes(4) and "frozen" in answer.refused
    assert all(isinstance(one, Refused) and "frozen" in one.reason for one in tier.store(writes_of(new)))
    keeper.server.submit(lambda: keeper.server.formats.freeze(False)).result(10)
    assert tier.store(writes_of(new)) == [Stored()] * 2


def test_a_server_that_takes_no_stores_keeps_everything_and_says_what_to_write(ending: ExitStack) -> None:
    server = listening()
    ending.callback(server.close)
    keys = key_chain(2)
    local = join_at(server.path)
    lease = local.begin_store(keys, "w")
    local.commit(lease)
    ending.callback(local.close)
    tier = tier_of(ending, address_of(server))
    outcomes = tier.store(writes_of(key_chain(2, branch="new")))
    assert all(isinstance(one, Refused) and "peers.take_stores: true" in one.reason for one in outcomes)
    tier.discard(keys[:1])
    tier.clear_tenant(keys[0].tenant)
    tier.clear()
    assert local.lookup(keys, "r").chunks == 2
    until(lambda: _tried(lambda: tier.holds(keys) == [False, False]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"hosts": ["a:1", "b:2"], "stores": True}, "one host"),
        ({"directory": {"url": "redis://h"}, "stores": True}, "one host"),
        ({"hosts": ["a:1"], "stores": "yes"}, "stores"),
    ],
)
def test_settings_that_cannot_be_meant(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_peers_tier({"unprotected": True, **options}, CONTEXT)


# What goes wrong.


@pytest.mark.parametrize("is_asked_first", [False, True])
def test_a_server_that_is_to_store_at_itself_says_so_once_and_its_tier_stays_up(
    ending: ExitStack,
    keeper: ThreadedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_asked_first: bool,
) -> None:
    monkeypatch.undo()
    cache = engine(ending, address_of(keeper))
    if is_asked_first:
        assert promoted(cache, key_chain(2)) == 0
    for number in range(3):
        store(cache, key_chain(2, branch=str(number)))
        (state,) = cache.lower.states()
        assert (state.health.name, state.lane.downs) == ("FULL", 0)
    assert caplog.text.count("this server itself") == 1
    assert served_by(keeper).stored == 0


def test_a_server_that_is_restarted_is_a_miss_and_then_stored_to_again(ending: ExitStack) -> None:
    server = listening(16, peers={"take_stores": True})
    address = address_of(server)
    cache = engine(ending, address)
    keys = key_chain(2)
    store(cache, keys)
    server.close()
    cache.forget(keys)
    store(cache, key_chain(2, branch="while it is away"))
    assert promoted(cache, keys) == 0
    again = listening(16, peers={"take_stores": True, "listen": address})
    ending.callback(again.close)
    until(lambda: served_by(again).stored == 2)  # what was stored while it was away, and waited here
    cache.lower.drain(20.0)
    store(cache, keys)
    store(cache, key_chain(8, branch="that pushes them out"))
    assert cache._index.find(keys[0]) is None
    assert promoted(cache, keys) == 2


def test_a_restarted_servers_disk_is_found_by_those_who_only_look(ending: ExitStack, tmp_path: Path) -> None:
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": 64 * SLOT_BYTES}
    keys = key_chain(3)
    first = listening(16, peers={"take_stores": True}, tiers=[disk])
    with ExitStack() as before:
        assert tier_of(before, address_of(first)).store(writes_of(keys)) == [Stored()] * 3
    first.close()
    second = listening(16, peers={"take_stores": True}, tiers=[disk])
    ending.callback(second.close)
    tier = tier_of(ending, address_of(second))
    until(lambda: tier.holds(keys) == [True] * 3)
    assert tier.load(reads_of(CONTEXT, keys)) == [Loaded(CHUNK_BYTES)] * 3


def test_who_has_cleared_a_server_reads_it_again_when_that_is_restarted(ending: ExitStack, tmp_path: Path) -> None:
    """It says then that it was never cleared."""
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": 64 * SLOT_BYTES}
    old, new = key_chain(2, branch="old"), key_chain(3)
    first = listening(16, peers={"take_stores": True}, tiers=[disk])
    tier = tier_of(ending, address_of(first))
    assert tier.store(writes_of(old)) == [Stored()] * 2
    tier.clear()
    assert tier.store(writes_of(new)) == [Stored()] * 3
    first.close()
    second = listening(16, peers={"take_stores": True, "listen": address_of(first)}, tiers=[disk])
    ending.callback(second.close)
    with tier._lock:
        tier._holders.clear()  # what it has found there before
    until(lambda: tier.holds(new) == [True] * 3)
    assert tier.holds(old) == [False] * 2


def connected(ending: ExitStack, server: ThreadedServer) -> PeerStream:
    """A sender that says what it likes."""
    sock = socket.create_connection(("127.0.0.1", int(address_of(server).rpartition(":")[2])))
    stream = PeerStream(sock)
    ending.callback(stream.close)
    stream.introduce(b"", time.monotonic() + 10)
    return stream


def announced(stream: PeerStream, keys: Sequence[ChunkKey]) -> PeerWanted:
    stream.send_message(PeerStore((CHUNK_BYTES,), "f", pack_keys(keys)), time.monotonic() + 10)
    return stream.answer(PeerWanted, time.monotonic() + 10)


def nothing_stays(server: ThreadedServer, keys: Sequence[ChunkKey]) -> None:
    """None of these is found, no slot is reserved, and others can still store."""
    (cache,) = server.server.caches.values()
    until(lambda: cache.counts().write_leases == 0)
    assert cache.counts().slots_used == cache.counts().chunks_resident
    assert cache.lookup(keys, "r").chunks == 0
    with ExitStack() as ending:
        tier = tier_of(ending, address_of(server))
        assert tier.store(writes_of(key_chain(2, branch="of another"))) == [Stored()] * 2


def test_a_flipped_bit_is_not_stored(ending: ExitStack, keeper: ThreadedServer) -> None:
    keys = key_chain(2)
    one, two = writes_of(keys)
    one.pages[CHUNK_BYTES // 2] ^= 8
    outcomes = tier_of(ending, address_of(keeper)).store([one, two])
    assert outcomes == [Refused("its bytes were damaged on the way"), Stored()]
    nothing_stays(keeper, keys[:1])


def _another_key(write: Write) -> bytes:
    return chunk_header.pack_header(
        key_chain(1, branch="another")[0], None, write.pages[: write.stored_bytes], FORMAT_ID
    )


def _another_model(write: Write) -> bytes:
    return chunk_header.pack_header(write.key, None, write.payload, chunk_header.format_id("another"))


def _another_size(write: Write) -> bytes:
    return chunk_header.pack_header(write.key, None, write.pages[:4096], FORMAT_ID)


def _a_flipped_bit(write: Write) -> bytes:
    return write.header[:60] + bytes([write.header[60] ^ 1]) + write.header[61:]


@pytest.mark.parametrize("lie", [_another_key, _another_model, _another_size, _a_flipped_bit])
def test_a_header_that_says_something_else_ends_the_connection(
    ending: ExitStack, keeper: ThreadedServer, lie: Callable[[Write], bytes]
) -> None:
    (write,) = writes_of(key_chain(1))
    stream = connected(ending, keeper)
    assert announced(stream, [write.key]) == PeerWanted(b"\1", "")
    stream.send([lie(write), write.payload], time.monotonic() + 10)
    with pytest.raises(OSError, match=r"closed|reset|Broken"):
        stream.answer(PeerStored, time.monotonic() + 10)
    nothing_stays(keeper, [write.key, *key_chain(1, branch="another")])


WHOLE = chunk_header.HEADER_BYTES + CHUNK_BYTES


@pytest.mark.parametrize("sent_bytes", [0, 100, chunk_header.HEADER_BYTES, WHOLE - 1])
def test_a_sender_that_dies_leaves_nothing(ending: ExitStack, keeper: ThreadedServer, sent_bytes: int) -> None:
    (write,) = writes_of(key_chain(1))
    stream = connected(ending, keeper)
    announced(stream, [write.key])
    stream.send([(write.header + bytes(write.payload))[:sent_bytes]], time.monotonic() + 10)
    stream.close()
    nothing_stays(keeper, [write.key])


def test_senders_that_stall_keep_others_waiting_only_for_a_time(ending: ExitStack) -> None:
    server = listening(16, peers={"take_stores": True, "timeout_s": 2.0})
    ending.callback(server.close)
    chains = [key_chain(1, branch=str(number)) for number in range(4)]
    stalled = [connected(ending, server) for _ in chains]
    for stream, keys in zip(stalled, chains, strict=True):
        assert announced(stream, keys).wanted == b"\1"
    tier = tier_of(ending, address_of(server))
    more = writes_of(key_chain(1, branch="more"))
    (outcome,) = tier.store(more)
    assert isinstance(outcome, Refused) and "busy" in outcome.reason
    until(lambda: tier.store(more) == [Stored()])
    nothing_stays(server, chains[0])


def test_a_sender_hears_that_others_stall_before_its_own_time_is_over(
    ending: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be less than half of the server's, as it is by default."""
    assert PeersTierConfig(hosts=["host:1"]).timeout_s > stores_module._WAIT_S
    monkeypatch.setattr(stores_module, "_WAIT_S", 0.2)
    server = listening(16, peers={"take_stores": True, "timeout_s": 10.0})
    ending.callback(server.close)
    for number in range(4):
        assert announced(connected(ending, server), key_chain(1, branch=str(number))).wanted == b"\1"
    (outcome,) = tier_of(ending, address_of(server), timeout_s=2.0).store(writes_of(key_chain(1, branch="more")))
    assert isinstance(outcome, Refused) and "busy" in outcome.reason


def test_a_cache_that_cannot_be_opened_is_a_refusal_and_the_log_says_why(
    ending: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    server = listening(1, peers={"take_stores": True, "timeout_s": 1.0})
    ending.callback(server.close)
    large = TierContext(64 * CHUNK_BYTES, 64 * SLOT_BYTES, "f")
    (outcome,) = tier_of(ending, address_of(server), large).store(writes_of(key_chain(1), large))
    assert isinstance(outcome, Refused) and "its log says more" in outcome.reason
    assert "a cache could not be opened: a capacity of 4096 bytes holds no chunk" in caplog.text


def test_no_more_formats_than_the_server_allows(ending: ExitStack) -> None:
    server = listening(4, peers={"take_stores": True, "timeout_s": 1.0}, max_formats=1)
    ending.callback(server.close)
    assert tier_of(ending, address_of(server)).store(writes_of(key_chain(1))) == [Stored()]
    other = TierContext(CHUNK_BYTES, SLOT_BYTES, "another model")
    (outcome,) = tier_of(ending, address_of(server), other).store(writes_of(key_chain(1), other))
    assert isinstance(outcome, Refused)
    assert len(server.server.caches) == 1


@pytest.mark.parametrize(
    "answer",
    [
        PeerWanted(b"\1" * 3, ""),
        PeerWanted(b"", ""),
        PeerHeld(b"\1\1", None),
        PeerStored(b"\1\1", ""),
    ],
)
def test_a_server_that_answers_wrongly_takes_the_tier_down(ending: ExitStack, answer: PeerWanted) -> None:
    fake = FakePeer(lambda stream, _: stream.send_message(answer, time.monotonic() + 10))
    ending.callback(fake.close)
    with pytest.raises(TierDown):
        tier_of(ending, fake.address).store(writes_of(key_chain(2)))


def test_a_server_that_claims_too_few_fates_takes_the_tier_down(ending: ExitStack) -> None:
    def answer(stream: PeerStream, request: Request) -> None:
        if isinstance(request, PeerStore):
            keys = unpack_keys(request)
            stream.send_message(PeerWanted(b"\1" * len(keys), ""), time.monotonic() + 10)
            room = memoryview(bytearray(chunk_header.HEADER_BYTES + CHUNK_BYTES))
            for _ in keys:
                stream.fill(room, time.monotonic() + 10)
            stream.send_message(PeerStored(bytes([StoreFate.STORED]), ""), time.monotonic() + 10)

    fake = FakePeer(answer)
    ending.callback(fake.close)
    with pytest.raises(TierDown):
        tier_of(ending, fake.address).store(writes_of(key_chain(2)))


@settings(max_examples=60)
@given(
    st.one_of(
        st.builds(
            PeerStore, st.tuples(st.integers(1, 1 << 39)), st.text(max_size=20), st.just(pack_keys(key_chain(2)))
        ),
        st.builds(PeerForget, st.text(max_size=64), st.just(pack_keys(key_chain(2)))),
        st.builds(PeerClear, st.text(max_size=64), st.binary(max_size=8)),
    ),
    st.binary(max_size=2000),
)
def test_anything_after_the_handshake_is_an_answer_or_an_end(
    one_keeper: ThreadedServer, request: Request, rest: bytes
) -> None:
    with ExitStack() as ending:
        stream = connected(ending, one_keeper)
        deadline = time.monotonic() + 10
        stream.send_message(request, deadline)
        try:
            stream.send([rest], deadline)
            wanted = PeerWanted if isinstance(request, PeerStore) else PeerHeld
            stream.answer(wanted, deadline)
        except (OSError, InputError):
            pass
    with ExitStack() as ending:
        keys = key_chain(1, branch="afterwards")
        assert tier_of(ending, address_of(one_keeper)).store(writes_of(keys)) == [Stored()]


@pytest.fixture(scope="module")
def one_keeper() -> object:
    server = listening(16, peers={"take_stores": True, "timeout_s": 0.5}, max_formats=2)
    yield server
    server.close()


def test_more_keys_than_a_message_may_have_are_refused(ending: ExitStack, keeper: ThreadedServer) -> None:
    stream = connected(ending, keeper)
    with pytest.raises(OSError, match=r"closed|reset|Broken"):
        announced(stream, key_chain(MAX_FETCHED + 1))
    tier = tier_of(ending, address_of(keeper))
    many = key_chain(MAX_FETCHED + 40)
    outcomes = tier.store(writes_of(many))
    assert len(outcomes) == len(many)
    assert all(isinstance(one, Stored | Refused) for one in outcomes)
    assert tier.load(reads_of(CONTEXT, key_chain(1, branch="nobody's"))) == [Absent()]
    held = [key for key, is_held in zip(many, tier.holds(many), strict=True) if is_held]
    reads = reads_of(CONTEXT, held)
    assert held and tier.load(reads) == [Loaded(CHUNK_BYTES)] * len(held)
    assert all(map(partial(is_whole, CONTEXT), reads))
