"""Tenants in settings and in a server's report: strict, private, and never with a salt in any text."""

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kv_core.errors import ConfigError
from kv_core.keys import NO_TENANT, tenant_tag
from kv_core.testing import key_chain
from kv_server import RemoteCache, launch, wire
from kv_server.config import read_config
from kv_server.connection import ask_server
from kv_server.report import TenantReport
from kv_tiers import HostConfig, Tenant, build_local_cache
from kv_tiers.config import TenantConfig
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.settings import read_file
from kv_tiers.tenants import read_tenants

CHUNK_BYTES = 4096
SECRET = "a secret salt"
GIB = 1 << 30


@pytest.fixture
def salt_file(tmp_path: Path) -> Path:
    path = tmp_path / "salt"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def read(*listed: dict[str, Any], capacity_bytes: int = GIB) -> list[Tenant]:
    return read_tenants(listed, capacity_bytes=capacity_bytes)


def test_a_salt_is_named_by_itself_its_file_or_its_tag(salt_file: Path) -> None:
    by_salt = read({"name": "a", "salt": SECRET, "quota_bytes": "4MiB"})
    assert by_salt == [Tenant("a", tenant_tag(SECRET), 4 << 20)]
    assert by_salt == read({"name": "a", "salt_file": str(salt_file), "quota_bytes": 4 << 20})
    assert by_salt == read({"name": "a", "tag": tenant_tag(SECRET).hex(), "quota_bytes": "4 MiB"})
    assert read({"name": "anybody", "tag": "0" * 14}) == [Tenant("anybody", NO_TENANT)]
    assert read({"name": "b", "salt": ""}) == [Tenant("b", tenant_tag(""))]
    salt_file.write_bytes(b"with spaces \r\n")
    assert read({"name": "a", "salt_file": str(salt_file)})[0].tag == tenant_tag("with spaces ")


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ([{"name": "a"}], r"tenants\[0\] \(a\): write one of salt, salt_file and tag; there is none"),
        ([{"name": "a", "salt": SECRET, "tag": "0" * 14}], "there is salt and tag"),
        ([{"name": "a", "salt": SECRET, "qouta_bytes": 1}], "no option 'qouta_bytes'; did you mean 'quota_bytes'"),
        ([{"salt": SECRET}], r"tenants\[0\].*`name`"),
        ([{"name": "", "salt": SECRET}], "length >= 1"),
        ([{"name": "a", "salt": [SECRET]}], "Expected `str"),
        ([{"name": "a", "salt": SECRET, "quota_bytes": -1}], ">= 0"),
        ([{"name": "a", "salt": SECRET, "quota_bytes": "lots"}], "'lots'; write a whole number of bytes"),
        ([{"name": "a", "salt": f"{SECRET}\ud800"}], "valid Unicode"),
        ([{"name": "a", "tag": "0" * 13}], "14 lower-case hex digits"),
        ([{"name": "a", "tag": "A" * 14}], "14 lower-case hex digits"),
        ([{"name": "a", "salt_file": "/nowhere/salt"}], "/nowhere/salt cannot be read: No such file"),
        ([{"name": "a", "salt": SECRET}, {"name": "a", "salt": "b"}], "two called 'a'"),
        ([{"name": "a", "salt": SECRET}, {"name": "b", "tag": tenant_tag(SECRET).hex()}], "'a' and 'b' have the same"),
        ([{"name": "a", "salt": "a", "quota_bytes": GIB}, {"name": "b", "salt": "b", "quota_bytes": 1}], "a larger"),
        ({"name": "a", "salt": SECRET}, "write a list|expected `array`"),
        ([SECRET], "write a list|expected `object`"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_no_salt_is_repeated(listed: Any, said: str) -> None:
    for refused in (
        lambda: read_tenants(listed, capacity_bytes=GIB),
        lambda: read_config({"host": {"capacity_bytes": "1GiB"}, "tenants": listed}),
    ):
        with pytest.raises(ConfigError, match=said) as raised:
            refused()
        assert SECRET not in str(raised.value)
        assert raised.value.__cause__ is None


@pytest.mark.parametrize("salt", ["hunter2: x", "*hunter2", "!hunter2", "'hunter2", "%hunter2"])
def test_a_file_that_is_not_yaml_is_refused_with_the_place_and_not_the_salt_there(tmp_path: Path, salt: str) -> None:
    path = tmp_path / "kv.yaml"
    path.write_text(f"tenants:\n  - name: a\n    salt: {salt}\n")
    with pytest.raises(ConfigError, match=r"is not YAML: .* \(at line [34], column [0-9]+\)") as raised:
        read_file(str(path))
    assert "hunter2" not in str(raised.value)


def test_a_salt_s_file_is_private_and_holds_text(salt_file: Path) -> None:
    options = {"name": "a", "salt_file": str(salt_file)}
    for mode in (0o640, 0o604, 0o660):
        salt_file.chmod(mode)
        with pytest.raises(ConfigError, match=f"can be read by others: run chmod 600 {salt_file}"):
            read(options)
    salt_file.chmod(0o600)
    for content, said in ((b"\n", "is empty"), (b"\xff\xfe", "not UTF-8")):
        salt_file.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read(options)


def test_no_salt_is_in_anything_that_is_printed(salt_file: Path) -> None:
    options = {"name": "a", "salt": SECRET, "quota_bytes": 4096}
    config = msgspec.convert(options, TenantConfig)
    assert SECRET not in f"{config} {config!r} {[config]}"
    server = read_config({"host": {"capacity_bytes": 4096}, "tenants": [options]})
    assert SECRET not in repr(server)
    assert server.tenants == [Tenant("a", tenant_tag(SECRET), 4096)]
    named = {"name": "a", "salt_file": str(salt_file), "quota_bytes": "4kB"}
    assert read_config({"tenants": [named]}).tenants == [Tenant("a", tenant_tag(SECRET), 4000)]


def test_a_cache_has_the_quotas_that_the_settings_say() -> None:
    tenants = read({"name": "a", "salt": "a", "quota_bytes": 3 * 4096 + 17}, {"name": "b", "salt": "b"})
    config = HostConfig(capacity_bytes=8 * 4096)
    cache = build_local_cache(config, group_bytes=(CHUNK_BYTES,), fingerprint="f", tenants=tenants)
    assert [(use.tenant, use.quota_bytes) for use in cache.admin.tenants()] == [(tenant_tag("a"), 3 * 4096)]
    assert len(cache.begin_store(key_chain(8, salt="a"), "w").keys) == 3
    assert len(cache.begin_store(key_chain(8, salt="b"), "w").keys) == 5
    cache.close()
    for wrong in (8 * 4096 + 4096, 4095):
        with pytest.raises(ConfigError, match="a quota of"):
            build_local_cache(
                config, group_bytes=(CHUNK_BYTES,), fingerprint="f", tenants=[Tenant("a", bytes(7), wrong)]
            )


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as made:  # short, as a socket's path must be
        yield Path(made)


def test_two_clients_of_different_tenants_each_keep_to_their_own(home: Path, salt_file: Path) -> None:
    slot = slot_bytes_for(CHUNK_BYTES)
    settings = {
        "host": {"capacity_bytes": 10 * slot},
        "tenants": [
            {"name": "quiet", "salt_file": str(salt_file), "quota_bytes": 3 * slot},
            {"name": "named", "salt": "named"},
        ],
    }
    server = launch(settings, socket=home / "kv.sock")
    try:
        quiet, noisy = (RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="f") for _ in range(2))
        mine = key_chain(3, salt=SECRET)
        quiet.commit(quiet.begin_store(mine, "q"))
        for turn in range(5):
            noisy.commit(noisy.begin_store(key_chain(7, branch=str(turn), salt="noisy"), "n"))
            assert noisy.lookup(mine[:0] + key_chain(3, salt="noisy"), "n").chunks == 0
        assert quiet.lookup(mine, "q").chunks == 3
        answer = ask_server(server.socket, wire.Status())
        assert isinstance(answer, wire.Stated)
        (cache,) = answer.report.caches
        told = {tenant.name: tenant for tenant in cache.tenants}
        assert told == {
            "quiet": TenantReport("quiet", tenant_tag(SECRET).hex(), 3, 3 * slot, 3 * slot),
            "named": TenantReport("named", tenant_tag("named").hex(), 0, 0, None),
            "": TenantReport("", tenant_tag("noisy").hex(), 7, 7 * slot, None),
        }
        assert cache.tenants_known == 3
        assert sum(tenant.chunks for tenant in cache.tenants) == cache.counts.slots_used
        assert SECRET not in repr(answer)
        quiet.close()
        noisy.close()
    finally:
        server.stop()


def test_a_server_whose_tenants_cannot_be_says_so_and_does_not_start(salt_file: Path) -> None:
    salt_file.chmod(0o644)
    settings = {"host": {"capacity_bytes": 1 << 20}, "tenants": [{"name": "a", "salt_file": str(salt_file)}]}
    run = subprocess.run(
        [sys.executable, "-m", "kv_server", "--config", "-", "--log-level", "debug"],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2
    assert f"run chmod 600 {salt_file}" in run.stdout + run.stderr
    assert SECRET not in run.stdout + run.stderr


def test_nothing_is_logged_of_a_salt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        tenants = read({"name": "a", "salt": SECRET, "quota_bytes": 4096})
        cache = build_local_cache(
            HostConfig(capacity_bytes=8192), group_bytes=(CHUNK_BYTES,), fingerprint="f", tenants=tenants
        )
        cache.commit(cache.begin_store(key_chain(2, salt=SECRET), "w"))
        cache.admin.clear_tenant(tenant_tag(SECRET))
        cache.close()
    assert SECRET not in caplog.text


def test_a_report_lists_no_end_of_tenants(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    from kv_server import server as server_module

    monkeypatch.setattr("kv_server.server.MAX_TENANTS", 3)
    tenants = [Tenant("named", tenant_tag("named")), Tenant("bound", tenant_tag("bound"), 4096)]
    cache = build_local_cache(
        HostConfig(capacity_bytes=64 * 4096), group_bytes=(CHUNK_BYTES,), fingerprint="f", tenants=tenants
    )
    for number in range(6):
        cache.commit(cache.begin_store(key_chain(number + 1, salt=str(number)), "w"))
    listed, known = server_module._tenants(cache, {tenant.tag: tenant.name for tenant in tenants})
    assert sorted((tenant.name, tenant.chunks) for tenant in listed) == [("", 6), ("bound", 0), ("named", 0)]
    assert known == 8
    cache.close()
