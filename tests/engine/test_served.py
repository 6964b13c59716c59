"""Two of vLLM's configurations with which a prompt has other KV are never taken for one model."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from kv_connect.file_digests import DigestMemory
from kv_connect.identity import ServedModel, described, identify
from packaging.version import Version

Served = Callable[..., ServedModel]

TREATED: Mapping[str, set[str]] = {
    "model_config": {
        *("config_format", "dtype", "hf_config", "hf_config_path", "hf_overrides", "max_model_len", "model"),
        *("model_weights", "multimodal_config", "quantization", "revision", "seed"),
    },
    "load_config": {"download_dir"},
    "cache_config": {"cache_dtype"},  # a part of every key by itself
    "": {
        *("attention_config", "cache_config", "load_config", "lora_config", "model_config", "parallel_config"),
        *("quant_config", "speculative_config"),
    },
}
"""Fields that `served_model` or the chunk's format has, beside those of `COUNTED`."""

LEAVES_KV_ALONE: Mapping[str, set[str]] = {
    "model_config": {
        *("allow_deprecated_quantization", "allowed_local_media_path", "allowed_media_domains", "convert"),
        *("disable_cascade_attn", "disable_sliding_window", "enable_cumem_allocator", "enable_nccl_comm_suspend"),
        *("enable_prompt_embeds", "enable_sleep_mode", "enable_trace_replay", "enforce_eager", "generation_config"),
        *("hf_text_config", "hf_token", "io_processor_plugin", "is_submodel_config", "logits_processors"),
        *("logprobs_mode", "max_logprobs", "override_generation_config", "pooler_config", "renderer_num_workers"),
        *("return_sampling_mask", "runner", "served_model_name", "skip_tokenizer_init", "sleep_mode_backend"),
        *("sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "spec_target_max_model_len", "tokenizer"),
        *("tokenizer_mode", "tokenizer_revision", "trust_remote_code", "use_fp64_gumbel"),
        "word_embeddings_untied_by_checkpoint",
    },
    "load_config": {
        *("device", "pt_load_map_location", "safetensors_load_strategy"),
        *("safetensors_prefetch_block_size", "safetensors_prefetch_num_threads", "use_tqdm_on_load"),
    },
    "cache_config": {
        # How blocks lie in memory is in the format of chunks, or proved to make no difference.
        *("_block_size_resolved", "block_size", "cache_hit_alignment_tokens", "effective_attention_block_size"),
        *("enable_mamba_shared_prefix_checkpoint", "enable_prefix_caching", "gpu_memory_utilization"),
        *("hash_block_size", "is_attention_free", "kv_cache_layout", "kv_cache_max_concurrency"),
        *("kv_cache_memory_bytes", "kv_cache_size_tokens", "kv_offloading_backend", "kv_offloading_size"),
        *("kv_sharing_fast_prefill", "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode"),
        *("mamba_page_size_padded", "mamba_ssm_cache_dtype", "num_cpu_blocks", "num_gpu_blocks"),
        *("num_gpu_blocks_override", "prefix_cache_retention_interval", "prefix_caching_hash_algo"),
        *("prefix_match_unit", "replayssm_buffer_len", "skip_page_size_padded", "sliding_window"),
        *("swa_bounded_replay", "use_kda_recoverssm", "use_replayssm", "user_specified_block_size"),
    },
    "attention_config": {
        *("backend", "backend_per_kind", "disable_flashinfer_q_quantization", "flash_attn_version"),
        *("flash_attn_max_num_splits_for_cuda_graph", "flex_attn_block_m", "flex_attn_block_n"),
        *("flex_attn_kv_block_size", "flex_attn_q_block_size", "hisparse_config", "minimax_m3_msa_decode_backend"),
        *("mla_prefill_backend", "sparse_mla_force_mqa", "sparse_mla_prefill_workspace_factor"),
        *("tokenspeed_mla_min_split_kv", "tq_max_kv_splits_for_cuda_graph", "use_trtllm_attention"),
    },
    "lora_config": {
        *("default_mm_loras", "enable_mixed_moe_lora_format", "fully_sharded_loras", "max_cpu_loras"),
        *("max_lora_cls_labels", "max_lora_rank", "max_loras", "specialize_active_lora"),
    },
    "multimodal_config": {
        *("allow_missing_mm_embeddings", "enable_mm_embeds", "interleave_mm_strings", "language_model_only"),
        *("limit_per_prompt", "mm_device_do_normalize", "mm_encoder_attn_backend", "mm_encoder_fp8_scale_save_margin"),
        *("mm_encoder_fp8_scale_save_path", "mm_encoder_only", "mm_encoder_tp_mode", "mm_hasher_algorithm"),
        *("mm_ipc_gpu_memory_gb", "mm_processor_cache_gb", "mm_processor_cache_type"),
        *("mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "skip_mm_profiling"),
    },
    "": {
        *("aux_output_config", "compilation_config", "device_config", "diffusion_config", "ec_manager_config"),
        *("ec_transfer_config", "engram_config", "instance_id", "kernel_config", "kv_events_config"),
        *("kv_transfer_config", "logging_config", "mamba_config", "observability_config", "offload_config"),
        *("optimization_level", "performance_mode", "profiler_config", "reasoning_config", "scheduler_config"),
        *("shutdown_timeout", "structured_outputs_config", "watermark_config", "weight_transfer_config"),
    },
}
"""What changes KV by rounding at most, as does another GPU."""

NEW_IN_0_33: Mapping[str, set[str]] = {
    "cache_config": {"simple_cpu_offload_num_blocks"},
    "attention_config": {"indexer_tp_shard_min_rows", "minimax_m3_indexer_cp", "trtllm_ragged_backend"},
    "": {"watchdog_config"},
}
"""Likewise, in vLLM 0.33 and later."""


def test_every_field_of_vllms_configuration_is_sorted() -> None:
    """A field of a later vLLM is somebody's to think about before two models share a disk."""
    from kv_vllm.served import COUNTED
    from vllm import config
    from vllm.version import __version__ as version

    sections = {
        "model_config": config.ModelConfig,
        "load_config": config.LoadConfig,
        "cache_config": config.CacheConfig,
        "attention_config": config.AttentionConfig,
        "lora_config": config.LoRAConfig,
        "multimodal_config": config.MultiModalConfig,
        "": config.VllmConfig,
    }
    assert sections.keys() == COUNTED.keys()
    for name, section in sections.items():
        sorted_fields = [*COUNTED[name], *TREATED.get(name, ()), *LEAVES_KV_ALONE[name]]
        if Version(version) >= Version("0.33"):
            sorted_fields += NEW_IN_0_33.get(name, ())
        assert sorted(sorted_fields) == sorted(field.name for field in dataclasses.fields(section)), name


@pytest.fixture(scope="module")
def directory(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and, in `turned`, its configuration with another base of its rotations and nothing else."""
    directory = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(tiny_llama, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "turned").mkdir()
    (directory / "turned" / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    return directory


@pytest.fixture(scope="module")
def served(directory: Path) -> Served:
    def read(**options: Any) -> ServedModel:
        from kv_vllm.served import served_model
        from vllm.engine.arg_utils import EngineArgs

        given = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True}
        return served_model(EngineArgs(str(directory), **{**given, **options}).create_engine_config(), kv_scales="")

    return read


def test_what_leaves_kv_alone_leaves_the_name_alone(served: Served) -> None:
    assert served().overrides["settings"] == {}, "else SGLang finds none of what vLLM computed"
    plain = described(served())
    for options in (
        {"enable_lora": True},
        {"enable_lora": True, "lora_dtype": "auto", "max_lora_rank": 8},
        {"enable_prefix_caching": False},
        {"gpu_memory_utilization": 0.3},
        {"load_format": "auto", "model_impl": "auto", "config_format": "auto", "hf_overrides": {}},
        {"max_model_len": 512},
    ):
        assert described(served(**options)) == plain, options


def test_options_from_which_other_kv_follows_are_other_names(served: Served, directory: Path) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"hf_config_path": str(directory / "turned")},
        {"hf_overrides": {"rope_theta": 77.0}},
        {"load_format": "pt"},
        {"load_format": "safetensors"},
        {"ignore_patterns": ["model-1*"]},
        {"model_loader_extra_config": {"qlora_adapter_name_or_path": "somebody/adapter"}},
        {"model_impl": "transformers"},
        {"code_revision": "other"},
        {"kv_cache_dtype_skip_layers": ["0", "1"]},
        {"kv_cache_dtype_skip_layers": ["0", "2"]},
        {"enable_lora": True, "lora_target_modules": ["o_proj"]},
        {"enable_lora": True, "lora_target_modules": ["q_proj"]},
        {"enable_lora": True, "lora_dtype": "bfloat16"},
        {"additional_config": {"somebodys_platform": {"cuts_corners": True}}},
    ]
    names = {described(served(**each)): each for each in options}
    assert list(names.values()) == options


def test_options_of_images_and_videos_are_other_names(served: Served, tmp_path: Path) -> None:
    """A hash of an image says what it is, and not what the processor made of it; a tiny Llama has no images."""
    from kv_vllm.served import served_model
    from vllm.config import MultiModalConfig
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 1024}
    config = EngineArgs(served().source, **given).create_engine_config()
    scales = [tmp_path / "one.json", tmp_path / "other.json"]
    for number, file in enumerate(scales):
        file.write_text(str(number))
    names = []
    for options in (
        {},
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"mm_processor_kwargs": {"num_crops": 8}},
        {"media_io_kwargs": {"video": {"num_frames": 40}}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
        *({"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(file)} for file in scales),
    ):
        config.model_config.multimodal_config = MultiModalConfig(**options)
        names.append(described(served_model(config, kv_scales="")))
    assert len(set(names)) == len(names)
    assert names[0] == described(served())


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "modelexpress"])
def test_weights_that_are_not_the_models_own_files_have_no_name(served: Served, load_format: str) -> None:
    """They come from a URI, a cache or a neighbour; the directory is there for its configuration."""
    assert identify(served(), DigestMemory(None)) is not None
    assert identify(served(load_format=load_format), DigestMemory(None)) is None
