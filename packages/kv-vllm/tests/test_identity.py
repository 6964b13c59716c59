"""Two models, or two adapters, that could compute other KV never share a name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kv_vllm.identity import adapter_identity, key_space, weights_fingerprint


def write(directory: Path, name: str = "model.safetensors", byte: int = 1, size: int = 3_000_000) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(bytes([byte]) * size)
    return directory


def test_weights_that_differ_in_bytes_size_or_name_differ(tmp_path: Path) -> None:
    same = weights_fingerprint(write(tmp_path / "a"))
    assert weights_fingerprint(write(tmp_path / "b")) == same
    assert weights_fingerprint(write(tmp_path / "c", byte=2)) != same
    assert weights_fingerprint(write(tmp_path / "d", size=3_000_001)) != same
    assert weights_fingerprint(write(tmp_path / "e", name="model-1.safetensors")) != same
    trained = write(tmp_path / "f")
    with (trained / "model.safetensors").open("r+b") as file:
        for at in range(0, 3_000_000, 50_000):
            file.seek(at)
            file.write(b"\x07")
    assert weights_fingerprint(trained) != same


def test_an_adapter_is_its_weights_and_not_its_name(tmp_path: Path) -> None:
    first = adapter_identity("helper", str(write(tmp_path / "a", "adapter_model.safetensors")))
    assert adapter_identity("helper", str(write(tmp_path / "b", "adapter_model.safetensors", byte=2))) != first
    assert adapter_identity("other", str(tmp_path / "a")) != first
    write(tmp_path / "a", "adapter_model.safetensors", byte=3, size=3_000_100)  # trained on, in the same place
    assert adapter_identity("helper", str(tmp_path / "a")) != first
    assert adapter_identity("helper", "hub/name") != adapter_identity("helper", "hub/other")


def config(directory: Path, **changed: Any) -> Any:
    hf: dict[str, Any] = {"hidden_size": 8, "rope_theta": 1e4, "_name_or_path": "x"} | changed.pop("hf", {})
    model: dict[str, Any] = {
        "model": str(directory),
        "revision": None,
        "dtype": "torch.float32",
        "quantization": None,
        "seed": 0,
        "max_model_len": 4096,
        "hf_config": SimpleNamespace(to_dict=lambda: hf),
    }
    load = {"load_format": changed.pop("load_format", "auto")}
    return SimpleNamespace(model_config=SimpleNamespace(**model | changed), load_config=SimpleNamespace(**load))


def test_whatever_changes_the_bytes_changes_the_key_space(tmp_path: Path) -> None:
    write(tmp_path)

    def space(kv_dtype: str = "float32", form: str = "f", **changed: Any) -> bytes:
        made = key_space(
            config(tmp_path, **changed), kv_dtype=kv_dtype, format_fingerprint=form, world=1, chain="sha256:256"
        )
        return made.fingerprint

    first = space()
    assert space() == first
    assert space(hf={"_name_or_path": "elsewhere"}) == first
    assert space(max_model_len=8192) == first
    others = [
        space(kv_dtype="bfloat16"),
        space(form="g"),
        space(dtype="torch.bfloat16"),
        space(quantization="fp8"),
        space(hf={"rope_theta": 1e6}),
        space(hf={"rope_scaling": {"rope_type": "longrope"}}),
        space(hf={"rope_scaling": {"rope_type": "longrope"}}, max_model_len=8192),
        space(load_format="dummy"),
        space(load_format="dummy", seed=1),
        space(model="org/name"),
        space(model="org/name", revision="v2"),
    ]
    assert len({first, *others}) == len(others) + 1
