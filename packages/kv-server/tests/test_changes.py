"""What entered and left a pool, as a reader of the record has it, equals what is in the pool."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kv_core.clock import HandClock
from kv_core.errors import MisuseError
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_server import RemoteCache
from kv_testing.cache_servers import ThreadedServer, join_server, kill_server, start_server, store
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.tower import Tower
from kv_testing.wait import until
from kv_tiers import HostPool, LocalCache
from kv_tiers.config import ColdConfig
from kv_tiers.events.bus import EventBus
from kv_tiers.events.changes import Change, ChangeLog, Changes
from kv_tiers.events.events import Committed, Evicted, Forgotten

SLOTS = 8


class Reader:
    """A copy of what is in a pool."""

    def __init__(self, since: Callable[[int], Changes]) -> None:
        self._since = since
        self._upto = 0
        self.held: set[ChunkKey] = set()
        self.lost = 0

    def read(self) -> set[ChunkKey]:
        answer = self._since(self._upto)
        self._upto = answer.upto
        if not answer.is_whole:
            self.held.clear()
            self.lost += 1
        for change in answer.changes:
            if not change.keys:
                self.held.clear()
            elif change.entered:
                self.held.update(change.keys)
            else:
                self.held.difference_update(change.keys)
        return self.held


@pytest.fixture(params=["in process", "through a socket"])
def caches(request: pytest.FixtureRequest) -> Iterator[tuple[LocalCache | RemoteCache, LocalCache]]:
    """A cache, and the one that it is behind the scenes."""
    if request.param == "in process":
        bus = EventBus()
        local = LocalCache(
            HostPool.anonymous("test", CHUNK_BYTES, SLOTS),
            clock=HandClock(),
            events=bus.source("", (CHUNK_BYTES,)),
        )
        yield local, local
        local.close()
        bus.close()
    else:
        served = ThreadedServer(SLOTS)
        remote = served.join()
        (behind,) = served.server.caches.values()
        yield remote, behind
        remote.close()
        served.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_readers_copy_equals_the_pool_whatever_happens(
    seed: int, caches: tuple[LocalCache | RemoteCache, LocalCache]
) -> None:
    """Stores with evictions, forgotten chunks, clears; stores given up, and cleared while they were written."""
    cache, behind = caches
    reader, chance = Reader(cache.changes_since), random.Random(seed)
    reader.read()
    chains = [key_chain(6, branch=str(number)) for number in range(6)]
    writing = []
    for _ in range(400):
        match chance.randrange(12):
            case 0:
                cache.forget(chance.sample(chance.choice(chains), 2))
            case 1 if chance.random() < 0.3:
                cache.clear()
            case 2 if writing:
                cache.release(writing.pop())
            case 3 | 4 | 5 if writing:
                cache.commit(writing.pop(chance.randrange(len(writing))))
            case _ if len(writing) < 3:
                writing.append(cache.begin_store(chance.choice(chains)[: chance.randrange(1, 5)], "w"))
        if chance.random() < 0.2:
            assert reader.read() == set(behind.admin.resident_keys())
    assert reader.read() == set(behind.admin.resident_keys())
    assert reader.lost == 0
    assert behind.counts().chunks_evicted > 0 and behind.counts().chunks_forgotten > 0


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_back_from_a_tier_is_among_them(seed: int) -> None:
    """Also where it is forgotten on its way."""
    bus = EventBus()
    tower = Tower(slots=SLOTS, events=bus.source("", (CHUNK_BYTES,)))
    reader, chance = Reader(tower.cache.changes_since), random.Random(seed)
    reader.read()
    chains = [key_chain(4, branch=str(number)) for number in range(6)]
    for _ in range(200):
        chain = chance.choice(chains)
        match chance.randrange(4):
            case 0:
                tower.store(chain)
                tower.run()
            case 1:
                tower.cache.forget(chance.sample(chain, 1))
            case _:
                tower.ask(chain)
                if chance.random() < 0.3:
                    tower.cache.forget(chance.sample(chain, 1))
                tower.run()
                tower.cache.end("r")
        assert reader.read() == set(tower.cache.admin.resident_keys())
    assert reader.lost == 0
    assert (
        tower.cache.counts().chunks_evicted > 0 and sum(state.lane.loaded for state in tower.cache.lower.states()) > 50
    )
    tower.close()
    bus.close()


def test_what_leaves_at_once_to_keep_slots_free_has_entered_before() -> None:
    """Else it would be among them for good."""
    bus = EventBus()
    cold = ColdConfig(batch_bytes=2 * 4096, spill_share=1.0, prefetch_share=1.0, drain_s=0.2)
    tower = Tower("back", slots=4, cold=cold, events=bus.source("", (CHUNK_BYTES,)))
    reader, keys = Reader(tower.cache.changes_since), key_chain(3)
    reader.read()
    tower.cache.commit(tower.cache.begin_store(keys, "w", tiers=()))
    assert reader.read() == set(tower.cache.admin.resident_keys()) == set()
    tower.store(keys)
    tower.run()
    assert reader.read() == set(tower.cache.admin.resident_keys()) == set()
    tower.ask(keys)
    tower.cache.end("r")
    tower.run()
    assert tower.lanes[0].counts().loaded > 0
    assert reader.read() == set(tower.cache.admin.resident_keys()) == set()
    tower.close()
    bus.close()


def test_nothing_is_recorded_before_somebody_asks(caches: tuple[LocalCache | RemoteCache, LocalCache]) -> None:
    cache, behind = caches
    if cache is behind:
        assert not behind.events.on
    store(cache, key_chain(2))
    assert cache.changes_since(0).changes == ()
    store(cache, key_chain(3))
    (change,) = cache.changes_since(0).changes
    assert change.entered and list(change.keys) == key_chain(3)[2:]


def test_a_record_is_bounded_and_a_late_reader_learns_that_it_lost_something() -> None:
    log = ChangeLog(max_keys=10)
    reader = Reader(log.since)
    keys = key_chain(20)
    for at in range(4):
        log.note(Committed("w", 1, keys[at : at + 1], 0.0))
    assert reader.read() == set(keys[:4]) and reader.lost == 0
    for at in range(4, 20):
        log.note(Committed("w", 1, keys[at : at + 1], 0.0))
    assert reader.read() == set(keys[15:]) and reader.lost == 1
    log.note(Evicted("host", keys[15:16], "store", "", "lru"))
    log.note(Evicted("disk", keys[16:17], "store", "", "lru"))  # another place
    log.note(Committed("w", 1, (), 0.0))  # all of it had been forgotten
    assert reader.read() == set(keys[16:]) and reader.lost == 1
    log.note(Forgotten((), everything=True))
    assert log.since(20).changes[-1] == Change(False, ())
    assert reader.read() == set()
    log.note(Evicted("host", keys, "store", "", "lru"))  # more than may be kept
    assert not log.since(0).is_whole and reader.read() == set() and reader.lost == 2


def test_a_cache_without_events_keeps_no_record() -> None:
    cache = LocalCache(HostPool.anonymous("test", CHUNK_BYTES, 2), clock=HandClock())
    with pytest.raises(MisuseError, match="without events"):
        cache.changes_since(0)
    cache.close()


def test_a_restarted_server_is_another_pool(home: Path) -> None:
    """Its numbers begin anew, and are not taken for the old one's."""

    server = start_server(home)
    cache = join_server(home)
    reader = Reader(cache.changes_since)
    try:
        reader.read()
        store(cache, key_chain(2))
        assert reader.read() == set(key_chain(2))
        kill_server(server)
        assert reader.read() == set() and reader.lost == 1  # away
        server = start_server(home)
        until(lambda: reader.read() is not None and cache.generation == 1, 20)
        store(cache, key_chain(3, branch="7"))
        assert reader.read() == set(key_chain(3, branch="7"))
    finally:
        cache.close()
        server.stop()


def test_what_a_new_server_stores_before_it_is_polled_is_not_missed(home: Path) -> None:
    server = start_server(home)
    cache = join_server(home)
    reader = Reader(cache.changes_since)
    try:
        reader.read()
        kill_server(server)
        server = start_server(home)
        until(lambda: cache.lookup(key_chain(2), "up") is not None and cache.generation == 1, 20)
        cache.end("up")
        store(cache, key_chain(2))
        assert reader.read() == set(key_chain(2))
    finally:
        cache.close()
        server.stop()
