"""Real vLLM with two tensor-parallel ranks that load layer by layer, each in a process of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, WARM_HITS, Answer, Engine, started
from kv_server.process import ServerProcess, launch
from kv_testing.wait import until

POOL: dict[str, Any] = {"host": {"capacity_bytes": "64MiB"}}
COLD_HITS = [0, 512, 512, 768, 0, 0]
LOADS = sum(hit > 0 for hit in WARM_HITS)


@contextmanager
def two_ranks(model: str, server: ServerProcess) -> Iterator[Engine]:
    cache = {"server": {"socket": str(server.socket), "answer_s": 20}, "load": "layerwise"}
    chosen: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "layerwise_workers.LayerwiseWorker",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with started(model, cache=cache, own_process=True, **chosen) as engine:
            yield engine


def is_back(server: ServerProcess) -> ServerProcess:
    """A server that was killed, started again at its place."""
    until(lambda: not server.is_running(), within_s=60)
    server.stop()
    return launch(POOL, socket=server.socket)


def layerwise(engine: Engine) -> list[int]:
    return [rank["loads_layerwise"] for rank in engine.inside_all("kv_snapshot")]


def assert_at_rest(engine: Engine) -> None:
    for rank in engine.inside_all("kv_snapshot"):
        cache = rank["cache"]
        assert rank["off"] == "" and rank["faults"] == rank["faults_of_device"] == []
        assert cache["read_leases"] == cache["write_leases"] == cache["chunks_reserved"] == 0, cache


@pytest.mark.long
def test_tokens_are_the_same_whatever_happens_between_promise_and_copy(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    server = launch(POOL, socket=tmp_path / "private" / "s")
    try:
        with two_ranks(tiny_llama, server) as engine:
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == COLD_HITS
            before = layerwise(engine)
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == WARM_HITS
            assert layerwise(engine) == [count + LOADS for count in before]
            assert engine.ask(PROMPTS) == reference
            assert_at_rest(engine)

        with two_ranks(tiny_llama, server) as engine:  # restarted
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == WARM_HITS
            assert engine.ask_in_turn(PROMPTS) == reference
            assert min(layerwise(engine)) > LOADS

            # A copy of one rank's fails.
            engine.llm.collective_rpc("kv_break", args=("fail",))
            assert engine.ask([PROMPTS[2]]) == [reference[2]]
            assert engine.hits == [WARM_HITS[2]]
            assert [rank["worker"]["loads_failed"] for rank in engine.inside_all("kv_snapshot")] == [0, 0]
            assert_at_rest(engine)

            # The server is killed after the promise, and one rank meets its successor before it has copied.
            returned: list[ServerProcess] = []
            watches = threading.Thread(target=lambda: returned.append(is_back(server)))
            watches.start()
            engine.llm.collective_rpc("kv_break", args=("kill", server.pid))
            assert engine.ask([PROMPTS[2]]) == [reference[2]]
            assert engine.hits == [WARM_HITS[2]]
            watches.join(60)
            (server,) = returned
            until(lambda: engine.ask_in_turn(PROMPTS) == reference and engine.hits == WARM_HITS, within_s=120)
            before = layerwise(engine)
            assert engine.ask_in_turn(PROMPTS) == reference
            assert layerwise(engine) == [count + LOADS for count in before]
            assert_at_rest(engine)

            # The control.
            engine.llm.collective_rpc("kv_break", args=("late",))
            assert engine.ask([PROMPTS[2]]) != [reference[2]]
    finally:
        server.stop()
