"""A model of one layer, and heads that guess what it says: EAGLE's, and a predictor of its own (MTP).

A random head is never right, and with it a test of how many guesses are right would show nothing. These heads repeat
the model's layer on the tokens, with a little of the model's hidden states added. EAGLE's applies no norm to what goes
into it or comes out; that makes no difference here, as embeddings have a root mean square of 1 and norms a weight of 1.
What is left is that a head sees each token one place earlier, and not the first, so that it is wrong now and then.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from kv_cuda.tiny import TinyLlama
from safetensors.torch import load_file, save_file

_LAYER: Final = "model.layers.0."
_HIDDEN_PART: Final = 0.02
"""Of the model's hidden states in what a head starts from."""


def write_guessed_model(directory: Path, seed: int = 0) -> Path:
    """A Llama whose next tokens EAGLE's head of the same seed guesses."""
    model = TinyLlama(layers=1, seed=seed)
    model.write(directory)
    weights = load_file(directory / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embeddings / embeddings.square().mean(dim=1, keepdim=True).sqrt()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_eagle_head(directory: Path, model: Path, seed: int = 0) -> Path:
    """An EAGLE head for that model. seed: of the part of hidden states that it takes, so that heads differ."""
    weights = load_file(model / "model.safetensors")
    head = {name.removeprefix("model."): weight for name, weight in _layer(weights).items()}
    head.pop("layers.0.input_layernorm.weight")
    head["fc.weight"] = torch.cat((torch.eye(_width(weights)), _hidden_part(weights, seed)), dim=1)
    return _write(directory, json.loads((model / "config.json").read_text()), head)


def write_model_with_a_head(directory: Path, model: Path) -> Path:
    """The same model as a MiMo, which has a head of its own for one more token, in its own files."""
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    weights = load_file(model / "model.safetensors")
    width = _width(weights)
    for part in "qkv":
        rows = weights[f"{_LAYER}self_attn.{part}_proj.weight"].shape[0]
        weights[f"{_LAYER}self_attn.{part}_proj.bias"] = torch.zeros(rows)
    own = "model.mtp_layers.0."
    head = {name.replace(_LAYER, own): weight.clone() for name, weight in _layer(weights).items()}
    head |= {f"{own}{norm}_layernorm.weight": torch.ones(width) for norm in ("token", "hidden", "final")}
    head[f"{own}input_proj.weight"] = torch.cat((_hidden_part(weights, 0), torch.eye(width)), dim=1)
    return _write(directory, config, weights | head)


def _layer(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in weights.items() if name.startswith(_LAYER)}


def _width(weights: Mapping[str, torch.Tensor]) -> int:
    return int(weights["model.norm.weight"].shape[0])


def _hidden_part(weights: Mapping[str, torch.Tensor], seed: int) -> torch.Tensor:
    width = _width(weights)
    drawn = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    return drawn * (_HIDDEN_PART / width**0.5)


def _write(directory: Path, config: Mapping[str, object], weights: Mapping[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, directory / "model.safetensors")
    return directory
