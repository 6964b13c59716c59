"""A tiny DeepSeek-V4, with random weights on which wrong KV shows: one layer of each kind that the model has.

All layers keep the last tokens' latents. The second also keeps one latent for every 4 tokens, with an index to choose
among them, and the third one for every 128. What their next latents are made of is kept for the last 8 and 128 tokens.
vLLM has it on a CPU since 0.32. Its kernels are written for these sizes of heads, indices and for 256 experts.
"""

import json
import math
from pathlib import Path

import torch

_LAYERS = (0, 4, 128)
"""Tokens in each latent that is kept for good; 0: none is."""
_HEADS, _HEAD, _ROPE, _QUERY, _GROUPS, _OUT = 4, 512, 64, 128, 2, 64
_INDEX_HEADS, _INDEX_HEAD = 8, 128
_EXPERTS, _EXPERT = 256, 32
_WIDTH, _VOCABULARY, _STREAMS = 256, 2048, 2


def write_tiny_deepseek_v4(directory: Path) -> Path:
    """Write the model, in bfloat16, to this directory, and return it."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "vocab_size": _VOCABULARY,
        "hidden_size": _WIDTH,
        "num_hidden_layers": len(_LAYERS),
        "compress_ratios": list(_LAYERS),
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "qk_rope_head_dim": _ROPE,
        "q_lora_rank": _QUERY,
        "o_lora_rank": _OUT,
        "o_groups": _GROUPS,
        "sliding_window": 128,
        "index_topk": 512,
        "index_n_heads": _INDEX_HEADS,
        "index_head_dim": _INDEX_HEAD,
        "moe_intermediate_size": _EXPERT,
        "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "num_hash_layers": 0,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hc_mult": _STREAMS,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "compress_rope_theta": 40000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "expert_dtype": "bf16",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {"embed.weight": _drawn(_VOCABULARY, _WIDTH) * 4, "head.weight": _drawn(_VOCABULARY, _WIDTH)}
    weights |= {"norm.weight": _ones(_WIDTH)} | _streams("hc_head", _STREAMS, 1)
    for number, ratio in enumerate(_LAYERS):
        layer = _layer(ratio)
        weights |= {f"layers.{number}.{name}": tensor for name, tensor in layer.items()}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory


def _layer(ratio: int) -> dict[str, torch.Tensor]:
    mixed = (2 + _STREAMS) * _STREAMS
    layer = {
        "attn_norm.weight": _ones(_WIDTH),
        "ffn_norm.weight": _ones(_WIDTH),
        "attn.attn_sink": torch.zeros(_HEADS),
        "attn.wq_a.weight": _drawn(_QUERY, _WIDTH),
        "attn.q_norm.weight": _ones(_QUERY),
        "attn.wq_b.weight": _drawn(_HEADS * _HEAD, _QUERY),
        "attn.wkv.weight": _drawn(_HEAD, _WIDTH),
        "attn.kv_norm.weight": _ones(_HEAD),
        "attn.wo_a.weight": _drawn(_GROUPS * _OUT, _HEADS * _HEAD // _GROUPS),
        "attn.wo_b.weight": _drawn(_WIDTH, _GROUPS * _OUT),
        "ffn.gate.weight": _drawn(_EXPERTS, _WIDTH),
        "ffn.gate.bias": torch.zeros(_EXPERTS),
        **_expert("ffn.shared_experts"),
        **_streams("hc_attn", mixed, 3),
        **_streams("hc_ffn", mixed, 3),
    }
    for expert in range(_EXPERTS):
        layer |= _expert(f"ffn.experts.{expert}")
    if ratio > 1:
        layer |= _compressor("attn.compressor", ratio, _HEAD)
    if ratio == 4:  # those with an index, whose latents are made of two runs of tokens that overlap
        layer |= _compressor("attn.indexer.compressor", ratio, _INDEX_HEAD)
        layer["attn.indexer.wq_b.weight"] = _drawn(_INDEX_HEADS * _INDEX_HEAD, _QUERY)
        layer["attn.indexer.weights_proj.weight"] = _drawn(_INDEX_HEADS, _WIDTH)
    return layer


def _expert(name: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}.w1.weight": _drawn(_EXPERT, _WIDTH),
        f"{name}.w3.weight": _drawn(_EXPERT, _WIDTH),
        f"{name}.w2.weight": _drawn(_WIDTH, _EXPERT),
    }


def _compressor(name: str, ratio: int, head: int) -> dict[str, torch.Tensor]:
    columns = head * (2 if ratio == 4 else 1)
    return {
        f"{name}.ape": torch.randn(ratio, columns) * 0.5,
        f"{name}.wkv.weight": _drawn(columns, _WIDTH),
        f"{name}.wgate.weight": _drawn(columns, _WIDTH),
        f"{name}.norm.weight": _ones(head),
    }


def _streams(name: str, mixed: int, scales: int) -> dict[str, torch.Tensor]:
    """What mixes the residual streams (hyper-connections)."""
    return {
        f"{name}_fn": torch.randn(mixed, _STREAMS * _WIDTH) * (_STREAMS * _WIDTH) ** -0.5,
        f"{name}_base": torch.randn(mixed) * 0.5,
        f"{name}_scale": torch.ones(scales),
    }


def _drawn(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * (1.6 / math.sqrt(columns))).to(torch.bfloat16)


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
