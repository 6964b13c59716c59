"""An engine that starts, and the server that it was told to join."""

import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from kv_connect import open_cache as connect
from kv_connect.doctor import servers
from kv_connect.neighbours import StoredFormat, warn_of_other_formats
from kv_connect.open_cache import Format, Replica, open_remote
from kv_core.errors import ConfigError
from kv_core.tools.cli import main
from kv_server.process import SupervisedServer, launch
from kv_server.remote_cache import RemoteCache
from kv_server.server import CacheServer
from kv_testing.cache_servers import ThreadedServer
from kv_testing.wait import until
from kv_tiers.config import ServerSettings
from kv_tiers.settings import Settings

POOL = {"host": {"capacity_bytes": 1 << 20}}


def join(socket: Path, *, chunk_bytes: int = 4096) -> RemoteCache:
    settings = msgspec.convert({"server": {"socket": str(socket), "answer_s": 10}}, Settings)
    cache, server = open_remote(settings, Format((chunk_bytes,), "f"), engine_id="engine", is_first=True, facts={})
    assert server is None
    return cache


def test_a_server_that_is_starting_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    socket = tmp_path / "s"
    with ThreadPoolExecutor(1) as engine:
        joining = engine.submit(join, socket)
        until(lambda: "waiting for it" in caplog.text)
        server = launch(POOL, socket=socket)
        try:
            joining.result(30).close()
        finally:
            server.stop()


def test_one_that_does_not_come_is_an_error_that_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "_WAIT_FOR_SERVER_S", 0.2)
    mistyped = tmp_path / "mistyped" / "s"
    with pytest.raises(ConfigError, match=rf"{mistyped}: no server answers"):
        join(mistyped)
    assert not mistyped.parent.exists()


def test_what_a_server_refuses_is_an_error_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = launch(POOL, socket=tmp_path / "s")
    try:
        with pytest.raises(ConfigError, match="holds no chunk"):
            join(tmp_path / "s", chunk_bytes=1 << 30)
    finally:
        server.stop()
    assert "waiting" not in caplog.text


def test_a_replica_waits_longer_for_the_one_that_leads_than_ranks_do_for_their_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each loads and compiles its model on its own, and one may take minutes more than another."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(connect, "_WAIT_FOR_FIRST_S", 0.0)
    monkeypatch.setattr(connect, "_WAIT_FOR_LEADER_S", 40.0)  # whatever fails here, the thread ends
    caplog.set_level(logging.INFO)
    settings, engine = msgspec.convert(POOL | {"server": {"answer_s": 10}}, Settings), uuid.uuid4().hex

    def open_replica(number: int) -> tuple[RemoteCache, SupervisedServer | None]:
        replica = Replica(engine, leads=number == 0)
        chunks, name = Format((4096,), "f"), f"{engine}_dp{number}"
        return open_remote(settings, chunks, engine_id=name, is_first=True, facts={}, replica=replica)

    with ThreadPoolExecutor(1) as other:
        following = other.submit(open_replica, 1)
        until(lambda: following.done() or "waiting for it" in caplog.text)
        leading, server = open_replica(0)
        assert server is not None
        try:
            joined, none = following.result(30)
            assert none is None and joined.pool.name == leading.pool.name
            joined.close()
        finally:
            leading.close()
            server.stop()


def test_a_server_that_answers_with_a_bug_is_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is another process, whose answer is no promise of ours."""
    monkeypatch.setattr(CacheServer, "registrations", lambda _: 1 // 0)
    served = ThreadedServer()
    try:
        settings = Settings(server=ServerSettings(socket=str(served.path)))
        assert connect.workers_of(settings, "engine") == []
        own = StoredFormat("vllm", "model", "canonical", "f")
        warn_of_other_formats(settings, own, notes=served.path.with_name("notes"))
        (found,) = servers(served.path.parent)
        assert found.state == "note" and "a bug in the server" in found.found
        tokens = served.path.with_name("tokens")
        tokens.write_text("1 2 3")
        for command in (["top", "--once"], ["explain", str(tokens), "--chunk-tokens", "1"]):
            assert main([*command, "--socket", str(served.path)]) == 2
            assert "a bug in the server" in capsys.readouterr().err
    finally:
        served.close()


def test_a_server_that_is_slow_because_engines_start_is_waited_for() -> None:
    """The scheduler asks once; without an answer its cache would be off for as long as the engine runs."""
    served = ThreadedServer()
    is_free = threading.Event()
    timer = threading.Timer(1.5, is_free.set)
    try:
        settings = Settings(server=ServerSettings(socket=str(served.path)))
        cache, _ = open_remote(settings, Format((4096,), "f"), engine_id="engine", is_first=True, facts={"rank": "0"})
        served.server.submit(lambda: is_free.wait(10))
        timer.start()
        (worker,) = connect.workers_of(settings, "engine")
        assert is_free.is_set() and worker.facts["rank"] == "0"
        cache.close()
    finally:
        timer.cancel()
        is_free.set()
        served.close()
