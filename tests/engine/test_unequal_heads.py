"""Models whose layers have different numbers of KV heads, on two ranks.

A rank has heads of its own in one layer and the same as its neighbour in another, and the shapes of both ranks' chunks
are equal.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PROMPTS, WARM_HITS, Engine, started
from kv_testing.tiny import TinyLlama
from safetensors.torch import load_file, save_file

_CONFIGURATION = """
from types import SimpleNamespace

from transformers import LlamaConfig


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **kwargs):
        self.block_configs = [
            SimpleNamespace(attention=SimpleNamespace(**block["attention"]), ffn=SimpleNamespace(**block["ffn"]))
            for block in block_configs
        ]
        super().__init__(**kwargs)
        self.num_key_value_heads = None

    def to_dict(self):
        told = super().to_dict()
        told["block_configs"] = [
            {"attention": vars(block.attention), "ffn": vars(block.ffn)} for block in self.block_configs
        ]
        return told
"""


def write_deci_lm(directory: Path, groups: list[int]) -> Path:
    """A DeciLM (nemotron-nas) with these numbers of query heads for each KV head, layer by layer."""
    shape = TinyLlama(layers=len(groups))
    shape.write(directory)
    config = json.loads((directory / "config.json").read_text())
    del config["num_key_value_heads"]
    ffn = {"no_op": False, "intermediate_size": shape.intermediate}
    config |= {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "block_configs": [{"attention": {"no_op": False, "n_heads_in_group": n}, "ffn": ffn} for n in groups],
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "configuration_decilm.py").write_text(_CONFIGURATION)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for layer, group in enumerate(groups):
        for part in "kv":
            rows = shape.heads // group * shape.head_dim
            drawn = torch.randn(rows, shape.hidden, generator=generator) * (1.6 / shape.hidden**0.5)
            weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = drawn
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def disk(directory: Path) -> dict[str, Any]:
    tier = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "256MiB"}
    patient = {"answer_s": 20.0}  # of the private server that several processes share: a later answer is a miss
    return {"host": {"capacity_bytes": "128MiB"}, "tiers": [tier], "cold": {"wait_s": 30}, "server": patient}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "shards"),
    [
        ([8, 1, 1], 2),  # one KV head in the first block, of which vLLM's total speaks, and eight in the others
        # Rank 1 has another of two heads in the second block: all layers of both ranks have equal shapes.
        pytest.param([8, 4, 8], 2, marks=pytest.mark.long),
        # Both ranks have the same head everywhere, and one of them stores it.
        pytest.param([8, 8, 8], 1, marks=pytest.mark.long),
    ],
)
def test_a_rank_gets_its_own_heads_of_every_layer(
    groups: list[int], shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(write_deci_lm(tmp_path / "model", groups))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    arguments: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    arguments |= {"trust_remote_code": True, "own_process": True}
    with started(model, cache=None, **arguments) as plain:
        reference = plain.ask_in_turn(PROMPTS)
    with started(model, cache=disk(tmp_path), **arguments) as engine:
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS
        assert shards_of(engine) == shards
        engine.assert_at_rest()
    with started(model, cache=disk(tmp_path), **arguments) as restarted:
        assert restarted.ask_in_turn(PROMPTS) == reference, "from disk"
        assert restarted.hits == WARM_HITS
        restarted.inside("kv_corrupt")
        assert restarted.ask_in_turn(PROMPTS)[:4] != reference[:4], "the control"


def shards_of(engine: Engine) -> int:
    return int(engine.inside("kv_shards"))
