"""What HTTP changes needs a token: clearing, tenants, quotas, pins, archives."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from kv_core.errors import ConfigError
from kv_core.keys import tenant_tag
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_server import RemoteCache, launch
from kv_server import caches as caches_module
from kv_server.http import relay as jobs_module
from kv_server.http.operation import Problem
from kv_server.http.relay import PrefixJobs
from kv_server.http.start import open_http, read_token
from kv_testing.http import SLOT_BYTES, TOKEN, Served, keys_of, problem, store, store_keys
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import joined, until
from kv_tiers.config import HttpConfig
from kv_tiers.testing.tier_contract import content


def test_clear_forgets_everything_or_one_format(served: Served) -> None:
    caches = [served.join("one"), served.join("two")]
    for cache in caches:
        store(cache, 4)
    assert served.post("/clear", {"fingerprint": "one", "chunk_bytes": CHUNK_BYTES}).json() == {
        "caches": 1,
        "chunks": 4,
        "below": {},
    }
    assert [cache.lookup(key_chain(4), "r").chunks for cache in caches] == [0, 4]
    caches[1].end("r")
    assert "two" in problem(served.post("/clear", {"fingerprint": "three"}), 404)
    for body in (None, {}, {"everything": False}):
        assert '{"everything": true}' in problem(served.post("/clear", body), 409)
    assert "a part of it" in problem(served.post("/clear", {"everything": True, "tenant": "acme"}), 409)
    assert caches[1].lookup(key_chain(4), "r").chunks == 4
    caches[1].end("r")
    assert served.post("/clear", {"everything": True}).json() == {"caches": 2, "chunks": 4, "below": {}}
    assert caches[1].lookup(key_chain(4), "r").chunks == 0
    for cache in caches:
        cache.close()


def test_what_is_cleared_below_the_pool_is_counted_too(tmp_path: Path) -> None:
    """Most of a cache is below its pool: a number that leaves that out looks as if little had gone."""
    made = Served(tiers=({"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"},))
    cache = made.join("one")
    store(cache, 4)
    until(lambda: [tier["usage"]["chunks"] for tier in made.get("/status").json()["caches"][0]["tiers"]] == [4])
    answer = made.post("/clear", {"everything": True}).json()
    assert answer == {"caches": 1, "chunks": 4, "below": {"disk": 4}}
    cache.close()
    made.close()


def test_nothing_is_cleared_while_a_cache_is_opened_that_would_keep_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tiers may hold what is to be cleared, and cannot be reached yet."""
    one = served.join("one")
    store(one, 2)
    go_on, build = threading.Event(), caches_module.build_local_cache

    def slow(*args: object, **options: object) -> object:
        assert go_on.wait(10)
        return build(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(caches_module, "build_local_cache", slow)
    joining = threading.Thread(target=lambda: served.join("two").close())
    joining.start()
    until(lambda: served.get("/readyz").status_code == 503)
    for body in ({"everything": True}, {"tenant": "acme"}, {"fingerprint": "two"}):
        assert "being opened" in problem(served.post("/clear", body), 503)
    assert one.lookup(key_chain(2), "r").chunks == 2
    one.end("r")
    assert served.post("/clear", {"fingerprint": "one"}).json() == {"caches": 1, "chunks": 2, "below": {}}
    go_on.set()
    joined(joining)
    assert served.post("/clear", {"everything": True}).json() == {"caches": 2, "chunks": 0, "below": {}}
    one.close()


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"])
def test_who_does_not_show_the_token_changes_nothing(served: Served, shown: str) -> None:
    cache = served.join()
    store(cache, 2)
    refused = served.client.post("/clear", headers={"authorization": shown.encode("latin-1")})
    assert "token_file" in problem(refused, 401)
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert cache.lookup(key_chain(2), "r").chunks == 2
    assert served.client.post(
        "/clear", json={"everything": True}, headers={"authorization": f"bearer  {TOKEN}"}
    ).is_success
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


def test_one_tenants_chunks_are_cleared_and_nobody_elses(served: Served) -> None:
    cache = served.join()
    for tenant in ("acme", "globex"):
        store_keys(cache, keys_of(tenant, 3))
    assert served.post("/clear", {"tenant": "acme"}).json() == {"caches": 1, "chunks": 3, "below": {}}
    assert cache.lookup(keys_of("acme", 3), "r").chunks == 0
    assert cache.lookup(keys_of("globex", 3), "r").chunks == 3
    cache.end("r")
    assert served.post("/clear", {"tenant": tenant_tag("salt of globex").hex()}).json() == {
        "caches": 1,
        "chunks": 3,
        "below": {},
    }
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


@pytest.mark.parametrize("text", [f"{4 * SLOT_BYTES}", f" {4 * SLOT_BYTES} B", f"{4 * SLOT_BYTES / 1024:.3f} KiB"])
def test_a_quota_is_written_as_every_other_size_is(served: Served, text: str) -> None:
    cache = served.join()
    headers = {"authorization": f"Bearer {TOKEN}"}
    after = served.client.put("/quota/acme", json={"quota_bytes": text}, headers=headers).json()
    assert after["caches"][0]["quota_bytes"] == 4 * SLOT_BYTES
    cache.close()


def test_a_quota_is_one_in_formats_that_come_later_too(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}

    def put(**body: object) -> httpx.Response:
        return served.client.put("/quota/acme", json=body, headers=headers)

    def quotas() -> dict[str, int | None]:
        return {use["fingerprint"]: use["quota_bytes"] for use in served.get("/quota/acme").json()["caches"]}

    assert put(quota_bytes=4 * SLOT_BYTES).json()["caches"] == []  # no engine has registered yet
    caches = [served.join("one")]
    assert quotas() == {"one": 4 * SLOT_BYTES}
    assert put(quota_bytes=2 * SLOT_BYTES, fingerprint="one").status_code == 200
    caches.append(served.join("two"))
    assert quotas() == {"one": 2 * SLOT_BYTES, "two": 4 * SLOT_BYTES}
    # No chunk of this format fits into the quota, and its engine is served all the same.
    caches.append(RemoteCache(served.path, group_bytes=(5 * SLOT_BYTES,), fingerprint="large"))
    assert quotas()["large"] is None
    assert "holds no chunk" in caplog.text
    assert served.client.delete("/quota/acme", headers=headers).status_code == 200
    caches.append(served.join("three"))
    assert quotas() == {"one": None, "two": None, "large": None, "three": None}
    for cache in caches:
        cache.close()


def test_a_tenant_is_found_by_a_name_with_a_slash_too() -> None:
    tag = tenant_tag("salt of a team").hex()
    http, tenants = {"listen": "127.0.0.1:0"}, [{"name": "org/team", "tag": tag}]
    server = launch({"host": {"capacity_bytes": "1MiB"}, "http": http, "tenants": tenants})
    try:
        found = httpx.get(f"{server.url}quota/org%2Fteam")
        assert found.status_code == 200, found.text
        assert (found.json()["name"], found.json()["tag"]) == ("org/team", tag)
        assert "no tenant is called 'org/crew'" in problem(httpx.get(f"{server.url}quota/org%2Fcrew"), 404)
        assert "no tenant is called ''" in problem(httpx.get(f"{server.url}quota/"), 404)
    finally:
        server.stop()


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
    assert "not a whole number" in problem(
        served.client.put("/quota/acme", json={"quota_bytes": "0.3 B"}, headers=headers), 409
    )
    for text in ("4 gigs", "-1", "", "4GiB5", "GiB"):
        assert problem(served.client.put("/quota/acme", json={"quota_bytes": text}, headers=headers), 400), text
    assert "14 hex digits" in problem(served.get("/quota/initech"), 404)
    assert problem(served.client.put("/quota/acme", json={"quota_bytes": whole}), 401)
    assert problem(served.client.delete("/quota/acme"), 401)
    for cache in caches:
        cache.close()


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
    here, there = Served(archive_directory=str(tmp_path)), Served(archive_directory=str(tmp_path))
    mine, yours = here.join(), there.join()
    keys = key_chain(5)
    store(mine, 4)
    job = done(here, here.post("/prefixes/export", {"file": "system.kv", "keys": [key.hex() for key in keys]}))
    assert (job["state"], job["chunks"]) == ("done", 4)
    assert "4 of 5" in str(job["reason"])
    assert there.get("/prefixes").json()["files"] == ["system.kv"]
    job = done(there, there.post("/prefixes/import", {"file": "system.kv"}))
    assert (job["state"], job["chunks"], job["reason"]) == ("done", 4, "")
    lease = yours.load(keys[:4], "l")
    assert isinstance(lease, ReadLease)
    for key, extent in zip(keys, lease.extents, strict=False):
        assert yours.pool.view[extent.offset : extent.offset + extent.nbytes] == content(key, extent.nbytes)
    (tmp_path / "cut.kv").write_bytes((tmp_path / "system.kv").read_bytes()[:-1])
    job = done(there, there.post("/prefixes/import", {"file": "cut.kv"}))
    assert job["state"] == "failed"
    assert "was truncated" in str(job["reason"])
    for cache, server in ((mine, here), (yours, there)):
        cache.close()
        server.close()


def test_a_prefix_is_warmed_up_from_below(tmp_path: Path) -> None:
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": 1 << 22}
    served = Served(tiers=[disk])
    cache = served.join()
    store(cache, 4)
    (behind,) = served.server.caches.values()
    behind.lower.drain(10)
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
    jobs = PrefixJobs()
    running = [jobs.start("export", "x", lambda: (int(go_on.wait(10)), "")) for _ in range(jobs_module.MAX_RUNNING)]
    with pytest.raises(Problem, match="ask again"):
        jobs.start("export", "x", lambda: (0, ""))
    go_on.set()
    until(lambda: {jobs.find(job.id).state for job in running} == {"done"})
    last = jobs.start("export", "x", lambda: (1 // 0, ""))
    until(lambda: jobs.find(last.id).state == "failed")
    assert "a bug" in jobs.find(last.id).reason
    monkeypatch.setattr(jobs_module, "_REMEMBERED", 2)
    jobs.start("export", "x", lambda: (0, ""))
    assert len(jobs.all()) == 2
    with pytest.raises(Problem, match="no job 1"):
        jobs.find(1)


def test_a_server_that_ends_waits_until_its_jobs_have_tidied_up() -> None:
    """Their threads would end with the process, and an export leave its unfinished file behind."""
    go_on, jobs = threading.Event(), PrefixJobs()
    job = jobs.start("export", "x", lambda: (int(go_on.wait(30)), ""))
    jobs.end(0.0)
    assert jobs.find(job.id).state == "running"
    ending = threading.Thread(target=jobs.end, args=(30.0,))
    ending.start()
    go_on.set()
    joined(ending)
    assert jobs.find(job.id).state == "done"


@pytest.mark.parametrize("file", ["../x", "a/b", "/etc/passwd", ".hidden", "x\n", "x\x00", "", "x" * 101, "é"])
def test_no_request_names_a_file_outside_the_archive(tmp_path: Path, file: str) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    served = Served(archive_directory=str(inside))
    cache = served.join()
    store(cache, 1)
    for what in ({"keys": [key_chain(1)[0].hex()]}, {}):
        assert problem(served.post(f"/prefixes/{'export' if what else 'import'}", {"file": file, **what}), 400)
    assert list(tmp_path.rglob("*")) == [inside]
    cache.close()
    served.close()


def test_files_that_no_request_can_name_are_not_listed(tmp_path: Path) -> None:
    """Such as an export that was killed, or a name that is no text."""
    for name in (b"system.kv", b".system.kv-x1y2z3", b"caf\xe9.kv"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"kvprefix")
    served = Served(archive_directory=str(tmp_path))
    assert served.get("/prefixes").json()["files"] == ["system.kv"]
    served.close()


def test_files_need_a_place(served: Served, tmp_path: Path) -> None:
    cache = served.join()
    assert "archive_directory" in problem(served.post("/prefixes/import", {"file": "x"}), 409)
    cache.close()
    with pytest.raises(ConfigError, match="archive_directory"):
        open_http(HttpConfig(listen="127.0.0.1:0", archive_directory=str(tmp_path / "no")))


@pytest.mark.parametrize("key", ["", "00" * 46, "01" * 45, ("01" * 46).upper().replace("0", "A"), "01" * 46 + "\n"])
def test_what_is_no_key_is_refused(served: Served, key: str) -> None:
    cache = served.join()
    assert problem(served.post("/prefixes/pin", {"name": "p", "keys": [key]}), 400)
    cache.close()


def test_a_server_without_peers_says_that_it_cannot_be_drained(served: Served) -> None:
    """With peers: tests/server/test_drain.py."""
    assert served.client.get("/drain").json() == {"caches": []}
    cache = served.join()
    store(cache, 2)
    assert "peers" in problem(served.post("/drain", {"timeout_s": 5, "max_bytes": 1 << 20}), 409)
    assert served.client.get("/status").json()["caches"][0]["drain"] is None
    assert served.post("/drain/end").json() == {"caches": []}
    assert problem(served.post("/drain", {"timeout_s": 0}), 400)
    cache.close()


def test_an_archive_whose_file_system_hangs_keeps_nobody_else_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount does whose server is away. Four such requests took all of HTTP's threads, and the server's end."""
    served, may_end, real = Served(archive_directory=str(tmp_path)), threading.Event(), Path.iterdir

    def hangs(path: Path) -> Any:
        if path == tmp_path:
            assert may_end.wait(60)
        return real(path)

    monkeypatch.setattr(Path, "iterdir", hangs)
    with ThreadPoolExecutor(6) as asking:
        answers = [asking.submit(httpx.get, f"http://127.0.0.1:{served.port()}/prefixes", timeout=30) for _ in range(6)]
        assert served.get("/metrics").status_code == 200
        for answer in answers:
            assert "archive_directory has not answered" in problem(answer.result(60), 503)
    may_end.set()
    until(lambda: served.get("/prefixes").status_code == 200)
    served.close()
