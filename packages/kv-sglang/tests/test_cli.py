"""`python -m kv_sglang flags` prints what SGLang takes, and nothing that it or we would refuse."""

import json
import shlex

import pytest
from kv_core.errors import ConfigError
from kv_sglang.attach import read_settings
from kv_sglang.cli import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert main(["flags", *arguments]) == 0
    flags = shlex.split(capsys.readouterr().out)
    return {name: value for name, _, value in (flag.partition("=") for flag in flags)}


def test_the_settings_that_are_printed_are_those_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    flags = printed(
        capsys, "--capacity", "1GiB", "--tier", "disk:path=/kv,capacity_bytes=1GiB", "--tier", "dram:capacity_bytes=5"
    )
    assert flags["--page-size"] == "64"
    assert flags["--hicache-storage-backend"] == "dynamic"
    extra = json.loads(flags["--hicache-storage-backend-extra-config"])
    assert (extra["module_path"], extra["class_name"], extra["interface_v1"]) == ("kv_sglang.storage", "KVStorage", 1)
    extra.pop("hicache_storage_pass_prefix_keys")  # SGLang takes it out itself
    settings = read_settings(extra, 64)
    assert settings.host.capacity == "1GiB"
    assert settings.tiers[0] == {"type": "disk", "path": "/kv", "capacity_bytes": "1GiB"}
    assert settings.tiers[1] == {"type": "dram", "capacity_bytes": 5}
    assert settings.chunk_tokens == 64


def test_for_the_linker_the_same_settings_go_into_its_own_config(capsys: pytest.CaptureFixture[str]) -> None:
    flags = printed(capsys, "--linker", "--capacity", "1GiB", "--page-size", "32")
    assert not any(name.startswith(("--hicache", "--enable-hierarchical")) for name in flags)
    assert "--enable-unified-cache-external-linker" in flags
    assert (flags["--page-size"], flags["--unified-cache-external-linker-backend"]) == ("32", "dynamic")
    config = json.loads(flags["--unified-cache-external-linker-config"])
    assert (config["linker_module_path"], config["linker"]) == ("kv_sglang.linker", "KVLinker")
    assert read_settings(config["linker_extra_config"], 32).host.capacity == "1GiB"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacity", "lots"], "host.capacity"),
        (["--tier", "disk:path"], "'path' is not OPTION=VALUE"),
        (["--page-size", "0"], "at least one token"),
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
        read_settings({"backend_name": "x", "interface_v1": 1, **extra}, 64)


def test_settings_that_both_engines_read_are_fine_where_they_agree() -> None:
    assert read_settings({"chunk_tokens": 16, "algorithm": "sha256", "save_decode": True}, 16).chunk_tokens == 16
