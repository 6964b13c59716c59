"""What `kv doctor` says of SGLang."""

import tomllib
from pathlib import Path

import pytest
from kv_core.tools.doctor import CHECKS
from kv_sglang import TESTED, judged


@pytest.mark.parametrize(
    ("version", "state"),
    [
        (TESTED, "ok"),
        (f"{TESTED}+cpu", "ok"),
        (f"{TESTED}.post1", "ok"),
        (f"{TESTED}0", "note"),
        ("0.99.0", "note"),
        (None, "note"),
    ],
)
def test_only_the_tested_version_is_passed_over_in_silence(version: str | None, state: str) -> None:
    finding = judged(version)
    assert finding.state == state
    assert bool(finding.advice) == (state != "ok")


def test_kv_doctor_asks_every_engines_package() -> None:
    for package, module in (("kv-vllm", "kv_vllm.interface"), ("kv-sglang", "kv_sglang")):
        project = tomllib.loads((Path(__file__).parents[2] / package / "pyproject.toml").read_text())["project"]
        assert project["entry-points"][CHECKS] == {package: f"{module}:check"}
