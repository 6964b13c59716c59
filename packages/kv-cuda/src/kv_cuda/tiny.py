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
    """Shape of the model. The defaults have grouped-query attention (8 query heads on 2 of KV)."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 512
    vocabulary: int = 2048
    max_tokens: int = 8192
    dtype: str = "float32"
    seed: int = 0
    sliding_window: int | None = None
    """If set, the model is a Mistral, all of whose layers have this window."""

    def write(self, directory: Path) -> Path:
        """Write `config.json` and `model.safetensors` there, and return the directory."""
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        sliding = self.sliding_window is not None
        config = {
            "architectures": ["MistralForCausalLM" if sliding else "LlamaForCausalLM"],
            "model_type": "mistral" if sliding else "llama",
            "sliding_window": self.sliding_window,
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
            "torch_dtype": self.dtype,
        }
        (directory / "config.json").write_text(json.dumps(config, indent=1))
        save_file(dict(self._weights()), directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        dtype: torch.dtype = getattr(torch, self.dtype)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            scaled: torch.Tensor = torch.randn(rows, columns, generator=generator) * (1.6 / columns**0.5)
            return scaled.to(dtype)

        def ones() -> torch.Tensor:
            return torch.ones(self.hidden, dtype=dtype)

        yield "model.embed_tokens.weight", torch.randn(self.vocabulary, self.hidden, generator=generator).to(dtype)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "self_attn.q_proj.weight", matrix(self.heads * self.head_dim, self.hidden)
            yield prefix + "self_attn.k_proj.weight", matrix(self.kv_heads * self.head_dim, self.hidden)
            yield prefix + "self_attn.v_proj.weight", matrix(self.kv_heads * self.head_dim, self.hidden)
            yield prefix + "self_attn.o_proj.weight", matrix(self.hidden, self.heads * self.head_dim)
            yield prefix + "mlp.gate_proj.weight", matrix(self.intermediate, self.hidden)
            yield prefix + "mlp.up_proj.weight", matrix(self.intermediate, self.hidden)
            yield prefix + "mlp.down_proj.weight", matrix(self.hidden, self.intermediate)
            yield prefix + "input_layernorm.weight", ones()
            yield prefix + "post_attention_layernorm.weight", ones()
        yield "model.norm.weight", ones()
        yield "lm_head.weight", matrix(self.vocabulary, self.hidden)


def write_tiny_deepseek(directory: Path, *, kv_lora_rank: int = 512, rope_dim: int = 64) -> Path:
    """Write a DeepSeek-V2 there: multi-head latent attention, no experts, random weights on which wrong KV shows.

    kv_lora_rank, rope_dim: of a latent. The defaults are the only ones for which vLLM has a CPU kernel.
    """
    from transformers import AutoModelForCausalLM, DeepseekV2Config

    config = DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"],
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        moe_layer_freq=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=32,
        qk_rope_head_dim=rope_dim,
        v_head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.15,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory
