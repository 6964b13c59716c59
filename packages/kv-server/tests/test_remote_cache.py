"""One cache, many engines: what crosses the socket means what it means in one process."""

import os
from collections import Counter
from pathlib import Path
from unittest import mock

from hypothesis import settings
from kv_connect.halves.step import StateBlock, StepPlan, StoreStep
from kv_connect.halves.worker import WorkerHalf
from kv_core.clock import HandClock
from kv_core.keys import NO_TENANT, ChunkKey
from kv_core.service import CacheService, Ended, WriteLease
from kv_core.testing import key_chain, keys_of
from kv_server import ServerProcess, launch, wire
from kv_server.connection import ServerConnection, ask_server
from kv_testing.cache_servers import ThreadedServer, fill, join_at, raw_session, read, store
from kv_testing.connect import DictCopier
from kv_testing.model import ServiceMachine
from kv_testing.service_contract import CHUNK_BYTES, GROUP_BYTES, ServiceContract
from kv_testing.toy_engine import BLOCK, CHUNK, SPACE, shape_of
from kv_testing.wait import until
from kv_tiers.config import ObserveConfig
from kv_tiers.events.bus import Occurred, Subscriber
from kv_tiers.events.events import BlocksAllocated
from kv_tiers.tier_state import Held


class TestThroughASocket(ServiceContract):
    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        self.teardown_method()
        self.served = ThreadedServer(slots, clock)
        self.cache = self.served.join()
        return self.cache, self.cache.pool.view

    def teardown_method(self) -> None:
        if hasattr(self, "served"):
            self.cache.close()
            self.served.close()


class RemoteMachine(ServiceMachine):
    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        self.served = ThreadedServer(slots, clock)
        self.cache = self.served.join(group_bytes=GROUP_BYTES)
        (self.behind,) = self.served.server.caches.values()
        return self.cache, self.cache.pool.view

    def resident(self) -> list[ChunkKey]:
        return self.behind.admin.resident_keys()

    def close(self) -> None:
        assert not self.behind._leases.holders()
        assert not any(self.behind._index._leases)
        resident = self.behind.admin.resident_keys()
        held = self.behind.admin.held()
        assert held.payload_bytes == self.behind.pool.sizes.total(resident)
        shares = Counter((key.group, key.shard) for key in resident)
        groups = {group for group, _ in shares}
        by_group = [
            max(n for (of, _), n in shares.items() if of == group) if group in groups else 0
            for group in range(len(held.by_group))
        ]
        assert list(held.by_group) == by_group
        assert groups <= set(range(len(held.by_group)))
        assert held.chunks == max(by_group, default=0)
        self.cache.close()
        self.served.close()


TestRemoteCacheAgainstTheModel = RemoteMachine.TestCase

TestRemoteCacheAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_engines_share_what_one_of_them_stored(served: ThreadedServer) -> None:
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


def test_one_shard_each_and_a_chunk_counts_when_all_are_there(served: ThreadedServer) -> None:
    ranks = [served.join(engine="tp", shards=2, facts={"rank": str(rank)}) for rank in range(2)]
    asker = served.join(engine="tp", shards=2)
    keys = key_chain(3, shards=2)
    store(ranks[0], keys[0::2])
    assert asker.lookup(keys, "r", shape=keys_of(2)).ended is Ended.INCOMPLETE
    store(ranks[1], keys[1::2])
    assert asker.lookup(keys, "r", shape=keys_of(2)).chunks == 3
    for cache in (*ranks, asker):
        cache.close()


def test_whoever_watches_the_server_hears_of_an_engines_blocks(served: ThreadedServer) -> None:
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


def test_a_holders_name_may_have_any_length(served: ThreadedServer) -> None:
    """An engine's clients may choose the ids of its requests. None of these ends the session of all the others."""
    cache = served.join()
    keys, long = key_chain(3), "r" * 1000
    lease = cache.begin_store(keys[:2], long)
    fill(cache, lease)
    cache.commit(lease)
    for holder in ("short", long, f"{long}, another"):
        assert cache.lookup(keys[:2], holder).chunks == 2
    cache.allocated({long: 5})
    assert read(cache, keys[:2], long)
    writing = cache.begin_store(keys, long)
    assert cache.renew(long)
    cache.end(long)
    assert not cache.renew(long) and not cache.release(writing)
    assert cache.renew("short") and cache.renew(f"{long}, another")
    cache.close()


def test_a_client_knows_how_long_leases_last_at_its_server(home: Path) -> None:
    def serve(lease_s: float) -> ServerProcess:
        return launch({"host": {"capacity_bytes": "1MiB", "lease_s": lease_s}}, socket=home / "s")

    server = serve(7.0)
    cache = join_at(home / "s")
    assert cache.lease_s == 7.0
    server.stop()
    server = serve(70.0)
    until(lambda: cache.lookup([], "r").ended is Ended.ALL_HELD)
    assert cache.lease_s == 70.0
    cache.close()
    server.stop()


def test_where_nobody_watches_blocks_are_not_told() -> None:
    quiet = ThreadedServer(observe=ObserveConfig(history_keys=0))
    cache = quiet.join()
    with mock.patch.object(ServerConnection, "send", autospec=True, side_effect=ServerConnection.send) as sent:
        cache.allocated({"one": 5})
        assert sent.call_count == 0
        cache.counts()
        assert sent.call_count == 1
    cache.close()
    quiet.close()


def test_an_engines_processes_find_what_its_workers_registered(served: ThreadedServer) -> None:
    worker = served.join(engine="e", shards=2, facts={"space": "model@1"})
    stranger = served.join(engine="other")
    registered = ask_server(served.path, wire.Registered("e"))
    assert isinstance(registered, wire.Registrations)
    (found,) = registered.sessions
    assert (found.group_bytes, found.fingerprint, found.shards) == ((CHUNK_BYTES,), "f", 2)
    assert (found.facts, found.pid) == ({"space": "model@1"}, os.getpid())
    worker.close()
    assert ask_server(served.path, wire.Registered("e")) == wire.Registrations([])
    stranger.close()


def test_no_client_touches_what_is_anothers(served: ThreadedServer) -> None:
    mine, yours = served.join(), served.join()
    keys = key_chain(2)
    writing = mine.begin_store(keys, "same name")
    with raw_session(served) as ask:
        for request in (wire.Commit(writing.id), wire.Release(writing.id)):
            refused = ask(request)
            assert isinstance(refused, wire.Failed)
            assert refused.kind == "misuse"
        assert isinstance(ask(wire.Commit(999)), wire.Failed)
        assert ask(wire.Release(999)) == wire.Truth(False)
        (behind,) = served.server.caches.values()
        of_peers: list[WriteLease] = []
        find = behind.parts.leases.find

        def find_too_early(number: int) -> object:
            found = find(number)
            of_peers.append(behind.begin_store(key_chain(1, branch="peer"), "store of another host/1"))
            return found

        with mock.patch.object(behind.parts.leases, "find", find_too_early):
            assert isinstance(ask(wire.Commit(writing.id + 1)), wire.Failed)
        assert of_peers[0].id == writing.id + 1
        assert behind.release(of_peers[0])
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


def test_the_stores_of_all_groups_of_a_step_are_two_messages(served: ThreadedServer) -> None:
    shape = shape_of(CHUNK)
    cache = served.join(group_bytes=(CHUNK_BYTES,) * len(shape.groups))
    copiers = [DictCopier(slots=dict.fromkeys(range(64), "kv")) for _ in shape.groups]
    worker = WorkerHalf(cache, shape, copiers, shard=0, name="e")
    digests = tuple(bytes([number]) * 32 for number in range(2))
    table = tuple(range(1, 2 * CHUNK // BLOCK + 1))
    states = tuple(StateBlock(2, 1 + chunk, chunk) for chunk in range(2))
    step = StoreStep("r", digests, NO_TENANT, (table, table, ()), states)
    messages: list[str] = []
    real = ServerConnection.ask

    def ask(self: ServerConnection, request: wire.Request) -> wire.Answer:
        messages.append(type(request).__name__)
        return real(self, request)

    with mock.patch.object(ServerConnection, "ask", ask):
        worker.stores.start(StepPlan(stores=(step,), space_id=SPACE.fingerprint))
        worker.stores.finish()
    assert messages == ["BeginStore", "Commit"]
    assert worker.counts.chunks_stored == 2 * len(shape.groups)
    keys = SPACE.keys(digests, groups=len(shape.groups))
    assert cache.lookup(keys, "asker", shape=shape.chunk).chunks == 2
    cache.end("asker")
    (behind,) = served.server.caches.values()
    assert behind.admin.held() == Held(
        2,
        2 * len(shape.groups) * CHUNK_BYTES,
        (2,) * len(shape.groups),
    )  # a chunk once
    cache.forget(keys[:1])
    assert behind.admin.held() == Held(
        2,
        (2 * len(shape.groups) - 1) * CHUNK_BYTES,
        (1, *[2] * (len(shape.groups) - 1)),
    )
    cache.clear()
    assert behind.admin.held() == Held(0, 0, (0,) * len(shape.groups))
    worker.close()
    cache.close()
