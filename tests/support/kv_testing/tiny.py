"""A tiny Llama with random weights on which wrong KV shows.

With vLLM's dummy weights different prompts give the same tokens, which hides wrong KV. With normally distributed
weights of standard deviation 1.6 / √fan_in, a single wrong block changes the generated tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """Shape of the model, in float32. The defaults have grouped-query attention (8 query heads on 2 of KV)."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 512
    vocabulary: int = 2048
    max_tokens: int = 8192
    seed: int = 0

    def write(self, directory: Path) -> Path:
        """Write `config.json` and `model.safetensors` there, and return the directory."""
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        }
        (directory / "config.json").write_text(json.dumps(config, indent=1))
        save_file(dict(self._weights()), directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            scaled: torch.Tensor = torch.randn(rows, columns, generator=generator) * (1.6 / columns**0.5)
            return scaled

        yield "model.embed_tokens.weight", torch.randn(self.vocabulary, self.hidden, generator=generator)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "self_attn.q_proj.weight", matrix(self.heads * self.head_dim, self.hidden)
            yield prefix + "self_attn.k_proj.weight", matrix(self.kv_heads * self.head_dim, self.hidden)
            yield prefix + "self_attn.v_proj.weight", matrix(self.kv_heads * self.head_dim, self.hidden)
            yield prefix + "self_attn.o_proj.weight", matrix(self.hidden, self.heads * self.head_dim)
            yield prefix + "mlp.gate_proj.weight", matrix(self.intermediate, self.hidden)
            yield prefix + "mlp.up_proj.weight", matrix(self.intermediate, self.hidden)
            yield prefix + "mlp.down_proj.weight", matrix(self.hidden, self.intermediate)
            yield prefix + "input_layernorm.weight", torch.ones(self.hidden)
            yield prefix + "post_attention_layernorm.weight", torch.ones(self.hidden)
        yield "model.norm.weight", torch.ones(self.hidden)
        yield "lm_head.weight", matrix(self.vocabulary, self.hidden)
