"""Which model vLLM serves, with all its settings that change the KV.

A checkpoint and its configuration do not determine that: a command-line option may quantise weights, read another
configuration, restrict adapters to some layers or prepare images in another way. Two engines that differ in one of them
must not share chunks, above all through a disk, and neither a chunk's size nor its bytes would reveal it.
`tests/engine/test_served.py` sorts every field of vLLM's sections, so a new one cannot be missed.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kv_connect.identity import Beside, ServedModel

from kv_vllm.parallel import draft_model

COUNTED: Final[Mapping[str, Mapping[str, object]]] = {
    "model_config": {
        "code_revision": None,
        "model_class_overrides": None,
        "model_impl": "auto",
        "quantization_config": None,
    },
    "load_config": {
        # A directory may hold several sets of weights.
        "ignore_patterns": ["original/**/*"],
        "load_format": "auto",
        "model_loader_extra_config": None,
    },
    "cache_config": {"kv_cache_dtype_skip_layers": None},
    "attention_config": {
        "indexer_kv_dtype": "auto",
        "indexer_sparse_logits": False,
        "use_non_causal": False,
        "use_prefill_query_quantization": False,
    },
    "lora_config": {
        "enable_moe_shared_loras": False,
        "enable_tower_connector_lora": False,
        "lora_dtype": "auto",
        "target_modules": None,
    },
    "multimodal_config": {
        "media_io_kwargs": None,
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
        "mm_processor_kwargs": None,
        "video_pruning_method": "evs",
        "video_pruning_rate": None,
    },
    "": {"additional_config": None},
}
"""By section of vLLM's configuration, the fields that count besides those that `served_model` handles one by one, and
the value of each that is not recorded. A false value is never recorded."""

_FROM_THE_MODEL: Final = frozenset(
    {
        *("auto", "bitsandbytes", "dummy", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache"),
        *("pt", "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state"),
    }
)
"""The formats whose weights are the model's own files. Those of another format (tensorizer's, a cache's, a plugin's)
come from anywhere, so nothing here identifies them."""


def tags_of_groups(kv_cache_config: Any) -> tuple[tuple[str, str], ...]:
    """For the key space, which layers each group holds, unless there is one with all in their order. vLLM deals them
    out, and may do it another way in another release; neither a chunk's size nor its bytes would reveal that."""
    names = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
    if len(names) < 2 and all(one == sorted(one, key=_numbers_in) for one in names):
        return ()
    return (("groups", hashlib.sha256(json.dumps(names).encode()).hexdigest()[:32]),)


def _numbers_in(name: str) -> list[int]:
    return list(map(int, re.findall("[0-9]+", name)))


def served_model(vllm_config: Any, *, kv_scales: str) -> ServedModel:
    """The model that vLLM is to serve, and how. kv_scales: a digest of the scales of a quantised cache, if any."""
    model, draft = vllm_config.model_config, draft_model(vllm_config)
    load_format, downloads = str(vllm_config.load_config.load_format), vllm_config.load_config.download_dir or ""
    draft_load = getattr(vllm_config.speculative_config, "draft_load_config", None) or vllm_config.load_config
    # Weights that do not come from the configuration's directory (but from an object store, say) are named separately.
    source = str(getattr(model, "model_weights", "") or model.model)
    model_quantization = getattr(model.hf_config, "quantization_config", None)
    quant_method = model_quantization.get("quant_method") if isinstance(model_quantization, dict) else None
    overrides = getattr(model, "hf_overrides", None)
    config = {str(key): value for key, value in model.hf_config.to_dict().items()}
    # A function may change anything, and the model's own file is irrelevant if another was read: then the configuration
    # that vLLM derived is recorded.
    is_derived = callable(overrides) or bool(model.hf_config_path) or model.config_format != "auto"
    return ServedModel(
        engine="vllm",
        source=source if load_format in _FROM_THE_MODEL else f"{load_format}:{source}",
        revision=model.revision,
        computed_in=str(model.dtype).removeprefix("torch."),
        dummy_seed=model.seed if load_format == "dummy" else None,
        overrides={
            "configuration": config if is_derived else overrides,
            "quantization": model.quantization if model.quantization != quant_method else None,
            # The layers of a draft model are in the chunks too; its weights are named below.
            "draft": [vllm_config.speculative_config.method, draft.model, draft.revision] if draft else None,
            "kv_scales": kv_scales,
            "settings": _changed_settings(vllm_config),
        },
        max_tokens=model.max_model_len,
        read_config=config,
        beside=[Beside("draft", str(draft.model), draft.revision, draft_load.download_dir or "")] if draft else (),
        downloads=downloads,
    )


def _changed_settings(vllm_config: Any) -> dict[str, object]:
    """The settings that the user has changed, by their names."""
    changed: dict[str, object] = {}
    for section, fields in COUNTED.items():
        holder = vllm_config.model_config if section == "multimodal_config" else vllm_config
        config = getattr(holder, section, None) if section else vllm_config
        for name, default in fields.items():
            value = getattr(config, name, None)
            if value and value != default:
                changed[f"{section}.{name}".lstrip(".")] = value
    if changed.get("load_config.load_format") in ("dummy", "hf"):  # the first is named by its seed; the other is auto
        del changed["load_config.load_format"]
    if changed.get("lora_config.lora_dtype") == vllm_config.model_config.dtype:  # the value that auto resolves to
        del changed["lora_config.lora_dtype"]
    scales = "multimodal_config.mm_encoder_fp8_scale_path"
    if scales in changed:
        changed[scales] = hashlib.sha256(Path(str(changed[scales])).read_bytes()).hexdigest()
    return changed
