"""The first command anybody types, with the tiny model: real vLLM in four processes, and equal tokens on every row; and
the demo of blending."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROW = re.compile(r" (\d+) +(\d+) +(\d+) +[\d.]+ s$", re.MULTILINE)
"""Of the demo of blending: tokens of a prompt, those found, and those computed again."""


def shown_by(demo: str, *options: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environ["VLLM_CACHE_ROOT"] = os.environ["VLLM_CACHE_ROOT"]
    command = [sys.executable, str(Path(__file__).parents[2] / "demo" / demo), *options]
    ran = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_demo_finds_the_prefix_in_every_phase() -> None:
    rows = [json.loads(line) for line in shown_by("on_vllm.py", "--json").splitlines() if line.startswith("{")]
    assert [row["phase"] for row in rows[::2]] == ["A", "B", "second process", "from disk"]
    assert [row["hit_tokens"] for row in rows] == [0, 512, *[640, 512] * 3]
    assert all(row["tokens_equal"] for row in rows)


def test_the_demo_of_blending_finds_documents_in_another_order(spelling_llama: str) -> None:
    shown = shown_by("blend.py", "--model", spelling_llama)
    prompts, found, again = zip(*(map(int, row) for row in ROW.findall(shown)), strict=True)
    assert found[:3] == (0, 0, 0) and 0.9 * prompts[3] < found[3] == found[4]
    assert [tokens > 0 for tokens in again] == [False, True, False, True, False]
    assert "of the time of a full prefill" in shown
