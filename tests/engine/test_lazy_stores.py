"""`store: lazy` under vLLM's real schedulers: a chunk is copied when vLLM gives its blocks away, before they are
overwritten, and what is found in both is no less than what eager stores would leave."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS
from engines import started as engine_started
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_connect.halves.step import StepPlan
from kv_connect.halves.stores import Stores
from kv_core.errors import ConfigError
from kv_server.process import launch
from kv_testing.connect import QueuedCopy
from oracle import Oracle
from oracle_of_ranks import OracleOfRanks
from test_stores_behind import SCHEDULERS, started

SHARED = [3 + (7 * i) % 40 for i in range(400)]
OTHERS = [3 + (11 * i) % 43 for i in range(700)]
CHUNK_TOKENS = 64
KEPT_TOKENS = 32
"""Of a prompt's beginning, a block that vLLM keeps beside those that it needs for all of OTHERS."""
LAZY: dict[str, Any] = {"store": "lazy", "prefix_caching": True, "use": "always"}


@pytest.fixture
def oracle(tiny_llama: str) -> Iterator[Oracle]:
    made = Oracle(tiny_llama, blocks=24, **LAZY)
    yield made
    made.run()
    made.assert_at_rest()
    made.close()


def stored(oracle: Oracle) -> int:
    assert oracle.engine.worker is not None
    return oracle.engine.worker.counts.chunks_stored


def test_what_vllm_keeps_is_not_stored_until_it_gives_it_away(oracle: Oracle) -> None:
    for name in "ab":
        assert oracle.ask(name, SHARED[:260]) == 0  # the second finds it in vLLM's own blocks
    assert stored(oracle) == 0
    oracle.ask("others", OTHERS[:480])
    of_shared = stored(oracle)
    assert 0 < of_shared < 4  # of the end: vLLM keeps the beginning
    assert 0 < oracle.ask("c", SHARED[:260]) <= of_shared * CHUNK_TOKENS  # behind what vLLM has itself
    oracle.ask("others again", OTHERS)
    assert oracle.ask("d", SHARED[:260]) == 4 * CHUNK_TOKENS - KEPT_TOKENS


def test_prompts_that_differ_within_a_chunk_share_blocks_and_are_both_stored(oracle: Oracle) -> None:
    one, other = [*SHARED[:96], *[5] * 32], [*SHARED[:96], *[6] * 32]
    for name, prompt in (("a", one), ("b", other)):
        oracle.ask(name, [*prompt, 9])
    oracle.ask("others", OTHERS)
    assert oracle.ask("c", [*one, 8]) == 128 - KEPT_TOKENS
    assert oracle.ask("d", [*other, 8]) == 32  # the rest is vLLM's now


def test_what_another_engine_waits_for_is_stored_at_once(oracle: Oracle) -> None:
    oracle.ask("kept", SHARED[:130])
    oracle.ask("handed over", SHARED[:130], params={"do_remote_decode": True})
    assert stored(oracle) == 2
    oracle.ask("retained", OTHERS[:130], asked={"retain_s": 60})
    assert stored(oracle) == 4


def test_a_reset_leaves_nothing_to_store(oracle: Oracle) -> None:
    oracle.ask("a", SHARED[:260])
    assert oracle.scheduler.reset_prefix_cache()
    oracle.ask("others", OTHERS)
    assert oracle.ask("b", SHARED[:260]) == 0


def test_a_forward_pass_that_raises_leaves_nothing_to_store(oracle: Oracle) -> None:
    oracle.submit("a", SHARED[:96], 1)
    output, worker, half = oracle.scheduler.schedule(), oracle.worker, oracle.engine.scheduler
    assert worker is not None and half is not None and half.lazy is not None
    worker.bind_connector_metadata(output.kv_connector_metadata)
    try:
        raise ZeroDivisionError("in the second layer")
    except ZeroDivisionError:
        worker.wait_for_save()  # as a context manager's `finally` would
    half.lazy.before_reuse(range(24))
    assert half.lazy.take() == ()
    oracle.abort("a")


def work(oracle: Oracle, chance: random.Random, after_step: Callable[[], object] = lambda: None) -> None:
    """Requests of three families come, grow, are preempted and aborted."""
    for number in range(25):
        family = chance.choice([SHARED, OTHERS, SHARED[::-1]])
        prompt = [*family[: chance.randrange(1, 380)], *([chance.randrange(3, 9)] * chance.randrange(0, 90))]
        oracle.submit(f"r{number}", prompt, chance.randrange(1, 60))
        for _ in range(chance.randrange(0, 12)):
            oracle.step()
            after_step()
        if chance.random() < 0.1 and (doomed := f"r{chance.randrange(number + 1)}") in oracle.scheduler.requests:
            oracle.abort(doomed)


class Watched:
    """An engine beside a record of all chunks that were ever computed, which is what eager stores would leave in a pool
    that is never full."""

    def __init__(self, model: str, **options: Any) -> None:
        self.oracle = Oracle(model, **LAZY, **options)
        self.lost: list[str] = []
        self.found = 0
        self._computed: set[tuple[int, ...]] = set()  # the tokens up to each chunk's end
        connector = self.oracle.scheduler.connector
        match, execute = connector.get_num_new_matched_tokens, self.oracle._execute

        def matched(request: Any, computed_tokens: int) -> Any:
            external, is_async = match(request, computed_tokens)
            tokens, eager = tuple(request.all_token_ids), 0
            while eager < len(tokens) - 1 and tokens[: eager + CHUNK_TOKENS] in self._computed:
                eager += CHUNK_TOKENS
            if external is not None:
                self.found += external
                if computed_tokens + external < min(eager, len(tokens) - 1):
                    self.lost.append(f"{request.request_id}: {computed_tokens} + {external} of {eager}")
            return external, is_async

        def executed(output: Any, works: Any, ahead: bool) -> None:
            execute(output, works, ahead)
            for each in works:
                tokens = self.oracle.tokens[each.request_id]
                kept = min(each.end, self.oracle.prompt_tokens[each.request_id])
                first = (each.start // CHUNK_TOKENS + 1) * CHUNK_TOKENS
                self._computed |= {tuple(tokens[:end]) for end in range(first, kept + 1, CHUNK_TOKENS)}

        connector.get_num_new_matched_tokens, self.oracle._execute = matched, executed  # type: ignore[method-assign]

    def work(self, chance: random.Random) -> None:
        work(self.oracle, chance)
        self.oracle.run(2000)  # with few blocks most requests are preempted again and again
        self.oracle.assert_at_rest()


@pytest.mark.slow
@given(data=st.data())
@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_hit_is_lost_that_eager_stores_would_leave(tiny_llama: str, data: st.DataObject) -> None:
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    blocks, batch_tokens = data.draw(st.sampled_from([18, 20, 28])), data.draw(st.sampled_from([64, 200, 512]))
    watched = Watched(tiny_llama, blocks=blocks, batch_tokens=batch_tokens)
    try:
        watched.work(chance)
        assert watched.lost == []
    finally:
        watched.oracle.close()


def test_one_order_in_which_no_hit_is_lost(tiny_llama: str) -> None:
    watched = Watched(tiny_llama, blocks=20)
    watched.work(random.Random(1))
    assert watched.lost == [] and watched.found > 1000 and stored(watched.oracle) > 10
    watched.oracle.close()


def test_the_record_sees_a_hit_that_is_lost(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without it the tests above could not fail."""
    monkeypatch.setattr(Stores, "gather_overwritten", lambda self, plan: None)
    watched = Watched(tiny_llama, blocks=20)
    watched.work(random.Random(1))
    assert watched.lost
    watched.oracle.close()


@SCHEDULERS
def test_copies_behind_the_step_hold_the_one_that_overwrites(tiny_llama: str, asynchronous: bool) -> None:
    """On a device with a queue: what is read is what was computed, and everything comes to rest."""
    with started(tiny_llama, asynchronous=asynchronous, blocks=20, **LAZY) as engine:
        work(engine.oracle, random.Random(1), lambda: engine.device.queue.run(1))
        engine.come_to_rest()
        assert engine.stored and engine.oracle.loaded


@SCHEDULERS
@pytest.mark.parametrize("fault", ["after the step", "beside the step"])
def test_the_oracle_sees_a_copy_that_is_too_late(
    tiny_llama: str, asynchronous: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a chunk that is gathered once its blocks are another's, or that the step does not wait for."""
    start = Stores.start

    def late(self: Stores, plan: StepPlan) -> None:
        start(self, replace(plan, stores=(*plan.stores, *plan.overwritten)))

    if fault == "after the step":
        monkeypatch.setattr(Stores, "gather_overwritten", lambda self, plan: None)
        monkeypatch.setattr(Stores, "start", late)
    else:
        monkeypatch.setattr(QueuedCopy, "hold_engine", lambda self: None)
    with (
        pytest.raises(AssertionError, match=r"wrong [KV]"),
        started(tiny_llama, asynchronous=asynchronous, blocks=20, **LAZY) as engine,
    ):
        work(engine.oracle, random.Random(1), lambda: engine.device.queue.run(1))


def test_two_ranks_store_what_leaves_their_blocks(tiny_llama: str, tmp_path: Path) -> None:
    server = launch({"host": {"capacity_bytes": 4 << 20}}, socket=tmp_path / "private" / "s")
    oracle = OracleOfRanks(tiny_llama, blocks=24, host={}, server={"socket": str(server.socket)}, **LAZY)
    try:
        oracle.ask("a", SHARED[:260])
        assert all(stored_by(rank) == 0 for rank in oracle.ranks)
        oracle.ask("others", OTHERS)
        assert [stored_by(rank) for rank in oracle.ranks] == [4, 4]
        assert oracle.ask("b", SHARED[:260]) == 4 * CHUNK_TOKENS - KEPT_TOKENS
        oracle.assert_at_rest()
    finally:
        oracle.close()
        server.stop()


def stored_by(rank: Any) -> int:
    return int(rank.engine.worker.counts.chunks_stored)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"prefix_caching": False}, "prefix caching is off"),
        ({"kinds": ("full", "window:100")}, "several kinds of layers"),
        ({"kinds": ("window:100",)}, "others than full attention"),
        ({"events": True}, "KV events"),
        ({"load": "layerwise"}, "load is layerwise"),
    ],
)
def test_what_it_does_not_go_with_is_said_at_start(tiny_llama: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"store: lazy is not possible here: .*{why}"):
        Oracle(tiny_llama, **(LAZY | options))


@pytest.mark.slow
def test_a_real_engine_stores_less_and_answers_alike(tiny_llama: str) -> None:
    """With room for all prompts nothing is stored; with little, what was evicted is found in the pool."""
    roomy: dict[str, Any] = {"enable_prefix_caching": True, "max_model_len": 1280}
    cache: dict[str, Any] = {"host": {"capacity_bytes": "128MiB"}, "use": "always"}
    with engine_started(tiny_llama, cache=cache, **roomy) as eager:
        expected = eager.ask_in_turn(PROMPTS)
        copied = eager.assert_at_rest()["worker"]["chunks_stored"]
    with engine_started(tiny_llama, cache=cache | {"store": "lazy"}, **roomy) as engine:
        assert engine.ask_in_turn(PROMPTS) == engine.ask_in_turn(PROMPTS) == expected
        assert engine.assert_at_rest()["worker"]["chunks_stored"] == 0 < copied
    with engine_started(tiny_llama, cache=cache | {"store": "lazy"}, num_gpu_blocks_override=14, **roomy) as engine:
        assert engine.ask_in_turn(PROMPTS) == engine.ask_in_turn(PROMPTS) == expected
        seen = engine.assert_at_rest()
        assert seen["worker"]["loaded_tokens"] > 0 and seen["worker"]["chunks_stored"] <= copied


@pytest.mark.parametrize(
    ("blocks", "pool", "expected"),
    [(100, "64MiB", [(56, 704), (19, 704)]), (60, "2MiB", [(118, 640), (90, 3904)])],
    ids=["much in vLLM's blocks", "little room in the pool"],
)
def test_conversations_are_found_alike_or_more_and_copied_less(
    tiny_llama: str, blocks: int, pool: str, expected: list[tuple[int, int]]
) -> None:
    """Rows of the table in docs/contracts/vllm.md."""
    copied_and_loaded, options = [], {"blocks": blocks, "save_decode": True, "host": {"capacity_bytes": pool}}
    for store in ("async", "lazy"):
        oracle = Oracle(tiny_llama, **(LAZY | options | {"store": store}))
        talks = [[3 + (7 * i + 6 * number) % 41 for i in range(64)] for number in range(8)]
        for turn in range(5):
            for number, talk in enumerate(talks):
                oracle.ask(name := f"{number}.{turn}", talk, 8)
                talk += oracle.generated[name] + [3 + (number * turn + i) % 37 for i in range(88)]
        copied_and_loaded.append((stored(oracle), oracle.loaded))
        oracle.close()
    assert copied_and_loaded == expected
