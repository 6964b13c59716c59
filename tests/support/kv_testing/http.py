"""A server with HTTP in this process, for tests that need access to both."""

import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from kv_core.clock import HandClock
from kv_core.keys import ChunkKey, KeySpace, tenant_tag
from kv_core.testing import key_chain
from kv_server import RemoteCache, ServerConfig
from kv_server.http.start import open_http
from kv_server.server import CacheServer
from kv_tiers.config import HostConfig, HttpConfig, PeersConfig
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.tenants import Tenant
from kv_tiers.testing.tier_contract import content

from kv_testing.service_contract import CHUNK_BYTES

SLOT_BYTES = slot_bytes_for(CHUNK_BYTES)
TOKEN = "a-token-for-these-tests"  # opens nothing


class Served:
    """A server and its HTTP on threads of this process, so that a test can reach into both."""

    def __init__(self, slots: int = 16, tiers: Sequence[dict[str, object]] = (), **http: object) -> None:
        self.home = tempfile.TemporaryDirectory(prefix="kv-")
        directory = Path(self.home.name)
        self.path = directory / "kv.sock"
        self.token_file = directory / "token"
        self.token_file.touch(0o600)
        self.token_file.write_text(TOKEN)
        given: dict[str, object] = {"listen": "127.0.0.1:0", "token_file": str(self.token_file), **http}
        config = ServerConfig(
            host=HostConfig(capacity_bytes=slots * SLOT_BYTES),
            tiers=list(tiers),
            tenants=[Tenant("acme", tenant_tag("salt of acme")), Tenant("globex", tenant_tag("salt of globex"))],
            socket=str(self.path),
            http=msgspec.convert(given, HttpConfig),
            peers=PeersConfig(listen="127.0.0.1:0", unprotected=True),
        )
        self.clock = HandClock()
        self.server = CacheServer(config, clock=self.clock)
        opened = open_http(config.http)
        assert opened is not None
        self.http = opened
        self.http.start(self.server)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()
        self.client = httpx.Client(base_url=self.http.url, timeout=30)

    def join(self, fingerprint: str = "f", engine: str = "", facts: dict[str, str] | None = None) -> RemoteCache:
        # What a busy machine answers too late is a miss, and the engine is not connected any more.
        return RemoteCache(
            self.path, group_bytes=(CHUNK_BYTES,), fingerprint=fingerprint, engine=engine, facts=facts, timeout_s=30.0
        )

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    def post(self, path: str, body: object = None, token: str = TOKEN) -> httpx.Response:
        return self.client.post(path, json=body, headers={"authorization": f"Bearer {token}"})

    def port(self) -> int:
        found = httpx.URL(self.http.url).port
        assert found is not None
        return found

    def close(self) -> None:
        self.client.close()
        self.server.stop()
        self.thread.join(30)
        self.http.stop()
        assert not self.thread.is_alive()
        self.home.cleanup()


def store(cache: RemoteCache, chunks: int, branch: str = "") -> None:
    store_keys(cache, key_chain(chunks, branch=branch))


def keys_of(tenant: str, chunks: int) -> list[ChunkKey]:
    tag = tenant_tag(f"salt of {tenant}")
    digests = [key.digest for key in key_chain(chunks, branch=tenant)]
    return list(KeySpace("m", "", "", "", 1, "c").keys(digests, tenant=tag))


def store_keys(cache: RemoteCache, keys: Sequence[ChunkKey]) -> None:
    lease = cache.begin_store(keys, "w")
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
    cache.commit(lease)


def problem(response: httpx.Response, status: int) -> str:
    """The detail of this problem."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == status
    assert document["title"]
    detail = document["detail"]
    assert isinstance(detail, str)
    assert detail
    return detail
