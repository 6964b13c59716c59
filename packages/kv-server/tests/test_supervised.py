"""A private server that ends unexpectedly has a successor, with its tiers; one that is stopped has none."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kv_connect.open_cache import Format, open_remote
from kv_core.errors import ConfigError
from kv_core.testing import key_chain
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess, SupervisedServer, launch
from kv_server.remote_cache import RemoteCache
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import line, until
from kv_tiers.settings import load
from kv_tiers.testing.tier_contract import content

CHUNKS = 3


class Starts:
    """What starts the servers; counts them, and fails for as long as it is told to."""

    def __init__(self, home: Path) -> None:
        self.started: list[int] = []
        self.failures_left = 0
        self.failed = 0
        self._start = partial(launch, {"host": {"capacity_bytes": "1MiB"}}, socket=home / "kv.sock")

    def __call__(self) -> ServerProcess:
        if self.failures_left:
            self.failures_left -= 1
            self.failed += 1
            raise ConfigError("no memory for a pool")
        server = self._start()
        self.started.append(server.pid)
        return server


@pytest.fixture
def starts(tmp_path: Path) -> Starts:
    return Starts(tmp_path)


@pytest.fixture
def server(starts: Starts) -> Iterator[SupervisedServer]:
    made = SupervisedServer(starts, first_rest_s=0.01)
    yield made
    made.stop()


def is_there(path: Path) -> bool:
    try:
        RemoteCache(path, group_bytes=(CHUNK_BYTES,), fingerprint="f", connect_timeout_s=5).close()
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_ends_unexpectedly_has_a_successor_at_its_socket(
    starts: Starts, server: SupervisedServer, number: int
) -> None:
    for rounds in range(2, 4):
        os.kill(server.pid, number)
        until(lambda: len(starts.started) == rounds, within_s=30)  # noqa: B023  # it is called in this round
        until(lambda: server.pid == starts.started[-1])
        assert is_there(server.socket)


def test_one_that_cannot_be_started_is_tried_again(
    starts: Starts, server: SupervisedServer, caplog: pytest.LogCaptureFixture
) -> None:
    starts.failures_left = 2
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: len(starts.started) == 2, within_s=30)
    assert starts.failed == 2
    assert "no memory for a pool" in caplog.text and f"process {starts.started[0]}) has ended" in caplog.text


def test_the_first_start_fails_as_it_always_did(starts: Starts) -> None:
    starts.failures_left = 1
    with pytest.raises(ConfigError, match="no memory"):
        SupervisedServer(starts)
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-server-watch"]


def test_a_stopped_one_has_no_successor(starts: Starts, server: SupervisedServer) -> None:
    server.stop()
    server.stop()
    assert len(starts.started) == 1 and not is_there(server.socket)
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-server-watch"]


def test_stopping_does_not_wait_for_the_next_start(starts: Starts, caplog: pytest.LogCaptureFixture) -> None:
    server = SupervisedServer(starts, first_rest_s=3600)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: "has ended unexpectedly" in caplog.text)
    server.stop()
    assert len(starts.started) == 1


def test_a_child_that_the_engine_forked_does_not_keep_it_from_stopping(tmp_path: Path) -> None:
    """It has what the engine had open, also that by which the thread learns that it is to end."""
    code = (
        "import os, sys\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "from kv_server.process import launch\n"
        "from kv_server.process import SupervisedServer\n"
        "start = partial(launch, {'host': {'capacity_bytes': '1MiB'}}, socket=Path(sys.argv[1]), detached=True)\n"
        "server = SupervisedServer(start)\n"
        "if os.fork():\n"
        "    server.stop()\n"
        "    print('stopped', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "s")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None and engine.stdin is not None
        try:
            assert line(engine.stdout) == "stopped\n"
        finally:
            engine.kill()
            engine.stdin.close()  # and with that the child ends


def store(cache: RemoteCache) -> int:
    lease = cache.begin_store(key_chain(CHUNKS), "w")
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
    cache.commit(lease)
    return len(lease.keys)


def has_stored_below(server: SupervisedServer) -> bool:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    (tier,) = answer.report.caches[0].tiers
    return tier.usage.chunks == CHUNKS and not (tier.spill.waiting or tier.spill.under_way)


def test_an_engine_whose_server_is_killed_stores_again_and_finds_what_the_disk_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines open it: the client reconnects by itself, also to a pool that is another."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    disk = {"type": "disk", "directory": str(tmp_path / "disk"), "capacity_bytes": "64MiB"}
    extra: dict[str, Any] = {"host.capacity_bytes": "4MiB", "tiers": [disk], "server.answer_s": 10}
    settings, _ = load(extra, {})
    engine = uuid.uuid4().hex
    cache, server = open_remote(settings, Format((CHUNK_BYTES,), "f"), engine_id=engine, is_first=True, facts={})
    assert server is not None
    try:
        assert store(cache) == CHUNKS
        until(lambda: has_stored_below(server))
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: cache.lookup(key_chain(CHUNKS), "r", wait_for_promotion=True).chunks == CHUNKS, within_s=60)
        assert cache.generation == 1
        lease = cache.load(key_chain(CHUNKS), "l")
        for key, extent in zip(lease.keys, lease.extents, strict=True):  # type: ignore[union-attr]
            assert cache.pool.view[extent.offset : extent.offset + extent.nbytes] == content(key, extent.nbytes)
    finally:
        cache.close()
        server.stop()
