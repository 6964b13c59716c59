"""Which model is this, said so that two different models never share a key space.

A model's name is not enough: a local directory is overwritten by the next training run, a hub name moves with its
branch, and a changed rope or dtype changes every byte of KV. So a key space holds the name, a fingerprint of the
weights (or the hub's commit), and a digest of the configuration that the engine really uses.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from kv_core.keys import KeySpace

_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024
_TRANSIENT = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"})


def key_space(vllm_config: Any, *, kv_dtype: str, format_fingerprint: str, world: int, chain: str) -> KeySpace:
    """The key space of this engine: all that must match for KV bytes to be interchangeable, beside the tokens."""
    model = vllm_config.model_config
    return KeySpace(
        model=str(model.model),
        revision=_revision(vllm_config),
        dtype=kv_dtype,
        format=format_fingerprint,
        world=world,
        chain=chain,
        tags=(("computed-in", str(model.dtype).removeprefix("torch.")), ("config", _config_digest(vllm_config))),
    )


def weights_fingerprint(directory: Path) -> str:
    """A digest over the name and size of each weight file and 16 evenly spaced samples of 64 KiB in each.

    Reading every byte of a large model at each start would cost minutes. A model trained further differs everywhere,
    so samples see it; someone who patches single bytes between the samples of a file must also change its size or
    give the model another name.
    """
    digest = hashlib.sha256(b"kv-vllm-weights-v1")
    for file in _weight_files(directory):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(directory).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def adapter_identity(name: str, path: str) -> str:
    """A LoRA adapter's name in keys: its weights where they lie on this machine, else its name and path.

    The name alone would serve the KV of whatever adapter had it before.
    """
    directory = Path(path)
    if not path or not directory.is_dir():
        return f"{name}@{path}"
    state = tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in _weight_files(directory))
    return f"{name}@{_adapter_fingerprint(path, state)}"


@lru_cache(maxsize=1024)
def _adapter_fingerprint(path: str, state: tuple[tuple[str, int, int], ...]) -> str:
    """Samples are read again only when a file's time or size changed, which is what `state` is for."""
    del state
    return weights_fingerprint(Path(path))


def _weight_files(directory: Path) -> Iterator[Path]:
    for file in sorted(directory.rglob("*")):
        if file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") and file.is_file():
            yield file


def _revision(vllm_config: Any) -> str:
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        return f"dummy-{model.seed}"
    directory = Path(str(model.model))
    if directory.is_dir():
        return "weights-" + weights_fingerprint(directory)
    if directory.is_file():
        return "weights-" + weights_fingerprint(directory.parent)
    return "commit-" + (_hub_commit(str(model.model), model.revision) or str(model.revision or "main"))


def _hub_commit(name: str, revision: str | None) -> str | None:
    """The commit of the snapshot that was loaded, from the hub's cache on this machine; None if it is not there."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    match = re.search(r"[/\\]snapshots[/\\]([0-9a-f]{40})[/\\]", found) if isinstance(found, str) else None
    return match[1] if match else None


def _config_digest(vllm_config: Any) -> str:
    """Over the configuration as the engine uses it: overrides, rope scaling, quantisation and adapters of all kinds."""
    model = vllm_config.model_config
    described = {key: value for key, value in model.hf_config.to_dict().items() if key not in _TRANSIENT}
    described["quantization"] = str(model.quantization)
    if "longrope" in json.dumps(described, default=str) or "dynamic" in json.dumps(described, default=str):
        # These choose their frequencies by the longest sequence the engine accepts.
        described["max_model_len"] = model.max_model_len
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
