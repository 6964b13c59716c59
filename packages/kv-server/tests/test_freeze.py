"""A frozen server serves what it holds and leaves it as it is, over the socket and HTTP, and beside a drain."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_core.errors import ConfigError
from kv_core.testing import key_chain
from kv_core.tools.cli import main
from kv_server import wire
from kv_server.connection import PACKAGE, ask_server
from kv_server.succession.channel import FORMAT
from kv_testing.cache_servers import (
    ThreadedServer,
    fill,
    held,
    join_server,
    read,
    report_of,
    start_server,
    store,
)
from kv_testing.http import Served, problem
from kv_testing.peers import PATIENT
from kv_testing.servers import free_port
from kv_testing.upgrades import Loads
from kv_testing.wait import until


@pytest.fixture
def served() -> Iterator[Served]:
    peers = {"type": "peers", "hosts": [f"127.0.0.1:{free_port()}"], **PATIENT}  # nobody listens there
    made = Served(tiers=[peers])
    yield made
    made.close()


def test_it_is_frozen_and_says_so_until_that_is_ended(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server(home, disk=True)
    cache = join_server(home)
    kept, begun = key_chain(5, branch="kept"), cache.begin_store(key_chain(2, branch="begun"), "w")
    store(cache, kept)
    socket = ["--socket", str(home / "s")]
    assert main(["freeze", *socket]) == 0
    assert "stores nothing new and evicts nothing" in capsys.readouterr().out
    assert report_of(home / "s").frozen
    fill(cache, begun)
    cache.commit(begun)
    for number in range(4):
        lease = cache.begin_store(key_chain(8, branch=str(number)), "w")
        assert not lease.keys and "frozen" in lease.refused
    assert read(cache, kept) and read(cache, begun.keys)
    assert main(["top", "--once", "--every", "0.1", *socket]) == 0
    assert "frozen: it stores nothing new and evicts nothing until kv freeze --end" in capsys.readouterr().out
    assert main(["freeze", "--end", *socket]) == 0
    assert not report_of(home / "s").frozen
    assert len(store(cache, key_chain(3, branch="new")).keys) == 3
    cache.close()
    server.stop()
    assert main(["freeze", *socket]) == 2


def test_a_format_that_comes_meanwhile_is_frozen_and_takes_no_others_place() -> None:
    served = ThreadedServer(max_formats=2)
    one = served.join("one")
    store(one, key_chain(3))
    one.close()
    served.server.submit(lambda: served.server.formats.freeze(True)).result(10)
    refused = ask_server(served.path, wire.TakeOver(FORMAT, PACKAGE))
    assert isinstance(refused, wire.Failed) and "kv freeze --end" in refused.text
    two = served.join("two")
    assert "frozen" in two.begin_store(key_chain(1), "w").refused
    served.clock.advance(10_000)
    with pytest.raises(ConfigError, match="already has caches of 2 formats"):
        served.join("three")
    two.close()
    served.close()


def test_over_http_it_needs_the_token_and_is_seen(served: Served) -> None:
    cache = served.join()
    assert problem(served.post("/freeze", token="another-token-that-is-wrong"), 401)
    assert not served.get("/status").json()["frozen"]
    for path, frozen in (("/freeze", True), ("/freeze", True), ("/freeze/end", False), ("/freeze/end", False)):
        assert served.post(path).json() == {"frozen": frozen}
        until(lambda frozen=frozen: served.get("/status").json()["frozen"] == frozen)  # one report serves 0.1 s
        assert f'\nkv_frozen{{cache="{served.get("/status").json()["caches"][0]["name"]}"}} {float(frozen)}\n' in (
            served.get("/metrics").text
        )
        assert bool(cache.begin_store(key_chain(1), "w").refused) == frozen
    cache.close()


def test_a_drain_and_a_freeze_end_each_by_itself(served: Served) -> None:
    cache = served.join()
    store(cache, key_chain(2))

    def why() -> str:
        lease = cache.begin_store(key_chain(3, branch="new"), "w")
        cache.release(lease)
        return lease.refused

    assert served.post("/drain", {"timeout_s": 30}).status_code == 202
    assert served.post("/freeze").status_code == 200
    assert served.post("/drain/end").status_code == 200
    assert "frozen" in why()
    assert served.post("/drain", {"timeout_s": 30}).status_code == 202
    assert served.post("/freeze/end").status_code == 200
    assert "being drained" in why()
    assert read(cache, key_chain(2))
    assert served.post("/drain/end").status_code == 200
    assert why() == ""
    cache.close()


def test_under_load_no_load_fails_and_nothing_is_lost(home: Path) -> None:
    server = start_server(home, slots=48, disk=True)
    cache, kept = join_server(home), key_chain(4, branch="kept")
    store(cache, kept)
    loads = Loads(home / "s", prompts=40)
    for _ in range(5):
        for is_begun in (True, False):
            rounds = sum(loads.rounds)
            assert isinstance(ask_server(home / "s", wire.Freeze(is_begun)), wire.Stated)
            counts = report_of(home / "s").caches[0].counts
            until(lambda rounds=rounds: sum(loads.rounds) > rounds + 30 or loads.failures, 60)
            if is_begun:
                after = report_of(home / "s").caches[0].counts
                assert after.chunks_evicted == counts.chunks_evicted
    loads.stop()
    assert not loads.failures
    assert held(cache, kept) == 4
    cache.close()
    server.stop()
