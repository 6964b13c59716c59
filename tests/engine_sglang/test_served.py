"""Two starts of SGLang with which a prompt has other KV are never taken for one model."""

from collections.abc import Callable
from typing import Any

import pytest
from kv_connect.file_digests import DigestMemory
from kv_connect.identity import ServedModel, described, identify

Served = Callable[..., ServedModel]

TREATED = {
    *(
        "context_length",
        "decrypted_config_file",
        "download_dir",
        "dtype",
        "json_model_override_args",
        "kv_cache_dtype",
        "lora_paths",
    ),
    *("model_config_parser", "model_path", "modelopt_checkpoint_restore_path", "quantization"),
    *("quantization_param_path", "revision", "weight_cache_mode"),
}
"""Arguments that `served_model` has, beside those of `COUNTED`."""

OF_OTHER_NAMESPACES = {
    *("enable_precise_embedding_interpolation", "kt_method", "kt_num_gpu_experts", "kt_weight_path"),
}

LEAVES_KV_ALONE = {
    # How the model is fetched and loaded.
    *("checkpoint_engine_wait_weights_before_ready", "custom_weight_loader", "decrypted_draft_config_file"),
    *("delete_ckpt_after_loading", "engine_info_bootstrap_port", "is_embedding", "model_checksum"),
    *("modelexpress_config", "modelopt_checkpoint_save_path", "modelopt_export_path", "trust_remote_code"),
    *("remote_instance_weight_loader_backend", "remote_instance_weight_loader_seed_instance_ip"),
    *("remote_instance_weight_loader_seed_instance_service_port", "startup_weight_load_mode"),
    *("remote_instance_weight_loader_send_weights_group_ports", "weight_cache_socket", "weight_cache_timeout"),
    *("remote_instance_weight_loader_start_seed_via_transfer_engine", "weight_loader_disable_mmap"),
    *("weight_loader_drop_cache_after_load", "weight_loader_prefetch_checkpoints"),
    "weight_loader_prefetch_num_threads",
    # How many adapters there are, and where.
    *("enable_lora", "enable_lora_overlap_loading", "lora_backend", "lora_drain_wait_threshold"),
    *("lora_eviction_policy", "lora_strict_loading", "lora_use_virtual_experts", "max_loaded_loras"),
    *("max_lora_chunk_size", "max_lora_rank", "max_loras_per_batch"),
    # Which media are taken, and what of them is kept.
    *("allowed_media_domains", "enable_broadcast_mm_inputs_process", "enable_mm_global_cache", "enable_multimodal"),
    *("enable_prefix_mm_cache", "limit_mm_data_per_request", "media_url_max_file_size_mb", "mm_attention_backend"),
    *("mm_enable_dp_encoder", "mm_feature_transport", "mm_global_cache_backend", "mm_io_worker_num"),
    *("mm_preprocess_cache_size_mb", "mm_processor_worker_num", "trust_mm_content_hashes"),
}
"""What changes KV by rounding at most, as does another GPU."""


def test_every_argument_of_models_adapters_and_media_is_sorted() -> None:
    """One of a later SGLang is somebody's to think about before two models share a disk."""
    from kv_sglang.served import COUNTED
    from sglang.srt.arg_groups.fields.lora import Lora
    from sglang.srt.arg_groups.fields.mm import Mm
    from sglang.srt.arg_groups.fields.model import Model

    listed = [*COUNTED.keys() - OF_OTHER_NAMESPACES, *TREATED, *LEAVES_KV_ALONE]
    assert sorted(listed) == sorted(field for space in (Model, Lora, Mm) for field in space.__struct_fields__)


@pytest.fixture
def served(tiny_llama: str) -> Served:
    def read(**arguments: Any) -> ServedModel:
        from kv_sglang.attach import Rank
        from kv_sglang.served import served_model
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path=tiny_llama, device="cpu", **arguments))
        return served_model(Rank(0, 1, False, 0, 1, 0, 1, 1))

    return read


def test_a_plain_start_has_nothing_that_vllm_would_not_name(served: Served) -> None:
    """Else neither engine finds what the other computed."""
    from kv_sglang.served import COUNTED
    from sglang.srt.server_args import ServerArgs

    assert served().overrides["settings"] == {}
    plain = ServerArgs(model_path="model")
    assert all(not getattr(plain, name) or getattr(plain, name) == usual for name, usual in COUNTED.items())


def test_arguments_from_which_other_kv_follows_are_other_names(served: Served) -> None:
    arguments: list[dict[str, Any]] = [
        {},
        {"json_model_override_args": '{"rope_theta": 77.0}'},
        {"load_format": "pt"},
        {"load_format": "safetensors"},
        {"model_config_parser": "hf"},
        {"model_impl": "transformers"},
        {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "somebody/adapter"}'},
        {"mm_process_config": {"image": {"max_pixels": 1048576}}},
        {"mm_process_config": {"image": {"max_pixels": 524288}}},
    ]
    names = {described(served(**each)): each for each in arguments}
    assert list(names.values()) == arguments
    assert described(served(max_running_requests=3, model_impl="auto", load_format="auto")) == described(served())


@pytest.mark.parametrize("arguments", [{"load_format": "remote_instance"}, {"weight_cache_mode": "client"}])
def test_weights_that_are_not_the_models_own_files_have_no_name(served: Served, arguments: dict[str, Any]) -> None:
    """They come from a neighbour or a cache; the directory is there for its configuration."""
    assert identify(served(), DigestMemory(None)) is not None
    assert identify(served(**arguments), DigestMemory(None)) is None
