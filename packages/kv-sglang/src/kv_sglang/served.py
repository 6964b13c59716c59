"""Which model SGLang serves, with all its arguments that change the KV.

A checkpoint and its configuration do not determine that: an argument may quantise weights, read another configuration,
restrict adapters to some layers or prepare images in another way. Two engines that differ in one of them must not share
pages, and neither a page's size nor its bytes would reveal it. `tests/engine_sglang/test_served.py` sorts every
argument of the namespaces that contain such arguments, so a new one cannot be missed.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kv_connect.identity import Beside, ServedModel, Source, source_of

from kv_sglang.attach import Rank

COUNTED: Final[Mapping[str, object]] = {
    "disable_fast_image_processor": False,
    "enable_precise_embedding_interpolation": False,
    "experts_shared_outer_loras": None,
    "image_processor_backend": "auto",
    "kt_method": "AMXINT4",
    "kt_num_gpu_experts": None,
    "kt_weight_path": None,
    # A directory may hold several sets of weights.
    "load_format": "auto",
    "lora_target_modules": None,
    "mm_process_config": None,
    "model_impl": "auto",
    "model_loader_extra_config": "{}",
    "modelopt_quant": None,
    "qsa_indexer_dtype": "auto",
    "quantize_and_serve": False,
    "rl_quant_profile": None,
}
"""The arguments that count besides those that `served_model` handles one by one, and the value of each that is not
recorded. A false value is never recorded."""

_FROM_THE_MODEL: Final = frozenset(
    {
        *("auto", "bitsandbytes", "dummy", "fastsafetensors", "flash_rl", "gguf", "instanttensor", "layered"),
        *("mistral", "npcache", "pt", "runai_streamer", "safetensors", "sharded_state"),
    }
)
"""The formats whose weights are the model's own files. Those of another format (a neighbour's, a cache's, a
plugin's) come from anywhere, so nothing here identifies them."""
_PLAIN_CACHES: Final = ("auto", "bf16", "bfloat16")
"""The kinds of caches in SGLang (`--kv-cache-dtype`) whose pools have the dtype of their elements."""


def served_model(rank: Rank) -> ServedModel:
    """The model that SGLang is to serve, and how."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    model = ModelConfig.from_server_args(arguments)
    read = {str(key): value for key, value in model.hf_config.to_dict().items()}
    own = read.get("quantization_config")
    quantized = own.get("quant_method") if isinstance(own, dict) else None
    quantization = getattr(model, "quantization", None)
    # The model's own file is irrelevant if another was read: then the configuration that SGLang derived is recorded.
    is_elsewhere = arguments.model_config_parser != "auto" or bool(arguments.decrypted_config_file)
    overrides = json.loads(arguments.json_model_override_args or "{}")
    return ServedModel(
        engine="sglang",
        source=_source_of_weights(arguments),
        revision=arguments.revision,
        computed_in=str(model.dtype).removeprefix("torch."),
        dummy_seed=arguments.random_seed if arguments.load_format == "dummy" else None,
        overrides={
            "configuration": read if is_elsewhere else overrides,
            "quantization": quantization if quantization != quantized else None,
            # A draft's layers may lie in the same pages.
            "draft": arguments.speculative_draft_model_path if arguments.speculative_algorithm else None,
            "stage": [rank.stage, rank.stages] if rank.stages > 1 else None,
            **_quantised_cache(arguments),
            "settings": _settings_that_count(arguments),
        },
        max_tokens=int(model.context_len),
        read_config=read,
        beside=_beside(arguments),
        downloads=arguments.download_dir or "",
    )


def sources() -> list[Source]:
    """All weights that determine the KV, as `sources_of` has them."""
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    of_model = _source_of_weights(arguments), arguments.revision, arguments.download_dir or ""
    return [of_model, *map(source_of, _beside(arguments))]


def _beside(arguments: Any) -> list[Beside]:
    """The weights besides the model's."""
    from sglang.srt.runtime_context import get_lora

    # SGLang names the pages of these by the adapter's name and path, which do not identify its weights. Adapters loaded
    # later have a name that is valid only in this process.
    beside = [Beside(str(each.lora_name), str(each.lora_path)) for each in get_lora().lora_paths or ()]
    if arguments.speculative_algorithm and arguments.speculative_draft_model_path:
        draft, revision = arguments.speculative_draft_model_path, arguments.speculative_draft_model_revision
        beside.append(Beside("draft", str(draft), revision, arguments.download_dir or ""))
    return beside


def _source_of_weights(arguments: Any) -> str:
    """The model's path or name; for weights from anywhere else, a name that no file and no hub has."""
    elsewhere = str(arguments.load_format) if arguments.load_format not in _FROM_THE_MODEL else ""
    if arguments.modelopt_checkpoint_restore_path:
        elsewhere = "modelopt"
    elif arguments.weight_cache_mode == "client":
        elsewhere = "weight-cache"
    return f"{elsewhere}:{arguments.model_path}" if elsewhere else str(arguments.model_path)


def _settings_that_count(arguments: Any) -> dict[str, object]:
    """The arguments that the user has changed, by their names."""
    found: dict[str, object] = {}
    for name, usual in COUNTED.items():
        value = getattr(arguments, name)
        if value and value != usual:
            found[name] = sorted(value) if isinstance(value, set) else value
    if found.get("load_format") == "dummy":  # named by its seed
        del found["load_format"]
    return found


def _quantised_cache(arguments: Any) -> dict[str, object]:
    """How SGLang is to quantise its cache, whose pools report uint8 whatever the kind. The model's own setting counts
    with its configuration."""
    kind, scales = str(arguments.kv_cache_dtype), arguments.quantization_param_path
    return {
        "kv_cache": kind if kind not in _PLAIN_CACHES else None,
        "kv_scales": hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales else None,
    }
