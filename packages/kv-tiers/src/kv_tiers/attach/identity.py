"""Which model is this, said so that two different models never share a key space, and two engines on one model do.

A model's name is not enough: a local directory is overwritten by the next training run, a hub name moves with its
branch, and a changed rope or dtype changes every byte of KV. So a key space holds the hub's name and commit or a
fingerprint of the weights, a digest of the model's own `config.json`, and whatever the engine was told to change of it.
Nothing of this depends on the engine's version or on the library that reads configurations.

Two engines may still keep other numbers for the same model (another order of rotary halves, say), and no configuration
tells. So chunks are shared between engines only for architectures of which a test of ours has shown that both engines
keep the same; for any other the engine's name is part of the key space.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kv_core.keys import KeySpace

SHARED_ARCHITECTURES: Final = frozenset({"LlamaForCausalLM"})
"""Those of which `tests/engine_sglang` shows that vLLM and SGLang keep the same KV, byte for byte up to rounding."""

_ADAPTER: Final = "adapter_config.json"
"""What it is scaled by and which layers it changes."""
_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024
_TRANSIENT = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
_SNAPSHOT = re.compile(r"[/\\]models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})(?=[/\\]|$)")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as an engine was told to serve it.

    engine: its name. source: a directory, a file or a hub's name, as given. revision: the hub's, None for its default.
    computed_in: the dtype of the layers, as torch spells it.
    dummy_seed: of weights that the engine makes up; None where it loads them.
    overrides: what the engine was told to change of the model's configuration, quantisation included; nothing else.
    most_tokens: the longest sequence that the engine accepts.
    read_config: the configuration as the engine read it. It counts only where the model's own file is not found.
    """

    engine: str
    source: str
    revision: str | None
    computed_in: str
    dummy_seed: int | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)
    most_tokens: int = 0
    read_config: Mapping[str, object] = field(default_factory=dict)


def key_space(model: ServedModel, *, kv_dtype: str, format_fingerprint: str, world: int, chain: str) -> KeySpace:
    """The key space of this engine: all that must match for KV bytes to be interchangeable, beside the tokens."""
    name, revision = _name_and_revision(model)
    described, architectures = _configuration(model)
    tags = [("computed-in", model.computed_in), ("config", _digest(described))]
    if model.dummy_seed is not None or not architectures or not set(architectures) <= SHARED_ARCHITECTURES:
        tags.append(("engine", model.engine))
    return KeySpace(
        model=name,
        revision=revision,
        dtype=kv_dtype,
        format=format_fingerprint,
        world=world,
        chain=chain,
        tags=tuple(tags),
    )


def weights_fingerprint(directory: Path) -> str:
    """A digest over the name and size of each weight file and 16 evenly spaced samples of 64 KiB in each.

    Reading every byte of a large model at each start would cost minutes. A model trained further differs everywhere,
    so samples see it; someone who patches single bytes between the samples of a file must also change its size or
    give the model another name.
    """
    digest = hashlib.sha256(b"kv-weights-v1")
    for file in _weight_files(directory):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(directory).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def adapter_identity(name: str, path: str) -> str:
    """A LoRA adapter's name in keys: its weights and scale where they are in a directory, else the hub's commit.

    The name alone would serve the KV of whatever adapter had it before.
    """
    directory = Path(path)
    if not path or not directory.is_dir():
        snapshot = _SNAPSHOT.search(str(_hub_file(path, None, _ADAPTER))) if path else None
        return f"{name}@{path}" + (f"@{snapshot[2]}" if snapshot else "")
    files = [*_weight_files(directory), *directory.glob(_ADAPTER)]
    state = tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return f"{name}@{_adapter_fingerprint(path, state)}"


@lru_cache(maxsize=1024)
def _adapter_fingerprint(path: str, state: tuple[tuple[str, int, int], ...]) -> str:
    """Samples are read again only when a file's time or size changed, which is what `state` is for."""
    del state
    described = Path(path) / _ADAPTER
    digest = hashlib.sha256(described.read_bytes() if described.is_file() else b"")
    return f"{weights_fingerprint(Path(path))}-{digest.hexdigest()[:16]}"


def _weight_files(directory: Path) -> Iterator[Path]:
    for file in sorted(directory.rglob("*")):
        if file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") and file.is_file():
            yield file


def _name_and_revision(model: ServedModel) -> tuple[str, str]:
    """A hub's name and commit, also where an engine was given the directory that the hub's cache keeps it in.

    Any other directory is its weights: where it lies and what it is called say nothing.
    """
    if model.dummy_seed is not None:
        return model.source, f"dummy-{model.dummy_seed}"
    path = Path(model.source)
    snapshot = _SNAPSHOT.search(model.source)
    if snapshot is not None and path.exists():
        return snapshot[1].replace("--", "/", 1), f"commit-{snapshot[2]}"
    if path.is_dir() or path.is_file():
        return "local", "weights-" + weights_fingerprint(path if path.is_dir() else path.parent)
    found = _hub_file(model.source, model.revision)
    snapshot = _SNAPSHOT.search(str(found))
    return model.source, "commit-" + (snapshot[2] if snapshot else str(model.revision or "main"))


def _configuration(model: ServedModel) -> tuple[dict[str, object], list[str]]:
    """What the bytes of KV follow from beside the weights, and the architectures that the model names itself."""
    raw = _own_config(model)
    described: dict[str, object] = {**(raw or model.read_config)}
    for name in _TRANSIENT:
        described.pop(name, None)
    architectures = raw.get("architectures") if raw else None
    # What the engine was told, beside what it would have done by itself.
    overrides = {key: value for key, value in model.overrides.items() if value not in (None, {}, "")}
    text = json.dumps([described, overrides], default=str)
    if "longrope" in text or "dynamic" in text:
        # These choose their frequencies by the longest sequence the engine accepts.
        overrides["most_tokens"] = model.most_tokens
    whole: dict[str, object] = {"config": described, "overrides": overrides, "own": raw is not None}
    known = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    return whole, list(architectures) if known and isinstance(architectures, list) else []


def _own_config(model: ServedModel) -> dict[str, Any] | None:
    """The model's `config.json` as it lies on this machine."""
    path = Path(model.source)
    file = path / "config.json" if path.is_dir() else _hub_file(model.source, model.revision)
    try:
        read = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def _hub_file(name: str, revision: str | None, file: str = "config.json") -> Path | None:
    """A file of the snapshot that was loaded, in the hub's cache on this machine; None if not there."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, file, revision=revision)
    except (ImportError, ValueError):  # not installed; or not a name that a hub has
        return None
    return Path(found) if isinstance(found, str) else None


def _digest(described: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32]
