"""A tiny DeepSeek-V2: multi-head latent attention, with random weights on which wrong KV shows."""

from pathlib import Path

import torch


def write_tiny_deepseek(directory: Path, *, kv_lora_rank: int = 512, rope_dim: int = 64, head_dim: int = 32) -> Path:
    """Write the model, which has no experts, to this directory, and return it.

    kv_lora_rank, rope_dim: of a latent. The defaults are the only ones for which vLLM has a CPU kernel.
    head_dim: of a head of V, and of the part of K without positions. vLLM's kernels for GPUs have 128.
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
        qk_nope_head_dim=head_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=head_dim,
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
