"""Whatever way vLLM keeps KV, what we load is what its own prefix cache would have found.

The judge is vLLM's own prefix-cache hit of the same length, since in bfloat16 and in a quantised cache a hit and a full
prefill differ by themselves; in float32 it is the full prefill. A control corrupts what is loaded, and must change the
tokens.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import SHARED, Answer, started

BLOCK = 128
PROMPTS = [
    SHARED[:512] + [11 + i for i in range(90)],
    SHARED[:512] + [1200 + i for i in range(150)],
    SHARED[:1000],
]
COLD, WARM = [0, 512, 512], [512, 640, 896]


@dataclass(frozen=True)
class Kind:
    """A way in which vLLM keeps KV.

    layout: as the log names it. amx: what `torch.cpu` says of this processor, None for the truth.
    disk: the kinds in one directory must not find each other's chunks.
    """

    layout: str
    arguments: dict[str, Any] = field(default_factory=dict)
    amx: bool | None = None
    disk: str = "one for all"


HAS_AMX = torch.cpu._is_amx_tile_supported()
HAS_FP8 = HAS_AMX or torch.cpu._is_avx512_supported()
NATIVE = "vLLM CPU, AMX" if HAS_AMX else "vLLM CPU, K transposed"
KINDS = {
    "bfloat16": Kind(NATIVE, {"dtype": "bfloat16"}),
    # In canonical chunks these are the same bytes, so it has a disk of its own.
    "bfloat16 without AMX": Kind("vLLM CPU, K transposed", {"dtype": "bfloat16"}, amx=False, disk="without AMX"),
    "fp8_e4m3": Kind("vLLM CPU, K transposed", {"kv_cache_dtype": "fp8_e4m3"}),
    "fp8_e5m2": Kind("vLLM CPU, K transposed", {"kv_cache_dtype": "fp8_e5m2"}),
    "fp8_e4m3 under bfloat16": Kind(NATIVE, {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}),
}


def cache(directory: Path, **settings: Any) -> dict[str, Any]:
    tier = {"type": "disk", "directory": str(directory), "capacity_bytes": "64MiB"}
    return {"chunk_tokens": BLOCK, "host": {"capacity_bytes": "64MiB"}, "tiers": [tier], **settings}


def own_hits(model: str, **arguments: Any) -> tuple[list[Answer], list[Answer]]:
    """What vLLM answers the first time and from its own prefix cache."""
    with started(model, cache=None, enable_prefix_caching=True, **arguments) as plain:
        cold = plain.ask_in_turn(PROMPTS)
        assert plain.hits == COLD
        warm = plain.ask_in_turn(PROMPTS)
        assert plain.hits == WARM
    return cold, warm


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the directories are that kinds share: none may find what another has stored."""
    return tmp_path_factory.mktemp("disk")


QUICK = "fp8_e4m3"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=name, marks=() if name == QUICK else pytest.mark.slow) for name, kind in KINDS.items()],
)
def test_what_is_loaded_is_what_vllm_itself_would_have_found(
    kind: Kind, tiny_llama: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "kv_cache_dtype" in kind.arguments and not HAS_FP8:
        pytest.skip("vLLM has no FP8 cache on a processor without AVX-512 and AMX")
    if kind.amx is not None:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: kind.amx)
    cold, warm = own_hits(tiny_llama, **kind.arguments)
    with started(tiny_llama, cache=cache(disk / kind.disk), **kind.arguments) as first:
        assert first.ask_in_turn(PROMPTS) == cold
        assert first.hits == COLD, "another kind's chunks were found"
        assert first.ask_in_turn(PROMPTS) == warm
        assert first.hits == WARM
        seen = first.assert_at_rest()
        assert seen["formats"] == ["canonical"]
        assert seen["layouts"] == [kind.layout]
    with started(tiny_llama, cache=cache(disk / kind.disk), **kind.arguments) as second:
        from_disk = second.ask_in_turn(PROMPTS)
        assert second.hits == WARM
        assert from_disk == warm
        second.inside("kv_scramble")
        assert second.ask_in_turn(PROMPTS) != warm
        assert second.hits == WARM


@pytest.mark.slow
@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
def test_a_chunk_stored_with_amx_is_found_without_it(
    tiny_llama: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Canonical bytes know nothing of the instruction set."""
    with started(tiny_llama, cache=cache(disk / "isa"), dtype="bfloat16") as first:
        first.ask_in_turn(PROMPTS)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with started(tiny_llama, cache=cache(disk / "isa"), dtype="bfloat16") as second:
        second.ask_in_turn(PROMPTS)
        assert second.hits == WARM


LATENTS = {
    "reference, float32": {"attention_config": {"backend": "CPU_MLA"}},
    "AMX, bfloat16": {"dtype": "bfloat16", "block_size": BLOCK},
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", list(LATENTS.values()), ids=list(LATENTS))
def test_latents_of_mla(arguments: dict[str, Any], tiny_deepseek: str, disk: Path) -> None:
    if "dtype" in arguments:
        if not HAS_AMX:
            pytest.skip("this processor has no AMX")
        cold, warm = own_hits(tiny_deepseek, **arguments)
    else:
        # vLLM turns its own prefix cache off for this backend, whose hits are exact.
        with started(tiny_deepseek, cache=None, **arguments) as plain:
            cold = warm = plain.ask_in_turn(PROMPTS)
    for number in range(2):
        with started(tiny_deepseek, cache=cache(disk / "one for all"), **arguments) as engine:
            if number == 0:
                assert engine.ask_in_turn(PROMPTS) == cold
                assert engine.hits == COLD
            assert engine.ask_in_turn(PROMPTS) == warm
            assert engine.hits == WARM
            seen = engine.assert_at_rest()
            assert seen["formats"] == ["canonical"]
            assert seen["layouts"] == ["vLLM MLA"]
            engine.inside("kv_scramble")
            assert engine.ask_in_turn(PROMPTS) != warm
            assert engine.hits == WARM


@pytest.mark.long
def test_of_two_ranks_with_the_same_latents_one_stores_for_both(
    tiny_deepseek: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    two = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "attention_config": {"backend": "CPU_MLA"},
    }
    with started(tiny_deepseek, cache=None, **two) as plain:
        expected = plain.ask_in_turn(PROMPTS)
    with started(tiny_deepseek, cache=cache(disk / "two"), **two) as engine:
        assert engine.ask_in_turn(PROMPTS) == expected
        assert engine.hits == COLD
        assert engine.ask_in_turn(PROMPTS) == expected
        assert engine.hits == WARM
        stored, loaded = (
            [seen["worker"][name] for seen in engine.inside_all("kv_snapshot")]
            for name in ("chunks_stored", "loaded_tokens")
        )
        assert stored[0] > 0
        assert stored[1] == 0
        assert loaded[0] == loaded[1] > 0
