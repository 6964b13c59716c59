"""Two models that could compute other KV never share a name."""

import json
from pathlib import Path
from typing import Any

import pytest
from kv_connect.file_digests import DigestMemory
from kv_connect.identity import (
    LiveKeySpace,
    LiveWeights,
    ServedModel,
    identify,
    key_space,
    origins_of,
    sources_of,
)


def write(directory: Path, name: str = "model.safetensors", byte: int = 1, size: int = 3_000_000) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(bytes([byte]) * size)
    return directory


def served(directory: Path, *, own: dict[str, Any] | None = None, **changed: Any) -> ServedModel:
    """A model that was written to `directory`; own: changes of its configuration file, `changed`: of what is served."""
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "rope_theta": 1e4, "_name_or_path": "x"}
    (directory / "config.json").write_text(json.dumps(config | (own or {})))
    given: dict[str, Any] = {
        "engine": "vllm",
        "source": str(directory),
        "revision": None,
        "computed_in": "float32",
        "max_tokens": 4096,
    }
    return ServedModel(**given | changed)


def fingerprint(model: ServedModel, kv_dtype: str = "float32", form: str = "f") -> bytes:
    weights = LiveWeights(model, before=origins_of(sources_of(model)), memory=DigestMemory(None), patience_s=30)
    live = LiveKeySpace(weights, kv_dtype=kv_dtype, format_fingerprint=form, world=1, chain="sha256:256")
    assert live.now is not None
    return live.now.fingerprint


LONGROPE = {"rope_scaling": {"rope_type": "longrope"}}
SU = {"rope_scaling": {"type": "su", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0]}}


def test_whatever_changes_the_bytes_changes_the_key_space(tmp_path: Path) -> None:
    write(tmp_path)
    first = fingerprint(served(tmp_path))
    assert fingerprint(served(tmp_path, own={"_name_or_path": "elsewhere", "transformers_version": "5"})) == first
    assert fingerprint(served(tmp_path, max_tokens=8192)) == first
    assert fingerprint(served(tmp_path, overrides={"configuration": {}, "quantization": None})) == first
    others = [
        fingerprint(served(tmp_path), kv_dtype="bfloat16"),
        fingerprint(served(tmp_path), form="g"),
        fingerprint(served(tmp_path, computed_in="bfloat16")),
        fingerprint(served(tmp_path, overrides={"quantization": "fp8"})),
        fingerprint(served(tmp_path, overrides={"configuration": {"rope_theta": 1e6}})),
        fingerprint(served(tmp_path, own={"rope_theta": 1e6})),
        fingerprint(served(tmp_path, own=LONGROPE)),
        fingerprint(served(tmp_path, own=LONGROPE, max_tokens=8192)),
        fingerprint(served(tmp_path, own=SU)),
        fingerprint(served(tmp_path, own=SU, max_tokens=8192)),
        fingerprint(served(tmp_path, dummy_seed=0)),
        fingerprint(served(tmp_path, dummy_seed=1)),
        fingerprint(served(tmp_path, source="org/name")),
        fingerprint(served(tmp_path, source="org/name", revision="v2")),
        fingerprint(served(tmp_path, source="org/name", read_config={"rope_theta": 2.0})),
    ]
    assert len({first, *others}) == len(others) + 1


def test_the_log_has_the_key_space_which_kv_keys_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path)
    with caplog.at_level("INFO"):
        named = fingerprint(served(tmp_path)).hex()
    assert f"the key space is {named}, of 1 shards" in caplog.text


def test_two_engines_share_a_model_that_both_are_shown_to_keep_alike(tmp_path: Path) -> None:
    """Wherever it lies, and whatever the library that reads configurations makes of it."""
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    first = fingerprint(served(one, read_config={"rope_parameters": {"rope_theta": 1e4}}))
    assert fingerprint(served(other, engine="sglang", read_config={"rope_theta": 1e4})) == first


@pytest.mark.parametrize("own", [{"architectures": ["SomethingElse"]}, {"architectures": None}])
def test_two_engines_never_share_what_was_not_shown(tmp_path: Path, own: dict[str, Any]) -> None:
    write(tmp_path)
    assert fingerprint(served(tmp_path, own=own)) != fingerprint(served(tmp_path, own=own, engine="sglang"))


@pytest.mark.parametrize(
    "changed",
    [
        {
            "overrides": {"quantization": "fp8"}
        },  # of the weights, as they are loaded: each engine scales them its own way
        {"overrides": {"configuration": {"rope_parameters": {"factor": 2.0}}}},  # merged by one, replaced by the other
        {"overrides": {"settings": {"load_format": "pt"}}},
        {"own": {"quantization_config": {"quant_method": "fp8"}}},  # activations, by each engine's own kernels
        {"own": {"compression_config": {"quantization_status": "compressed"}}},
    ],
)
def test_two_engines_never_share_what_each_does_in_its_own_way(tmp_path: Path, changed: dict[str, Any]) -> None:
    write(tmp_path)
    names = {fingerprint(served(tmp_path, engine=engine, **changed)) for engine in ("vllm", "sglang")}
    assert len(names) == 2


def test_made_up_weights_are_each_engines_own(tmp_path: Path) -> None:
    write(tmp_path)
    assert fingerprint(served(tmp_path, dummy_seed=0)) != fingerprint(served(tmp_path, dummy_seed=0, engine="sglang"))


def test_a_snapshot_in_the_hubs_cache_is_the_hubs_name_and_commit(tmp_path: Path) -> None:
    snapshot = write(tmp_path / "models--org--name" / "snapshots" / ("a" * 40))
    weights = identify(served(snapshot), DigestMemory(None))
    assert weights is not None
    space = key_space(
        served(snapshot), weights, kv_dtype="float32", format_fingerprint="f", world=1, chain="sha256:256"
    )
    assert (space.model, space.revision) == ("org/name", "commit-" + "a" * 40)


@pytest.mark.parametrize("parts", [("small", "large"), ("model-Q4_K_M.gguf", "model-Q8_0.gguf")])
def test_two_models_in_one_commit_are_two(tmp_path: Path, parts: tuple[str, str]) -> None:
    """A hub's repository may have one in each directory, or one quantisation in each file."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    found = []
    for byte, part in enumerate(parts):
        if part.endswith(".gguf"):
            source = write(snapshot, part, byte) / part
            model = ServedModel("sglang", str(source), None, "float32", read_config={"hidden_size": 8})
        else:
            model = served(write(snapshot / part, byte=byte))
        found.append(identify(model, DigestMemory(None)))
    assert [weights and (weights.model, weights.revision) for weights in found] == [
        (f"org/name/{part}", "commit-" + "a" * 40) for part in parts
    ]
