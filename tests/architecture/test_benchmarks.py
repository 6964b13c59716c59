"""A benchmark that cannot measure what it is asked for says so at once, not after an hour or by leaving it out."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--way", "kvtc"), "kvtc needs --calibration"),
        (("--way", "kvtc, auto", "--calibration", "missing.kvtc"), "--calibration: "),
    ],
)
def test_kvtc_is_not_measured_without_a_calibration(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "progressive.py", "--model", str(tmp_path / "no-model"), *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert ran.returncode == 2 and message in ran.stderr
