"""`kv doctor --bundle` collects what a bug report needs, and no secret, wherever the settings have one."""

import json
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from kv_core.tools.cli import main

SECRET = "hush-4f1c"
TIERS: list[dict[str, Any]] = [
    {"type": "redis", "url": f"redis://me:{SECRET}@host:6379/0"},
    {"type": "redis", "url": f"redis://:a/{SECRET}@host"},
    {"type": "redis", "url": f"redis://host/0?password={SECRET}&db=1"},
    {"type": "redis", "url": "redis://host", "password": SECRET},
    {"type": "redis", "url": "redis://host", "password_env": SECRET},
    {"type": "s3", "bucket": "kv", "secret_access_key": SECRET},
    {"type": "s3", "bucket": "kv", "options": {"Authorization": SECRET, "session_token": SECRET}},
    {"type": "s3", "bucket": "kv", "credentials": [SECRET], "api_key": SECRET},
]


def bundled(path: Path, *words: str) -> dict[str, str]:
    assert main(["doctor", "--no-measure", "--bundle", str(path), *words]) == 0
    with tarfile.open(path) as archive:
        members = {name: archive.extractfile(name) for name in archive.getnames()}
        return {name: file.read().decode() for name, file in members.items() if file is not None}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server of this user is asked."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("in_file", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_secret_of_any_setting_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_file: bool) -> None:
    settings = {"tiers": TIERS, "tenants": [{"name": "acme", "salt": SECRET}]}
    words = []
    if in_file:
        file = tmp_path / "kv.json"
        file.write_text(json.dumps(settings))
        words = ["--config", str(file)]
    else:
        for name, value in settings.items():
            monkeypatch.setenv(f"KV_{name.upper()}", json.dumps(value))
    found = bundled(tmp_path / "report.tar.gz", *words)
    assert [name for name, text in found.items() if SECRET in text] == []
    shown = found["kv-bundle/settings.txt"]
    assert shown.count("***") >= len(TIERS), "they were read, and what is no secret is there"
    assert "acme" in shown and "host:6379" not in shown.replace("***@host:6379", "")


@pytest.mark.parametrize(
    "text",
    [
        "tenants: [{salt: SECRET",
        pytest.param('{"tenants": {"salt": "SECRET"}}', marks=pytest.mark.slow),
        pytest.param("salt: SECRET\n", marks=pytest.mark.slow),
    ],
)
def test_settings_that_cannot_be_read_give_away_none_either(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(text.replace("SECRET", SECRET))
    found = bundled(tmp_path / "report.tar.gz", "--config", str(file))
    assert [name for name, text in found.items() if SECRET in text] == []
    assert "kv config: exit status 2" in found["kv-bundle/settings.txt"]


def test_it_has_what_a_report_needs_and_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.tar.gz"
    found = bundled(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert json.loads(found["kv-bundle/versions.json"])["packages"]["kv-server"]
    assert "kv doctor: exit status" in found["kv-bundle/doctor.txt"]
    assert "host.capacity_bytes" in found["kv-bundle/settings.txt"]
    assert "kv top: exit status 2" in found["kv-bundle/server.txt"], "no server runs"
    content = path.read_bytes()
    capsys.readouterr()
    assert main(["doctor", "--bundle", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert path.read_bytes() == content
