"""HTTP beside the relay: what it tells is true, what it changes needs a token, and the relay never notices it."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from kv_core.clock import HandClock
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey, KeySpace, tenant_tag
from kv_core.service import LoadReady
from kv_core.testing import key_chain
from kv_tiers.config import HostConfig
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.server import RemoteCache, ServerConfig, launch, wire
from kv_tiers.server import caches as caches_module
from kv_tiers.server.connection import ask_server
from kv_tiers.server.http import connections as connections_module
from kv_tiers.server.http import jobs as jobs_module
from kv_tiers.server.http import operation as operation_module
from kv_tiers.server.http import relay as relay_module
from kv_tiers.server.http.app import make_app
from kv_tiers.server.http.config import HttpConfig, read_listen
from kv_tiers.server.http.jobs import Jobs
from kv_tiers.server.http.problem import Problem
from kv_tiers.server.http.relay import Relay
from kv_tiers.server.http.start import open_http
from kv_tiers.server.http.tenants import Names
from kv_tiers.server.http.token import read_token
from kv_tiers.server.report import Report
from kv_tiers.server.server import CacheServer
from kv_tiers.tenants import Tenant
from kv_tiers.testing.contract import CHUNK_BYTES, content
from kv_tiers.testing.wait import joined, until
from schemathesis import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import ignored_auth
from starlette.types import ASGIApp

SLOT_BYTES = slot_bytes_for(CHUNK_BYTES)
TOKEN = "a-token-for-these-tests"


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
        )
        self.server = CacheServer(config, clock=HandClock())
        opened = open_http(config.http, config.tenants)
        assert opened is not None
        self.http = opened
        self.http.start(self.server)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()
        self.client = httpx.Client(base_url=self.http.url, timeout=30)

    def join(self, fingerprint: str = "f") -> RemoteCache:
        return RemoteCache(self.path, chunk_bytes=CHUNK_BYTES, fingerprint=fingerprint)

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


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


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


# What it tells.


def test_status_is_what_the_socket_says_too(served: Served) -> None:
    cache = served.join()
    store(cache, 3)
    assert cache.lookup(key_chain(5), "r").chunks == 3
    cache.end("r")
    over_socket = ask_server(served.path, wire.Status())
    assert isinstance(over_socket, wire.Stated)
    over_http = msgspec.json.decode(served.get("/status").content, type=Report)
    assert over_http == over_socket.report
    counts = over_http.caches[0].counts
    assert (counts.chunks_resident, counts.chunks_hit, counts.chunks_asked) == (3, 3, 5)
    cache.close()


def test_alive_and_ready_are_two_things(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, build = threading.Event(), caches_module.build_local_cache

    def slow(*args: object, **options: object) -> object:
        assert go_on.wait(10)
        return build(*args, **options)  # type: ignore[arg-type]

    assert served.get("/readyz").json() == {"ready": True}
    monkeypatch.setattr(caches_module, "build_local_cache", slow)
    joining = threading.Thread(target=lambda: served.join().close())
    joining.start()
    until(lambda: served.get("/readyz").status_code == 503)
    assert "being opened" in problem(served.get("/readyz"), 503)
    assert served.get("/healthz").json() == {"alive": True}
    go_on.set()
    joined(joining)
    until(lambda: served.get("/readyz").status_code == 200)


def test_while_it_stops_it_is_alive_and_not_ready() -> None:
    """Stopping may take as long as the tiers below take to store."""
    served = Served()
    served.join().close()
    (cache,) = served.server.caches.values()
    go_on, close = threading.Event(), cache.close
    cache.close = lambda: go_on.wait(10) and close()  # type: ignore[method-assign, func-returns-value]
    served.server.stop()
    until(lambda: served.get("/readyz").status_code == 503)
    assert "stopping" in problem(served.get("/readyz"), 503)
    until(lambda: served.get("/status").status_code == 503)
    assert "stopping" in problem(served.get("/status"), 503)
    assert "stopping" in problem(served.post("/clear"), 503)
    assert served.get("/healthz").status_code == 200
    go_on.set()
    served.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.http.url)


def test_a_relay_that_hangs_is_told_as_not_ready(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "ANSWER_S", 0.2)
    go_on = threading.Event()
    hanging = served.server.ask(lambda: go_on.wait(30))
    assert "not answered" in problem(served.get("/readyz"), 503)
    assert served.get("/healthz").status_code == 200
    go_on.set()
    assert hanging.result(10)
    until(lambda: served.get("/readyz").status_code == 200)


def test_what_is_asked_of_a_server_that_has_ended_is_refused_at_once(served: Served) -> None:
    def wrong() -> None:
        raise KeyError("a bug of whoever asks")

    assert served.server.ask(lambda: 3).result(10) == 3
    with pytest.raises(KeyError):
        served.server.ask(wrong).result(10)
    assert served.get("/readyz").status_code == 200
    served.server.stop()
    served.thread.join(10)
    with pytest.raises(TierDown, match="stopping"):
        served.server.ask(lambda: 3).result(0)


def test_metrics_are_what_happened(served: Served) -> None:
    cache = served.join()
    store(cache, 3)
    assert cache.lookup(key_chain(5), "r").chunks == 3
    cache.end("r")
    (behind,) = served.server.caches.values()
    label = f'cache="{behind.events.name}"'
    until(lambda: f"kv_chunks_asked_total{{{label}}} 5.0" in served.get("/metrics").text)
    told = served.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain; version=")
    assert f'kv_chunks_hit_total{{{label},tier="host"}} 3.0' in told.text
    assert f'kv_pool_bytes{{{label},state="resident"}} {3.0 * SLOT_BYTES}' in told.text
    cache.close()


# What it changes.


def test_clear_forgets_everything_or_one_format(served: Served) -> None:
    caches = [served.join("one"), served.join("two")]
    for cache in caches:
        store(cache, 4)
    assert served.post("/clear", {"fingerprint": "one", "chunk_bytes": CHUNK_BYTES}).json() == {
        "caches": 1,
        "chunks": 4,
    }
    assert [cache.lookup(key_chain(4), "r").chunks for cache in caches] == [0, 4]
    caches[1].end("r")
    assert "two" in problem(served.post("/clear", {"fingerprint": "three"}), 404)
    assert served.post("/clear").json() == {"caches": 2, "chunks": 4}
    assert caches[1].lookup(key_chain(4), "r").chunks == 0
    for cache in caches:
        cache.close()


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"])
def test_who_does_not_show_the_token_changes_nothing(served: Served, shown: str) -> None:
    cache = served.join()
    store(cache, 2)
    refused = served.client.post("/clear", headers={"authorization": shown.encode("latin-1")})
    assert "token_file" in problem(refused, 401)
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert cache.lookup(key_chain(2), "r").chunks == 2
    assert served.client.post("/clear", headers={"authorization": f"bearer  {TOKEN}"}).status_code == 200
    cache.close()


def test_without_a_token_nothing_can_be_changed() -> None:
    served = Served(token_file="")
    assert "start it with http.token_file" in problem(served.post("/clear"), 403)
    assert served.get("/status").status_code == 200
    served.close()


def test_a_token_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(token) >= 40
    assert read_token(path) == token
    assert read_token(path) != read_token(tmp_path / "other")


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (TOKEN, 0o640, "chmod 600"),
        (TOKEN, 0o604, "chmod 600"),
        ("short", 0o600, "at least 16"),
        ("two words that are long enough", 0o600, "visible"),
        ("", 0o600, "remove the file"),
        ("ünïcödé" * 4, 0o600, "visible"),
    ],
)
def test_a_token_file_that_cannot_be_trusted_is_refused(tmp_path: Path, text: str, mode: int, says: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        read_token(path)


def test_a_token_file_is_a_file_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        read_token(tmp_path / "no" / "token")
    with pytest.raises(ConfigError, match="not a file"):
        read_token(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "link")


# Tenants.


def test_one_tenants_chunks_are_cleared_and_nobody_elses(served: Served) -> None:
    cache = served.join()
    for tenant in ("acme", "globex"):
        store_keys(cache, keys_of(tenant, 3))
    assert served.post("/clear", {"tenant": "acme"}).json() == {"caches": 1, "chunks": 3}
    assert cache.lookup(keys_of("acme", 3), "r").chunks == 0
    assert cache.lookup(keys_of("globex", 3), "r").chunks == 3
    cache.end("r")
    assert served.post("/clear", {"tenant": tenant_tag("salt of globex").hex()}).json() == {"caches": 1, "chunks": 3}
    assert "acme, globex" in problem(served.post("/clear", {"tenant": "initech"}), 404)
    cache.close()


def test_a_quota_is_set_and_seen_and_taken_away(served: Served) -> None:
    cache = served.join()
    store_keys(cache, keys_of("acme", 6))
    headers = {"authorization": f"Bearer {TOKEN}"}
    before = served.get("/quota/acme").json()
    tag = tenant_tag("salt of acme").hex()
    assert before == {
        "name": "acme", "tag": tag,
        "caches": [{"chunk_bytes": CHUNK_BYTES, "fingerprint": "f", "chunks": 6, "used_bytes": 6 * SLOT_BYTES,
                    "quota_bytes": None}],
        "note": before["note"],
    }  # fmt: skip
    quota = {"quota_bytes": 4 * SLOT_BYTES}
    after = served.client.put("/quota/acme", json=quota, headers=headers).json()
    assert after["caches"][0]["quota_bytes"] == 4 * SLOT_BYTES and "until the server ends" in after["note"]
    assert after["caches"][0]["chunks"] == 4
    assert served.get(f"/quota/{tag}").json() == after
    assert served.get("/status").json()["caches"][0]["tenants"][0]["quota_bytes"] == 4 * SLOT_BYTES
    store_keys(cache, keys_of("globex", 16))
    assert cache.lookup(keys_of("acme", 4), "r").chunks == 4  # nobody else's chunks get there
    cache.end("r")
    freed = served.client.delete("/quota/acme", headers=headers).json()
    assert freed["caches"][0]["quota_bytes"] is None
    cache.close()


def test_a_quota_that_cannot_be_had_changes_nothing(served: Served) -> None:
    caches = [served.join("one"), served.join("two")]
    headers = {"authorization": f"Bearer {TOKEN}"}
    whole = 16 * SLOT_BYTES
    mine = {"quota_bytes": 10 * SLOT_BYTES, "fingerprint": "two"}
    assert served.client.put("/quota/globex", json=mine, headers=headers).status_code == 200
    refused = served.client.put("/quota/acme", json={"quota_bytes": whole}, headers=headers)
    assert problem(refused, 409)
    assert [use["quota_bytes"] for use in served.get("/quota/acme").json()["caches"]] == [None, None]
    assert problem(served.client.put("/quota/acme", json={"quota_bytes": 1}, headers=headers), 409)
    assert problem(served.client.put("/quota/acme", json={"quota_bytes": -1}, headers=headers), 400)
    assert "14 hex digits" in problem(served.get("/quota/initech"), 404)
    assert problem(served.client.put("/quota/acme", json={"quota_bytes": whole}), 401)
    assert problem(served.client.delete("/quota/acme"), 401)
    for cache in caches:
        cache.close()


# Prefixes.


def test_a_pinned_prefix_stays_until_it_is_unpinned(served: Served) -> None:
    cache = served.join()
    keys = [key.hex() for key in key_chain(6)]
    assert "no cache yet" not in served.get("/prefixes").text
    store(cache, 4)
    assert served.post("/prefixes/pin", {"name": "system", "keys": keys}).json() == {"chunks": 4}
    assert served.get("/prefixes").json()["pins"] == [
        {"chunk_bytes": CHUNK_BYTES, "fingerprint": "f", "name": "system", "chunks": 4}
    ]
    for number in range(10):
        store(cache, 12, branch=str(number))
    assert cache.lookup(key_chain(4), "r").chunks == 4
    cache.end("r")
    assert served.post("/prefixes/unpin", {"name": "system"}).json() == {"caches": 1}
    for number in range(10):
        store(cache, 16, branch=str(number))
    assert cache.lookup(key_chain(4), "r").chunks == 0
    assert "nothing is pinned" in problem(served.post("/prefixes/unpin", {"name": "system"}), 404)
    cache.close()


def test_a_prefix_must_say_whose_format_it_is_only_where_there_are_several(served: Served) -> None:
    body = {"name": "p", "keys": [key_chain(1)[0].hex()]}
    assert "no cache yet" in problem(served.post("/prefixes/pin", body), 404)
    one = served.join("one")
    store(one, 1)
    assert served.post("/prefixes/pin", body).json() == {"chunks": 1}
    two = served.join("two")
    assert "one with chunks of" in problem(served.post("/prefixes/pin", body), 409)
    assert served.post("/prefixes/pin", {**body, "fingerprint": "two"}).json() == {"chunks": 0}
    assert served.post("/prefixes/pin", {**body, "fingerprint": "one"}).json() == {"chunks": 1}
    one.close()
    two.close()


def done(served: Served, response: httpx.Response) -> dict[str, object]:
    """What has become of this job."""
    assert response.status_code == 202, response.text
    job = response.json()
    until(lambda: served.get(f"/prefixes/jobs/{job['id']}").json()["state"] != "running")
    found: dict[str, object] = served.get(f"/prefixes/jobs/{job['id']}").json()
    assert found in served.get("/prefixes").json()["jobs"]
    return found


def test_a_prefix_goes_to_another_server_in_a_file(tmp_path: Path) -> None:
    here, there = Served(archive_dir=str(tmp_path)), Served(archive_dir=str(tmp_path))
    mine, yours = here.join(), there.join()
    keys = key_chain(5)
    store(mine, 4)
    job = done(here, here.post("/prefixes/export", {"file": "system.kv", "keys": [key.hex() for key in keys]}))
    assert (job["state"], job["chunks"]) == ("done", 4)
    assert "4 of 5" in str(job["said"])
    assert there.get("/prefixes").json()["files"] == ["system.kv"]
    job = done(there, there.post("/prefixes/import", {"file": "system.kv"}))
    assert (job["state"], job["chunks"], job["said"]) == ("done", 4, "")
    yours.begin_load(keys[:4], "l")
    (ready,) = yours.poll("l")
    assert isinstance(ready, LoadReady)
    for key, extent in zip(keys, ready.lease.extents, strict=False):
        assert yours.pool.view[extent.offset : extent.offset + extent.nbytes] == content(key, extent.nbytes)
    (tmp_path / "cut.kv").write_bytes((tmp_path / "system.kv").read_bytes()[:-1])
    job = done(there, there.post("/prefixes/import", {"file": "cut.kv"}))
    assert job["state"] == "failed"
    assert "was cut" in str(job["said"])
    for cache, server in ((mine, here), (yours, there)):
        cache.close()
        server.close()


def test_a_prefix_is_warmed_up_from_below(tmp_path: Path) -> None:
    disk = {"type": "disk", "path": str(tmp_path / "kv"), "capacity_bytes": 1 << 22}
    served = Served(tiers=[disk])
    cache = served.join()
    store(cache, 4)
    (behind,) = served.server.caches.values()
    behind.below.drain(10)
    for number in range(4):
        store(cache, 16, branch=str(number))
    assert cache.lookup(key_chain(4), "r").chunks == 0
    body = {"name": "warm", "keys": [key.hex() for key in key_chain(4)], "timeout_s": 10}
    assert done(served, served.post("/prefixes/warm-up", body))["chunks"] == 4
    assert cache.lookup(key_chain(4), "r").chunks == 4
    cache.close()
    served.close()


def test_so_many_jobs_at_once_and_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    jobs = Jobs()
    running = [jobs.start("export", "x", lambda: (int(go_on.wait(10)), "")) for _ in range(jobs_module.MAX_RUNNING)]
    with pytest.raises(Problem, match="ask again"):
        jobs.start("export", "x", lambda: (0, ""))
    go_on.set()
    until(lambda: {jobs.find(job.id).state for job in running} == {"done"})
    last = jobs.start("export", "x", lambda: (1 // 0, ""))
    until(lambda: jobs.find(last.id).state == "failed")
    assert "a bug" in jobs.find(last.id).said
    monkeypatch.setattr(jobs_module, "_REMEMBERED", 2)
    jobs.start("export", "x", lambda: (0, ""))
    assert len(jobs.all()) == 2
    with pytest.raises(Problem, match="no job 1"):
        jobs.find(1)


@pytest.mark.parametrize("file", ["../x", "a/b", "/etc/passwd", ".hidden", "x\n", "x\x00", "", "x" * 101, "é"])
def test_no_request_names_a_file_outside_the_archive(tmp_path: Path, file: str) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    served = Served(archive_dir=str(inside))
    cache = served.join()
    store(cache, 1)
    for what in ({"keys": [key_chain(1)[0].hex()]}, {}):
        assert problem(served.post(f"/prefixes/{'export' if what else 'import'}", {"file": file, **what}), 400)
    assert list(tmp_path.rglob("*")) == [inside]
    cache.close()
    served.close()


def test_files_need_a_place(served: Served, tmp_path: Path) -> None:
    cache = served.join()
    assert "archive_dir" in problem(served.post("/prefixes/import", {"file": "x"}), 409)
    cache.close()
    with pytest.raises(ConfigError, match="archive_dir"):
        open_http(HttpConfig(listen="127.0.0.1:0", archive_dir=str(tmp_path / "no")))


@pytest.mark.parametrize("key", ["", "00" * 46, "01" * 45, ("01" * 46).upper().replace("0", "A"), "01" * 46 + "\n"])
def test_what_is_no_key_is_refused(served: Served, key: str) -> None:
    cache = served.join()
    assert problem(served.post("/prefixes/pin", {"name": "p", "keys": [key]}), 400)
    cache.close()


# Who may ask.


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "[::2]:80"])
def test_a_page_whose_name_leads_here_reads_nothing(served: Served, host: str) -> None:
    assert "not called" in problem(served.get("/status", host=host), 421)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:9400", "kv.internal"])
def test_the_names_of_this_machine_and_those_that_the_settings_say_are_ours(host: str) -> None:
    served = Served(hosts=["KV.internal"])
    assert served.get("/status", host=host).status_code == 200
    served.close()


def test_no_answer_may_be_framed_sniffed_or_shared_with_another_origin(served: Served) -> None:
    for path in ("/status", "/nothing", "/openapi.json"):
        headers = served.get(path, origin="https://evil.example").headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert not [name for name in headers if name.startswith("access-control")]
        assert "server" not in headers


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("0.0.0.0:9400", "token_file"),
        ("[::]:9400", "token_file"),
        ("kv.internal:9400", "token_file"),
        ("9400", "a host and a port"),
        (":9400", "a host and a port"),
        ("127.0.0.1:", "a host and a port"),
        ("127.0.0.1:65536", "a host and a port"),
        ("127.0.0.1:-1", "a host and a port"),
        ("::1:9400", "a host and a port"),
        ("[127.0.0.1]:9400", "a host and a port"),
    ],
)
def test_an_address_that_is_wrong_or_open_without_a_token_is_refused(listen: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_listen(HttpConfig(listen=listen))


def test_an_address_open_to_others_needs_its_token_and_is_asked_by_any_name(tmp_path: Path) -> None:
    served = Served(listen="0.0.0.0:0")
    asked = httpx.get(f"http://127.0.0.1:{served.port()}/status", headers={"host": "kv.example"})
    assert asked.status_code == 200
    served.close()
    named = Served(listen="0.0.0.0:0", hosts=["kv.example"])
    asked = httpx.get(f"http://127.0.0.1:{named.port()}/status", headers={"host": "evil.example"})
    assert problem(asked, 421)
    named.close()


def test_an_address_that_is_taken_is_an_error_at_the_start(served: Served) -> None:
    with pytest.raises(ConfigError, match="nobody can listen"):
        open_http(HttpConfig(listen=f"127.0.0.1:{served.port()}"))


# Wrong and hostile requests.


def test_what_is_wrong_is_said_with_what_to_do(served: Served) -> None:
    assert "openapi.json" in problem(served.get("/nothing"), 404)
    other_method = served.client.delete("/clear")
    assert "POST" in problem(other_method, 405)
    assert other_method.headers["allow"] == "POST"
    assert "unknown field `x`" in problem(served.post("/clear", {"x": 1}), 400)
    for body in (b"{", b"\xff", b"[" * 100_000, b"[]", b'"x"'):
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        assert problem(served.client.post("/clear", content=body, headers=headers), 400)
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "text/plain"}
    assert "application/json" in problem(served.client.post("/clear", content=b"{}", headers=headers), 415)


def test_a_body_has_bounds(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    many = b" " * (operation_module.MAX_BODY_BYTES + 1)
    assert "at most" in problem(served.client.post("/clear", content=many, headers=headers), 413)
    in_parts = (many[:65536] for _ in range(len(many) // 65536 + 1))
    with contextlib.suppress(httpx.WriteError):  # it hangs up on who goes on
        assert "at most" in problem(served.client.post("/clear", content=in_parts, headers=headers), 413)
    monkeypatch.setattr(operation_module, "BODY_S", 0.2)
    head = f"POST /clear HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 2\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port()), 10) as slow:
        slow.sendall(head.encode() + b"{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
    with socket.create_connection(("127.0.0.1", served.port()), 10) as gone:
        gone.sendall(head.encode() + b"{")
    assert served.get("/healthz").status_code == 200


def test_who_sends_no_whole_head_is_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "HEAD_S", 0.2)
    with socket.create_connection(("127.0.0.1", served.port()), 10) as silent:
        assert hung_up(silent)
    with socket.create_connection(("127.0.0.1", served.port()), 10) as dribbling:
        dribbling.sendall(b"GET /healthz HTTP/1.1\r\nHost: localh")
        assert hung_up(dribbling)
    with socket.create_connection(("127.0.0.1", served.port()), 10) as again:
        again.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert again.recv(10_000).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET /healthz HTTP/1.1\r\n")
        while not hung_up(again):
            pass


def test_there_are_so_many_connections_and_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "MAX_CONNECTIONS", 4)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port()), 10)) for _ in range(5)]
        assert hung_up(held[-1])
        held[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert held[0].recv(10_000).startswith(b"HTTP/1.1 200")
    until(lambda: can_ask(served))


def can_ask(served: Served) -> bool:
    try:
        return httpx.get(f"{served.http.url}healthz").status_code == 200
    except httpx.HTTPError:
        return False


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(10_000) == b""
    except ConnectionResetError:
        return True


def test_garbage_ends_its_own_connection_only(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "HEAD_S", 0.5)
    for garbage in (
        b"\x00" * 1000,
        b"GET / HTTP\r\n\r\n",
        b"G" * 100_000,
        b"GET /" + b"x" * 50_000 + b" HTTP/1.1\r\n",
    ):
        with socket.create_connection(("127.0.0.1", served.port()), 10) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(garbage)
            while not hung_up(connection):
                pass
    assert served.get("/status").status_code == 200


def test_a_bug_in_an_answer_is_that_requests_trouble_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(served.server, "report", lambda: 1 / 0)
        assert "bug" in problem(served.get("/status"), 500)
    until(lambda: "ZeroDivisionError" in caplog.text)  # which comes after the answer
    until(lambda: served.get("/status").status_code == 200)


def test_the_relay_serves_engines_while_http_is_flooded(served: Served) -> None:
    cache = served.join()
    store(cache, 5)
    stop = threading.Event()

    def flood() -> None:
        with httpx.Client(base_url=served.http.url, timeout=30) as client:
            while not stop.is_set():
                client.get("/status")

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    answered = [cache.lookup(key_chain(5), "r").chunks for _ in range(500)]
    stop.set()
    for thread in threads:
        joined(thread)
    assert answered == [5] * 500
    cache.close()


# The document.


def make_asgi(served: Served) -> ASGIApp:
    archive = Path(served.home.name) / "archive"
    archive.mkdir(exist_ok=True)
    hosts = frozenset({"localhost", "testserver"})
    return make_app(
        Relay(served.server), names=Names({tenant_tag("x"): "acme"}), token=TOKEN, hosts=hosts, archive_dir=str(archive)
    )


@pytest.fixture(scope="module")
def described() -> Iterator[Served]:
    """A server with a little in it, whose document is tried."""
    served = Served()
    cache = served.join()
    store(cache, 3)
    yield served
    cache.close()
    served.close()


def check_against_document(schema: BaseSchema, token: str, mode: GenerationMode) -> int:
    """Ask for every operation in all ways that the document says are right, or wrong; how many operations those are."""
    operations = [found.ok() for found in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:  # nothing can be wrong about a request for /healthz
        operations = [operation for operation in operations if operation.body]
    for operation in operations:

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            # That a token is needed is tried above, and by that check in a way that keeps our header.
            headers = {"authorization": f"Bearer {token}", "host": "localhost"}
            case.call_and_validate(headers=headers, excluded_checks=[ignored_auth])

        ask()
    return len(operations)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_as_the_document_says(described: Served, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_asgi(described))
    assert check_against_document(schema, TOKEN, mode) >= 6


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_of_a_real_server_is_as_the_document_says(tmp_path: Path, mode: GenerationMode) -> None:
    http = {"listen": "127.0.0.1:0", "token_file": str(tmp_path / "token"), "archive_dir": str(tmp_path)}
    server = launch({"host": {"capacity_bytes": 16 * SLOT_BYTES}, "http": http})
    cache = RemoteCache(server.socket, chunk_bytes=CHUNK_BYTES, fingerprint="f")
    store(cache, 3)
    try:
        schema = schemathesis.openapi.from_url(f"{server.url}openapi.json")
        assert check_against_document(schema, (tmp_path / "token").read_text().strip(), mode) >= 6
        assert server.is_running()
    finally:
        cache.close()
        server.stop()


DOCS = Path(__file__).parents[3] / "docs" / "http.md"


def test_the_docs_tell_of_every_path_and_every_setting(described: Served) -> None:
    text = DOCS.read_text()
    for path, methods in described.get("/openapi.json").json()["paths"].items():
        assert path in text, path
        for method in methods:
            assert method.upper() in text
    for setting in HttpConfig.__struct_fields__:
        assert setting in text


# The command.


def run(*arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    code = f"import sys\n{before}\nfrom kv_tiers.server.cli import main\nsys.exit(main({list(arguments)!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    for missing in ("starlette", "uvicorn"):
        done = run(
            "--socket", str(tmp_path / "s"), "--capacity", "1MiB", "--http", "127.0.0.1:0",
            before=f"sys.modules[{missing!r}] = None",
        )  # fmt: skip
        assert done.returncode == 2
        assert "pip install 'kv-tiers[http]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_server_without_http_does_not_import_its_packages() -> None:
    code = (
        "import sys, kv_tiers.server.cli\n"
        "from kv_tiers.server.config import read_config\n"
        "from kv_tiers.server.http.start import open_http\n"
        "assert open_http(read_config({'host': {'capacity_bytes': 4096}}).http) is None\n"
        "print(sorted({'starlette', 'uvicorn', 'asyncio', 'prometheus_client', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_tells_where_it_serves_http(tmp_path: Path) -> None:
    server = launch({"host": {"capacity_bytes": 16 * SLOT_BYTES}, "http": {"listen": "127.0.0.1:0"}})
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server.url)
    assert httpx.get(f"{server.url}status").json()["pid"] == server.pid
    server.stop()
    plain = launch({"host": {"capacity_bytes": 16 * SLOT_BYTES}})
    assert plain.url == ""
    plain.stop()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"http": {"listen": "0.0.0.0:0"}}, "token_file"),
        ({"http": {"lisen": "127.0.0.1:0"}}, "did you mean 'listen'"),
        ({"http": {"listen": "127.0.0.1:0", "token_file": "/nowhere/token"}}, "cannot be made"),
        ({"tiers": [{"type": "dsik"}]}, "did you mean 'disk'"),
        ({"tiers": [{"type": "redis", "ur": "redis://h"}]}, "did you mean 'url'"),
    ],
)
def test_wrong_settings_end_the_command_with_status_2(tmp_path: Path, wrong: dict[str, object], says: str) -> None:
    settings = tmp_path / "kv.json"
    settings.write_text(json.dumps({"host": {"capacity_bytes": 1 << 20}, "socket": str(tmp_path / "s"), **wrong}))
    done = run("--config", str(settings))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["kv.json"]
