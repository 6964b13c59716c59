"""The promises of test_vllm.py on an NVIDIA GPU: its attention kernels, its streams, and pools that are pinned.

In float32 a hit equals a full prefill. In bfloat16 the kernels of the short rest of a prompt round otherwise than those
of a whole one: there the reference is vLLM with its own prefix cache, in blocks of a chunk's size, which finds as much.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    CHUNK_TOKENS,
    PROMPTS,
    SHARED,
    WARM_HITS,
    Answer,
    Engine,
    assert_half_evicted_is_stored_again,
    started,
)
from kv_connect.engine import engines
from kv_core.errors import CopyFailed
from kv_testing.tiny_deepseek import write_tiny_deepseek

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

CACHE: dict[str, Any] = {"host": {"capacity_bytes": "1GiB"}}
# Of whole blocks vLLM leaves one to compute; none of these prompts is one. Four of them share what the first two leave.
UNEVEN = [*PROMPTS[:2], SHARED[:1000], SHARED[:700], *PROMPTS[4:]]
FOUND = [512, 512, 768, 512, 0, 512]
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("tiny_llama", {}),
    "bfloat16": ("tiny_llama", {"dtype": "bfloat16"}),
    "CUDA graphs": ("tiny_llama", {"dtype": "bfloat16", **GRAPHS}),
    "an fp8 cache": ("tiny_llama", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    "MLA": ("deepseek_of_wide_heads", {"dtype": "bfloat16"}),
    "sliding windows": ("tiny_gemma", {"dtype": "bfloat16"}),
}
WAYS = {
    "between steps": {},
    "by layers": {"load": "layerwise", "store": "layerwise"},
}


@pytest.fixture(scope="session")
def deepseek_of_wide_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_deepseek(tmp_path_factory.mktemp("tiny-deepseek"), head_dim=128))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_cold_and_warm_make_the_tokens_of_an_engine_without_us(
    request: pytest.FixtureRequest, kind: str, way: str
) -> None:
    if kind == "CUDA graphs" and way == "by layers":
        pytest.skip("a layer has no hook in a full graph, and piecewise ones are compiled")
    fixture, arguments = KINDS[kind]
    model = request.getfixturevalue(fixture)
    arguments = {"block_size": CHUNK_TOKENS} | arguments
    with started(model, cache=None, enable_prefix_caching=True, **arguments) as plain:
        cold = plain.ask_in_turn(UNEVEN)
        warm = plain.ask_in_turn(UNEVEN)
        assert plain.hits == FOUND
    with started(model, cache=CACHE | WAYS[way], **arguments) as engine:
        assert engine.ask_in_turn(UNEVEN, settles=True) == cold
        assert engine.ask_in_turn(UNEVEN, settles=True) == warm
        assert engine.hits == FOUND
        engine.assert_at_rest()
        engine.inside("kv_corrupt")
        assert engine.ask_in_turn(UNEVEN)[:4] != warm[:4]


class TestOneEngine:
    @pytest.fixture(scope="class")
    def engine(self, tiny_llama: str, reference: list[Answer]) -> Iterator[Engine]:
        with started(tiny_llama, cache=CACHE) as running:
            yield running

    @pytest.fixture(autouse=True)
    def _at_rest(self, engine: Engine) -> Iterator[None]:
        yield
        engine.assert_at_rest()
        engine.llm.reset_prefix_cache(reset_connector=True)

    def test_all_prompts_at_once(self, engine: Engine, reference: list[Answer]) -> None:
        assert engine.ask(PROMPTS) == reference
        assert engine.ask(PROMPTS) == reference
        assert engine.hits == WARM_HITS

    def test_half_evicted(self, engine: Engine, reference: list[Answer]) -> None:
        assert_half_evicted_is_stored_again(engine, reference)

    def test_a_load_that_fails_is_computed(
        self, engine: Engine, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (inner,) = engines().values()
        assert inner.worker is not None

        def failing(plan: object) -> None:
            raise CopyFailed("the bus is on fire")

        engine.ask_in_turn(PROMPTS)
        failed = inner.worker.counts.loads_failed
        with monkeypatch.context() as patch:
            patch.setattr(inner.copiers[0], "load", failing)
            assert engine.ask([PROMPTS[0]]) == [reference[0]]
        assert inner.worker.counts.loads_failed == failed + 1


def test_preemption_in_a_small_kv_space(tiny_llama: str) -> None:
    prompts = [SHARED[:256] + [20 + number * 7 + i for i in range(120)] for number in range(8)]
    with started(tiny_llama, cache=None, max_model_len=1024) as plain:
        expected = plain.ask_in_turn(prompts, new_tokens=150)
    cache = CACHE | {"save_decode": True}
    with started(tiny_llama, cache=cache, num_gpu_blocks_override=112, max_model_len=1024) as tight:
        assert tight.ask(prompts, new_tokens=150) == expected
        assert tight.ask(prompts, new_tokens=150) == expected
        assert tight.assert_at_rest()["scheduler"]["loads"] > 0


def test_a_server_beside_the_engine_and_a_restart_from_disk(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """The worker pins a pool that is the server's, and what another process left on disk is found."""
    disk = {"type": "disk", "directory": str(tmp_path), "capacity_bytes": "1GiB"}
    cache = CACHE | {"tiers": [disk]}
    for hits in ([0, 512, 512, 768, 0, 0], WARM_HITS):
        with started(tiny_llama, cache=cache, own_process=True) as engine:
            assert engine.ask_in_turn(PROMPTS) == reference, json.dumps(engine.hits)
            assert engine.hits == hits
            engine.inside("kv_settle")


def test_files_are_read_into_the_gpu_after_a_restart(tiny_llama: str, reference: list[Answer], tmp_path: Path) -> None:
    """By cuFile where it is, else staged."""
    cache = CACHE | {"tiers": [{"type": "gds", "directory": str(tmp_path), "capacity_bytes": "1GiB"}]}
    for hits in ([0, 512, 512, 768, 0, 0], WARM_HITS):
        with started(tiny_llama, cache=cache, own_process=True) as engine:
            assert engine.ask_in_turn(PROMPTS) == reference, json.dumps(engine.hits)
            assert engine.hits == hits
            read_bytes = engine.assert_at_rest()["worker"]["loaded_file_bytes"]
    assert read_bytes > 0
