"""`python -m kv_sglang flags` prints what SGLang takes, and nothing that it or we would refuse."""

import argparse
import json
import os
import shlex
from pathlib import Path

import pytest
from kv_core.errors import ConfigError
from kv_sglang.cli import main, read_settings


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert main(["flags", *arguments]) == 0
    flags = shlex.split(capsys.readouterr().out)
    return {name: value for name, _, value in (flag.partition("=") for flag in flags)}


def test_the_settings_that_are_printed_are_those_that_were_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    disk = f"disk:directory={tmp_path}/kv,capacity_bytes=1GiB"
    flags = printed(capsys, "--capacity", "1GiB", "--tier", disk, "--tier", "dram:capacity_bytes=67108864")
    assert flags["--page-size"] == "64"
    assert flags["--hicache-storage-backend"] == "dynamic"
    extra = json.loads(flags["--hicache-storage-backend-extra-config"])
    assert (extra["module_path"], extra["class_name"], extra["interface_v1"]) == ("kv_sglang.storage", "KVStorage", 1)
    extra.pop("hicache_storage_pass_prefix_keys")  # SGLang takes it out itself
    settings = read_settings(extra, 64, {})
    assert settings.host.capacity_bytes == 1 << 30
    assert settings.tiers[0] == {"type": "disk", "directory": f"{tmp_path}/kv", "capacity_bytes": "1GiB"}
    assert settings.tiers[1] == {"type": "dram", "capacity_bytes": 64 << 20}
    assert settings.chunk_tokens == 64


def test_for_the_linker_the_same_settings_go_into_its_own_config(capsys: pytest.CaptureFixture[str]) -> None:
    flags = printed(capsys, "--linker", "--capacity", "1GiB", "--page-size", "32")
    assert not any(name.startswith(("--hicache", "--enable-hierarchical")) for name in flags)
    assert "--enable-unified-cache-external-linker" in flags
    assert (flags["--page-size"], flags["--unified-cache-external-linker-backend"]) == ("32", "dynamic")
    config = json.loads(flags["--unified-cache-external-linker-config"])
    assert (config["linker_module_path"], config["linker"]) == ("kv_sglang.linker", "KVLinker")
    assert read_settings(config["linker_extra_config"], 32, {}).host.capacity_bytes == 1 << 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacity", "lots"], "host.capacity_bytes"),
        (["--tier", "disk:directory"], "'directory' is not OPTION=VALUE"),
        (["--page-size", "0"], "at least one token"),
        (["--page-size", "2000000"], "from 1 to 1048576"),
        (["--hicache-size", "0"], "whole number of GB"),
        (["--hicache-ratio", "-1"], "a number above 0"),
        (["--hicache-ratio", "nan"], "a number above 0"),
        (["--tier", "disc:directory=/tmp/kv,capacity_bytes=1GiB"], "did you mean 'disk'"),
        (["--tier", "disk:directory=/tmp/kv,capacity=1GiB"], "did you mean 'capacity_bytes'"),
        (["--tier", "disk:directory=/tmp/kv,capacity_bytes=lots"], 'such as "4MiB"'),
        (
            ["--tier", "disk:directory=/nowhere/at/all,capacity_bytes=1GiB"],
            "no directory /nowhere/at; make that one",
        ),
        (["--tier", "disk:directory=/dev/null,capacity_bytes=1GiB"], "/dev/null cannot be used for the disk tier"),
        (["--tier", "redis:url=redis://h,password_file=/nowhere"], "/nowhere cannot be read"),
        (["--tier", "dram:capacity_bytes=1GiB", "--tier", "dram:capacity_bytes=1GiB"], "two tiers are called 'dram'"),
        (["--tier", "disk:directory=2026,capacity_bytes=1GiB"], "directory"),
        (["--tier", "dram:capacity_bytes=1" + "0" * 5000], 'such as "4MiB"'),
        (["--config-file", "/nowhere.yaml"], "cannot be read"),
        (["--tier", "gds:directory=/tmp/kv,capacity_bytes=1GiB"], "type: gds is for vLLM; write type: disk"),
    ],
)
def test_what_would_be_refused_at_the_start_is_refused_here(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["flags", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"chunk_tokens": 256}, "start with --page-size 256"),
        ({"algorithm": "xxh3_128"}, "by sha256"),
        ({"format": "blocks"}, "canonical"),
        ({"hostt": {}}, "did you mean 'host"),
    ],
)
def test_settings_that_sglangs_pages_cannot_have_are_refused(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings({"backend_name": "x", "interface_v1": 1, **extra}, 64, {})


def test_what_sglang_adds_to_the_settings_is_its_own() -> None:
    """It adds its argument `--file-storage-path`, which is for the files of batches, too, for whatever backend."""
    settings = read_settings({"file_storage_path": "/files", "host": {"capacity_bytes": "1GiB"}}, 64, {})
    assert settings.host.capacity_bytes == 1 << 30


def test_settings_that_both_engines_read_are_fine_where_they_agree() -> None:
    assert read_settings({"chunk_tokens": 16, "algorithm": "sha256", "save_decode": True}, 16, {}).chunk_tokens == 16


def config_file(directory: Path, text: str) -> str:
    (directory / "kv.yaml").write_text(text)
    return str(directory / "kv.yaml")


def test_a_file_whose_chunk_is_another_than_the_page_is_refused_and_without_a_page_its_chunk_is_the_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It was printed, and refused a minute later by the engine."""
    file = config_file(tmp_path, "chunk_tokens: 128\n")
    assert main(["flags", "--config-file", file, "--page-size", "64"]) == 2
    assert "chunk_tokens is 128" in (said := capsys.readouterr().err) and "--page-size 128" in said
    assert printed(capsys, "--config-file", file)["--page-size"] == "128"
    assert printed(capsys, "--config-file", file, "--page-size", "128")["--page-size"] == "128"
    assert main(["flags", "--config-file", config_file(tmp_path, "format: blocks\n")]) == 2
    assert "canonical" in capsys.readouterr().err


def test_paths_are_printed_as_they_are_from_wherever_sglang_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config_file(tmp_path, "chunk_tokens: 64\n")
    flags = printed(
        capsys, "--config-file", "kv.yaml", "--tier", "disk:directory=kv,capacity_bytes=1GiB", "--socket", "s"
    )
    extra = json.loads(flags["--hicache-storage-backend-extra-config"])
    here = os.getcwd()
    assert extra["config_file"] == f"{here}/kv.yaml"
    assert extra["tiers"][0]["directory"] == f"{here}/kv"
    assert extra["server"]["socket"] == f"{here}/s"
    several = config_file(tmp_path, "tiers:\n  - {type: disk, directory: [/srv/a, b], capacity_bytes: 1GiB}\n")
    assert main(["flags", "--config-file", several]) == 2
    assert f"directory b is relative, and SGLang may start elsewhere: write {here}/b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ([], "--hicache-size", "5"),  # our 4 GiB are 4.3 GB
        (["--capacity", "16GB"], "--hicache-size", "16"),
        (["--hicache-size", "3"], "--hicache-size", "3"),
        (["--hicache-ratio", "1.5"], "--hicache-ratio", "1.5"),
    ],
)
def test_sglangs_own_host_memory_has_a_size(
    capsys: pytest.CaptureFixture[str], given: list[str], name: str, value: str
) -> None:
    """Without one SGLang takes most of what the machine has left, or refuses to start."""
    flags = printed(capsys, *given)
    assert {flag: size for flag, size in flags.items() if flag in ("--hicache-size", "--hicache-ratio")} == {
        name: value
    }


def test_the_linker_has_no_host_memory_of_sglangs(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any(flag.startswith("--hicache") for flag in printed(capsys, "--linker"))


def test_a_directory_of_others_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As an ordinary user sees it: root may write everywhere."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write everywhere")
    assert main(["flags", "--tier", f"disk:directory={locked}/kv,capacity_bytes=1GiB"]) == 2
    assert "cannot" in (said := capsys.readouterr().err) and str(locked) in said


def test_peers_that_are_in_a_directory_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Their `directory` is a table of options, and was taken for a path."""
    listed = "{url: 'redis://127.0.0.1:6379', address: '127.0.0.1:9500'}"
    file = config_file(tmp_path, f"tiers:\n  - {{type: peers, directory: {listed}, unprotected: true}}\n")
    flags = printed(capsys, "--config-file", file)
    assert json.loads(flags["--hicache-storage-backend-extra-config"])["config_file"] == file


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tiers: [{type: peers, directory: {url: 'redis://h:1', address: 'h:2', password_file: a}}]", "password_file"),
        ("tenants: [{name: one, salt_file: a}]", "tenants[0]: salt_file"),
        ("server: {socket: a}", "server.socket"),
        ("observe: {record: a}", "observe.record"),
        ("judge: {verdict: a}", "judge.verdict"),
    ],
)
def test_a_relative_path_anywhere_in_the_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str
) -> None:
    """Only the paths of tiers were checked, and of them not those in a table. Each was missing where SGLang started.

    A tenant's salt is read with the settings, so there is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch(mode=0o600)
    (tmp_path / "a").write_text("salt")
    assert main(["flags", "--config-file", config_file(tmp_path, text)]) == 2
    expected = f"{name} a is relative, and SGLang may start elsewhere: write {os.getcwd()}/a"
    assert expected in capsys.readouterr().err


def test_settings_that_are_refused_do_not_start_an_engine_without_the_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In `eval … $(… flags …)` the shell ignores the status, so what is printed must be refused as well."""
    assert main(["flags", "--tier", "dsik:directory=/x"]) == 2
    printed = capsys.readouterr().out
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--model-path")
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parser.parse_args(["--model-path", "m", *shlex.split(printed)])
