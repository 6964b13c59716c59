"""Tiny models of every kind that vLLM serves, with random weights whose attention and states matter.

Dummy weights make different prompts give the same tokens and so hide wrong KV. A standard deviation of 0.15 at a width
of 256 does not, and what decides how long a state remembers is drawn so that a state still shows hundreds of tokens on.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

_VOCABULARY: Final = 2048
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A row of the table.

    name: as people call it.
    write: puts configuration and weights into a directory.
    arguments: of vLLM's engine, beside the tests' own.
    prompt_tokens: how long the tests' prompts are.
    own_hits: the yardstick is vLLM's own prefix-cache hit of the same length, since its full prefill differs from that.
    cannot: what vLLM's engine on this CPU says instead of running it; "" where it runs.
    """

    name: str
    write: Callable[[Path], Path]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 1500
    own_hits: bool = False
    cannot: str = ""

    @property
    def has_states(self) -> bool:
        """vLLM keeps them only with its own prefix cache on, which no other row asks for."""
        return STATES.items() <= self.arguments.items()

    @property
    def dtype(self) -> str:
        return str(self.arguments.get("dtype", "float32"))


def _config(kind: str, architecture: str = "", **sizes: Any) -> Any:
    """Of transformers, for the architecture of the same name unless another is given."""
    config = getattr(import_module("transformers"), f"{kind}Config")
    return config(**_COMMON, architectures=[f"{architecture or kind}ForCausalLM"], **sizes)


def _save(directory: Path, model_class: Any, config: Any, **weights: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """weights: by the end of a parameter's name, what it is to be instead of what the model draws."""
    torch.manual_seed(0)
    model = (model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config)(
        config, dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for ending, make in weights.items():
                if name.endswith(ending):
                    parameter.copy_(make(parameter))
    model.save_pretrained(directory)
    return directory


def _causal(config: Any, **weights: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        from transformers import AutoModelForCausalLM

        return _save(directory, AutoModelForCausalLM, config(), **weights)

    return write


def _slowly(parameter: torch.Tensor) -> torch.Tensor:
    """Time steps of a state from 0.001 to 0.1, as the authors of Mamba draw them: it forgets in 10 to 1,000 tokens."""
    steps = torch.exp(torch.linspace(math.log(0.001), math.log(0.1), parameter.numel(), dtype=torch.float32)).reshape(
        parameter.shape
    )
    return steps + torch.log(-torch.expm1(-steps))


def _decays(parameter: torch.Tensor) -> torch.Tensor:
    return torch.log(torch.linspace(1, 4, parameter.numel(), dtype=torch.float32)).reshape(parameter.shape)


_MAMBA2: Final = {
    "dt_bias": _slowly,
    "A_log": _decays,
    ".D": lambda parameter: torch.full_like(parameter, 0.1),  # what passes a state by, beside what comes out of it
    "out_proj.weight": lambda parameter: torch.randn_like(parameter) * 0.15,
}


_MAMBA2_SIZES: Final[dict[str, Any]] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}
"""As most hybrid models name them."""


def _drawn(deviation: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda parameter: torch.randn_like(parameter) * deviation


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_COMMON, architectures=["Qwen3ForCausalLM"], num_hidden_layers=3, head_dim=64)


def _gemma3() -> Any:
    return _config(
        "Gemma3Text",
        "Gemma3",
        num_hidden_layers=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def _gpt_oss() -> Any:
    return _config(
        "GptOss",
        num_hidden_layers=4,
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )


def _deepseek_v2(directory: Path) -> Path:
    from kv_testing.tiny_deepseek import write_tiny_deepseek

    return write_tiny_deepseek(directory)


def _llama(directory: Path) -> Path:
    from kv_testing.tiny import TinyLlama

    return TinyLlama().write(directory)


def _deepseek_v32(directory: Path) -> Path:
    import json

    from kv_testing.tiny_deepseek import write_tiny_deepseek

    write_tiny_deepseek(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": 64,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "q_lora_rank": 64,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _deepseek_v4(directory: Path) -> Path:
    from kv_testing.tiny_deepseek_v4 import write_tiny_deepseek_v4

    return write_tiny_deepseek_v4(directory)


def _qwen3_next() -> Any:
    return _config(
        "Qwen3Next",
        num_hidden_layers=4,
        head_dim=64,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _mamba2() -> Any:
    from transformers import Mamba2Config

    return Mamba2Config(
        architectures=["Mamba2ForCausalLM"],
        vocab_size=_VOCABULARY,
        hidden_size=256,
        state_size=32,
        num_hidden_layers=3,
        expand=2,
        num_heads=16,
        head_dim=32,
        n_groups=2,
        conv_kernel=4,
        chunk_size=64,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        rms_norm=True,
        dtype="float32",
    )


def _jamba() -> Any:
    return _config(
        "Jamba",
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=16,
        use_mamba_kernels=False,
    )


def _falcon_h1() -> Any:
    return _config(
        "FalconH1",
        num_hidden_layers=3,
        head_dim=64,
        mamba_d_ssm=512,
        mamba_d_conv=4,
        mamba_expand=2,
        **_MAMBA2_SIZES,
    )


def _nemotron_h() -> Any:
    return _config(
        "NemotronH",
        layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"],
        head_dim=64,
        ssm_state_size=32,
        mamba_num_heads=16,
        mamba_head_dim=32,
        n_groups=2,
        conv_kernel=4,
        expand=2,
        chunk_size=64,
    )


def _bamba() -> Any:
    return _config(
        "Bamba",
        num_hidden_layers=4,
        attn_layer_indices=[2],
        **_MAMBA2_SIZES,
    )


def _granite4() -> Any:
    return _config(
        "GraniteMoeHybrid",
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        attention_multiplier=0.125,
        shared_intermediate_size=256,
        num_local_experts=4,
        **_MAMBA2_SIZES,
    )


def _llama4() -> Any:
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        **(_COMMON | {"pad_token_id": None}),
        architectures=["Llama4ForCausalLM"],
        num_hidden_layers=4,
        head_dim=64,
        intermediate_size_mlp=512,
        attention_chunk_size=384,  # of no whole chunk, so that there is something of it to load
        no_rope_layers=[1, 1, 1, 0],
        layer_types=["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
    )


def _lfm2() -> Any:
    return _config(
        "Lfm2",
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        conv_L_cache=3,
        # As its published configurations have them, and vLLM reads them.
        conv_dim=256,
        block_dim=256,
        block_ff_dim=512,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    )


def _words(directory: Path, *special: str) -> Any:
    """A tokenizer whose token 17 is the word w17, and whose last tokens are `special`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {f"w{number}": number for number in range(_VOCABULARY - len(special))}
    names |= {name: len(names) + number for number, name in enumerate(special)}
    words = Tokenizer(models.WordLevel(names, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"bos_token": "w1", "eos_token": "w2", "unk_token": "w0", "pad_token": "w0"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **tokens, additional_special_tokens=list(special))
    tokenizer.save_pretrained(directory)
    return tokenizer


def _blip2(directory: Path) -> Path:
    from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2Processor, BlipImageProcessorPil

    config = Blip2Config(
        architectures=["Blip2ForConditionalGeneration"],
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
        },
        qformer_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "encoder_hidden_size": 64,
            "vocab_size": 100,
        },
        text_config={
            "model_type": "opt",
            "vocab_size": _VOCABULARY,
            "hidden_size": 256,
            "word_embed_proj_dim": 256,
            "ffn_dim": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 8192,
            "init_std": 0.15,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        num_query_tokens=32,
        image_token_index=_VOCABULARY - 1,
        initializer_range=0.15,
        dtype="float32",
    )
    _save(directory, Blip2ForConditionalGeneration, config)
    Blip2Processor(
        image_processor=BlipImageProcessorPil(size={"height": 56, "width": 56}),
        tokenizer=_words(directory, "<image>"),
        num_query_tokens=32,
    ).save_pretrained(directory)
    return directory


def _qwen2_vl(directory: Path) -> Path:
    from transformers import (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
        Qwen2VLVideoProcessor,
    )

    config = Qwen2VLConfig(
        architectures=["Qwen2VLForConditionalGeneration"],
        text_config={
            **_COMMON,
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 256,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "in_chans": 3,  # SGLang's name of it
        },
        image_token_id=_VOCABULARY - 1,
        video_token_id=_VOCABULARY - 2,
        vision_start_token_id=_VOCABULARY - 3,
        vision_end_token_id=_VOCABULARY - 4,
        dtype="float32",
    )
    config.text_config.initializer_range = 0.15
    _save(directory, Qwen2VLForConditionalGeneration, config)
    _words(directory, "<|vision_end|>", "<|vision_start|>", "<|video_pad|>", "<|image_pad|>")
    Qwen2VLVideoProcessor().save_pretrained(directory)
    Qwen2VLImageProcessorPil(min_pixels=112 * 112, max_pixels=112 * 112).save_pretrained(directory)
    return directory


def _qwen2_audio(directory: Path) -> Path:
    """A second of sound is 25 tokens."""
    from safetensors.torch import load_file, save_file
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    mel_bins = 80
    config = Qwen2AudioConfig(
        architectures=["Qwen2AudioForConditionalGeneration"],
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": mel_bins,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "initializer_range": 0.15,
        },
        text_config={**_COMMON, "model_type": "qwen2", "num_hidden_layers": 3},
        audio_token_index=_VOCABULARY - 1,
        initializer_range=0.15,
        dtype="float32",
    )
    _save(directory, Qwen2AudioForConditionalGeneration, config)
    # transformers 5.19 doubles a part of the names that the published weights have, and vLLM reads.
    weights = directory / "model.safetensors"
    named = {name.replace("model.model.model.", "model.model."): tensor for name, tensor in load_file(weights).items()}
    save_file(named, weights, metadata={"format": "pt"})
    Qwen2AudioProcessor(
        WhisperFeatureExtractor(feature_size=mel_bins),
        _words(directory, "<|audio_eos|>", "<|audio_bos|>", "<|AUDIO|>"),
    ).save_pretrained(directory)
    return directory


def _whisper(directory: Path) -> Path:
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    config = WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        vocab_size=_VOCABULARY,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        num_mel_bins=80,
        max_source_positions=1500,
        max_target_positions=448,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        init_std=0.15,
        dtype="float32",
    )
    _save(directory, WhisperForConditionalGeneration, config)
    letters = {chr(code): code - 33 for code in range(33, 127)} | {"\u0120": 94}
    tokenizer = WhisperTokenizer(vocab=letters, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|startoftranscript|>", "<|en|>", "<|transcribe|>"]})
    WhisperProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer).save_pretrained(directory)
    return directory


STATES: Final = {"enable_prefix_caching": True}
"""vLLM keeps a state at each block's end only with its own prefix cache on."""

SCANNED: Final = STATES | {"max_num_batched_tokens": 128}
"""Where a step goes beyond a block, vLLM 0.32 asks Mamba2's kernel for the state at the block's end as well, and its
kernel for CPUs has none to give: an IndexError in `conv_ssm_forward`."""

GATED: Final = STATES | {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
"""With AVX512-BF16 vLLM keeps states in float32, elsewhere in the model's type; and a block has a state's bytes."""

REFERENCE_MLA: Final = {"attention_config": {"backend": "CPU_MLA"}}
"""vLLM's kernel for latents that runs on every processor; with AMX it has another (`test_every_cache` has both)."""

MODELS: Final = (
    TinyModel("Llama", _llama),
    TinyModel("Qwen3", _causal(_qwen3)),
    TinyModel("Gemma 3", _causal(_gemma3)),
    TinyModel("gpt-oss", _causal(_gpt_oss, sinks=_drawn(1.0))),
    TinyModel("DeepSeek-V2", _deepseek_v2, REFERENCE_MLA),
    TinyModel("DeepSeek-V3.2", _deepseek_v32, cannot="Sparse Attention is not supported on CPU"),
    # Up to 2,048 tokens its index chooses everything.
    TinyModel("DeepSeek-V4", _deepseek_v4, {"dtype": "bfloat16"}, prompt_tokens=2900),
    TinyModel("Qwen3-Next", _causal(_qwen3_next), GATED, own_hits=True),
    TinyModel("Mamba2", _causal(_mamba2, **_MAMBA2), SCANNED | {"block_size": 128}),
    TinyModel("Jamba", _causal(_jamba), STATES, cannot="object has no attribute 'selective_scan_fwd'"),
    TinyModel(
        "Bamba",
        _causal(_bamba, **_MAMBA2),
        STATES,
        cannot="does not dispatch through the Transformers attention interface",
    ),
    TinyModel("Granite 4", _causal(_granite4, **_MAMBA2), SCANNED),
    TinyModel("Falcon-H1", _causal(_falcon_h1, **_MAMBA2), SCANNED),
    TinyModel("Nemotron-H", _causal(_nemotron_h, **_MAMBA2), SCANNED),
    TinyModel("LFM2", _causal(_lfm2), STATES, own_hits=True),
    TinyModel("Llama 4", _causal(_llama4)),
    TinyModel("BLIP-2", _blip2, {"skip_tokenizer_init": False}),
    TinyModel("Qwen2-Audio", _qwen2_audio, {"skip_tokenizer_init": False}),
    TinyModel(
        "Whisper",
        _whisper,
        {"max_model_len": 448, "skip_tokenizer_init": False},
        cannot="Encoder-decoder models are not currently supported with KV connectors",
    ),
)
ALSO_SGLANG: Final = (TinyModel("Qwen2-VL", _qwen2_vl),)
"""Rows that only SGLang's table has."""
BY_NAME: Final = {model.name: model for model in (*MODELS, *ALSO_SGLANG)}
