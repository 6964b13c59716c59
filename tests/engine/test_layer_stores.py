"""Layerwise stores: vLLM's schedulers and real engines with `store: layerwise`. `test_stores_behind.py` has the orders
in which anything happens to them."""

from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, SHARED, WARM_HITS, Answer, started
from kv_connect.engine import engines
from kv_connect.halves.copies import Copies
from kv_connect.halves.stores import Stores
from kv_connect.nodes import share_of
from kv_core.errors import ConfigError
from kv_cuda.copy import behind
from kv_vllm.connector import KVTiersConnector
from oracle import Oracle
from slow_device import slow_device

LAYERWISE: dict[str, Any] = {"host": {"capacity_bytes": "128MiB"}, "store": "layerwise"}
PREFIX = [3 + (7 * i) % 40 for i in range(400)]
SCHEDULERS = pytest.mark.parametrize("asynchronous", [False, True], ids=["Scheduler", "AsyncScheduler"])


@SCHEDULERS
def test_chunks_whose_layers_are_copied_in_the_step_are_found_when_it_ends(tiny_llama: str, asynchronous: bool) -> None:
    """Where copies keep pace with the layers, none is left behind the forward pass."""
    with slow_device(layerwise=True) as device:
        oracle = Oracle(tiny_llama, asynchronous=asynchronous, store="layerwise", batch_tokens=256)
        worker = oracle.engine.worker
        assert worker is not None
        start, behind_step = worker.stores.start, []

        def start_stores(plan: Any) -> None:
            device.queue.run(len(device.queue.pending))
            start(plan)
            behind_step.append(len(device.queue.pending))

        worker.stores.start = start_stores  # type: ignore[method-assign]
        oracle.submit("a", PREFIX[:200], 1)
        oracle.run()
        assert behind_step and not any(behind_step)
        assert (worker.counts.chunks_stored, worker.counts.layers_stored_early) == (3, 2)
        assert oracle.ask("b", [*PREFIX[:200], 9]) == 192
        oracle.close()


def test_a_commit_before_all_layers_are_there_is_seen(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without it the device could not find an early commit."""
    monkeypatch.setattr(Copies, "have_stopped", lambda self, *, wait=False: True)
    with slow_device(layerwise=True) as device:
        oracle = Oracle(tiny_llama, store="layerwise")
        device.watch(oracle.scheduler.kv_cache_manager.block_pool, oracle.engine.cache)
        oracle.submit("a", PREFIX[:200], 1)
        oracle.run()
        assert "committed before its bytes are there" in oracle.engine.off
        oracle.close()


@pytest.mark.parametrize("store", ["async", "layerwise"])
def test_a_forward_pass_that_raises_leaves_nothing_of_it(tiny_llama: str, store: str) -> None:
    """vLLM calls `wait_for_save` on the way out, with blocks that nothing was computed in."""
    oracle = Oracle(tiny_llama, store=store)
    oracle.submit("a", PREFIX[:96], 1)
    output = oracle.scheduler.schedule()
    worker, counts = oracle.worker, oracle.engine.worker
    assert worker is not None and counts is not None
    worker.bind_connector_metadata(output.kv_connector_metadata)
    worker.save_kv_layer(oracle.names[0][0], None, None)
    try:
        raise ZeroDivisionError("in the second layer")
    except ZeroDivisionError:
        worker.wait_for_save()  # as a context manager's `finally` would
    cache = oracle.engine.cache
    assert cache is not None
    seen = cache.counts()
    assert (seen.chunks_resident, seen.chunks_reserved, seen.write_leases, counts.counts.chunks_stored) == (0, 0, 0, 0)
    oracle.close()


@pytest.mark.parametrize("store", ["async", "layerwise"])
def test_an_engine_that_is_asked_by_an_exception_handler_stores_what_it_computes(tiny_llama: str, store: str) -> None:
    """The exception that its caller is handling is none of the forward pass."""
    oracle = Oracle(tiny_llama, store=store)
    try:
        raise ZeroDivisionError("in the program that asks")
    except ZeroDivisionError:
        oracle.submit("a", PREFIX[:200], 1)
        oracle.run()
    assert oracle.ask("b", [*PREFIX[:200], 9]) == 192
    oracle.close()


def test_a_stage_without_the_draft_model_stores_when_its_own_layers_are_computed(tiny_llama: str) -> None:
    """The last stage alone guesses tokens, and vLLM's older runner calls `wait_for_save` in no other one then."""
    drafter = {"method": "draft_model", "model": tiny_llama}
    oracle = Oracle(tiny_llama, guesses=2, drafter=drafter, saves="never")
    oracle.engine.share = share_of(0, 1, 1, stage=0, stages=2)
    oracle.submit("a", PREFIX[:200], 1)
    oracle.run()
    worker = oracle.engine.worker
    assert worker is not None and worker.counts.chunks_stored == 3
    oracle.close()


def test_graphs_are_asked_to_leave_the_hooks_only_where_layers_are_stored() -> None:
    assert KVTiersConnector.requires_piecewise_for_cudagraph({"store": "layerwise"})
    assert not KVTiersConnector.requires_piecewise_for_cudagraph({"store": "async"})
    with pytest.raises(ConfigError, match="write one of async, layerwise"):
        KVTiersConnector.requires_piecewise_for_cudagraph({"store": "layer-wise"})
    with pytest.raises(ConfigError, match=r"did you mean.*store"):
        KVTiersConnector.requires_piecewise_for_cudagraph({"stor": "layerwise"})


def test_formats_that_are_encoded_whole_are_stored_behind_the_step(
    tiny_llama: str, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = Oracle(tiny_llama, store="layerwise", format="int8")
    oracle.submit("a", PREFIX[:200], 1)
    oracle.run()
    worker = oracle.engine.worker
    assert worker is not None
    assert (worker.counts.chunks_stored, worker.counts.layers_stored_early) == (3, 0)
    assert "store: layerwise is not used" in caplog.text
    oracle.close()


@pytest.mark.slow
def test_tokens_are_the_same_cold_warm_and_preempted(tiny_llama: str) -> None:
    """On a device whose copies take some time, in a KV space so tiny that requests are preempted meanwhile."""
    prompts = [SHARED[number * 50 :][:256] + [20 + number * 7 + i for i in range(120)] for number in range(6)]
    tight: dict[str, Any] = {"num_gpu_blocks_override": 14, "max_model_len": 1280}
    with started(tiny_llama, cache=None, max_model_len=1280) as plain:
        reference = plain.ask_in_turn(PROMPTS)
        expected = plain.ask_in_turn(prompts, new_tokens=150)
    cache = LAYERWISE | {"save_decode": True}
    with slow_device(layerwise=True) as device, started(tiny_llama, cache=cache, **tight) as engine:
        (inner,) = engines().values()
        core = engine.llm.llm_engine.engine_core.engine_core
        device.watch(core.scheduler.kv_cache_manager.block_pool, inner.cache)
        device.go_on(copy_s=0.02)
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS
        assert engine.ask(prompts, new_tokens=150) == expected
        assert engine.ask(prompts, new_tokens=150) == expected
        assert device.faults == []
        seen = engine.assert_at_rest()
        assert seen["worker"]["layers_stored_early"] >= 2 * len(WARM_HITS)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma"])
def test_tokens_are_the_same_from_disk_and_after_a_restart(
    model: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the CPU copies the layers, of full attention and of sliding windows."""
    monkeypatch.setattr(behind, "_MIN_BYTES", 0)
    monkeypatch.setattr(behind.os, "sched_getaffinity", lambda _process: {0, 1}, raising=False)
    path = request.getfixturevalue(model)
    disk = {"type": "disk", "directory": str(tmp_path / "disk"), "capacity_bytes": "1GiB"}
    with started(path, cache=None) as plain:
        reference = plain.ask_in_turn(PROMPTS)
    for _ in range(2):
        with started(path, cache=LAYERWISE | {"tiers": [disk]}) as engine:
            assert engine.ask_in_turn(PROMPTS) == reference
            cold = engine.hits
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == WARM_HITS or model != "tiny_llama"
            seen = engine.assert_at_rest()
            assert seen["worker"]["layers_stored_early"] > 0 or cold[0], "neither stored by layers nor found"
            assert sum(engine.hits) > 1000


@pytest.mark.slow
def test_a_layer_that_is_stored_too_early_makes_other_tokens(
    tiny_llama: str, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the two above: of one layer the chunks have what was in the blocks before."""
    gather = Stores._gather_layer

    def too_early(self: Any, by_layers: Any, layer: int) -> Any:
        events = gather(self, by_layers, layer)
        for store in self._storing:
            for part in store.parts:
                extents = {copy.extent for copy in part.plan.copies}
                for event in events:
                    event.wait()
                for extent in extents if layer == 0 else ():
                    cache = next(iter(engines().values())).cache
                    assert cache is not None
                    cache.pool.view[extent.offset : extent.offset + 4096] = bytes(4096)
        return events

    monkeypatch.setattr(behind, "_MIN_BYTES", 0)
    monkeypatch.setattr(behind.os, "sched_getaffinity", lambda _process: {0, 1}, raising=False)
    monkeypatch.setattr(Stores, "_gather_layer", too_early)
    with started(tiny_llama, cache=LAYERWISE) as engine:
        assert engine.ask_in_turn(PROMPTS[:1]) == reference[:1]
        assert engine.ask([PROMPTS[0]]) != [reference[0]]
