"""Quantised chunks in the real engine: hits as with exact ones, and what comes back is within the documented bound.

The answers may differ; benchmarks/quantised.py says how often.
"""

from pathlib import Path

import pytest
from engines import PROMPTS, WARM_HITS, Answer, started
from kv_cuda import bind
from kv_testing.vllm_witness import Witness


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all engines here."""
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest.mark.parametrize(
    ("kind", "dtype", "worst"),
    [("int8", "float32", 1 / 254), pytest.param("fp8", "bfloat16", 1 / 15, marks=pytest.mark.slow)],
)
def test_hits_are_whole_chunks_and_what_comes_back_is_within_the_bound(
    kind: str,
    dtype: str,
    worst: float,
    tiny_llama: str,
    reference: list[Answer],
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second engine finds the first one's chunks on its disk, as large and of another meaning, and takes none."""
    witness = Witness()
    monkeypatch.setattr(bind, "make_copier", witness.make_copier)
    tier = {"type": "disk", "directory": str(disk), "capacity_bytes": "64MiB"}
    cache = {"format": kind, "host": {"capacity_bytes": "64MiB"}, "tiers": [tier]}
    with started(tiny_llama, cache=cache, dtype=dtype) as engine:
        first = engine.ask([PROMPTS[0]])
        if dtype == "float32":
            assert first == [reference[0]]
        assert engine.hits == [0]
        engine.ask_in_turn(PROMPTS)
        engine.ask_in_turn(PROMPTS)
        assert engine.hits == WARM_HITS
        seen = engine.assert_at_rest()
        assert seen["formats"] == [kind]
        assert seen["tiers"]["disk"]["chunks"] >= seen["cache"]["chunks_resident"] > 0
        (described,) = witness.formats
        assert described.is_quantised
        loaded = seen["worker"]["loaded_tokens"]
    assert loaded > sum(WARM_HITS) - len(WARM_HITS)
    assert witness.errors.numbers == loaded * len(described.parts) * described.layers * described.heads * 32
    assert 0 < witness.errors.worst <= worst * (1 + 1e-4)
    assert witness.errors.rms < 2 * worst
