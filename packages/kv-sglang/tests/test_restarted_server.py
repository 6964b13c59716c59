"""A server that is started again while pages are on their way: they are a miss, and the engine keeps its cache."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_connect.identity import LiveKeySpace, LiveWeights, ServedModel
from kv_core.service import WriteLease
from kv_server.process import ServerProcess, launch
from kv_server.remote_cache import RemoteCache
from kv_sglang import exchange as exchange_module
from kv_sglang.exchange import Exchange
from kv_sglang.lanes import LoadLane
from kv_sglang.names import Names
from kv_sglang.pages import PageStore
from kv_sglang.pools import describe
from kv_testing.wait import until

WEIGHTS = LiveWeights(ServedModel("sglang", "m", None, "float32", dummy_seed=0))
NAMES = ["ab" * 32, "cd" * 32]
PAGE = 4


@dataclass
class Engine:
    """One engine's pages at a server. errors: what would have turned its cache off."""

    server: ServerProcess
    store: PageStore
    pool: Any

    def restart_server(self) -> None:
        """And notice it, as any call of another thread does."""
        before = self.store.cache.pool.name
        self.server.stop()
        self.server = serve(self.server.socket)
        until(lambda: bool(self.store.cache.counts()) and self.store.cache.pool.name != before, 30)


def serve(socket: Path) -> ServerProcess:
    return launch({"host": {"capacity_bytes": 1 << 20}}, socket=socket)


@pytest.fixture
def engine(make_pool: Callable[..., Any], tmp_path: Path) -> Iterator[Engine]:
    pool = make_pool("mha", "page_first_direct")
    pages = describe(pool, "kv")
    nbytes, fingerprint = pages.format.nbytes, pages.format.fingerprint
    server = serve(tmp_path / "private" / "s")
    cache = RemoteCache(server.socket, group_bytes=(nbytes,), fingerprint=fingerprint)
    space = LiveKeySpace(WEIGHTS, kv_dtype=pages.dtype, format_fingerprint=fingerprint, world=1, chain=f"sha256:{PAGE}")
    made = Engine(server, PageStore(cache, space, pages, shard=0, wait_s=0.0), pool)
    yield made
    made.store.close()
    cache.close()
    made.server.stop()


def after(call: Any, then: Callable[[], None]) -> Any:
    """The same call, and then this, once."""
    left = [then]

    def called(*args: Any, **named: Any) -> Any:
        answer = call(*args, **named)
        while left:
            left.pop()()
        return answer

    return called


def test_a_read_in_the_middle_of_it_is_a_miss(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.store.write(NAMES, [0, PAGE]) == [True, True]
    monkeypatch.setattr(engine.store, "lease", after(engine.store.lease, engine.restart_server))
    assert engine.store.read(NAMES, [0, PAGE]) == [False, False]
    assert engine.store.write(NAMES, [0, PAGE]) == engine.store.read(NAMES, [0, PAGE]) == [True, True]


def test_a_write_in_the_middle_of_it_is_not_stored(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = engine.store.cache
    monkeypatch.setattr(cache, "begin_store", after(cache.begin_store, engine.restart_server))
    assert engine.store.write(NAMES, [0, PAGE]) == [False, False]
    assert engine.store.write(NAMES, [0, PAGE]) == engine.store.read(NAMES, [0, PAGE]) == [True, True]


class Restart:
    """A point in the device's work, and what happens before it is reached."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def synchronize(self) -> None:
        self._engine.restart_server()


def test_a_load_of_the_linker_does_not_land(engine: Engine) -> None:
    errors: list[str] = []
    assert engine.store.write(NAMES, [0, PAGE]) == [True, True]
    loads = LoadLane(engine.store, engine.store.pages.copier(), lambda why, _error: errors.append(why))
    try:
        assert loads.take("r", NAMES, torch.arange(2 * PAGE))
        assert not loads.gate.finish(loads.start([Restart(engine)]))
        assert errors == []
    finally:
        loads.close()


def exchange_of(engine: Engine, *, wait_s: float) -> Exchange:
    return Exchange(engine.store, engine.store.pages.copier(), lambda: False, wait_s=wait_s, hold_s=30.0)


def test_a_hand_over_that_loses_the_server_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that another thread stores these pages."""
    monkeypatch.setattr(exchange_module, "_AWAY_S", 0.0)
    cache, exchange = engine.store.cache, exchange_of(engine, wait_s=0.0)
    commit = cache.commit

    def commit_too_late(lease: WriteLease) -> None:
        engine.server.stop()
        commit(lease)

    monkeypatch.setattr(cache, "commit", commit_too_late)
    assert exchange.put(Names(tuple(NAMES), 0), 0, [0, PAGE], lambda: True) == "the cache server is away"
    exchange.close()


def test_pages_of_a_hand_over_in_the_middle_of_it_are_stored_at_the_new_server(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, exchange = engine.store.cache, exchange_of(engine, wait_s=10.0)
    named = Names(tuple(NAMES), 0)
    monkeypatch.setattr(cache, "begin_store", after(cache.begin_store, engine.restart_server))
    assert exchange.put(named, 0, [0, PAGE], lambda: True) == ""
    assert exchange.get(named, 0, [0, PAGE], lambda: True, threading.Lock()) == ""
    monkeypatch.setattr(engine.store, "lease", after(engine.store.lease, engine.restart_server))
    said = exchange.get(named, 0, [0, PAGE], lambda: True, threading.Lock())
    assert said == "pages left the cache while they were read"
    exchange.close()


def test_a_hand_over_waits_longer_for_a_server_that_is_away_than_for_room(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang aborts a request whose pages do not arrive, and a server that is restarted is back in a second or two; on
    a busy machine in more."""
    monkeypatch.setattr(exchange_module, "_AWAY_S", 60.0)
    exchange, named = exchange_of(engine, wait_s=0.0), Names(tuple(NAMES), 0)
    engine.server.stop()
    with ThreadPoolExecutor(1) as pool:
        stored = pool.submit(exchange.put, named, 0, [0, PAGE], lambda: True)
        engine.restart_server()
        assert stored.result() == ""
    exchange.close()


def test_a_hand_over_that_finds_no_server_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that its pages are missing there."""
    monkeypatch.setattr(exchange_module, "_AWAY_S", 0.0)
    exchange, named = exchange_of(engine, wait_s=0.0), Names(tuple(NAMES), 0)
    assert exchange.put(named, 0, [0, PAGE], lambda: True) == ""
    engine.server.stop()
    assert exchange.get(named, 0, [0, PAGE], lambda: True, threading.Lock()) == "the cache server is away"
    exchange.close()
