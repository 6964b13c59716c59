"""The real engine is the judge: the same prompt gives the same tokens without us, cold, warm, and half broken.

In float32 a hit gives the tokens of a full prefill. A control corrupts what is read, and must change them.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from engines import COLD_HITS, ON_A_CORE_EACH, PAGE, PROMPTS, WARM_HITS, Answer, Engine, corrupt, started
from kv_server.process import launch
from kv_testing.tiny import TinyLlama
from kv_tiers import HostPool
from one_engine import OneEngine

POOL = f"sglang-test-{os.getpid()}"
"""Of two processes of an engine."""


def disk(path: Path, **options: Any) -> dict[str, Any]:
    return {"type": "disk", "directory": str(path), "capacity_bytes": "64MiB", **options}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "kv"


@pytest.fixture(scope="class")
def engine(tiny_llama: str, reference: list[Answer], directory: Path) -> Iterator[Engine]:
    cache = {"host": {"capacity_bytes": "32MiB", "name": POOL}, "tiers": [disk(directory)], "cold": {"wait_s": 10.0}}
    try:
        with started(tiny_llama, cache=cache) as running:
            yield running
    finally:
        HostPool.unlink(POOL)


class TestOneEngine(OneEngine):
    pool = POOL


class TestAfterARestart:
    """The first engine has ended and its pool is gone: what is found comes from disk."""

    def test_a_second_process_with_another_host_layout_and_no_room_for_it_all(
        self, tiny_llama: str, reference: list[Answer], directory: Path
    ) -> None:
        """40 pages of room for prompts of up to 64, host memory as a buffer only, and pages of another order."""
        cache = {"host": {"capacity_bytes": "1280KiB"}, "tiers": [disk(directory)], "cold": {"wait_s": 10.0}}
        with started(
            tiny_llama, cache=cache, hicache_mem_layout="layer_first", hicache_host_memory_mode="buffer_only"
        ) as second:
            for _ in range(2):
                assert second.ask_in_turn(PROMPTS) == reference
                assert min(second.hits[0], second.hits[1], second.hits[5]) > 0

    @pytest.mark.long
    def test_another_dtype_on_the_same_directory_never_hits(self, tiny_llama: str, directory: Path) -> None:
        """SGLang's own file backend serves NaN here."""
        cache = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk(directory)], "cold": {"wait_s": 10.0}}
        with started(tiny_llama, cache=cache, dtype="bfloat16") as other:
            first = other.ask_in_turn(PROMPTS)
            assert other.hits == COLD_HITS  # its own, and nothing of the other's
            assert all(-100 < logprob <= 0 for answer in first for logprob in answer.logprobs)


@pytest.mark.slow
def test_calls_that_fail_and_are_late(tiny_llama: str, reference: list[Answer], tmp_path: Path) -> None:
    """SGLang's own fault injection around every call of ours."""
    injected = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02"}
    cache = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk(tmp_path / "kv")]}
    with started(tiny_llama, cache=cache, environ=injected) as engine:
        found = 0
        for _ in range(3):
            assert engine.ask_in_turn(PROMPTS) == reference
            found += sum(engine.hits)
            engine.flush()
            assert engine.ask(PROMPTS) == reference
        assert found > 0


@pytest.mark.slow
def test_two_ranks_each_with_its_shard(tiny_llama: str, tmp_path: Path) -> None:
    """At a private server, which rank 0 starts. Both change the key space together when weights are updated."""
    apart = {"tp_size": 2, "environ": ON_A_CORE_EACH}
    other = str(TinyLlama(seed=1).write(tmp_path / "other"))
    with started(tiny_llama, **apart) as plain:
        expected = plain.ask_in_turn(PROMPTS)
        plain.update_weights(other)
        of_other = plain.ask_in_turn(PROMPTS)
    with started(tiny_llama, cache={"host": {"capacity_bytes": "32MiB"}}, **apart) as ranks:
        assert ranks.ask_in_turn(PROMPTS) == expected
        assert ranks.hits == COLD_HITS
        assert ranks.ask_in_turn(PROMPTS) == expected
        assert ranks.hits == WARM_HITS
        ranks.update_weights(other)
        assert ranks.ask_in_turn(PROMPTS) == of_other
        assert ranks.hits == COLD_HITS
        assert ranks.ask_in_turn(PROMPTS) == of_other
        assert ranks.hits == WARM_HITS


@pytest.mark.long
def test_a_model_with_latents(tiny_deepseek: str, tmp_path: Path) -> None:
    """MLA: from a second process too, whose host layout is another."""
    with started(tiny_deepseek) as plain:
        expected = plain.ask_in_turn(PROMPTS)
    cache = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk(tmp_path / "kv")], "cold": {"wait_s": 10.0}}
    with started(tiny_deepseek, cache=cache) as first:
        assert first.ask_in_turn(PROMPTS) == expected
        assert first.hits == COLD_HITS
        first.detach()
    with started(tiny_deepseek, cache=cache, hicache_mem_layout="layer_first") as second:
        assert second.ask_in_turn(PROMPTS) == expected
        assert second.hits == WARM_HITS


@pytest.mark.slow
def test_a_model_with_sliding_windows(tiny_mellum: str, tmp_path: Path) -> None:
    """Two host pools: a prefix is found only where the last window of its other layers has been kept too."""
    longer = PROMPTS[2] + [7 + (13 * i) % 1900 for i in range(200)]
    with started(tiny_mellum) as plain:
        expected = plain.ask_in_turn([*PROMPTS, longer])
    pool = f"{POOL}-windows"
    cache = {
        "host": {"capacity_bytes": "32MiB", "name": pool},
        "tiers": [disk(tmp_path / "kv")],
        "cold": {"wait_s": 10.0},
    }
    try:
        with started(tiny_mellum, cache=cache) as first:
            assert first.ask_in_turn([*PROMPTS, longer]) == expected
            # What one prompt shares with another ends where no window was kept; a prompt's own end is one.
            assert first.hits == [0] * len(PROMPTS) + [len(PROMPTS[2])]
            assert first.ask_in_turn(PROMPTS) == expected[:-1]
            assert first.hits == WARM_HITS
            corrupt(pool)
            wrong = first.ask_in_turn(PROMPTS)
            assert first.hits == WARM_HITS
            assert all(wrong[number] != expected[number] for number in (0, 1, 2, 3, 5))
        HostPool.unlink(pool)
        with started(tiny_mellum, cache=cache, hicache_mem_layout="layer_first") as second:
            assert second.ask_in_turn([*PROMPTS, longer]) == expected
            assert second.hits == [*WARM_HITS, (len(longer) - 1) // PAGE * PAGE]
    finally:
        HostPool.unlink(pool)


@pytest.mark.slow
def test_what_waits_to_be_written_back_outlives_an_engine_that_is_killed(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """`Engine.shutdown` kills every process of the engine and their descendants, with nothing on disk before."""
    back = disk(tmp_path / "kv", write="back")
    cache = {"host": {"capacity_bytes": "32MiB"}, "tiers": [back], "cold": {"wait_s": 10.0}}
    with started(tiny_llama, cache=cache) as first:
        assert first.ask_in_turn(PROMPTS) == reference
        assert first.hits == COLD_HITS
    with started(tiny_llama, cache=cache) as second:
        assert second.ask_in_turn(PROMPTS) == reference
        assert second.hits == WARM_HITS


@pytest.mark.slow
def test_adapters_share_no_page_with_the_model_nor_with_other_weights_of_their_name(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """SGLang's page hash has an adapter's name and path in it, and nothing of its weights."""
    cache = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk(tmp_path / "kv")], "cold": {"wait_s": 10.0}}
    adapter = tmp_path / "adapter"
    loaded = {"enable_lora": True, "lora_paths": [f"one={adapter}"], "lora_backend": "torch_native"}
    write_adapter(adapter, 1)
    with started(tiny_llama, cache=cache, max_loras_per_batch=2, **loaded) as engine:
        assert engine.ask_in_turn(PROMPTS[:1]) == reference[:1]
        with_adapter = engine.ask_in_turn(PROMPTS[:1], lora_path="one")
        assert engine.hits == [0] and with_adapter != reference[:1]
        assert engine.ask_in_turn(PROMPTS[:1]) == reference[:1]
        assert engine.hits == WARM_HITS[:1]
    with started(tiny_llama, cache=cache, max_loras_per_batch=2, **loaded) as engine:
        assert engine.ask_in_turn(PROMPTS[:1], lora_path="one") == with_adapter
        assert engine.hits == WARM_HITS[:1]
    write_adapter(adapter, 2)
    with started(tiny_llama, cache=cache, max_loras_per_batch=2, **loaded) as engine:
        assert engine.ask_in_turn(PROMPTS[:1], lora_path="one") != with_adapter
        assert engine.hits == [0]


@pytest.mark.long
def test_two_replicas_find_at_a_server_what_the_other_computed(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """Data parallelism. Each has caches of its own on device and host, which are emptied besides."""
    server = launch({"host": {"capacity_bytes": "32MiB"}}, socket=tmp_path / "private" / "s", detached=True)
    cache = {"server": {"socket": str(server.socket)}}
    try:
        with started(tiny_llama, cache=cache, dp_size=2, environ=ON_A_CORE_EACH) as replicas:
            for number, hits in ((0, 0), (1, WARM_HITS[0])):
                assert replicas.ask_in_turn(PROMPTS[:1], routed_dp_rank=number) == reference[:1]
                assert replicas.hits == [hits]
    finally:
        server.stop()


@pytest.mark.long
def test_two_replicas_start_a_private_server_each(tiny_llama: str, tmp_path: Path) -> None:
    """A tier of `write: back` has one, whose process outlives the engine's. SGLang starts both at the same time."""
    tier = {"type": "shared_fs", "directory": str(tmp_path), "write": "back"}
    cache = {"host": {"capacity_bytes": "32MiB"}, "tiers": [tier]}
    with started(tiny_llama, cache=cache, dp_size=2, environ=ON_A_CORE_EACH) as replicas:
        answers = []
        for number in (0, 1):
            for hits in (0, WARM_HITS[0]):
                answers += replicas.ask_in_turn(PROMPTS[:1], routed_dp_rank=number)
                assert replicas.hits == [hits]
    assert answers == answers[:1] * 4


@pytest.mark.long
def test_two_stages_each_with_its_layers(tiny_llama: str, reference: list[Answer]) -> None:
    """Pipeline parallelism, at the private server that the first stage starts."""
    with started(tiny_llama, cache={"host": {"capacity_bytes": "32MiB"}}, pp_size=2, environ=ON_A_CORE_EACH) as stages:
        assert stages.ask_in_turn(PROMPTS) == reference
        assert stages.hits == COLD_HITS
        assert stages.ask_in_turn(PROMPTS) == reference
        assert stages.hits == WARM_HITS
