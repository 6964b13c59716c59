"""Settings: strict, typed, with an order of precedence, and errors that say what to write."""

import io
import json
import re
import socket
import uuid
from argparse import Namespace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from kv_connect.open_cache import Format, open_in_process, open_remote
from kv_core.errors import ConfigError
from kv_core.testing import key_chain
from kv_core.tools.cli import main, prompt_scheme
from kv_server import wire
from kv_server.config import read_config, server_config
from kv_server.connection import ask_server
from kv_tiers.build import check_settings
from kv_tiers.config import ColdConfig, HostConfig
from kv_tiers.options import read_options, spelled_as
from kv_tiers.settings import Layer, Settings, load, read_file, resolve
from kv_tiers.tiers.disk import DiskConfig


class Named(msgspec.Struct):
    name: Annotated[str, spelled_as("[a-z]+", "a plain word")]


def nested(depth: int) -> list[object]:
    made: list[object] = []
    for _ in range(depth):
        made = [made]
    return made


def test_nothing_given_means_the_defaults() -> None:
    settings, in_force = load({}, {})
    assert settings == Settings()
    assert {entry.origin for entry in in_force} == {"default"}


def test_extra_config_beats_the_file_which_beats_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("chunk_tokens: 512\nsave_decode: true\nhost:\n  capacity_bytes: 2GiB\n")
    environ = {
        "KV_CHUNK_TOKENS": "1024",
        "KV_HOST_LEASE_S": "60",
        "KV_HOST_CAPACITY_BYTES": "1GiB",
        "KV_CONFIG_FILE": str(file),
    }
    settings, in_force = load({"chunk_tokens": 128}, environ)
    assert settings.chunk_tokens == 128
    assert settings.save_decode is True
    assert settings.host.capacity_bytes == 2 << 30
    assert settings.host.lease_s == 60.0
    origins = {entry.path: entry.origin for entry in in_force}
    assert origins["chunk_tokens"] == "extra config"
    assert origins["host.capacity_bytes"] == f"file {file}"
    assert origins["host.lease_s"] == "environment KV_HOST_LEASE_S"
    assert origins["format"] == "default"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"chunk_token": 256}, "did you mean 'chunk_tokens'"),
        ({"host": {"capasity_bytes": "1GiB"}}, "did you mean 'host.capacity_bytes'"),
        ({"host": {"capacity_bytes": "lots"}}, "text such as"),
        ({"host": {"capacity_bytes": 0}}, ">= 1"),
        ({"chunk_tokens": "256"}, "expected `int`"),
        ({"chunk_tokens": True}, "expected `int`"),
        ({"chunk_tokens": 0}, ">= 1"),
        ({"format": "nhd"}, "write one of auto, canonical, blocks, int8, fp8"),
        ({"host": {"lease_s": -1}}, "> 0"),
        ({"host": {"lease_s": float("inf")}}, "<= 1000000"),
        ({"cold": {"drain_s": float("inf")}}, "<= 1000000"),
        ({"server": {"answer_s": 1e10}}, "<= 1000000"),
        ({"host": "4GiB"}, "host is '4GiB' in extra config; it must hold settings"),
        ({"tiers": [{"directory": "/kv"}]}, "tiers[0] has no type"),
        ({"tiers": {"type": "disk"}}, "write a list of them, such as [{type: disk"),
        ({"tiers": ["disk"]}, "write a list of them, such as [{type: disk"),
        ({"cold": {"wait": 1}}, "did you mean 'cold.wait_s'"),
        ({"tenants": [{"name": "a", "sallt": "s"}]}, "did you mean 'salt'"),
        ({"tenants": [{"name": "a", "salt": "s", "quota_bytes": "5GiB"}]}, "write smaller quota_bytes"),
        ({"cold": {"spill_share": 0}}, "> 0"),
        ({"cold": {"batch_bytes": 0}}, ">= 1"),
        ({"observe": {"log": "yes"}}, "write one of none, text, json"),
        ({"observe": {"history_keys": -1}}, "observe.history_keys is -1"),
        ({"cold": {"wait_s": 1.0}, "cold.wait_s": 2.0}, "cold.wait_s appears twice in extra config"),
        ({"config_file": "/nowhere/kv.yaml"}, "cannot be read"),
        (
            {"http": {"token_file": "/kv/\0"}},
            "http.token_file in extra config has a character that no name may contain",
        ),
        (
            {"server": {"socket": "/kv/\ud800"}},
            "server.socket in extra config has a character that no name may contain",
        ),
        ({"tiers": [{"type": "disk", "directory": ["/kv/\0"]}]}, "tiers in extra config has a character"),
        ({"tiers": [{"type": "disk", "directory": nested(100_000)}]}, "nested too deeply"),
    ],
)
def test_a_bad_setting_is_an_error_that_says_what_to_write(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(extra, {})


def test_what_no_name_may_contain_is_found_wherever_it_comes_from() -> None:
    tiers = [{"type": "disk", "directory": "/kv/\0", "capacity_bytes": "1GiB"}]
    extras: list[dict[str, object]] = [{"config_file": "/kv/\0"}, {"config_file": "/kv/\ud800"}]
    for extra, environ in [*((extra, {}) for extra in extras), ({}, {"KV_TIERS": json.dumps(tiers)})]:
        with pytest.raises(ConfigError, match="has a character that no name may contain"):
            load(extra, environ)
    with pytest.raises(ConfigError, match=r"tiers is .* in environment KV_TIERS"):
        load({}, {"KV_TIERS": '[{"type": "disk", "directory": "/kv/\udcff"}]'})  # bytes that are not UTF-8


def test_an_unknown_setting_far_from_all_names_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"there are .*chunk_tokens.*host.capacity_bytes"):
        load({"zzz": 1}, {})


def test_a_slip_in_the_environment_is_an_error_and_a_strangers_variable_is_not() -> None:
    with pytest.raises(ConfigError, match="did you mean KV_CHUNK_TOKENS"):
        load({}, {"KV_CHUNK_TOKEN": "256"})
    load({}, {"KV_SERVICE_HOST": "10.0.0.1", "KV_SERVER_PORT": "tcp://10.0.0.1:9400", "KVM": "yes"})


# What Kubernetes sets in every container of a namespace with a service of this name and these ports.
def service_links(name: str, address: str, ports: dict[str, int], protocol: str = "TCP") -> dict[str, str]:
    prefix = name.upper().replace("-", "_")
    links = {f"{prefix}_SERVICE_HOST": address}
    for number, (port_name, port) in enumerate(ports.items()):
        url = f"{protocol.lower()}://{address}:{port}"
        if number == 0:
            links |= {f"{prefix}_SERVICE_PORT": str(port), f"{prefix}_PORT": url}
        if port_name:
            links[f"{prefix}_SERVICE_PORT_{port_name.upper().replace('-', '_')}"] = str(port)
        links |= {
            f"{prefix}_PORT_{port}_{protocol}": url,
            f"{prefix}_PORT_{port}_{protocol}_PROTO": protocol.lower(),
            f"{prefix}_PORT_{port}_{protocol}_PORT": str(port),
            f"{prefix}_PORT_{port}_{protocol}_ADDR": address,
        }
    return links


def test_links_to_services_are_no_settings_whatever_the_services_are_called() -> None:
    """Those whose names are nearest to ours: sections, settings, and ports called as settings."""
    settings, in_force = load({}, {})
    names = {one.path.replace(".", "-").replace("_", "-") for one in in_force}
    for name in {f"kv-{part}" for path in names for part in (path, path.rpartition("-")[0])} | {"kv"}:
        for address in ("10.0.0.1", "fd00::1"):
            for protocol in ("TCP", "UDP", "SCTP"):
                ports = {"socket": 9400, "listen": 80, "capacity-bytes": 65535}
                assert load({}, service_links(name.rstrip("-"), address, ports, protocol))[0] == settings
    for wrong in ({"KV_SERVER_SOCKETS": "tcp"}, {"KV_HTTP_LISTEN_": "tcp://10.0.0.1:80"}, {"KV_OBSERVE_LOG_": "1"}):
        with pytest.raises(ConfigError, match="did you mean"):
            load({}, wrong)


@pytest.mark.parametrize(
    ("path", "written", "meant"),
    [
        ("host.capacity_bytes", "5.36e+11", 536_000_000_000),
        ("host.capacity_bytes", "1.099511627776e+12", 1 << 40),
        ("host.capacity_bytes", "4.294967296e+09", 1 << 32),
        ("chunk_tokens", "256.0", 256),
        ("chunk_tokens", "2.56e+02", 256),
        ("stores_in_flight_bytes", "1.073741824e+09", 1 << 30),
        ("server.max_sessions", "1e+03", 1000),
        ("cold.wait_s", "2.0", 2.0),
        ("cold.wait_s", "2.5e+00", 2.5),
        ("observe.history_keys", "1.048576e+06", 1 << 20),
    ],
)
def test_integers_that_are_rendered_as_floats_are_integers(
    tmp_path: Path, path: str, written: str, meant: float
) -> None:
    """Helm does that to every number of its values above a million, and to some below."""
    section, _, name = path.rpartition(".")
    file = tmp_path / "kv.yaml"
    file.write_text(f"{section}:\n  {name}: {written}\n" if section else f"{name}: {written}\n")
    of_json = tmp_path / "kv.json"
    of_json.write_text(f'{{"{path}": {written}}}')
    variable = f"KV_{path.replace('.', '_').upper()}"
    places: list[tuple[dict[str, object], dict[str, str]]] = [
        ({"config_file": str(file)}, {}),
        ({"config_file": str(of_json)}, {}),
        ({path: float(written)}, {}),
        ({}, {variable: written}),
    ]
    if path.endswith("_bytes"):
        places.append(({path: written}, {}))  # quoted
    for extra, environ in places:
        found = attrgetter(path)(load(extra, environ)[0])
        assert found == meant and type(found) is type(meant)


def test_a_fraction_is_no_integer_and_a_name_of_digits_is_a_name() -> None:
    for extra, environ in (({"chunk_tokens": 256.5}, {}), ({}, {"KV_CHUNK_TOKENS": "2.565e+02"})):
        with pytest.raises(ConfigError, match="chunk_tokens"):
            load(extra, environ)
    assert load({}, {"KV_SERVER_NAME": "1e3"})[0].server.name == "1e3"
    assert read_options(DiskConfig, {"directory": "/kv", "capacity_bytes": 5.36e11}, "t").capacity_bytes == 536 * 10**9


SAME = {
    "kv.yaml": "host: {capacity_bytes: 2GiB}\ncold: {batch_bytes: 64MiB}\ntiers: [{type: disk, directory: /kv}]\n"
    "server: {socket: /run/kv.sock}\n",
    "kv.toml": '[host]\ncapacity_bytes = "2GiB"\n[cold]\nbatch_bytes = "64MiB"\n[server]\nsocket = "/run/kv.sock"\n'
    '[[tiers]]\ntype = "disk"\ndirectory = "/kv"\n',
    "kv.json": '{"host.capacity_bytes": "2GiB", "cold": {"batch_bytes": 67108864}, "server.socket": "/run/kv.sock", '
    '"tiers": [{"type": "disk", "directory": "/kv"}]}',
}


def test_what_has_no_value_is_as_if_left_out(tmp_path: Path) -> None:
    """YAML makes null of a section or a list whose lines are all comments."""
    file = tmp_path / "kv.yaml"
    file.write_text("host:\n#  capacity_bytes: 1GiB\ntiers:\n#  - {type: disk}\nuse:\n")
    settings, in_force = load({"config_file": str(file)}, {"KV_USE": "always"})
    assert settings == Settings(use="always")
    assert {setting.path for setting in in_force if setting.origin != "default"} == {"use"}


@pytest.mark.parametrize("name", SAME)
def test_one_file_in_any_language_serves_an_engine_and_the_server(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(SAME[name])
    engine, _ = load({"config_file": str(file)}, {})
    server = server_config(resolve([Layer(f"file {file}", read_file(str(file)))], {})[0])
    assert engine.host == server.host == HostConfig(capacity_bytes=2 << 30)
    assert engine.cold == server.cold == ColdConfig(batch_bytes=64 << 20)
    assert engine.tiers == server.tiers == [{"type": "disk", "directory": "/kv"}]
    assert engine.server.socket == server.socket == "/run/kv.sock"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"host": {"capacity": "1GiB"}}, "did you mean 'host.capacity_bytes'"),
        ({"host.capacity": "1GiB"}, "did you mean 'host.capacity_bytes'"),
        ({"http": {"archive_dir": "/a"}}, "did you mean 'http.archive_directory'"),
        ({"socket": "/run/kv.sock"}, "did you mean 'server.socket'"),
        ({"max_formats": 1}, "did you mean 'server.max_formats'"),
        ({"max_sessions": 1}, "did you mean 'server.max_sessions'"),
    ],
)
def test_a_name_that_is_none_is_an_error_that_says_the_one_probably_meant(wrong: dict[str, object], said: str) -> None:
    for read in (lambda: load(wrong, {}), lambda: read_config(wrong)):
        with pytest.raises(ConfigError, match=said):
            read()


def test_wrong_names_of_tiers_options_and_variables_are_errors_too() -> None:
    with pytest.raises(ConfigError, match="disk: there is no option 'directry'; did you mean 'directory'"):
        check_settings(HostConfig(), [{"type": "disk", "directry": "/kv", "capacity_bytes": "1GiB"}])
    with pytest.raises(ConfigError, match="did you mean KV_HOST_CAPACITY_BYTES"):
        load({}, {"KV_HOST_CAPACITY": "1GiB"})


def test_every_size_may_be_text_wherever_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("observe: {record_bytes: 2MiB}\n")
    environ = {"KV_COLD_BATCH_BYTES": "1.5 MiB", "KV_CONFIG_FILE": str(file)}
    settings, _ = load({"host": {"capacity_bytes": "3GB"}}, environ)
    assert settings.host.capacity_bytes == 3 * 10**9
    assert (settings.observe.record_bytes, settings.cold.batch_bytes) == (2 << 20, 3 << 19)


def test_a_server_of_another_host_is_a_small_pool_and_a_tier_that_stores_there() -> None:
    files = {f"tls_{name}_file": f"/etc/kv/{name}.pem" for name in ("ca", "cert", "key")}
    disk = {"type": "disk", "directory": "/kv", "capacity_bytes": 1 << 30}
    extra: dict[str, Any] = {"server": {"url": "kvs://[fd00::1]:9500/"}, "peers": files, "tiers": [disk]}
    settings, in_force = load(extra, {})
    there = {"type": "peers", "name": "server", "hosts": ["[fd00::1]:9500"], "stores": True, "answer_timeout_s": 1.0}
    assert settings.tiers == [disk, {**there, **files}] and settings.host.capacity_bytes == 1 << 30
    origins = {entry.path: entry.origin for entry in in_force}
    assert origins["tiers"] == origins["host.capacity_bytes"] == "server.url"
    assert (origins["server.url"], origins["host.name"]) == ("extra config", "default")
    assert load(extra, {"KV_HOST_CAPACITY_BYTES": "4GiB"})[0].host.capacity_bytes == 4 << 30
    with pytest.raises(ConfigError, match="for an engine whose host has no kv-server"):
        read_config(extra)
    with pytest.raises(ConfigError, match="leave one of them out"):
        load(extra, {"KV_SERVER_SOCKET": "/run/kv/kv.sock"})
    extra["tenants"] = [{"name": "acme", "salt": "s", "quota_bytes": "2GiB"}]
    with pytest.raises(ConfigError, match=r"the pool has 1073741824 .*; write smaller quota_bytes or a larger"):
        load(extra, {})
    assert load(extra, {"KV_HOST_CAPACITY_BYTES": "4GiB"})[0].tenants == extra["tenants"]


@pytest.mark.parametrize(
    "url",
    ["kv-a:9500", "kv://kv-a:9500", "https://kv-a:9500", "kvs://kv-a", "kvs://kv-a:", "kvs://kv-a:9500/pool",
     "kvs://fd00::1:9500", "kvs://kv-a:9500,kv-b:9500", "kvs://user:hush@kv-a:9500", "kvs://:9500", "kvs://kv-a:0"],
)  # fmt: skip
def test_a_url_that_is_none_of_a_server_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.url is .*; write kvs://HOST:PORT") as raised:
        load({"server": {"url": url}}, {})
    assert "hush" not in str(raised.value)


def test_an_engine_says_that_it_serves_neither_http_nor_peers(caplog: pytest.LogCaptureFixture) -> None:
    load({"http": {"listen": "127.0.0.1:0"}, "server": {"socket": "/run/kv.sock"}}, {})
    assert not caplog.text
    load({"http": {"listen": "127.0.0.1:0"}}, {})
    assert "http.listen is 127.0.0.1:0" in caplog.text and "start kv-server" in caplog.text
    load({"peers": {"listen": "127.0.0.1:1", "unprotected": True}}, {})
    assert "peers.listen is 127.0.0.1:1" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("kv.yaml", "- a\n- b\n", "must hold settings"),
        ("kv.yaml", "a: [1\n", "kv.yaml is not YAML"),
        ("kv.yaml", "just words", "must hold settings"),
        ("kv.toml", "a = ", "kv.toml is not TOML"),
        ("kv.json", "{]", "kv.json is not JSON"),
        ("kv.json", "[]", "must hold settings"),
        ("kv.json", "[" * 100_000, "kv.json is nested too deeply"),
        ("kv.yaml", "a: " + "{b: " * 10_000, "kv.yaml is nested too deeply"),
        ("kv.yaml", "host: {lease_s: 1}\ntiers: []\nhost: {name: a}\n", "'host' appears twice"),
        ("kv.yaml", "host:\n  name: a\n  name: b\n", "'name' appears twice"),
        ("kv.json", '{"host": {"name": "a", "name": "b"}}', "'name' appears twice"),
        ("kv.toml", "[host]\n[host]\n", "kv.toml is not TOML"),
        ("kv.conf", "chunk_tokens: 1", "end its name in .yaml, .yml, .toml, .json"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_an_error(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load({"config_file": str(file)}, {})


def test_standard_input_is_json_or_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ('{"chunk_tokens": 64}', "chunk_tokens: 64\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert read_file("-") == {"chunk_tokens": 64}
    monkeypatch.setattr("sys.stdin", io.StringIO("{]"))
    with pytest.raises(ConfigError, match="standard input is not JSON"):
        read_file("-")


def test_a_secret_is_required_private_and_long_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a secret"):
        load({"algorithm": "blake2b"}, {})[0].scheme()
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load({"algorithm": "blake2b", "secret_file": str(secret)}, {})[0].scheme()
    secret.chmod(0o600)
    assert load({"algorithm": "blake2b", "secret_file": str(secret)}, {})[0].scheme().secret == b"0123456789abcdef"
    secret.write_bytes(b"short")
    with pytest.raises(ConfigError, match="16 to 64"):
        load({"algorithm": "blake2b", "secret_file": str(secret)}, {})[0].scheme()
    with pytest.raises(ConfigError, match="takes none"):
        load({"secret_file": str(secret)}, {})[0].scheme()


def test_an_engine_and_kv_keys_read_the_same_secret(tmp_path: Path) -> None:
    """A secret of random bytes may begin or end with one that is white space."""
    secret = tmp_path / "secret"
    secret.write_bytes(b" 0123456789abcdef\t\n")
    secret.chmod(0o600)
    scheme = load({"algorithm": "blake2b", "secret_file": str(secret)}, {})[0].scheme()
    assert scheme == prompt_scheme(Namespace(algorithm="blake2b", chunk_tokens=256, secret_file=str(secret)))
    assert scheme.secret == b" 0123456789abcdef\t"


def test_tiers_are_listed_in_any_of_the_places(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("tiers:\n- {type: disk, directory: /kv, capacity_bytes: 1GiB}\n- {type: redis, write: back}\n")
    tiers = [{"type": "disk", "directory": "/kv", "capacity_bytes": "1GiB"}, {"type": "redis", "write": "back"}]
    assert load({"config_file": str(file)}, {})[0].tiers == tiers
    assert load({"tiers": tiers[:1]}, {"KV_CONFIG_FILE": str(file)})[0].tiers == tiers[:1]
    environ = {"KV_TIERS": '[{"type": "disk", "directory": "/kv"}]', "KV_COLD_WAIT_S": "0.5"}
    settings, _ = load({}, environ)
    assert settings.tiers == [{"type": "disk", "directory": "/kv"}]
    assert settings.cold.wait_s == 0.5


def test_a_policy_has_parameters_in_any_of_the_places() -> None:
    policy = {"name": "prefix", "learn": False}
    for extra, environ in (({"host.policy": policy}, {}), ({}, {"KV_HOST_POLICY": f" {json.dumps(policy)}"})):
        assert load(extra, environ)[0].host.policy == policy
    assert load({}, {"KV_HOST_POLICY": "lru"})[0].host.policy == "lru"
    with pytest.raises(ConfigError, match=r"host\.policy is .* in environment KV_HOST_POLICY"):
        load({}, {"KV_HOST_POLICY": '{"name": '})


def test_secrets_are_not_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    urls = ("redis://me:hush@host:6379/0", "redis://:hush@host", "redis://:a/hush@host", "redis://me:a@hush#@host")
    for tier in (*({"url": url} for url in urls), {"password": "hush"}):
        monkeypatch.setenv("KV_TIERS", json.dumps([{"type": "redis", **tier}]))
        for output in ("table", "json"):
            assert main(["config", "--output", output]) == 2  # none of these is where a password belongs
            printed = capsys.readouterr()
            assert "hush" not in printed.out + printed.err
            assert "***" in printed.out


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"tiers": [{"type": "dsk"}]}, "tiers[0]: there is no tier of type 'dsk'; did you mean 'disk'?"),
        ({"tiers": [{"type": "dram", "capacity_bytes": 4096, "codec": "gz"}]}, "tiers[0]: there is no codec 'gz'"),
        ({"tiers": [{"type": "dram", "capcity_bytes": 1 << 30}]}, "did you mean 'capacity_bytes'?"),
        ({"host": {"policy": "lruu"}}, "did you mean 'lru'?"),
        ({"host": {"name": "a/b"}}, "the pool's name 'a/b' must be"),
        ({"tiers": [{"type": "dram", "capacity_bytes": "9PiB"}]}, "needs 9216 TiB and this machine"),
    ],
)
def test_kv_config_shows_what_an_engine_would_refuse_and_says_why(
    extra: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--extra", json.dumps(extra)]) == 2
    told = capsys.readouterr()
    assert "host.capacity_bytes" in told.out
    assert told.err.startswith("kv config: ") and said in told.err
    joined = {**extra, "server": {"socket": "/run/kv/kv.sock"}}
    assert main(["config", "--extra", json.dumps(joined)]) == 0


def test_kv_config_says_what_is_wrong_with_the_directory_of_the_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_one, private, link = tmp_path / "open", tmp_path / "private", tmp_path / "link"
    open_one.mkdir()
    open_one.chmod(0o755)
    private.mkdir(0o700)
    link.symlink_to(private)
    for directory, status, said in (
        (private, 0, ""),
        (tmp_path / "new", 0, "does not exist yet; kv-server makes it"),
        (open_one, 2, "name another one for the socket"),
        (link, 2, "write another socket"),
        (tmp_path / "no" / "such", 2, f"there is no directory {tmp_path / 'no'}"),
    ):
        assert main(["config", "--extra", json.dumps({"server": {"socket": f"{directory}/kv.sock"}})]) == status
        errors = capsys.readouterr().err
        assert said in errors and bool(errors) == bool(said), directory
    assert not (tmp_path / "new").exists()


OBSERVED = [
    ({"record": "/no/where.jsonl"}, "no trace can be recorded in /no"),
    ({"subscribers": ["mien"]}, "there is no subscriber 'mien'"),
    ({"subscribers": [{"level": 3}]}, "say which"),
    ({"otel": True}, "OTEL_TRACES_EXPORTER is 'smoke'"),
]


@pytest.mark.parametrize(("observe", "said"), OBSERVED)
def test_kv_config_shows_which_observers_an_engine_would_refuse(
    observe: dict[str, object], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "smoke")
    assert main(["config", "--extra", json.dumps({"observe": observe})]) == 2
    assert said in capsys.readouterr().err
    joined = {"observe": observe, "server": {"socket": "/run/kv/kv.sock"}}
    assert main(["config", "--extra", json.dumps(joined)]) == 0
    listens = {**joined, "http": {"listen": "127.0.0.1:0"}}  # these settings are the server's
    assert main(["config", "--extra", json.dumps(listens)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"http": {"listen": "nowhere"}}, "http: listen is 'nowhere'"),
        ({"http": {"listen": "0.0.0.0:1"}}, "write a token_file"),
        ({"http": {"listen": "127.0.0.1:0", "token_file": "HOME/no/token"}}, "token_file: HOME/no/token does not"),
        ({"http": {"listen": "127.0.0.1:0", "token_file": "HOME/short"}}, "holds no token"),
        ({"http": {"listen": "127.0.0.1:0", "archive_directory": "/no/where"}}, "archive_directory: /no/where"),
        ({"peers": {"listen": "127.0.0.1:9500"}}, "`kv peers init` makes"),
        ({"peers": {"listen": "127.0.0.1:0", "token_file": "HOME/short"}}, "inside TLS only"),
        ({"peers": {"listen": "127.0.0.1:0", "tls_ca_file": "/no"}}, "go together"),
        ({"server": {"name": "a/b"}}, "write a plain word"),
        ({"server": {"url": "kvs://kv-a:9500"}}, "`kv peers init` makes"),
        ({"server": {"url": "kvs://kv-a:99999"}, "peers": {"unprotected": True}}, "write a host and a port"),
    ],
)
def test_kv_config_shows_what_kv_server_would_refuse(
    extra: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("short")
    (tmp_path / "short").chmod(0o600)
    assert main(["config", "--extra", json.dumps(extra).replace("HOME", str(tmp_path))]) == 2
    told = capsys.readouterr()
    assert "host.capacity_bytes" in told.out
    assert told.err.startswith("kv config: ") and said.replace("HOME", str(tmp_path)) in told.err


def test_kv_config_neither_listens_nor_creates_anything(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # as by the server that runs with these settings
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        extra = {
            "http": {"listen": listen, "token_file": str(tmp_path / "token"), "archive_directory": str(tmp_path)},
            "peers": {"listen": listen, "unprotected": True},
            "observe": {"record": str(tmp_path / "trace.jsonl"), "otel": True, "log": "json"},
        }
        assert main(["config", "--extra", json.dumps(extra)]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"algorithm": "blake2b"}, "blake2b needs a secret"),
        ({"algorithm": "blake2b", "secret_file": "/nowhere"}, "/nowhere"),
        ({"secret_file": "/nowhere"}, "sha256 takes none"),
        ({"chunk_tokens": 1 << 21}, "from 1 to 1048576"),
    ],
)
def test_kv_config_shows_that_an_engine_could_not_name_chunks(
    extra: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which an engine does itself, whatever server it joins."""
    for server in ({}, {"server": {"socket": "/run/kv/kv.sock"}}):
        assert main(["config", "--extra", json.dumps(extra | server)]) == 2
        told = capsys.readouterr()
        assert "host.capacity_bytes" in told.out
        assert told.err.startswith("kv config: ") and said in told.err


def test_what_watches_the_cache_in_this_process_is_what_the_settings_say(tmp_path: Path) -> None:
    settings, _ = load({"observe": {"record": str(tmp_path / "trace.jsonl")}, "host.capacity_bytes": "1MiB"}, {})
    cache, bus = open_in_process(settings, Format((4096,), "f"))
    cache.lookup(key_chain(3), "r")
    cache.close()
    bus.close()
    said, line = (tmp_path / "trace.jsonl").read_text().splitlines()
    assert json.loads(said)["chunk_tokens"] == 256 and len(json.loads(line)["hash_ids"]) == 3


def test_nothing_watches_a_cache_in_this_process_unless_it_was_asked_for() -> None:
    cache, bus = open_in_process(load({"host.capacity_bytes": "1MiB"}, {})[0], Format((4096,), "f"))
    assert not cache.events.on
    cache.close()
    bus.close()


def test_a_private_server_watches_as_the_settings_say(tmp_path: Path) -> None:
    extra = {"observe": {"record": str(tmp_path / "trace.jsonl"), "history_keys": 7}, "host.capacity_bytes": "1MiB"}
    settings, _ = load(extra, {})
    remote, server = open_remote(settings, Format((4096,), "f"), engine_id=uuid.uuid4().hex, is_first=True, facts={})
    assert server is not None
    try:
        remote.lookup(key_chain(3), "r")
        answer = ask_server(server.socket, wire.Explain(32, b"d" * 32, []))
        assert isinstance(answer, wire.Explanations) and answer.history_keys == 7
    finally:
        remote.close()
        server.stop()
    (trace,) = tmp_path.glob("trace-*.jsonl")
    assert len(json.loads(trace.read_text().splitlines()[1])["hash_ids"]) == 3


@pytest.mark.parametrize("tenants", [{"salt": "hush"}, [{"name": "a", "salt": ["hush"]}], "hush", ["hush"]])
def test_a_salt_is_in_no_error(tenants: object) -> None:
    for extra, environ in (({"tenants": tenants}, {}), ({}, {"KV_TENANTS": json.dumps(tenants)})):
        with pytest.raises(ConfigError, match="tenants") as raised:
            load(extra, environ)
        assert "hush" not in str(raised.value)


@pytest.mark.parametrize("name", ["tiers", "observe.subscribers"])
@pytest.mark.parametrize(
    "listed", [{"url": "redis://:hush@h"}, ["redis://:hush@h", 1], "redis://:hush@h", [[{"token": "hush"}]]]
)
def test_a_password_in_a_list_of_the_wrong_kind_is_in_no_error(name: str, listed: object) -> None:
    variable = f"KV_{name.replace('.', '_').upper()}"
    for extra, environ in (({name: listed}, {}), ({}, {variable: json.dumps(listed)}), ({}, {variable: f"[{listed}"})):
        with pytest.raises(ConfigError, match=rf"{name} is not right in e.*: .*") as raised:
            load(extra, environ)
        assert "hush" not in str(raised.value)
    with pytest.raises(ConfigError, match="peers is a list") as raised:
        load({"peers": [{"token": "hush"}]}, {})
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("extra", ["{", "[]", "[" * 100_000, "9" * 5_000, '{"chunk_token": 1}'])
def test_kv_config_says_what_is_wrong_in_one_line(extra: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--extra", extra]) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.startswith("kv config: ") and told.err.count("\n") == 1


def test_kv_config_shows_tenants_without_their_salts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    salt = tmp_path / "its salt"
    salt.write_text("more")
    salt.chmod(0o600)
    tenants = [{"name": "a", "salt": "hush", "quota_bytes": "1MiB"}, {"name": "b", "salt_file": str(salt)}]
    for output in ("table", "json"):
        assert main(["config", "--extra", json.dumps({"tenants": tenants}), "--output", output]) == 0
        shown = capsys.readouterr().out
        assert "hush" not in shown
        assert "1MiB" in shown
        assert str(salt) in shown


def test_kv_config_shows_what_only_yaml_and_toml_have(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Dates, and names that are no text, in options whose types are checked later, or elsewhere."""
    (tmp_path / "kv.yaml").write_text(
        "tiers: [{type: s3, bucket: b, prefix: 2026-11-26}]\n"
        "observe: {subscribers: [{name: mine, levels: {1: low, 2026-11-27: high}}]}\n"
    )
    (tmp_path / "kv.toml").write_text('[[tiers]]\ntype = "s3"\nbucket = "b"\nprefix = 2026-11-26\n')
    for name in ("kv.yaml", "kv.toml"):
        for output in ("table", "json"):
            assert main(["config", "--file", str(tmp_path / name), "--output", output]) == 2
            told = capsys.readouterr()
            assert "2026-11-26" in told.out
            assert told.err.startswith("kv config: ") and "prefix" in told.err


@pytest.mark.parametrize(
    ("verdict", "kl", "said"),
    [
        (None, 0.01, "kv judge MODEL --out"),  # a file that is not there
        ("", 0.01, "set judge.verdict"),
        ("here", 0.001, "allows 0.001"),
        ("here", 0.01, ""),
    ],
)
def test_a_verdict_that_an_engine_would_refuse_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verdict: str | None, kl: float, said: str
) -> None:
    verdict_module = pytest.importorskip("kv_tiers.verdict")
    path = tmp_path / "verdict.json"
    finding = verdict_module.FormatQuality("fp8", 8.5, 0.002, 0.99, 0.0, 1.0, 0.1, 1.0, 1.0)
    verdict_module.write_verdict(path, verdict_module.Verdict("m", ((8, 64),), "bfloat16", 100, (finding,)))
    named = {None: str(tmp_path / "none.json"), "": "", "here": str(path)}[verdict]
    extra = {"format": "fp8", "judge": {"verdict": named, "max_kl": kl}}
    assert main(["config", "--extra", json.dumps(extra)]) == (2 if said else 0)
    assert said in capsys.readouterr().err


def test_commands_that_ask_a_server_find_it_by_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Engines, server and commands may share one file, under either name of the option."""
    file = tmp_path / "kv.yaml"
    file.write_text("server: {socket: /nowhere/kv.sock}\n")
    prompt = tmp_path / "prompt"
    prompt.write_text("1 2 3")
    for command in (["top", "--once"], ["drain"], ["explain", str(prompt)]):
        for option in ("--config", "--file"):
            assert main([*command, option, str(file)]) == 2
            assert "/nowhere/kv.sock" in capsys.readouterr().err
    file.write_text("server: {name: llama}\n")
    assert main(["top", "--once", "--config", str(file)]) == 2
    assert "llama.sock" in capsys.readouterr().err
    for named in (["--config", str(file)], [str(file)]):
        assert main(["config", *named]) == 0
        assert "llama" in capsys.readouterr().out
    file.write_text("http: {listen: '127.0.0.1:0'}\n")  # a server's, at the socket that all know
    assert main(["top", "--once", "--config", str(file)]) == 2
    assert "serves nothing there" not in capsys.readouterr().err + caplog.text


def test_a_servers_file_is_shown_as_the_server_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads no environment variables, as engines do."""
    monkeypatch.setenv("KV_HOST_CAPACITY_BYTES", "1GiB")
    file = tmp_path / "kv.yaml"
    for text, capacity in (("http: {listen: '127.0.0.1:0'}\n", ""), ("server: {name: llama}\n", "1073741824")):
        file.write_text(text)
        assert main(["config", str(file)]) == 0
        (shown,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("host.capacity_bytes")]
        assert ("1073741824" in shown) == bool(capacity), shown


@pytest.mark.parametrize("name", ["a b", "ab\n", "\nab"], ids=["space", "newline behind", "newline before"])
def test_errors_have_no_regular_expressions(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_options(Named, {"name": name}, "here")
    assert "that is a plain word" in str(refused.value) and "regex" not in str(refused.value)


def test_a_form_of_text_has_the_same_words_everywhere() -> None:
    """Else an error would use those of the module that was imported last."""
    with pytest.raises(AssertionError):
        spelled_as("[a-z]+", "a name")
