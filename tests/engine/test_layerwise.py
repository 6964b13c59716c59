"""Layerwise loads under vLLM's real schedulers: each layer's bytes are there before it is attended to, a promise holds
through resets, aborts and evictions, and what fails all the same is never answered with."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kv_core.errors import ConfigError, CopyFailed
from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_cuda import CpuCopier
from kv_server.process import ServerProcess, launch
from kv_server.remote_cache import RemoteCache
from kv_testing.cache_servers import lose
from kv_testing.connect import QueuedCopier, QueuedCopy
from kv_testing.wait import until
from kv_tiers.settings import load
from kv_vllm.connector import KVTiersConnector
from oracle import Oracle
from slow_device import SlowDevice, slow_device
from test_stores_behind import Engine, anything

SHARED = [3 + (7 * i) % 40 for i in range(400)]
POOL_BYTES = 2 << 20
SCHEDULERS = pytest.mark.parametrize("asynchronous", [False, True], ids=["Scheduler", "AsyncScheduler"])


@contextmanager
def started(model: str, **options: Any) -> Iterator[tuple[Oracle, SlowDevice]]:
    """An engine whose cache holds the first 384 tokens of SHARED."""
    with slow_device(layerwise=True) as device:
        oracle = Oracle(model, **{"load": "layerwise"} | options)
        try:
            oracle.submit("first", SHARED, 2)
            come_to_rest(oracle, device)
            yield oracle, device
        finally:
            oracle.close(drain=False)


def come_to_rest(oracle: Oracle, device: SlowDevice) -> None:
    for _ in range(500):
        if not oracle.scheduler.has_requests() and not oracle._pending:
            break
        oracle.step()
        device.queue.run(sum(copy.is_store for copy in device.queue.pending))
    oracle.drain()
    oracle.assert_at_rest()


def layerwise(oracle: Oracle) -> int:
    assert oracle.engine.scheduler is not None
    return oracle.engine.scheduler.counts.loads_layerwise


@SCHEDULERS
def test_a_load_takes_no_step_of_its_own(tiny_llama: str, asynchronous: bool) -> None:
    """Its request computes its first token in the step in which it gets blocks, and several load in one step."""
    with started(tiny_llama, asynchronous=asynchronous, batch_tokens=200) as (oracle, device):
        for name in "abc":
            oracle.submit(name, [*SHARED[:330], 9], 3)
        oracle.step()
        oracle.drain()
        assert [len(oracle.generated[name]) for name in "abc"] == [1, 1, 1]
        assert layerwise(oracle) == 3 and oracle.loaded == 3 * 320
        come_to_rest(oracle, device)
        for name in "abc":
            assert oracle.generated[name] == oracle.expected_tokens(name, 331, 3)


@SCHEDULERS
@pytest.mark.parametrize("saves", ["after", "never"])
def test_a_step_ends_with_its_reports_where_vllm_guesses_tokens_before_it_saves(
    tiny_llama: str, asynchronous: bool, saves: str
) -> None:
    """Blocks that were filled are not reported, chunks are stored, and their blocks are given back."""
    with started(tiny_llama, asynchronous=asynchronous, saves=saves) as (oracle, device):
        oracle.submit("a", [*SHARED[:330], 9], 3)
        come_to_rest(oracle, device)
        assert oracle.unfilled == set()
        assert oracle.loaded == 320 and layerwise(oracle) == 1
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)
        assert not oracle.scheduler.has_requests()


@SCHEDULERS
def test_the_oracle_sees_a_forward_pass_that_does_not_wait(
    tiny_llama: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: layers whose bytes are still to come are attended to, and the tests here would see it."""
    with started(tiny_llama, asynchronous=asynchronous) as (oracle, _):
        monkeypatch.setattr(QueuedCopy, "hold_engine", lambda self: None)
        oracle.submit("a", [*SHARED[:330], 9])
        with pytest.raises(AssertionError, match="wrong K"):
            oracle.run()


@SCHEDULERS
def test_a_full_hit_computes_one_token_in_a_block_that_is_loaded(tiny_llama: str, asynchronous: bool) -> None:
    with started(tiny_llama, asynchronous=asynchronous) as (oracle, device):
        oracle.submit("a", SHARED[:384], 4)
        come_to_rest(oracle, device)
        assert oracle.loaded == 384 and layerwise(oracle) == 1
        assert oracle.generated["a"] == oracle.expected_tokens("a", 384, 4)


@SCHEDULERS
def test_a_reset_between_promise_and_copy_takes_nothing_away(tiny_llama: str, asynchronous: bool) -> None:
    """The chunks are leased until the copies have ended: nobody finds them any more, and their bytes stay."""
    with started(tiny_llama, asynchronous=asynchronous) as (oracle, device):
        oracle.submit("a", [*SHARED[:330], 9], 3)
        connector = oracle.scheduler.connector
        build = connector.build_connector_meta

        def build_and_reset(output: Any) -> Any:
            made = build(output)
            connector.reset_cache()
            return made

        connector.build_connector_meta = build_and_reset
        oracle.step()
        del connector.build_connector_meta
        cache = oracle.engine.cache
        assert cache is not None and cache.counts().chunks_resident == 0
        oracle.submit("evicts", [5 + i % 30 for i in range(300)], 2)
        come_to_rest(oracle, device)
        assert oracle.loaded == 320
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)


@SCHEDULERS
def test_an_abort_while_layers_are_copied_gives_everything_back(tiny_llama: str, asynchronous: bool) -> None:
    with started(tiny_llama, asynchronous=asynchronous) as (oracle, device):
        oracle.submit("a", [*SHARED[:330], 9], 3)
        oracle.step()
        oracle.abort("a")
        come_to_rest(oracle, device)
        oracle.submit("b", [*SHARED[:330], 9], 3)
        come_to_rest(oracle, device)
        assert oracle.generated["b"] == oracle.expected_tokens("b", 331, 3)


@SCHEDULERS
def test_requests_that_are_preempted_load_anew(tiny_llama: str, asynchronous: bool) -> None:
    with started(tiny_llama, asynchronous=asynchronous, blocks=18, save_decode=True) as (oracle, device):
        for name in "abc":
            oracle.submit(name, [*SHARED[:130], ord(name) - 90], 120)
        come_to_rest(oracle, device)
        for name in "abc":
            assert oracle.generated[name] == oracle.expected_tokens(name, 131, 120)
        assert layerwise(oracle) > 3


@SCHEDULERS
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_anything_that_can_happen_in_any_order(tiny_llama: str, asynchronous: bool, seed: int) -> None:
    """Requests come, are aborted and preempted; stores take long and fail; caches are reset and chunks forgotten."""
    with slow_device(layerwise=True) as device:
        options: dict[str, Any] = {"blocks": 28, "batch_tokens": 200, "save_decode": True, "load": "layerwise"}
        engine = Engine(Oracle(tiny_llama, asynchronous=asynchronous, **options), device)
        try:
            anything(engine, random.Random(seed), 0.5)
            assert layerwise(engine.oracle) > 2
        finally:
            engine.oracle.close(drain=False)


def come_to_rest_of_all(oracle: Oracle, device: SlowDevice) -> None:
    """Also of loads between steps."""
    for _ in range(500):
        if not oracle.scheduler.has_requests() and not oracle._pending:
            break
        oracle.step()
        device.queue.run(len(device.queue.pending))
    oracle.drain()
    oracle.assert_at_rest()


def fail_a_layer(device: SlowDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device fails once, in the middle of a forward pass: some layers arrive, and the next does not."""
    made = iter(range(100))

    def hold_engine(copy: QueuedCopy) -> None:
        device.queue.run(failure="the bus is on fire" if next(made) == 1 else "")
        copy.wait()

    monkeypatch.setattr(QueuedCopy, "hold_engine", hold_engine)


def fail_a_load(device: SlowDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, and from then on always."""

    def load(self: Any, plan: Any) -> Any:
        raise CopyFailed("the bus is still on fire")

    fail_a_layer(device, monkeypatch)
    monkeypatch.setattr(QueuedCopier, "load", load)


@SCHEDULERS
def test_a_layer_whose_copy_fails_is_copied_again_before_it_is_read(
    tiny_llama: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tiny_llama, asynchronous=asynchronous) as (oracle, device):
        fail_a_layer(device, monkeypatch)
        oracle.submit("a", [*SHARED[:330], 9], 3)
        oracle.run()
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)
        worker = oracle.engine.worker
        assert worker is not None and (worker.counts.loads_failed, worker.counts.loads_finished) == (0, 1)
        assert layerwise(oracle) == 1


@SCHEDULERS
def test_layers_that_cannot_be_copied_one_by_one_are_copied_together(
    tiny_llama: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_layers(self: Any, plan: Any) -> Any:
        raise RuntimeError("a bug")

    with started(tiny_llama, asynchronous=asynchronous) as (oracle, _):
        monkeypatch.setattr(QueuedCopier, "load_layers", load_layers)
        oracle.submit("a", [*SHARED[:330], 9], 3)
        oracle.run()
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)
        assert oracle.engine.worker is not None and oracle.engine.worker.counts.loads_finished == 1


def test_a_device_that_fails_costs_the_load_and_no_token(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's plain scheduler hears of the blocks in time, and computes the request. No load is promised so again."""
    with started(tiny_llama) as (oracle, device):
        fail_a_load(device, monkeypatch)
        oracle.submit("a", [*SHARED[:330], 9], 3)
        oracle.run()
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)
        assert oracle.engine.worker is not None and oracle.engine.worker.counts.loads_failed == 1
        monkeypatch.undo()
        oracle.submit("b", [*SHARED[:330], 9], 3)
        come_to_rest_of_all(oracle, device)
        assert oracle.generated["b"] == oracle.expected_tokens("b", 331, 3)
        assert layerwise(oracle) == 1 and oracle.engine.worker.counts.loads_finished == 1


def test_where_vllm_would_hear_too_late_the_engine_ends(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tiny_llama, asynchronous=True) as (oracle, device):
        fail_a_load(device, monkeypatch)
        oracle.submit("a", [*SHARED[:330], 9], 3)
        with pytest.raises(CopyFailed, match="load: async"):
            oracle.run()
        assert oracle.generated["a"] == []


@pytest.mark.parametrize("half", ["scheduler", "worker"])
def test_a_fault_of_ours_in_the_step_itself_is_computed(
    tiny_llama: str, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise has been given, and the cache goes off before it is kept."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    with started(tiny_llama) as (oracle, _):
        engine = oracle.engine
        if half == "scheduler":
            monkeypatch.setattr(engine.scheduler, "build_step", fails)
        else:
            monkeypatch.setattr(engine.worker, "start_loads", fails)
        oracle.submit("a", [*SHARED[:330], 9], 3)
        oracle.run()
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)
        assert "a bug" in engine.off


def test_a_pass_that_waits_for_no_layer_is_noticed(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with full CUDA graphs, which leave the hooks out."""
    with started(tiny_llama) as (oracle, _):
        monkeypatch.setattr(KVTiersConnector, "wait_for_layer_load", lambda self, name: None)
        oracle.submit("a", [*SHARED[:330], 9], 3)
        oracle.run()
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)
        assert oracle.engine.worker is not None and oracle.engine.worker.counts.loads_failed == 1


def test_a_step_whose_load_failed_stores_nothing_of_it(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it computed, it computed on blocks that were not filled."""
    with started(tiny_llama) as (oracle, device):
        monkeypatch.setattr(KVTiersConnector, "wait_for_layer_load", lambda self, name: None)
        worker = oracle.engine.worker
        assert worker is not None
        oracle.submit("a", [*SHARED[:330], *range(3, 73)], 3)
        while not worker.counts.loads_failed:
            oracle.step()
            assert not any(copy.is_store for copy in device.queue.pending)
        come_to_rest_of_all(oracle, device)
        assert oracle.generated["a"] == oracle.expected_tokens("a", 400, 3)
        assert oracle.engine.cache is not None and oracle.engine.cache.counts().chunks_resident == 7


def test_memory_that_cannot_be_made_ready_is_loaded_between_steps(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tiny_llama) as (oracle, device):

        def prepare(self: CpuCopier, extents: Any) -> None:
            raise ConfigError("no more memory may be locked")

        monkeypatch.setattr(CpuCopier, "prepare", prepare)
        oracle.submit("a", [*SHARED[:330], 9], 3)
        come_to_rest_of_all(oracle, device)
        assert oracle.loaded == 320 and layerwise(oracle) == 0


@pytest.mark.parametrize("kinds", [("full", "window:100"), ("full", "full")])
def test_models_with_several_groups_load_between_steps(tiny_llama: str, kinds: tuple[str, ...]) -> None:
    with started(tiny_llama, kinds=kinds) as (oracle, device):
        oracle.submit("a", [*SHARED[:330], 9], 3)
        come_to_rest_of_all(oracle, device)
        assert oracle.loaded == 320 and layerwise(oracle) == 0


@contextmanager
def started_at_a_server(model: str, home: Path, **options: Any) -> Iterator[tuple[Oracle, SlowDevice, ServerProcess]]:
    """Like `started`, its cache in a small server, which is stopped at the end."""
    settings = {"host": {"capacity_bytes": POOL_BYTES}}
    server = launch(settings, socket=home / "private" / "s")
    try:
        with started(model, host={}, server={"socket": str(server.socket)}, **options) as (oracle, device):
            yield oracle, device, server
    finally:
        server.stop()


@SCHEDULERS
def test_a_server_is_loaded_from_in_the_step_too(tiny_llama: str, tmp_path: Path, asynchronous: bool) -> None:
    with started_at_a_server(tiny_llama, tmp_path, asynchronous=asynchronous) as (oracle, device, _):
        oracle.submit("a", [*SHARED[:330], 9], 3)
        come_to_rest(oracle, device)
        assert oracle.loaded == 320 and layerwise(oracle) == 1
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)
        assert oracle.engine.cache is not None and oracle.engine.cache.counts().read_leases == 0


def between_promise_and_copy(oracle: Oracle, happens: Callable[[], object]) -> None:
    """Have this happen in the next step after the scheduler has promised, before the worker begins."""
    connector = oracle.scheduler.connector
    build = connector.build_connector_meta

    def build_and_more(output: Any) -> Any:
        made = build(output)
        happens()
        return made

    connector.build_connector_meta = build_and_more
    oracle.step()
    del connector.build_connector_meta


@SCHEDULERS
def test_a_server_that_dies_takes_no_bytes_along(tiny_llama: str, tmp_path: Path, asynchronous: bool) -> None:
    """Its successor's pool is not taken for it while layers are still copied."""
    with started_at_a_server(tiny_llama, tmp_path, asynchronous=asynchronous) as (oracle, device, server):
        oracle.submit("a", [*SHARED[:330], 9], 3)
        successors: list[ServerProcess] = []

        def killed_and_back() -> None:
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
            successors.append(launch({"host": {"capacity_bytes": POOL_BYTES}}, socket=server.socket))
            assert cache.lookup([], "notices").ended is Ended.REFUSED
            assert cache.lookup([], "and comes back").ended is Ended.REFUSED

        cache = oracle.engine.cache
        assert isinstance(cache, RemoteCache)
        between_promise_and_copy(oracle, killed_and_back)
        come_to_rest(oracle, device)
        assert layerwise(oracle) == 1
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)
        until(lambda: cache.lookup([], "later").ended is Ended.ALL_HELD)
        assert cache.generation == 1
        oracle.submit("b", [*SHARED[:330], 9], 3)
        come_to_rest_of_all(oracle, device)
        oracle.submit("c", [*SHARED[:330], 8], 3)
        come_to_rest(oracle, device)
        assert layerwise(oracle) == 2
        assert oracle.generated["c"] == oracle.expected_tokens("c", 331, 3)
        (successor,) = successors
        successor.stop()


@SCHEDULERS
@pytest.mark.parametrize("lasts", [True, False], ids=["", "control"])
def test_a_server_that_has_lost_its_client_leaves_the_bytes_where_they_are(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is gone, and another engine fills the whole pool. With a lease that ends with the connection the
    wrong bytes would be attended to."""
    load = RemoteCache.load
    if not lasts:
        monkeypatch.setattr(RemoteCache, "load", lambda self, *arguments, **_: load(self, *arguments))
    with started_at_a_server(tiny_llama, tmp_path, asynchronous=asynchronous) as (oracle, _device, _):
        cache = oracle.engine.cache
        assert isinstance(cache, RemoteCache)
        other = RemoteCache(cache.socket, group_bytes=cache._group_bytes, fingerprint=cache._fingerprint)
        slots = other.counts().slots_total
        oracle.submit("a", [*SHARED[:330], 9], 3)

        def lost_and_replaced() -> None:
            lose(cache)
            until(lambda: other.counts().read_leases == (1 if lasts else 0))
            greedy = other.begin_store(key_chain(slots), "greedy")
            assert (len(greedy.keys) == slots) is not lasts
            for extent in greedy.extents:
                other.pool.view[extent.offset :][: extent.nbytes] = bytes(extent.nbytes)
            other.commit(greedy)

        def run() -> None:
            between_promise_and_copy(oracle, lost_and_replaced)
            oracle.run()

        if not lasts:
            with pytest.raises(AssertionError, match="wrong K"):
                run()
            other.close()
            return
        run()
        assert layerwise(oracle) == 1
        assert oracle.generated["a"] == oracle.expected_tokens("a", 331, 3)
        cache._link.back_off(0)
        until(lambda: cache.lookup([], "later").ended is Ended.ALL_HELD)
        until(lambda: other.counts().read_leases == 0)
        other.close()


@pytest.mark.parametrize(("mode", "piecewise"), [("async", False), ("layerwise", True), ("auto", True)])
def test_graphs_that_leave_the_hooks_out_are_refused_only_where_hooks_are_used(mode: str, piecewise: bool) -> None:
    assert KVTiersConnector.requires_piecewise_for_cudagraph({"load": mode}) is piecewise
    assert load({"load": mode}, {})[0].load == mode
