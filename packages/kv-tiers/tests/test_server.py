"""The cache in another process: every promise of a `CacheService`, and what becomes of them when either side dies."""

import tempfile
import threading
from pathlib import Path

from hypothesis import settings
from kv_core.clock import HandClock
from kv_core.keys import ChunkKey
from kv_core.service import CacheService
from kv_tiers.config import HostConfig
from kv_tiers.pool import slot_bytes_for
from kv_tiers.server import RemoteCache, ServerConfig
from kv_tiers.server.server import CacheServer
from kv_tiers.testing.contract import CHUNK_NBYTES, ServiceContract
from kv_tiers.testing.model import ServiceMachine


class Served:
    """A server on a thread of this process, whose clock and caches a test can reach."""

    def __init__(self, slots: int = 8, clock: HandClock | None = None, **options: object) -> None:
        self.home = tempfile.TemporaryDirectory(prefix="kv-")
        self.path = Path(self.home.name) / "kv.sock"
        self.clock = clock or HandClock()
        host = HostConfig(capacity_bytes=slots * slot_bytes_for(CHUNK_NBYTES))
        config = ServerConfig(host=host, socket=str(self.path), **options)  # type: ignore[arg-type]
        self.server = CacheServer(config, clock=self.clock)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()

    def join(self, fingerprint: str = "f", **options: object) -> RemoteCache:
        return RemoteCache(self.path, chunk_nbytes=CHUNK_NBYTES, fingerprint=fingerprint, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.home.cleanup()


class TestThroughASocket(ServiceContract):
    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        self.teardown_method()
        self.served = Served(slots, clock)
        self.cache = self.served.join()
        return self.cache, self.cache.pool.view

    def teardown_method(self) -> None:
        if hasattr(self, "served"):
            self.cache.close()
            self.served.close()


class RemoteMachine(ServiceMachine):
    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        self.served = Served(slots, clock)
        self.cache = self.served.join()
        (self.behind,) = self.served.server.caches.values()
        return self.cache, self.cache.pool.view

    def resident(self) -> list[ChunkKey]:
        return self.behind.resident_keys()

    def close(self) -> None:
        assert not self.behind._holdings
        assert not any(self.behind._host.residency._leases)
        self.cache.close()
        self.served.close()


TestRemoteCacheAgainstTheModel = RemoteMachine.TestCase
TestRemoteCacheAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
