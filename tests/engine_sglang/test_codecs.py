"""Real SGLang over a disk with a codec: a lossless one changes no token, a calibrated one hardly any."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import COLD_HITS, ON_A_CORE_EACH, PROMPTS, WARM_HITS, Answer, started
from kv_testing.spelling import some_text, with_words
from kv_testing.tiny import TinyLlama


def over(directory: Path, codec: Any) -> dict[str, Any]:
    disk = {"type": "disk", "directory": str(directory), "capacity_bytes": "256MiB", "codec": codec}
    return {"host": {"capacity_bytes": "64MiB"}, "tiers": [disk], "cold": {"wait_s": 60.0}}


def same(answers: list[Answer], others: list[Answer]) -> float:
    """The share of tokens before the first that differs."""
    pairs = [list(zip(one.tokens, other.tokens, strict=True)) for one, other in zip(answers, others, strict=True)]
    equal = [next((at for at, (one, other) in enumerate(pair) if one != other), len(pair)) for pair in pairs]
    return sum(equal) / sum(map(len, pairs))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["floats", "progressive"])
def test_what_a_lossless_codec_made_smaller_comes_back_after_a_restart(
    tiny_llama: str, reference: list[Answer], codec: str, tmp_path: Path
) -> None:
    for hits in (COLD_HITS, WARM_HITS):
        with started(tiny_llama, cache=over(tmp_path / "kv", codec)) as engine:
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == hits
            engine.detach()  # so that the last prompt is on disk, too


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_words(TinyLlama().write(tmp_path_factory.mktemp("spelling-llama")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "step"),
    [
        (2, 0.01),
        (1, 4),  # the wide steps are the control
        pytest.param(1, 0.01, marks=pytest.mark.long),
        pytest.param(2, 4, marks=pytest.mark.long),
    ],
)
def test_what_a_calibrated_codec_made_smaller_comes_back_nearly_as_it_was(
    model: str, ranks: int, step: float, tmp_path: Path
) -> None:
    """Each rank's heads by their own share of the calibration; with two of them in a private server's tier."""
    text = tmp_path / "text.txt"
    text.write_text(some_text())
    calibration = str(tmp_path / "model.kvtc")
    judge = [str(Path(sys.executable).parent / "kv"), "judge", model, "--calibrate", str(text), "--dtype", "float32"]
    subprocess.run([*judge, "--calibration", calibration, "--step", str(step), "--ranks", str(ranks)], check=True)
    cache = over(tmp_path / "kv", {"type": "kvtc", "calibration": calibration})
    apart: dict[str, Any] = {"tp_size": ranks, "environ": ON_A_CORE_EACH} if ranks > 1 else {}
    if ranks > 1:
        cache["server"] = {"answer_s": 20}
    answers = []
    for hits in (COLD_HITS, WARM_HITS):
        with started(model, cache=cache, **apart) as engine:
            answers.append(engine.ask_in_turn(PROMPTS))
            assert engine.hits == hits
            engine.detach()
    computed, found = answers
    near = same(found, computed)
    assert near > 0.8 if step < 1 else near < 0.5  # a tiny model's answers change at a touch
