"""Real vLLM over a disk of the codec `kvtc`, calibrated by `kv judge` on the same model, and refused where it must be.

A trained model shows what users see; a tiny one, which needs no download, the way and its controls.
"""

from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, WARM_HITS, Answer, Engine, empty_the_pool, started
from kv_core.tools.cli import main
from kv_cuda.judge.verdict import read_verdict

TEXT = " ".join(f"w{3 + (7919 * n) % 1900}" for n in range(2300))
ROOT = Path(__file__).parents[2]
TRAINED = ROOT / ".venvs" / "trained" / "models" / "SmolLM2 135M"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def calibrated(model: str, by: Path, out: Path, step: float, *more: str) -> Path:
    assert main(["judge", model, "--calibrate", str(by), "--calibration", str(out), "--step", str(step), *more]) == 0
    return out


def over(directory: Path, calibration: Path | None) -> dict[str, Any]:
    disk: dict[str, Any] = {"type": "disk", "directory": str(directory), "capacity_bytes": "512MiB"}
    if calibration is not None:
        disk["codec"] = {"type": "kvtc", "calibration": str(calibration)}
    return {"host": {"capacity_bytes": "256MiB"}, "tiers": [disk], "cold": {"wait_s": 20.0}}


def same(answers: list[Answer], others: list[Answer]) -> float:
    """The share of tokens before the first that differs."""
    equal = 0
    for one, other in zip(answers, others, strict=True):
        equal += next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
    return equal / sum(map(len, answers))


def likeliest(engine: Engine, prompts: list[list[int]]) -> list[dict[int, float]]:
    """For each prompt the next token's log-probabilities, of the twenty likeliest."""
    from vllm import SamplingParams, TokensPrompt

    made = []
    for prompt in prompts:
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=20, detokenize=False)
        (output,) = engine.llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        assert output.num_cached_tokens == 1024
        made.append({token: one.logprob for token, one in output.outputs[0].logprobs[0].items()})
    return made


def distance(exact: list[dict[int, float]], other: list[dict[int, float]]) -> float:
    """How far apart the log-probabilities of the five likeliest tokens are, on average, in nats."""
    apart = [
        abs(value - its.get(token, -20.0))
        for one, its in zip(exact, other, strict=True)
        for token, value in sorted(one.items(), key=lambda pair: -pair[1])[:5]
    ]
    return sum(apart) / len(apart)


def from_disk(engine: Engine, prompts: list[list[int]], new_tokens: int = 12) -> list[Answer]:
    """What it answers with nothing in its pool."""
    engine.inside("kv_settle")
    empty_the_pool()
    return engine.ask_in_turn(prompts, new_tokens)


@pytest.mark.slow
def test_chunks_come_back_nearly_as_they_were_and_meet_no_other_cache(
    spelling_llama: str, tmp_path: Path, text: Path
) -> None:
    fine = calibrated(spelling_llama, text, tmp_path / "fine.kvtc", 0.01, "--dtype", "float32")
    coarse = calibrated(spelling_llama, text, tmp_path / "coarse.kvtc", 4, "--dtype", "float32")
    directory = tmp_path / "kv"
    with started(spelling_llama, cache=over(directory, fine)) as engine:
        engine.ask_in_turn(PROMPTS)
        expected = engine.ask_in_turn(PROMPTS)  # from the pool, which has what was computed
        assert engine.hits == WARM_HITS
        answers = from_disk(engine, PROMPTS)
        assert engine.hits == WARM_HITS
        seen = engine.assert_at_rest()["tiers"]["disk"]
        assert seen["lane"]["loaded"] > 0 < seen["lane"]["stored"]
        assert same(answers, expected) > 0.8  # a tiny model's answers change at a touch
    # The control: the same way with steps as wide as four standard deviations answers otherwise.
    with started(spelling_llama, cache=over(directory, coarse)) as engine:
        engine.ask_in_turn(PROMPTS)
        assert engine.hits == [0, 512, 512, 768, 0, 0]  # it finds nothing that another calibration stored
        assert same(from_disk(engine, PROMPTS), expected) < 0.5


@pytest.mark.slow
def test_a_calibration_beyond_the_bound_is_refused_at_start(
    spelling_llama: str, tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "verdict.json"
    judged = ["--text", str(text), "--context", "512", "--windows", "1", "--out", str(out)]
    path = calibrated(spelling_llama, text, tmp_path / "model.kvtc", 0.4, "--dtype", "float32", *judged)
    (finding,) = read_verdict(out).findings
    assert finding.format.startswith("kvtc-") and finding.kl > 0
    judge = {"judge": {"verdict": str(out), "max_kl": finding.kl / 2}}
    # In a process of its own: vLLM keeps the connector of an engine that did not start for the next one.
    with (
        pytest.raises(RuntimeError, match="Engine core initialization failed"),
        started(spelling_llama, cache=over(tmp_path / "kv", path) | judge, own_process=True),
    ):
        pass
    assert f"format {finding.format} has a KL divergence of {finding.kl:.2g}" in capfd.readouterr().err


@pytest.mark.trained
def test_a_trained_model_answers_nearly_the_same_from_a_sixth_of_the_bytes(tmp_path: Path) -> None:
    if not (TRAINED / ".written").exists():
        pytest.skip("the trained models are not here; make test-trained makes them")
    by = ROOT / "docs" / "contracts" / "vllm.md"
    calibration = calibrated(str(TRAINED), by, tmp_path / "smollm2.kvtc", 0.4)
    arguments = {"skip_tokenizer_init": False, "max_num_batched_tokens": 4096, "dtype": "bfloat16"}
    cache = over(tmp_path / "kv", calibration)
    with started(str(TRAINED), cache=cache, **arguments) as engine:
        tokenizer = engine.llm.get_tokenizer()
        prompts = [
            [*tokenizer.encode((ROOT / name).read_text(encoding="utf-8"))[:1040], *tokenizer.encode(question)]
            for name in ("README.md", "ARCHITECTURE.md")
            for question in ("\n\nIn short, this document", "\n\nThe most important term is")
        ]
        engine.ask_in_turn(prompts, 1)
        exact = likeliest(engine, prompts)  # from the pool, which has what was computed
        engine.inside("kv_settle")
        empty_the_pool()
        loaded = likeliest(engine, prompts)
        lane = engine.assert_at_rest()["tiers"]["disk"]["lane"]
        assert lane["stored"] == lane["loaded"] == 2 * 4
        engine.inside("kv_corrupt")
        wrong = likeliest(engine, prompts)
        near, far = distance(exact, loaded), distance(exact, wrong)
        print(f"nats apart: {near:.3f} from disk, {far:.3f} where chunks are wrong")
        assert 0 < near < 0.3 and far > 5 * near
