"""`kv judge --calibrate` on tiny random models that rotate a part of each key, neighbours, some layers, or nothing."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_cuda.judge import calibrate as calibrating
from kv_cuda.judge.calibrate import calibrate, through_calibrated
from kv_cuda.judge.measure import Model, Windows, judge
from kv_cuda.judge.verdict import Finding

TEXT = " ".join(f"w{3 + (7919 * n) % 1900}" for n in range(1300))
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": 4096, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "attention_bias": True}


def config(kind: str, vocabulary: int) -> Any:
    import transformers

    sizes = SIZES | {"vocab_size": vocabulary}
    match kind:
        case "a quarter":
            return transformers.GPTNeoXConfig(**sizes, rotary_pct=0.25)
        case "half of it, neighbours":
            return transformers.GlmConfig(**sizes, num_key_value_heads=2, head_dim=32)
        case "all, neighbours":
            return transformers.CohereConfig(**sizes, num_key_value_heads=2)
        case "one layer of two":
            return transformers.SmolLM3Config(**sizes, num_key_value_heads=2, no_rope_layers=[1, 0])
        case _:
            return transformers.SmolLM3Config(**sizes, num_key_value_heads=2, no_rope_layers=[0, 0])


@pytest.mark.parametrize(
    ("kind", "rotated", "neighbours", "turned_layers"),
    [
        ("a quarter", 8, False, 2),
        ("half of it, neighbours", 16, True, 2),
        ("all, neighbours", 32, True, 2),
        ("one layer of two", 32, False, 1),
        ("nothing", 32, False, 0),
    ],
)
def test_models_that_do_not_rotate_halves_of_whole_keys_are_calibrated(
    spelling_llama: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    rotated: int,
    neighbours: bool,
    turned_layers: int,
) -> None:
    """Keys have a mean, as those of trained models do. Without the rotation (the control) they take more bytes."""
    import transformers

    folder = tmp_path / "model"
    shutil.copytree(spelling_llama, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocabulary = transformers.AutoConfig.from_pretrained(spelling_llama).vocab_size
    torch.manual_seed(7)
    made = transformers.AutoModelForCausalLM.from_config(config(kind, vocabulary))
    with torch.no_grad():
        for name, one in made.named_parameters():
            if name.endswith(("k_proj.bias", "query_key_value.bias")):
                one.normal_(0, 4)
    made.save_pretrained(folder)
    model = Model(str(folder))

    def found(step: float) -> Finding:
        calibrate(model, model.tokens(TEXT)).learnt(step).write(tmp_path / "file")
        trip = through_calibrated(str(tmp_path / "file"))
        return judge(model, TEXT, [trip], Windows(512, 64, 16, most=1)).findings[0]

    learnt = calibrate(model, model.tokens(TEXT)).learnt(0.4)
    assert (learnt.shape.rotated, learnt.shape.neighbours) == (rotated, neighbours)
    used = [learnt.frequencies[table] for table in learnt.shape.tables]
    assert [np.count_nonzero(one) for one in used] == [rotated // 2] * turned_layers + [0] * (2 - turned_layers)
    fine, coarse = found(0.1), found(0.4)
    print(f"{kind}: {fine.bits:.2f} and {coarse.bits:.2f} bits, KL {fine.kl:.5f} and {coarse.kl:.5f}")
    assert 0 < fine.kl < coarse.kl < 0.05
    assert coarse.bits < fine.bits < 8
    if turned_layers:
        as_they_are = calibrating._Rotation([np.zeros(16)] * 2, 32, False)
        monkeypatch.setattr(calibrating, "_shown", lambda *_: as_they_are)
        control = found(0.4)
        print(f"control: {control.bits:.2f} bits, KL {control.kl:.5f}")
        # A step is relative to all of a layer's numbers, so what is larger for the rotation's sake is also coarser.
        assert control.bits > 1.02 * coarse.bits or control.kl > 1.5 * coarse.kl
