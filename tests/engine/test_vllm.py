"""The real engine is the judge: the same prompt gives the same tokens with the cache off, cold, warm and half broken.

In float32 a hit equals a full prefill exactly. A control corrupts what is loaded, and must change the tokens.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from engines import PROMPTS, SHARED, WARM_HITS, Answer, Engine, assert_half_evicted_is_stored_again, started
from kv_connect.engine import Engine as Attached
from kv_connect.engine import engines
from kv_core.errors import CopyFailed
from kv_core.service import LoadFailed

CACHE: dict[str, Any] = {"host": {"capacity_bytes": "256MiB"}}
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@pytest.fixture(scope="class")
def engine(tiny_llama: str, reference: list[Answer]) -> Iterator[Engine]:
    """An engine with us, in this process, its own prefix cache off. vLLM keeps one connector a process, so it must have
    ended before another engine starts: hence the class, and hence the reference before it."""
    with started(tiny_llama, cache=CACHE) as running:
        yield running


@pytest.fixture(autouse=True)
def _at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        running: Engine = request.getfixturevalue("engine")
        running.assert_at_rest()
        running.llm.reset_prefix_cache(reset_connector=True)


def _inner() -> Attached:
    (inner,) = engines().values()
    return inner


class TestOneEngine:
    """Everything that one engine can show, with its cache emptied in between."""

    def test_cold_then_warm_tokens_equal_and_hits_are_whole_chunks(
        self, engine: Engine, reference: list[Answer]
    ) -> None:
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == [0, 512, 512, 768, 0, 0]
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS
        assert engine.inside("kv_snapshot")["formats"] == ["canonical"]

    def test_all_prompts_at_once_equal(self, engine: Engine, reference: list[Answer]) -> None:
        assert engine.ask(PROMPTS) == reference
        assert engine.ask(PROMPTS) == reference
        assert engine.hits == WARM_HITS

    def test_the_control_that_halves_stored_bytes_changes_the_tokens(
        self, engine: Engine, reference: list[Answer]
    ) -> None:
        """Without this the comparisons above could not fail."""
        engine.ask_in_turn(PROMPTS)
        engine.inside("kv_corrupt")
        assert engine.ask_in_turn(PROMPTS)[:4] != reference[:4]

    def test_half_evicted_still_equals_and_is_stored_again(self, engine: Engine, reference: list[Answer]) -> None:
        assert_half_evicted_is_stored_again(engine, reference)

    def test_each_load_failing_in_turn_is_computed_instead(
        self, engine: Engine, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the copy fails, where the chunks have gone, and where the lease runs out under the copy."""
        inner = _inner()
        assert inner.cache is not None and inner.worker is not None

        def failing_copy(plan: object) -> None:
            raise CopyFailed("the bus is on fire")

        def nothing_there(keys: Any, holder: str) -> LoadFailed:
            return LoadFailed(tuple(keys), "gone")

        def expired(lease: Any) -> bool:
            return real_release(lease) and False

        real_release = inner.cache.release
        engine.ask_in_turn(PROMPTS)
        for target, name, fault in (
            (inner.copiers[0], "load", failing_copy),
            (inner.cache, "load", nothing_there),
            (inner.cache, "release", expired),
        ):
            for failing in range(4):
                failed_before = inner.worker.counts.loads_failed
                for number, prompt in enumerate(PROMPTS[:4]):
                    with monkeypatch.context() as patch:
                        if number == failing:
                            patch.setattr(target, name, fault)
                        assert engine.ask([prompt]) == [reference[number]], (name, failing, number)
                assert inner.worker.counts.loads_failed == failed_before + 1, name


def test_a_bug_of_ours_turns_the_cache_off_and_not_the_engine(
    tiny_llama: str, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tiny_llama, cache=CACHE) as running:
        assert running.ask_in_turn(PROMPTS) == reference
        inner = _inner()
        assert inner.worker is not None

        def bug(plan: object) -> None:
            raise RuntimeError("a bug in the worker half")

        monkeypatch.setattr(inner.worker, "start_loads", bug)
        assert running.ask_in_turn(PROMPTS) == reference
        assert "a bug in the worker half" in inner.off
        assert inner.cache is not None
        assert inner.cache.counts().read_leases == inner.cache.counts().write_leases == 0
        assert running.ask_in_turn(PROMPTS) == reference
        assert running.hits == [0] * len(PROMPTS)


def test_preemption_in_a_tiny_kv_space(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests that decode past what the blocks hold: some are preempted, and come back through the cache."""
    prompts = [SHARED[:256] + [20 + number * 7 + i for i in range(120)] for number in range(8)]
    with started(tiny_llama, cache=None, max_model_len=1024) as plain:
        expected = plain.ask_in_turn(prompts, new_tokens=60)
    with started(
        tiny_llama, cache=CACHE | {"save_decode": True}, num_gpu_blocks_override=14, max_model_len=1024
    ) as tight:
        scheduler = tight.llm.llm_engine.engine_core.engine_core.scheduler
        preempt = Mock(side_effect=scheduler._preempt_request)
        monkeypatch.setattr(scheduler, "_preempt_request", preempt)
        assert tight.ask(prompts, new_tokens=60) == expected
        assert preempt.called and tight.assert_at_rest()["scheduler"]["loads"] > 0
        assert tight.ask(prompts, new_tokens=60) == expected
        tight.assert_at_rest()
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 13  # all but the null block


def test_chunked_prefill(tiny_llama: str, reference: list[Answer]) -> None:
    """A prefill cut every 200 tokens, never at a chunk's or a block's end."""
    with started(tiny_llama, cache=CACHE, max_num_batched_tokens=200, max_num_seqs=4) as cut:
        assert cut.ask(PROMPTS) == reference
        assert cut.ask(PROMPTS) == reference
        assert cut.hits == WARM_HITS
        cut.assert_at_rest()


def test_with_vllms_own_prefix_cache_we_add_only_what_it_lacks(tiny_llama: str, reference: list[Answer]) -> None:
    with started(tiny_llama, cache=CACHE, enable_prefix_caching=True) as both:
        assert both.ask_in_turn(PROMPTS) == reference
        assert both.ask_in_turn(PROMPTS) == reference
        loads = both.assert_at_rest()["scheduler"]["loads"]
        # vLLM held all of it, but of a prompt of whole blocks it computes the last one again: there we load 127 tokens.
        assert loads == 1
        assert both.llm.reset_prefix_cache()
        assert both.ask_in_turn(PROMPTS) == reference
        assert both.assert_at_rest()["scheduler"]["loads"] > 0
        assert both.llm.reset_prefix_cache(reset_connector=True)
        assert both.ask([PROMPTS[0]]) == [reference[0]]
        assert both.hits == [0]


def test_by_default_it_finds_all_that_vllms_own_cache_would(tiny_llama: str, reference: list[Answer]) -> None:
    """vLLM's blocks have 128 tokens on a CPU, and a chunk is one if nobody says otherwise. Of whole blocks alone vLLM
    computes the last one again, and we one token."""
    with started(tiny_llama, cache=None, enable_prefix_caching=True) as plain:
        plain.ask_in_turn(PROMPTS)
        plain.ask_in_turn(PROMPTS)
        own = plain.hits
    with started(tiny_llama, cache=CACHE, chunk_tokens=None) as ours:
        assert ours.ask_in_turn(PROMPTS) == reference
        assert ours.ask_in_turn(PROMPTS) == reference
        assert len(PROMPTS[2]) % 128 == 0 and own[2] == len(PROMPTS[2]) - 128
        assert ours.hits == [*own[:2], len(PROMPTS[2]) - 1, *own[3:]]
        assert sum(ours.hits) > sum(WARM_HITS)
        ours.assert_at_rest()


def test_the_engine_core_in_its_own_process(tiny_llama: str, reference: list[Answer]) -> None:
    with started(tiny_llama, cache=CACHE, own_process=True, distributed_executor_backend=ONE_PROCESS) as apart:
        assert apart.ask_in_turn(PROMPTS) == reference
        assert apart.ask_in_turn(PROMPTS) == reference
        assert apart.hits == WARM_HITS
        apart.assert_at_rest()
        apart.inside("kv_corrupt")
        assert apart.ask_in_turn(PROMPTS)[:4] != reference[:4]


def test_opaque_blocks_serve_as_well(tiny_llama: str, reference: list[Answer]) -> None:
    with started(tiny_llama, cache=CACHE | {"format": "blocks"}) as opaque:
        assert opaque.ask_in_turn(PROMPTS) == reference
        assert opaque.ask_in_turn(PROMPTS) == reference
        assert opaque.hits == WARM_HITS
        assert opaque.assert_at_rest()["formats"] == ["blocks"]


def test_in_bfloat16_a_hit_equals_the_engines_own_hit_of_the_same_length(tiny_llama: str) -> None:
    """Another split of the prefill rounds differently, so the engine's own prefix cache is the yardstick."""
    prompts = PROMPTS[:2]
    with started(tiny_llama, cache=None, dtype="bfloat16", enable_prefix_caching=True, block_size=128) as plain:
        plain.ask_in_turn([[*SHARED[:512], 7]])
        expected = plain.ask_in_turn(prompts)
        assert plain.hits == [512, 512]
    with started(tiny_llama, cache=CACHE, dtype="bfloat16", block_size=128) as ours:
        ours.ask_in_turn([[*SHARED[:512], 7]])
        assert ours.ask_in_turn(prompts) == expected
        assert ours.hits == [512, 512]
        ours.assert_at_rest()


def test_under_vllms_default_policy_a_failed_load_ends_that_request_alone(
    tiny_llama: str, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tiny_llama, cache=CACHE, policy="fail") as strict:
        strict.ask_in_turn(PROMPTS)

        def failing_copy(plan: object) -> None:
            raise CopyFailed("the bus is on fire")

        with monkeypatch.context() as patch:
            patch.setattr(_inner().copiers[0], "load", failing_copy)
            assert strict.ask([PROMPTS[0]]) != [reference[0]]
        assert strict.ask_in_turn(PROMPTS) == reference
        strict.assert_at_rest()


def test_a_named_pool_outlives_its_engine(tiny_llama: str, reference: list[Answer]) -> None:
    from kv_tiers import HostPool

    named = {"host": {"capacity_bytes": "64MiB", "name": "kv-test-engine"}}
    try:
        with started(tiny_llama, cache=named) as first:
            first.ask_in_turn(PROMPTS)
        with started(tiny_llama, cache=named) as second:
            assert second.ask_in_turn(PROMPTS) == reference
            assert second.hits == WARM_HITS
            second.assert_at_rest()
    finally:
        HostPool.unlink("kv-test-engine")
