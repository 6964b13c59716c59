"""A model of one layer, and heads that guess what it says: EAGLE's, EAGLE-3's, and a predictor of its own (MTP).

A random head is never right, and with it a test of how many guesses are right would show nothing. These heads repeat
the model's layer on the tokens, with a little of the model's hidden states added. What is left is that a head sees each
token one place earlier, and not the first, so that it is wrong now and then. Two things that heads do otherwise than
the model make no difference here. EAGLE's applies no norm to what goes into it or comes out, but norms have a weight of
1, and embeddings a root mean square of 1. EAGLE-3's adds hidden states to what its attention says, where the model adds
the embedding, but in the model that it guesses for, attention says so much that neither counts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from kv_testing.tiny import TinyLlama
from safetensors.torch import load_file, save_file

_LAYER: Final = "model.layers.0."
_HIDDEN_PART: Final = 0.02
"""Of the model's hidden states in what a head starts from."""
_LOUD: Final = 400.0
"""By how much attention's output is multiplied for EAGLE-3's head."""


def write_guessed_model(directory: Path, *, loud_attention: bool = False) -> Path:
    """A Llama whose next tokens these heads guess. loud_attention: as EAGLE-3's needs it."""
    model = TinyLlama(layers=1)
    model.write(directory)
    weights = load_file(directory / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embeddings / embeddings.square().mean(dim=1, keepdim=True).sqrt()
    if loud_attention:
        weights[f"{_LAYER}self_attn.o_proj.weight"] *= _LOUD
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_eagle_head(directory: Path, model: Path, seed: int = 0) -> Path:
    """An EAGLE head for that model. seed: of the part of hidden states that it takes, so that heads differ."""
    weights = load_file(model / "model.safetensors")
    head = {name.removeprefix("model."): weight for name, weight in _layer(weights).items()}
    head.pop("layers.0.input_layernorm.weight")
    head["fc.weight"] = torch.cat((torch.eye(_width(weights)), _hidden_part(weights, seed)), dim=1)
    return _write(directory, json.loads((model / "config.json").read_text()), head)


def write_eagle3_head(directory: Path, model: Path) -> Path:
    """An EAGLE-3 head for that model, which takes the model's hidden states before and behind its layer."""
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["vocab_size"]}
    config |= {"eagle_aux_hidden_state_layer_ids": [0, 1], "num_aux_hidden_states": 2, "norm_output": True}
    head = {name.replace(_LAYER, "midlayer."): weight for name, weight in _layer(weights).items()}
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        hidden = _hidden_part(weights, 0)[: len(head[name])]
        head[name] = torch.cat((head[name], hidden), dim=1)
    head["midlayer.hidden_norm.weight"] = torch.ones(_width(weights))
    head["fc.weight"] = torch.cat((_hidden_part(weights, 1), _hidden_part(weights, 2)), dim=1)
    head |= {"norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}
    return _write(directory, config, head)


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
