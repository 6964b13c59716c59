"""Whatever raises inside a hook of vLLM's, and wherever, the engine goes on and its tokens are right.

A profiler raises at the first call of one function of ours, and every function that a hook calls has its turn. What
vLLM computes is checked by the oracle, to the byte.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import kv_connect
import pytest
from kv_connect import guard
from kv_vllm import connector
from oracle import Oracle
from slow_device import slow_device
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

PACKAGES = f"{Path(str(kv_connect.__file__)).parents[3]}/"
HOOKS = {name for name in vars(connector.KVTiersConnector) if name in vars(KVConnectorBase_V1) or "finished" in name}
NOT_HOOKS = {"__init__", "shutdown", "build_kv_connector_stats", "build_prom_metrics"}
PARTS = 5
SHARED = [3 + (7 * i) % 40 for i in range(400)]
WAYS: dict[str, dict[str, Any]] = {
    "behind": {"asynchronous": True, "prefix_caching": True},
    "by layers": {"load": "layerwise", "store": "layerwise"},
    "events": {"events": True},
}


class Injected(Exception):
    """Of no family of ours."""


class Profiler:
    """Sees every call of a function of ours below a hook. fails: the one that raises, once."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.seen: dict[str, None] = {}
        self.has_raised = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGES) or code.co_filename == guard.__file__:
            return
        name = f"{Path(code.co_filename).stem}.{code.co_qualname}"
        if name in self.seen or code.co_name in ("off", "turn_off", "<genexpr>", "<lambda>") or not below_hook(frame):
            return
        self.seen[name] = None
        if name == self.fails:
            self.has_raised = True
            sys.setprofile(None)
            raise Injected(name)


def below_hook(frame: FrameType) -> bool:
    """Not in a hook itself, which only calls one of ours, and not where the cache is being turned off."""
    above, is_below = frame.f_back, False
    while above is not None:
        name, file = above.f_code.co_name, above.f_code.co_filename
        if name == "turn_off" or (file == guard.__file__ and name == "fall_back"):
            return False
        is_below = is_below or (file == connector.__file__ and name in HOOKS - NOT_HOOKS)
        above = above.f_back
    is_hook = frame.f_code.co_filename == connector.__file__ and frame.f_code.co_name in HOOKS
    return is_below and not is_hook


@contextmanager
def profiled(profiler: Profiler) -> Iterator[None]:
    sys.setprofile(profiler)
    try:
        yield
    finally:
        sys.setprofile(None)


def served(model: str, way: str, profiler: Profiler) -> None:
    """Requests that store, find, are aborted and preempted, and a reset."""
    with slow_device() if way == "behind" else nullcontext() as device:
        oracle = Oracle(model, blocks=24, **WAYS[way])
        pool = oracle.scheduler.kv_cache_manager.block_pool

        def run(then: Callable[[], object] = lambda: None) -> None:
            for step in range(400):
                if not oracle.scheduler.has_requests() and not oracle._pending:
                    return
                with nullcontext() if profiler.has_raised else profiled(profiler):
                    oracle.step()
                    oracle.scheduler.connector.get_kv_connector_stats()
                if step == 2:
                    then()
                if device is not None:
                    device.queue.run(1)
            raise AssertionError(f"{profiler.fails}: not finished, {oracle.scheduler.get_request_counts()}")

        asked = {"a": (SHARED[:200], 3), "b": (SHARED[:200], 3), "c": (SHARED[100:330], 40), "d": (SHARED[:260], 60)}
        try:
            for names in ("a", "bcd"):
                for name in names:
                    oracle.submit(name, *asked[name])
                oracle.submit(f"aborted {names}", SHARED[:200], 3)
                run(lambda names=names: oracle.abort(f"aborted {names}"))  # type: ignore[misc]
            with profiled(profiler):
                oracle.scheduler.reset_prefix_cache(reset_connector=True)
            for name, (prompt, new_tokens) in asked.items():
                assert oracle.generated[name] == oracle.expected_tokens(name, len(prompt), new_tokens)
            assert not oracle.errors
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks were lost"
            assert bool(oracle.engine.off) <= bool(profiler.fails)
        finally:
            oracle.close(drain=False)


def functions(model: str, way: str) -> list[str]:
    profiler = Profiler()
    served(model, way, profiler)
    return list(profiler.seen)


@pytest.mark.parametrize("way", ["by layers", pytest.param("behind", marks=pytest.mark.slow)])
def test_the_functions_that_hooks_call_first(tiny_llama: str, way: str) -> None:
    for name in functions(tiny_llama, way):
        if name.startswith("connector."):
            profiler = Profiler(name)
            served(tiny_llama, way, profiler)
            assert profiler.has_raised, name


@pytest.fixture(scope="module")
def shares(tiny_llama: str) -> dict[str, list[str]]:
    """Every function below a hook, with one of the ways that come to it."""
    ways: dict[str, list[str]] = {}
    for way in WAYS:
        for name in functions(tiny_llama, way):
            ways.setdefault(name, []).append(way)
    dealt: dict[str, list[str]] = {way: [] for way in WAYS}
    for name, each in ways.items():
        dealt[min(each, key=lambda way: len(dealt[way]))].append(name)
    return dealt


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
@pytest.mark.parametrize("way", WAYS)
def test_every_function_below_a_hook(tiny_llama: str, shares: dict[str, list[str]], way: str, part: int) -> None:
    assert len(shares[way]) > 100
    for name in shares[way][part::PARTS]:
        served(tiny_llama, way, Profiler(name))


def test_the_hooks_are_all_known() -> None:
    """Else one could be missing above."""
    assert {"bind_connector_metadata", "update_state_after_alloc", "has_pending_push_work", "reset_cache"} <= HOOKS
    assert {"request_finished_all_groups", "get_num_new_matched_tokens", "build_connector_worker_meta"} <= HOOKS
