"""What `kv doctor` says of vLLM."""

import pytest
from kv_vllm.interface import TESTED, judged


@pytest.mark.parametrize(
    ("version", "state"),
    [
        *((f"{tested}.0", "ok") for tested in TESTED),
        *((f"{tested}.3+cpu", "ok") for tested in TESTED),
        *((f"{tested}0.0", "note") for tested in TESTED),
        ("0.99.0", "note"),
        (None, "note"),
    ],
)
def test_only_a_tested_version_is_passed_over_in_silence(version: str | None, state: str) -> None:
    finding = judged(version)
    assert finding.state == state
    assert bool(finding.advice) == (state != "ok")
