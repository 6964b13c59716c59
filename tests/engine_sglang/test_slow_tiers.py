"""Real SGLang over a tier that is far slower than computing: it learns this by itself, and does not wait."""

import sys
from pathlib import Path
from typing import Any

import pytest
from engines import PAGE, started
from kv_testing.throttled import offer

LEARNING = 8
"""Prompts that are computed and stored, which is enough to know what computing takes."""
BYTES_PER_S = 1_000_000.0
"""A prompt takes 1.3 MB."""


def prompt(number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(640)]


@pytest.mark.slow
@pytest.mark.parametrize("use", ["auto", "always"])  # the latter is the control
def test_what_takes_longer_to_load_than_to_compute_is_computed(
    tiny_llama: str, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    monkeypatch.syspath_prepend(str(tmp_path))
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "256MiB"}
    cache: dict[str, Any] = {
        "use": use,
        "host": {"capacity_bytes": "2MiB", "policy": "lru"},  # less than two prompts
        "tiers": [{"type": "throttled", "load_bytes_per_s": BYTES_PER_S, "tier": disk}],
        "cold": {"wait_s": 60.0},
    }
    with started(tiny_llama, cache=cache) as engine:
        first = [engine.ask_in_turn([prompt(number)]) for number in range(LEARNING)]
        found = 0
        for number in range(LEARNING // 2):
            assert engine.ask_in_turn([prompt(number)]) == first[number]
            found += engine.hits[0]
    if use == "always":
        assert found == LEARNING // 2 * ((len(prompt(0)) - 1) // PAGE * PAGE)
    else:
        assert found < len(prompt(0))  # of the first ones, as long as the tier's speed is not known
