"""Real vLLM over a disk of the codec `progressive`: every bit of whole chunks, and approximations where allowed."""

from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, WARM_HITS, Answer, started
from kv_tiers.verdict import FIRST_PARTS, FormatQuality, Verdict, write_verdict

BOUND = 0.01


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `kv judge` writes it, of a model such as `tiny_llama`."""
    path = tmp_path_factory.mktemp("verdict") / "verdict.json"
    finding = FormatQuality(FIRST_PARTS, 4.0, BOUND, 0.98, 0.001, 0.9, 0.1, 1.0, 1.0)
    write_verdict(path, Verdict("tiny", ((2, 32),), "bfloat16", 512, (finding,)))
    return path


def over(directory: Path, **options: Any) -> dict[str, Any]:
    disk = {"type": "disk", "directory": str(directory), "capacity_bytes": "64MiB", **options}
    return {"host": {"capacity_bytes": "16MiB"}, "tiers": [disk], "cold": {"wait_s": 20.0}}


@pytest.mark.slow
def test_cold_warm_after_a_restart_and_approximate(tiny_llama: str, tmp_path: Path, verdict: Path) -> None:
    """A hit's tokens are compared with a hit's of the same length, as in bfloat16 computing rounds otherwise."""

    def answers(cache: dict[str, Any]) -> tuple[list[Answer], list[int], dict[str, Any]]:
        with started(tiny_llama, cache=cache, dtype="bfloat16") as engine:
            given = engine.ask_in_turn(PROMPTS)
            return given, engine.hits, engine.assert_at_rest()["tiers"]["disk"]["lane"]

    exact = over(tmp_path / "kv", codec="progressive")
    with started(tiny_llama, cache=exact, dtype="bfloat16") as first:
        first.ask_in_turn(PROMPTS)
        assert first.hits == [0, 512, 512, 768, 0, 0]
        warm = first.ask_in_turn(PROMPTS)
        assert first.hits == WARM_HITS
        first.assert_at_rest()
    given, hits, lane = answers(exact)
    assert (given, hits) == (warm, WARM_HITS)
    assert lane["approximate"] == 0 < lane["loaded"]

    approximate = over(tmp_path / "kv", approximate=True, write="never")
    judge = {"judge": {"verdict": str(verdict), "max_kl": BOUND}}
    given, hits, lane = answers(approximate | judge)
    assert hits == WARM_HITS
    assert lane["approximate"] == lane["loaded"] > 0
    assert lane["stored"] == 0
    assert [len(answer) for answer in given] == [len(answer) for answer in warm]

    given, hits, lane = answers(exact)  # nothing of the approximations is there
    assert (given, hits) == (warm, WARM_HITS)


@pytest.mark.slow
def test_approximations_beyond_the_bound_are_refused_at_start(
    tiny_llama: str, tmp_path: Path, verdict: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = over(tmp_path / "kv", approximate=True, write="never")
    judge = {"judge": {"verdict": str(verdict), "max_kl": BOUND / 2}}
    # In a process of its own: vLLM keeps the connector of an engine that did not start for the next one.
    with (
        pytest.raises(RuntimeError, match="Engine core initialization failed"),
        started(tiny_llama, cache=cache | judge, own_process=True, dtype="bfloat16"),
    ):
        pass
    assert f"format progressive has a KL divergence of {BOUND:g}" in capfd.readouterr().err
