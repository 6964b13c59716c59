"""LoRA adapters for the tiny Llama, so that a prompt can be asked with other weights of the same name."""

import json
from pathlib import Path

import torch
from kv_testing.tiny import TinyLlama
from safetensors.torch import save_file


def write_adapter(directory: Path, seed: int) -> None:
    """A LoRA adapter for the attention of `tiny_llama`, with random weights that matter."""
    model, rank = TinyLlama(), 8
    queries, kept = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {
        "q_proj": (queries, model.hidden),
        "k_proj": (kept, model.hidden),
        "v_proj": (kept, model.hidden),
        "o_proj": (model.hidden, queries),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(model.layers):
        for name, (rows, columns) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            weights[prefix + "lora_A.weight"] = 0.1 * torch.randn(rank, columns, generator=generator)
            weights[prefix + "lora_B.weight"] = 0.1 * torch.randn(rows, rank, generator=generator)
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none", "target_modules": list(shapes)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
