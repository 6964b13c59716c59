"""`kv judge --calibrate` on tiny random models that rotate a part of each key, neighbours, some layers, or nothing.

Real vLLM has to store the keys that transformers showed, and to refuse a calibration for keys in another order.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import PROMPTS, WARM_HITS, in_pool, started
from kv_codecs.calibration import Calibration
from kv_codecs.judge import calibrate as calibrating
from kv_codecs.judge.calibrate import CONTEXT_TOKENS, calibrate
from kv_codecs.judge.measure import Model
from kv_codecs.kvtc import KvtcCodec
from kv_connect.nodes import ALONE
from kv_core.errors import ConfigError
from kv_vllm.calibrated import check_calibration
from numpy.typing import NDArray
from test_kvtc import BY_GROUPS_HITS, from_disk, over, same

CHUNK_TOKENS = 256
LEARN, OTHER = np.random.default_rng(1).integers(3, 2000, (2, 2048)).tolist()
"""Tokens."""
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": 4096, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "attention_bias": True, "vocab_size": 2048}

KINDS = {
    "Nemotron": (16, False, [8, 8]),
    "GLM-4": (16, True, [8, 8]),
    "Cohere": (32, True, [16, 16]),
    "Cohere 2": (32, True, [16, 0]),
    "SmolLM3": (32, False, [16, 0]),
    "SmolLM3, no layer": (32, False, [0, 0]),
    "GPT-NeoX": (8, False, [4, 4]),
}
"""For each how many elements of a key it rotates, whether neighbours, and how many pairs in each layer."""


def config(kind: str) -> Any:
    import transformers

    match kind:
        case "GPT-NeoX":
            return transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.25)
        case "Nemotron":
            return transformers.NemotronConfig(**SIZES, num_key_value_heads=2, head_dim=32)
        case "GLM-4":
            return transformers.Glm4Config(**SIZES, num_key_value_heads=2, head_dim=32)
        case "Cohere 2":
            types = ["sliding_attention", "full_attention"]
            sizes = SIZES | {"attention_bias": False, "layer_types": types, "sliding_window": 256}
            return transformers.Cohere2Config(**sizes, num_key_value_heads=2, head_dim=32)
        case "Cohere":
            return transformers.CohereConfig(**(SIZES | {"attention_bias": False}), num_key_value_heads=2)
        case "SmolLM3":
            return transformers.SmolLM3Config(**SIZES, num_key_value_heads=2, no_rope_layers=[1, 0])
        case "SmolLM3, no layer":
            return transformers.SmolLM3Config(**SIZES, num_key_value_heads=2, no_rope_layers=[0, 0])
        case "GPT-2":
            return transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=4096, vocab_size=2048)
    raise AssertionError(kind)


def written(kind: str, tokenizer_of: str, folder: Path) -> str:
    """Keys have a mean, as those of trained models do. vLLM's Cohere has no biases: there it is the tokens' own."""
    import transformers

    shutil.copytree(tokenizer_of, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(7)
    made = transformers.AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, one in made.named_parameters():
            if kind.startswith("Cohere") and name.endswith("embed_tokens.weight"):
                one += torch.randn(one.shape[1])
            elif name.endswith("k_proj.bias"):
                one.normal_(0, 4)
            elif name.endswith("query_key_value.bias"):
                one.view(2, 3, -1)[:, 1].normal_(0, 4)
    made.save_pretrained(folder)
    return str(folder)


def chunks(model: Model, tokens: list[int]) -> list[bytes]:
    """Of the prompt's whole chunks, as an engine stores them."""
    layers = model.attended(tokens)
    stacked = torch.stack([torch.stack([layer[part][0] for layer in layers]) for part in (0, 1)]).transpose(2, 3)
    return [
        stacked[:, :, first : first + CHUNK_TOKENS].contiguous().numpy().tobytes()
        for first in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS)
    ]


def layers_of(chunk: bytes) -> list[NDArray[np.float32]]:
    """Each [keys then values, tokens, heads, head_dim]; of one layer, or of two."""
    numbers = np.frombuffer(chunk, "<f4")
    return list(numbers.reshape(2, -1, CHUNK_TOKENS, 2, 32).swapaxes(0, 1))


def bits_at_an_error_of_1(calibration: Calibration, chunk: bytes) -> float:
    """Of a number of a key: what its payload takes, less what a larger error than 1 saves, or more.

    Steps are relative to all of a layer's numbers, so they are wider where keys vary by their rotation, too.
    """
    codec, out, back = KvtcCodec(calibration), bytearray(2 * len(chunk)), bytearray(len(chunk))
    size = codec.encode(memoryview(chunk), memoryview(out))
    assert size is not None
    codec.decode(memoryview(out)[:size], memoryview(back))
    keys, others = (np.frombuffer(one, "<f4")[: len(chunk) // 8] for one in (chunk, back))
    return float(8 * size / keys.size + np.log2(np.sqrt(np.square(keys - others).mean())))


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_do_not_rotate_halves_of_whole_keys_are_calibrated(
    spelling_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The controls: with keys as they are, or turned back in another order, the same error takes more bits."""
    rotated, neighbours, pairs = KINDS[kind]
    model = Model(written(kind, spelling_llama, tmp_path / "model"), dtype="float32")
    learnt = calibrate(model, LEARN).learnt(0.02)
    assert (learnt.shape.rotated, learnt.shape.neighbours) == (rotated, neighbours)
    used = [learnt.frequencies[table] for table in learnt.shape.tables]
    assert [np.count_nonzero(one) for one in used] == pairs
    third = chunks(model, OTHER)[2]
    right = bits_at_an_error_of_1(learnt, third)
    if any(pairs):
        shown = calibrating._Rotation(used, rotated, neighbours)
        unknown = replace(shown, frequencies=[np.zeros(16)] * 2)
        for control in (unknown, replace(shown, neighbours=not neighbours)):
            monkeypatch.setattr(calibrating, "_find_rotation", lambda *_, it=control: it)
            wrong = bits_at_an_error_of_1(calibrate(model, LEARN).learnt(0.02), third)
            print(f"{kind}: {right:.2f} bits, {wrong:.2f} with {control.neighbours=}")
            assert wrong > right + 0.1


def test_keys_that_change_otherwise_with_their_position_are_not_calibrated(spelling_llama: str, tmp_path: Path) -> None:
    """GPT-2 adds a position to what it reads."""
    model = Model(written("GPT-2", spelling_llama, tmp_path / "model"))
    with pytest.raises(ConfigError, match="the keys of layer 0 in a way that codec kvtc does not support"):
        calibrate(model, LEARN)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Llama 4", r"rotates .* in an? .*way"),  # it multiplies complex numbers
        ("DeepSeek-V2", "judged only where both are alike"),  # so does this one, but latents are no keys in any case
    ],
)
def test_keys_that_the_codec_is_not_for_are_refused(spelling_model: Callable[[str], str], name: str, why: str) -> None:
    model = Model(spelling_model(name))
    with pytest.raises(ConfigError, match=why):
        calibrate(model, LEARN)


@pytest.mark.parametrize(("name", "rotated", "pairs"), [("Qwen3-Next", 16, 8), ("Nemotron-H", 64, 0)])
def test_attention_beside_states_is_calibrated(
    spelling_model: Callable[[str], str], name: str, rotated: int, pairs: int
) -> None:
    learnt = calibrate(Model(spelling_model(name)), LEARN[:CONTEXT_TOKENS]).learnt(0.4)
    assert (learnt.shape.layers, learnt.shape.rotated, learnt.shape.neighbours) == (1, rotated, False)
    assert np.count_nonzero(learnt.frequencies) == pairs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Nemotron", "GLM-4", "Cohere", "Cohere 2", "GPT-NeoX"])
def test_an_engine_stores_the_keys_that_were_shown(spelling_llama: str, tmp_path: Path, kind: str) -> None:
    """Number by number, and what a disk keeps of them comes back. The controls: calibrations of the same components for
    keys in another order, or with other frequencies, are refused.
    """
    rotated, neighbours, _ = KINDS[kind]
    name = written(kind, spelling_llama, tmp_path / "model")
    model = Model(name, dtype="float32")
    learnt = calibrate(model, LEARN).learnt(0.01)
    learnt.write(tmp_path / "file")
    shown = layers_of(chunks(model, PROMPTS[0][:CHUNK_TOKENS])[0])
    with started(name, cache=over(tmp_path / "kv", tmp_path / "file")) as engine:
        engine.ask_in_turn(PROMPTS)
        expected = engine.ask_in_turn(PROMPTS)  # from the pool, which has what was computed
        warm = engine.hits
        assert warm == (BY_GROUPS_HITS if kind == "Cohere 2" else WARM_HITS)
        stored = [layer for chunk in in_pool(bytes).values() for layer in layers_of(chunk)]
        for one in shown:
            assert min(float(np.abs(one - its).max()) for its in stored if its.shape == one.shape) < 0.01
        answers = from_disk(engine, PROMPTS)
        assert engine.hits == warm
        assert same(answers, expected) > 0.8
        lane = engine.assert_at_rest()["tiers"]["disk"]["lane"]
        assert lane["loaded"] > 0 < lane["stored"] and lane["damaged"] == 0
        vllm_config = engine.llm.llm_engine.vllm_config
        check_calibration(vllm_config, learnt, ALONE)
        if vllm_config.model_config.using_transformers_backend():
            assert kind == "GPT-NeoX"  # which vLLM computes as the judge does
            return
        for wrong in ({"neighbours": not neighbours}, {"rotated": rotated - 2}):
            with pytest.raises(ConfigError, match=f"this engine rotates {rotated} of 32 elements"):
                check_calibration(vllm_config, replace(learnt, shape=replace(learnt.shape, **wrong)), ALONE)
        with pytest.raises(ConfigError, match="rotates keys with different frequencies"):
            check_calibration(vllm_config, replace(learnt, frequencies=learnt.frequencies / 2), ALONE)


@pytest.mark.slow
def test_an_engine_does_not_start_with_a_calibration_for_keys_in_another_order(
    spelling_llama: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = written("Cohere", spelling_llama, tmp_path / "model")
    learnt = calibrate(Model(name, dtype="float32"), LEARN).learnt(0.4)
    replace(learnt, shape=replace(learnt.shape, neighbours=False)).write(tmp_path / "file")
    # In a process of its own: vLLM keeps the connector of an engine that did not start for the next one.
    with (
        pytest.raises(RuntimeError, match="Engine core initialization failed"),
        started(name, cache=over(tmp_path / "kv", tmp_path / "file"), own_process=True),
    ):
        pass
    assert "this engine rotates 32 of 32 elements, neighbours together" in capfd.readouterr().err
