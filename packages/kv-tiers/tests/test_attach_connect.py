"""An engine that starts, and the server that it was told to join."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from kv_core.errors import ConfigError
from kv_testing.wait import until
from kv_tiers.attach import connect
from kv_tiers.attach.connect import Format, open_remote
from kv_tiers.server.process import launch
from kv_tiers.server.remote_cache import RemoteCache
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
