"""`kv doctor` shows what every package finds, also when one of them fails."""

import importlib.metadata
import json
from collections.abc import Iterator

import pytest
from kv_core.tools.cli import main
from kv_core.tools.doctor import CHECKS, DoctorOptions, Finding, version_of


def well(options: DoctorOptions) -> Iterator[Finding]:
    yield Finding("ok", "bus", f"measured: {options.measure}, {options.path}")
    yield Finding("note", "copy paths", "not measured", "measure them")


def broken(options: DoctorOptions) -> Iterator[Finding]:
    yield Finding("ok", "before", "fine")
    raise ValueError("no such thing")


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As entry points of this module."""
    entries = [importlib.metadata.EntryPoint(name, f"{__name__}:{name}", CHECKS) for name in names]
    known = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: importlib.metadata.EntryPoints(entries) if group == CHECKS else known(group=group),
    )
    checks = {"well": well, "broken": broken}
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: checks[self.name])


def test_each_finding_is_a_line_and_its_advice_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, "well")
    assert main(["doctor", "--path", "/data", "--no-measure"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok     bus: measured: False, /data",
        "note   copy paths: not measured",
        "       → measure them",
    ]


def test_a_check_that_fails_is_a_finding_and_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, "broken", "well")
    assert main(["doctor", "--json"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [finding["state"] for finding in told] == ["ok", "wrong", "ok", "note"]
    assert "no such thing" in told[1]["found"]


def test_the_version_of_what_is_not_there_is_none() -> None:
    assert version_of("kv-core")
    assert version_of("kv-no-such-package") is None
