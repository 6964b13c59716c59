"""Real engines on a device whose copies go on behind their steps, each taking some time."""

import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from engines import PROMPTS, SHARED, WARM_HITS, Answer, started
from kv_connect.engine import engines
from kv_cuda.copy import behind
from kv_cuda.copy.behind import LayerCopy, copying_thread
from kv_server.process import launch
from kv_testing.connect import QueuedCopy
from kv_vllm.connector import PoolBlocks
from slow_device import slow_device

CACHE: dict[str, Any] = {"host": {"capacity_bytes": "128MiB"}}


@pytest.mark.slow
def test_tokens_are_the_same_cold_warm_and_preempted(tiny_llama: str) -> None:
    """In a KV space so tiny that requests wait for blocks that are still being read, and are preempted."""
    prompts = [SHARED[number * 50 :][:256] + [20 + number * 7 + i for i in range(120)] for number in range(6)]
    tight: dict[str, Any] = {"num_gpu_blocks_override": 14, "max_model_len": 1280}
    with started(tiny_llama, cache=None, max_model_len=1280) as plain:
        reference = plain.ask_in_turn(PROMPTS)
        expected = plain.ask_in_turn(prompts, new_tokens=150)
    with slow_device() as device, started(tiny_llama, cache=CACHE | {"save_decode": True}, **tight) as engine:
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        (inner,) = engines().values()
        pool = scheduler.kv_cache_manager.block_pool
        device.watch(pool, inner.cache)
        device.go_on(copy_s=0.05)
        assert engine.ask(prompts, new_tokens=2) == [answer[:2] for answer in expected]
        assert pool.get_num_free_blocks() == 13  # nobody steps it any more, and it has its blocks all the same
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS
        assert engine.ask(prompts, new_tokens=150) == expected
        assert engine.ask(prompts, new_tokens=150) == expected
        assert device.faults == [] and device.stores > 6 and device.late
        assert engine.assert_at_rest()["scheduler"]["loads"] > 0
        assert pool.get_num_free_blocks() == 13
        assert engine.llm.reset_prefix_cache()


@pytest.mark.slow
def test_layers_that_are_copied_while_others_are_computed_give_the_same_tokens(
    tiny_llama: str, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a copy takes beside a layer's computation; and a pass that does not wait makes other tokens."""
    with slow_device(layerwise=True) as device, started(tiny_llama, cache=CACHE | {"load": "layerwise"}) as engine:
        device.go_on(copy_s=0.0)
        began = time.perf_counter()
        assert engine.ask_in_turn(PROMPTS) == reference
        layer_s = (time.perf_counter() - began) / sum(12 * 2 for _ in PROMPTS)  # tokens of each, and layers
        for factor in (0.1, 0.5, 1.0, 2.0):
            device.queue.copy_s = factor * layer_s
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == WARM_HITS
        assert engine.ask(PROMPTS) == reference
        seen = engine.assert_at_rest()
        assert seen["scheduler"]["loads_layerwise"] == seen["scheduler"]["loads"] > 4 * 5
        monkeypatch.setattr(QueuedCopy, "hold_engine", lambda self: None)
        device.queue.copy_s = 0.5
        assert engine.ask([PROMPTS[2]]) != [reference[2]]
        assert device.faults == []


@pytest.mark.slow
def test_layers_that_a_thread_copies_give_the_same_tokens(
    tiny_llama: str, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU as it is; and a pass that does not wait for the thread makes other tokens."""
    begun: list[int] = []
    submit = copying_thread().submit
    with started(tiny_llama, cache=CACHE | {"load": "layerwise"}) as engine:
        monkeypatch.setattr(behind, "_MIN_BYTES", 0)
        monkeypatch.setattr(behind.os, "sched_getaffinity", lambda _process: {0, 1}, raising=False)
        monkeypatch.setattr(
            copying_thread(), "submit", lambda run, copies: (begun.append(len(copies)), submit(run, copies))
        )
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS
        seen = engine.assert_at_rest()
        of_loads = [layers for layers in begun if layers > 1]  # a store is one copy
        assert seen["scheduler"]["loads_layerwise"] == seen["scheduler"]["loads"] == len(of_loads) > 4
        free = Event()
        working = submit(free.wait)
        monkeypatch.setattr(LayerCopy, "hold_engine", lambda self: None)
        assert engine.ask([PROMPTS[2]]) != [reference[2]]
        free.set()
        working.result()


@pytest.mark.slow
def test_chunks_that_a_thread_stores_behind_the_step_are_what_was_computed(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU as it is, where blocks are soon given to others; and what nobody holds is stored as others wrote it."""
    first, second = ([[number * 11 + turn + i % 97 for i in range(376)] for number in range(1, 7)] for turn in (3, 500))
    monkeypatch.setattr(behind, "_MIN_BYTES", 0)
    monkeypatch.setattr(behind.os, "sched_getaffinity", lambda _process: {0, 1}, raising=False)
    submit, stores, may_copy = copying_thread().submit, 0, Event()
    may_copy.set()

    def late(run: Any, copies: Any) -> Any:
        nonlocal stores
        stores += 1
        return submit(lambda: (time.sleep(0.02), may_copy.wait(), run(copies)))

    with started(tiny_llama, cache=None, max_model_len=1280) as plain:
        expected = [plain.ask_in_turn(prompts, new_tokens=150) for prompts in (first, second)]
    monkeypatch.setattr(copying_thread(), "submit", late)
    tight: dict[str, Any] = {"num_gpu_blocks_override": 14, "max_model_len": 1280}
    with started(tiny_llama, cache=CACHE, **tight) as engine:
        assert engine.ask(first, new_tokens=150) == expected[0]
        assert engine.ask(first, new_tokens=150) == expected[0]
        assert engine.hits == [256] * 6
        assert stores >= 6
        engine.assert_at_rest()
        assert engine.llm.reset_prefix_cache()  # all blocks are vLLM's again

        may_copy.clear()  # until the last request ends, which waits for them
        monkeypatch.setattr(PoolBlocks, "hold", lambda self, blocks: None)
        monkeypatch.setattr(PoolBlocks, "give_back", lambda self, blocks: None)
        monkeypatch.setattr(PoolBlocks, "is_ours_alone", lambda self, block: False)
        assert engine.ask(second, new_tokens=150) == expected[1]
        may_copy.set()
        assert engine.ask(second, new_tokens=150) != expected[1]
        assert engine.hits == [256] * 6


@pytest.mark.slow
def test_layers_come_from_a_server_as_well(tiny_llama: str, reference: list[Answer], tmp_path: Path) -> None:
    server = launch(CACHE, socket=tmp_path / "private" / "s")
    cache = {"server": {"socket": str(server.socket)}, "load": "layerwise"}
    with slow_device(layerwise=True) as device, started(tiny_llama, cache=cache) as engine:
        device.go_on(copy_s=0.002)
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS
        seen = engine.assert_at_rest()
        assert seen["scheduler"]["loads_layerwise"] == seen["scheduler"]["loads"] > 4
        server.stop()
        assert engine.ask(PROMPTS) == reference
        assert device.faults == []


@pytest.mark.long
def test_ranks_that_read_at_their_own_pace(tiny_llama: str, reference: list[Answer]) -> None:
    """Each acknowledges for itself, across processes; an engine that falls idle goes on until all have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        chosen: dict[str, Any] = {
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": "slow_workers.SlowWorker",
            "num_gpu_blocks_override": 14,
            "max_model_len": 1280,
        }
        with started(tiny_llama, cache=CACHE, own_process=True, **chosen) as engine:
            assert engine.ask_in_turn(PROMPTS) == reference
            time.sleep(2)
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == WARM_HITS
            assert engine.ask(PROMPTS) == reference
            time.sleep(2)
            assert engine.llm.reset_prefix_cache()  # which vLLM does if, and only if, no block is in use
            engine.assert_at_rest()
            # Of all prompts three bring chunks that nobody has.
            assert [rank["stores_behind"] for rank in engine.inside_all("kv_snapshot")] == [3, 3]
