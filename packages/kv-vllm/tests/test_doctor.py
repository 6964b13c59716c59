"""What `kv doctor` says of vLLM."""

import pytest
from kv_vllm.doctor import TESTED, judged


@pytest.mark.parametrize(
    ("version", "state"),
    [(f"{TESTED}.0", "ok"), (f"{TESTED}.3+cpu", "ok"), (f"{TESTED}0.0", "note"), ("0.99.0", "note"), (None, "note")],
)
def test_only_the_tested_version_is_passed_over_in_silence(version: str | None, state: str) -> None:
    finding = judged(version)
    assert finding.state == state
    assert bool(finding.advice) == (state != "ok")
