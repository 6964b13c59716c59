"""The judge on a tiny model by transformers, and its verdict where the real engine starts."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import PROMPTS, started
from kv_codecs.judge.calibrate import calibrate, through_calibrated
from kv_codecs.judge.measure import Model, RoundTrip, Windows, judge
from kv_codecs.judge.rivals import rivals
from kv_core.errors import ConfigError
from kv_core.tools.cli import main
from kv_testing.spelling import some_text, with_words
from kv_testing.tiny_deepseek import write_tiny_deepseek
from kv_tiers.verdict import read_verdict

TEXT = some_text(1300)


def test_kv_as_it_is_costs_nothing_and_wrong_kv_much(spelling_llama: str) -> None:
    """The control of the whole way: what is fed back is what was computed, and the model goes by it."""
    model = Model(spelling_llama, dtype="float32")
    tokens = model.tokens(TEXT)
    layers = model.computed(tokens[:600])
    whole = model.predicted([], tokens[:616])[600:]
    fed_back = model.predicted(layers, tokens[600:616])
    assert float((whole.exp() * (whole - fed_back)).sum(-1).mean()) < 1e-6
    wrong = [(keys.roll(1, 2), values) for keys, values in layers]
    spoilt = model.predicted(wrong, tokens[600:616])
    assert float((whole.exp() * (whole - spoilt)).sum(-1).mean()) > 1e-2


def test_more_bits_lose_less_and_a_text_that_is_too_short_is_named(spelling_llama: str) -> None:
    model = Model(spelling_llama)
    found = judge(model, TEXT, [RoundTrip("fp8"), RoundTrip("int8")], Windows(512, 64, 16, most=2))
    fp8, int8 = found.of("fp8"), found.of("int8")
    assert fp8 and int8 and found.tokens == 128
    assert 0 < int8.kl < fp8.kl
    assert int8.worst < fp8.worst
    assert found.heads == ((2, 32),) * 4 and found.dtype == "bfloat16"
    assert torch.isfinite(torch.tensor([int8.perplexity, int8.top1, int8.greedy])).all()
    compared = judge(model, TEXT, rivals(), Windows(512, 64, 16, most=1))
    kivi4, kivi2 = compared.of("kivi4"), compared.of("kivi2")
    assert kivi4 and kivi2 and kivi4.kl < kivi2.kl
    with pytest.raises(ConfigError, match="one window takes 2128"):
        judge(model, TEXT, [RoundTrip("int8")], Windows(2000))


def test_a_smaller_step_of_a_calibration_loses_less_and_takes_more(spelling_llama: str, tmp_path: Path) -> None:
    model = Model(spelling_llama)
    learning = calibrate(model, model.tokens(TEXT))
    trips = []
    for step in (0.25, 0.5):
        learning.learnt(step).write(tmp_path / str(step))
        trips.append(through_calibrated(str(tmp_path / str(step))))
    fine, coarse = judge(model, TEXT, trips, Windows(512, 64, 16, most=1)).findings
    assert 0 < fine.kl < coarse.kl and coarse.bits < fine.bits < 8
    assert fine.encode_gbs > 0 < fine.decode_gbs


def test_a_model_whose_rotation_is_not_known_is_not_calibrated(
    spelling_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says of itself: keys at other positions have to be the same, turned back."""
    model = Model(spelling_llama)
    tokens = model.tokens(TEXT)
    rotations = model.rotations

    def slower(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        angles = [np.arctan2(sin[1], cos[1]) / 2 * np.arange(count)[:, None] for cos, sin in rotations(count)]
        return [(np.cos(one), np.sin(one)) for one in angles]

    monkeypatch.setattr(model, "rotations", slower)
    with pytest.raises(ConfigError, match="rotates the keys of layer 0 in a way that codec kvtc does not support"):
        calibrate(model, tokens)
    longer = 1 + np.arange(64)[:, None] / 640
    monkeypatch.setattr(model, "rotations", lambda _: [(longer * cos, longer * sin) for cos, sin in rotations(64)])
    with pytest.raises(ConfigError, match="rotates its keys in a way"):
        calibrate(model, tokens)
    with pytest.raises(ConfigError, match="at least 1024 tokens of text"):
        calibrate(model, tokens[:500])


def test_a_model_whose_values_are_smaller_than_its_keys_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in torch's words for tensors that cannot be stacked."""
    model, text = with_words(write_tiny_deepseek(tmp_path / "deepseek")), tmp_path / "text"
    text.write_text(TEXT)
    calibrating = ["--calibrate", str(text), "--calibration", str(tmp_path / "calibration")]
    for arguments in (["--windows", "1", "--context", "257", "--text", str(text)], calibrating):
        assert main(["judge", model, *arguments]) == 2
        said = capsys.readouterr().err
        assert "in layer 0 a token's keys are 1 × 512 numbers and its values 1 × 64" in said


@pytest.mark.slow
def test_the_engine_starts_with_a_format_that_is_good_enough_and_with_no_other(
    spelling_llama: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "verdict.json"
    text.write_text(TEXT)
    arguments = ["judge", spelling_llama, "--text", str(text), "--context", "512", "--windows", "1"]
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["tokens"] == 128
    assert "the verdict is in" in said.err
    int8, fp8 = read_verdict(out).of("int8"), read_verdict(out).of("fp8")
    assert int8 and fp8
    bound = (int8.kl + fp8.kl) / 2
    cache = {"host": {"capacity_bytes": "64MiB"}, "judge": {"verdict": str(out), "max_kl": bound}}
    with started(spelling_llama, cache=cache | {"format": "int8"}) as engine:
        engine.ask_in_turn(PROMPTS[:2])
        assert engine.hits == [0, 512]
    # In a process of its own: vLLM keeps the connector of an engine that did not start for the next one.
    with (
        pytest.raises(RuntimeError, match="Engine core initialization failed"),
        started(spelling_llama, cache=cache | {"format": "fp8"}, own_process=True),
    ):
        pass
    assert f"format fp8 has a KL divergence of {fp8.kl:.2g}" in capfd.readouterr().err


def test_a_model_whose_file_was_cut_short_is_named(
    spelling_llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A download that ended early, say: safetensors has an exception of its own for it."""
    model, text = tmp_path / "model", tmp_path / "text"
    shutil.copytree(spelling_llama, model)
    os.truncate(model / "model.safetensors", 1000)
    text.write_text("some words")
    assert main(["judge", str(model), "--text", str(text)]) == 2
    said = capsys.readouterr().err
    assert f"kv: error: model {model}: " in said and "Traceback" not in said
