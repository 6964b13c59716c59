"""Stores that go on behind the step, under vLLM's real schedulers: no block is read after it was given away, nothing is
committed before its bytes are there, no step waits, and every block and every lease comes back."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_cuda.copy import behind
from kv_vllm.connector import PoolBlocks
from models import BY_NAME
from oracle import BLOCK_TOKENS, Oracle
from slow_device import SlowDevice, slow_device

SHARED = [3 + (7 * i) % 40 for i in range(400)]
KINDS = [
    ("full",),
    ("full", "window:20"),
    ("full", "window:100"),
    ("full", "state"),
    ("full", "window:100", "state"),
]
SCHEDULERS = pytest.mark.parametrize("asynchronous", [False, True], ids=["Scheduler", "AsyncScheduler"])


@pytest.fixture(scope="session")
def linear_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(BY_NAME["Qwen3-Next"].write(tmp_path_factory.mktemp("tiny-qwen3-next")))


class Engine:
    """An oracle on a slow device."""

    def __init__(self, oracle: Oracle, device: SlowDevice) -> None:
        self.oracle = oracle
        self.device = device
        self.blocks = oracle.scheduler.kv_cache_manager.block_pool
        device.watch(self.blocks, oracle.engine.cache, holds=oracle.engine.scheduler.lazy is None)

    def come_to_rest(self) -> None:
        """Let the device make all copies, and the engine go on until it has heard of them."""
        self.oracle.drain()
        for _ in range(5000):
            if not self.oracle.scheduler.has_requests() and not self.oracle._pending:
                break
            self.device.queue.run(len(self.device.queue.pending))
            self.oracle.step()
        assert not self.device.queue.pending
        assert self.device.queue.waits == 0, "a step has waited for a copy"
        assert self.device.faults == []
        self.oracle.assert_at_rest()
        assert self.blocks.get_num_free_blocks() == self.blocks.num_gpu_blocks - 1, "blocks were lost"

    @property
    def stored(self) -> int:
        assert self.oracle.engine.worker is not None
        return self.oracle.engine.worker.counts.chunks_stored


@contextmanager
def started(model: str, **options: Any) -> Iterator[Engine]:
    with slow_device(layerwise=options.get("store") == "layerwise") as device:
        oracle = Oracle(model, **options)
        engine = Engine(oracle, device)
        try:
            yield engine
            engine.come_to_rest()
        finally:
            oracle.close(drain=False)  # or the engine would be found by the tests after this one


def step(engine: Engine, steps: int, copies: int = 0) -> None:
    for _ in range(steps):
        engine.oracle.step()
        engine.device.queue.run(copies)


@SCHEDULERS
def test_a_request_that_has_ended_is_stored_all_the_same(tiny_llama: str, asynchronous: bool) -> None:
    with started(tiny_llama, asynchronous=asynchronous) as engine:
        engine.oracle.submit("a", SHARED[:200], 2)
        step(engine, 8)
        assert engine.oracle.generated["a"] == engine.oracle.expected_tokens("a", 200, 2)
        assert engine.stored == 0 and engine.oracle.scheduler.has_requests()  # vLLM goes on stepping for it
        assert not engine.oracle.scheduler.requests
        engine.come_to_rest()
        assert engine.stored == 3 and engine.device.late
        engine.oracle.submit("b", [*SHARED[:200], 9])
        engine.come_to_rest()
        assert engine.oracle.loaded == 192


@SCHEDULERS
def test_blocks_that_are_still_read_are_waited_for_instead_of_a_preemption(tiny_llama: str, asynchronous: bool) -> None:
    """And nobody is starved: with the copies made, vLLM has its blocks."""
    with started(tiny_llama, asynchronous=asynchronous, blocks=9) as engine:
        engine.oracle.submit("a", SHARED[:128], 1)
        step(engine, 5)
        assert not engine.oracle.scheduler.requests and engine.blocks.get_num_free_blocks() == 4
        engine.oracle.submit("b", [1, *SHARED[:95]], 60)
        step(engine, 60)
        request = engine.oracle.scheduler.requests["b"]
        assert request.num_preemptions == 0 and request.num_output_tokens < 60
        engine.come_to_rest()
        assert engine.oracle.generated["b"] == engine.oracle.expected_tokens("b", 96, 60)


@SCHEDULERS
def test_a_reset_while_copies_are_on_their_way_publishes_none_of_them(tiny_llama: str, asynchronous: bool) -> None:
    with started(tiny_llama, asynchronous=asynchronous) as engine:
        engine.oracle.submit("a", SHARED[:200], 2)
        step(engine, 8)
        assert engine.device.queue.pending
        assert engine.oracle.scheduler.reset_prefix_cache(reset_connector=True)
        engine.come_to_rest()
        cache = engine.oracle.engine.cache
        assert cache is not None and cache.counts().chunks_resident == 0
        assert engine.oracle.scheduler.reset_prefix_cache(reset_connector=True)


@SCHEDULERS
@pytest.mark.parametrize("what", ["a store", "a load", "a request"])
def test_vllms_cache_is_empty_after_a_reset_though_copies_of_ours_hold_blocks(
    tiny_llama: str, asynchronous: bool, what: str
) -> None:
    """vLLM itself refuses then, and a trainer that takes no notice would get KV of the weights before."""
    with started(tiny_llama, asynchronous=asynchronous, prefix_caching=True) as engine:
        oracle, manager = engine.oracle, engine.oracle.scheduler.kv_cache_manager
        oracle.submit("a", SHARED[:200], 60 if what == "a request" else 2)
        step(engine, 8)
        if what == "a load":
            engine.come_to_rest()
            assert oracle.scheduler.reset_prefix_cache()
            oracle.submit("b", SHARED[:200], 2)
            step(engine, 3)
            oracle.abort("b")
        assert engine.device.queue.pending and engine.blocks.get_num_free_blocks() < engine.blocks.num_gpu_blocks - 1
        assert oracle.scheduler.reset_prefix_cache() == (what != "a request")
        if what != "a request":
            assert not len(engine.blocks.cached_block_hash_to_block)
            assert manager.block_pool.get_num_free_blocks() < manager.block_pool.num_gpu_blocks - 1


@SCHEDULERS
def test_more_than_may_be_on_its_way_is_dropped_and_counted(tiny_llama: str, asynchronous: bool) -> None:
    chunk_bytes = 64 * 2 * 2 * 32 * 4 * 2
    options: dict[str, Any] = {"stores_in_flight_bytes": 3 * chunk_bytes, "asynchronous": asynchronous}
    with started(tiny_llama, **options) as engine:
        engine.oracle.submit("a", SHARED[:330], 2)
        step(engine, 12)
        engine.come_to_rest()
        worker = engine.oracle.engine.worker
        assert worker is not None and engine.stored == 3 and worker.counts.dropped_chunks > 0
        engine.oracle.submit("b", [*SHARED[:330], 9])  # who computes what is missing leaves it
        engine.come_to_rest()
        assert engine.oracle.loaded == 192 and engine.stored > 3


@SCHEDULERS
def test_a_cache_that_is_turned_off_gives_the_blocks_back(tiny_llama: str, asynchronous: bool) -> None:
    with slow_device() as device:
        oracle = Oracle(tiny_llama, asynchronous=asynchronous)
        pool = oracle.scheduler.kv_cache_manager.block_pool
        oracle.submit("a", SHARED[:300], 30)
        for _ in range(6):
            oracle.step()
        assert device.queue.pending
        oracle.engine.turn_off("a fault")
        oracle.submit("b", SHARED[:100], 3)
        oracle.run()
        assert oracle.generated["a"] == oracle.expected_tokens("a", 300, 30)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert oracle.engine.cache is not None
        assert oracle.engine.cache.counts().write_leases == 0
        oracle.close()


@SCHEDULERS
@pytest.mark.parametrize("device", ["a slow device", "a CPU", "one processor"])
def test_where_nothing_may_be_on_its_way_a_step_ends_with_its_stores_in_the_pool(
    tiny_llama: str, asynchronous: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no block is held. A thread that has to share its processor with the engine has nothing on its way."""
    monkeypatch.setattr(PoolBlocks, "hold", lambda self, blocks: pytest.fail("blocks are held"))
    monkeypatch.setattr(behind, "_MIN_BYTES", 0)
    processors = {0} if device == "one processor" else {0, 1}
    monkeypatch.setattr(behind.os, "sched_getaffinity", lambda _process: processors, raising=False)
    options: dict[str, Any] = {} if device == "one processor" else {"stores_in_flight_bytes": 0}
    with slow_device() if device == "a slow device" else nullcontext():
        oracle = Oracle(tiny_llama, asynchronous=asynchronous, **options)
    try:
        oracle.submit("a", SHARED[:200], 2)
        oracle.run()
        assert oracle.engine.worker is not None and oracle.engine.worker.counts.chunks_stored == 3
        oracle.assert_at_rest()
    finally:
        oracle.close(drain=False)  # or the engine would be found by the tests after this one


@SCHEDULERS
def test_a_thread_of_a_cpu_stores_behind_the_step(
    tiny_llama: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are held, what is loaded is what was computed, and all blocks come back."""
    held: list[int] = []
    hold = PoolBlocks.hold

    def noted(self: PoolBlocks, blocks: Sequence[int]) -> None:
        held.extend(blocks)
        hold(self, blocks)

    monkeypatch.setattr(PoolBlocks, "hold", noted)
    monkeypatch.setattr(behind, "_MIN_BYTES", 0)
    monkeypatch.setattr(behind.os, "sched_getaffinity", lambda _process: {0, 1}, raising=False)
    oracle = Oracle(tiny_llama, asynchronous=asynchronous)
    try:
        oracle.submit("a", SHARED[:200], 2)
        oracle.run()
        oracle.drain()
        assert oracle.engine.worker is not None and oracle.engine.worker.counts.chunks_stored == 3
        assert len(set(held)) == 3 * 64 // BLOCK_TOKENS
        oracle.submit("b", [*SHARED[:200], 9])
        oracle.run()
        assert oracle.loaded == 192
        oracle.assert_at_rest()
        pool = oracle.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    finally:
        oracle.close(drain=False)


@pytest.mark.slow
@given(data=st.data())
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_anything_that_can_happen_in_any_order(tiny_llama: str, linear_model: str, data: st.DataObject) -> None:
    """Requests come, grow, are aborted and preempted; copies take long and fail; caches are reset, weights updated."""
    kinds, store = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(["async", "layerwise", "lazy"]))
    kinds = ("full",) if store == "lazy" else kinds
    has_states = "state" in kinds
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    options = {
        "kinds": kinds,
        "asynchronous": data.draw(st.booleans()),
        "blocks": data.draw(st.sampled_from([20, 28, 60])) * len(kinds),
        "batch_tokens": data.draw(st.sampled_from([64, 200, 512])),
        "prefix_caching": has_states or store == "lazy" or data.draw(st.booleans()),
        "save_decode": data.draw(st.booleans()),
        "host": {"capacity_bytes": data.draw(st.sampled_from(["2MiB", "16MiB"]))},
        "stores_in_flight_bytes": data.draw(st.sampled_from([100_000, "2GiB"])),
        "store": store,
    }
    with started(linear_model if has_states else tiny_llama, **options) as engine:
        anything(engine, chance, data.draw(st.sampled_from([0.05, 0.3, 0.9])))


def anything(engine: Engine, chance: random.Random, pace: float) -> None:
    """pace: how likely the device makes a copy in a step."""
    oracle, queue = engine.oracle, engine.device.queue
    assert oracle.engine.cache is not None and oracle.engine.weights is not None
    sizes: dict[str, tuple[int, int]] = {}
    aborted = set()
    for number in range(20):
        name = f"r{number}"
        prompt = [*SHARED[: chance.randrange(1, 380)], *([chance.randrange(3, 40)] * chance.randrange(0, 60))]
        sizes[name] = (len(prompt), chance.randrange(1, 60))
        oracle.submit(name, prompt, sizes[name][1])
        for _ in range(chance.randrange(0, 12)):
            oracle.step()
            if chance.random() < pace:
                queue.run(chance.randrange(1, 4), failure="not this time" if chance.random() < 0.1 else "")
        doomed = chance.choice(list(sizes))
        if chance.random() < 0.2 and doomed in oracle.scheduler.requests:
            oracle.abort(doomed)
            aborted.add(doomed)
        if chance.random() < 0.1:
            oracle.scheduler.reset_prefix_cache(reset_connector=chance.random() < 0.5)
        if chance.random() < 0.1:
            oracle.engine.cache.forget(
                [key for key in oracle.engine.cache.admin.resident_keys() if chance.random() < 0.3]
            )
    engine.come_to_rest()
    for name, (prompt_tokens, new_tokens) in sizes.items():
        expected, made = oracle.expected_tokens(name, prompt_tokens, new_tokens), oracle.generated[name]
        assert made == expected or (name in aborted and made == expected[: len(made)]), name


@SCHEDULERS
@pytest.mark.parametrize("store", ["async", "layerwise"])
def test_one_order_in_which_everything_happens(tiny_llama: str, asynchronous: bool, store: str) -> None:
    options: dict[str, Any] = {"kinds": ("full", "window:100"), "blocks": 40, "save_decode": True, "store": store}
    with started(tiny_llama, asynchronous=asynchronous, **options) as engine:
        anything(engine, random.Random(1), 0.3)
        assert engine.device.late and engine.stored and engine.oracle.loaded
        worker = engine.oracle.engine.worker
        assert worker is not None and (worker.counts.layers_stored_early > 0) == (store == "layerwise")


def test_a_request_whose_load_has_failed_is_computed_and_keeps_nobody_waiting(tiny_llama: str) -> None:
    """An order in which two loads failed and vLLM, offered one of them anew, waited for ever for what the other held:
    it stands before it in the queue, and a load is admitted only beside all that those under way may still need."""
    options: dict[str, Any] = {"blocks": 20, "batch_tokens": 64, "save_decode": True}
    few: dict[str, Any] = {"host": {"capacity_bytes": "2MiB"}, "stores_in_flight_bytes": 100_000}
    with started(tiny_llama, **options, **few) as engine:
        anything(engine, random.Random(15416), 0.05)
        worker = engine.oracle.engine.worker
        assert worker is not None and worker.counts.loads_failed > 1


@SCHEDULERS
def test_the_oracle_sees_blocks_that_are_freed_early(
    tiny_llama: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without it none of the tests here could fail."""
    monkeypatch.setattr(PoolBlocks, "hold", lambda self, blocks: None)
    monkeypatch.setattr(PoolBlocks, "give_back", lambda self, blocks: None)
    with slow_device() as device:
        engine = Engine(Oracle(tiny_llama, asynchronous=asynchronous, blocks=14), device)
        with pytest.raises(AssertionError, match="is read after it was given"):
            anything(engine, random.Random(1), 0.3)
        engine.oracle.close(drain=False)
