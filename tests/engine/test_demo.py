"""The first command anybody types, with the tiny model: real vLLM in four processes, and equal tokens on every row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demo_finds_the_prefix_in_every_phase() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environ["VLLM_CACHE_ROOT"] = os.environ["VLLM_CACHE_ROOT"]
    command = [sys.executable, str(Path(__file__).parents[2] / "demo" / "on_vllm.py"), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [row["phase"] for row in rows[::2]] == ["A", "B", "second process", "from disk"]
    assert [row["hit_tokens"] for row in rows] == [0, 512, *[640, 512] * 3]
    assert all(row["tokens_equal"] for row in rows)
