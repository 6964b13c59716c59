"""Real vLLM over a full disk that drops last parts of chunks before it drops chunks, beside one that drops chunks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import in_pool, started
from kv_tiers.cache.upgrade import Upgrades
from kv_tiers.tier import TierContext
from kv_tiers.tiers.disk import bytes_for

CHUNK_BYTES = 256 << 10
"""Of `tiny_llama` in bfloat16."""
SLOTS = 6
"""Whole chunks for which the disk has room; as `progressive` stores them, up to eight."""
PROMPTS = [[3 + (7919 * i + 131 * number) % 2000 for i in range(512 + 20)] for number in range(8)]
"""Two chunks each, and no chunk in two of them."""
FOUND = [512] * len(PROMPTS)


def over(directory: Path, **options: Any) -> dict[str, Any]:
    capacity_bytes = bytes_for(TierContext(CHUNK_BYTES, CHUNK_BYTES, ""), SLOTS)
    disk = {"type": "disk", "directory": str(directory), "capacity_bytes": capacity_bytes, "codec": "progressive"}
    return {"host": {"capacity_bytes": "16MiB"}, "tiers": [disk | options], "cold": {"wait_s": 20.0}}


def numbers(chunk: memoryview) -> np.ndarray[Any, Any]:
    """Of bfloat16, copied."""
    assert len(chunk) == CHUNK_BYTES
    return (np.frombuffer(chunk, "<u2").astype(np.uint32) << 16).view(np.float32)


def after_a_restart(model: str, cache: dict[str, Any]) -> tuple[list[int], dict[str, float], dict[str, Any]]:
    """What a second engine finds on the disk that the first has filled: tokens of each prompt; of each chunk that came
    from there the error of its numbers, beside their size; and the lane's counters."""
    with started(model, cache=cache, dtype="bfloat16") as engine:
        engine.ask_in_turn(PROMPTS)
        assert engine.hits == [0] * len(PROMPTS)
        engine.assert_at_rest()
        computed = in_pool(numbers)
    assert len(computed) == 2 * len(PROMPTS)
    with started(model, cache=cache, dtype="bfloat16") as engine:
        errors = {}
        hits = []
        for prompt in reversed(PROMPTS):  # the newest first, which no store for an older one has pushed out by then
            engine.ask([prompt])
            hits = [*engine.hits, *hits]
            for key, chunk in in_pool(numbers).items():
                errors.setdefault(key, float(np.abs(chunk - computed[key]).mean() / np.abs(computed[key]).mean()))
        return hits, errors, engine.assert_at_rest()["tiers"]["disk"]["lane"]


@pytest.mark.slow
def test_a_full_disk_that_drops_parts_finds_every_prompt_and_one_that_drops_chunks_does_not(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Upgrades, "_begin", lambda self, tier: self._wanted[tier].clear())  # what is cut stays so
    hits, errors, lane = after_a_restart(tiny_llama, over(tmp_path / "chunks"))  # the control
    print(f"chunks dropped: hits {hits}, errors up to {max(errors.values()):.4f}, {lane}")
    assert 0 < sum(hits) < sum(FOUND) * 2 // 3
    assert lane["approximate"] == 0

    parts = over(tmp_path / "parts", when_full="drop_parts", approximate=True)
    hits, errors, lane = after_a_restart(tiny_llama, parts)
    print(f"parts dropped: hits {hits}, errors from {min(errors.values()):.4f} to {max(errors.values()):.4f}, {lane}")
    assert hits == FOUND
    assert lane["approximate"] >= len(errors) == 2 * len(PROMPTS)
    assert all(0 < error < 0.1 for error in errors.values())
