"""The connector under vLLM's real schedulers, with a content oracle: every byte that is attended to is checked."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from kv_connect.halves.step import StepPlan
from kv_core.errors import ConfigError, CopyFailed
from kv_core.keys import ChunkKey
from kv_core.service import LoadFailed
from kv_vllm import connector
from oracle import BLOCK_TOKENS, Oracle
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

pytestmark = pytest.mark.usefixtures("newer_runner")

SHARED = [3 + (7 * i) % 40 for i in range(300)]
Make = Callable[..., Oracle]


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def make(request: pytest.FixtureRequest, tiny_llama: str) -> Iterator[Make]:
    """Engines on one of the two schedulers; each ends at rest."""
    made: list[Oracle] = []

    def build(**options: Any) -> Oracle:
        made.append(Oracle(tiny_llama, asynchronous=request.param, **options))
        return made[-1]

    yield build
    for oracle in made:
        oracle.drain()
        oracle.run()
        oracle.assert_at_rest()
        oracle.close()


def ask(oracle: Oracle, request_id: str, prompt: list[int], new_tokens: int = 4) -> None:
    """Run one request to its end and check what it generated."""
    oracle.submit(request_id, prompt, new_tokens)
    oracle.run()
    assert oracle.generated[request_id] == oracle.expected_tokens(request_id, len(prompt), new_tokens)


def loaded(oracle: Oracle) -> int:
    assert oracle.engine.worker is not None
    return oracle.engine.worker.counts.loaded_tokens


def test_what_one_request_stored_another_loads(make: Make) -> None:
    oracle = make()
    ask(oracle, "a", SHARED[:200])
    assert loaded(oracle) == 0
    ask(oracle, "b", [*SHARED[:200], 9, 9, 9])
    assert loaded(oracle) == 192  # three whole chunks of 64


def test_a_full_hit_leaves_one_token_to_compute(make: Make) -> None:
    oracle = make()
    ask(oracle, "a", SHARED[:128])
    ask(oracle, "b", SHARED[:128])
    assert loaded(oracle) == 128
    assert oracle.engine.scheduler is not None
    assert oracle.engine.scheduler.counts.tokens_to_load == 127


def test_generated_tokens_are_kept_only_when_asked(make: Make) -> None:
    for save_decode, chunks in ((False, 1), (True, 3)):
        oracle = make(save_decode=save_decode)
        ask(oracle, "a", SHARED[:100], new_tokens=100)
        assert oracle.engine.cache is not None
        assert oracle.engine.cache.counts().chunks_resident == chunks


def test_preempted_requests_come_back_through_the_cache(make: Make) -> None:
    """Four requests that outgrow the blocks; on resumption their generated tokens are a prompt like any other."""
    oracle = make(blocks=15, save_decode=True)
    prompts = {f"r{number}": [*SHARED[:64], number, *SHARED[:60]] for number in range(4)}
    for request_id, prompt in prompts.items():
        oracle.submit(request_id, prompt, new_tokens=90)
    preempted = 0
    for _ in range(3000):
        if not oracle.scheduler.has_requests() and not oracle._pending:
            break
        oracle.step()
        preempted += sum(request.num_preemptions for request in oracle.scheduler.requests.values())
    for request_id, prompt in prompts.items():
        assert oracle.generated[request_id] == oracle.expected_tokens(request_id, len(prompt), 90)
    assert preempted > 0
    assert loaded(oracle) > 0


def test_a_request_aborted_at_any_step_leaves_nothing(make: Make) -> None:
    oracle = make()
    ask(oracle, "first", SHARED[:260])
    for step in range(8):
        oracle.submit(f"doomed{step}", [*SHARED[:256], step], new_tokens=8)
        oracle.submit(f"kept{step}", [*SHARED[:200], 1, step], new_tokens=4)
        for _ in range(step):
            oracle.step()
        oracle.abort(f"doomed{step}")
        oracle.run()
        kept = f"kept{step}"
        assert oracle.generated[kept] == oracle.expected_tokens(kept, 202, 4)
        oracle.assert_at_rest()


@pytest.mark.parametrize("fault", ["copy fails", "chunks are gone", "lease expires"])
def test_a_load_that_comes_up_short_is_computed_and_asked_for_once(
    make: Make, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = make()
    ask(oracle, "a", SHARED[:200])
    cache, copier = oracle.engine.cache, oracle.engine.copiers[0]
    assert cache is not None and oracle.engine.worker is not None
    real_release = cache.release

    def fail(plan: object) -> None:
        raise CopyFailed("the bus is on fire")

    def gone(keys: Sequence[ChunkKey], holder: str) -> LoadFailed:
        return LoadFailed(tuple(keys), "gone")

    with monkeypatch.context() as patch:
        match fault:
            case "copy fails":
                patch.setattr(copier, "load", fail)
            case "chunks are gone":
                patch.setattr(cache, "load", gone)
            case _:
                patch.setattr(cache, "release", lambda lease: real_release(lease) and False)
        ask(oracle, "b", [*SHARED[:200], 8])
    assert oracle.engine.worker.counts.loads_failed == 1  # the forgotten keys are a miss, not the same failure again
    before = loaded(oracle)
    ask(oracle, "c", [*SHARED[:200], 9])
    assert loaded(oracle) == before + 192  # and what was computed instead is held again


def test_loads_that_fail_one_after_another_turn_the_cache_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the scheduler sees of a worker in another process that was turned off."""
    oracle = make()

    def fail(plan: object) -> None:
        raise CopyFailed("the bus is on fire")

    monkeypatch.setattr(connector, "_MAX_FAILURES", 3)
    monkeypatch.setattr(oracle.engine.copiers[0], "load", fail)
    ask(oracle, "stores", SHARED[:200])
    for number in range(3):
        assert oracle.engine.off == ""
        ask(oracle, f"loads {number}", SHARED[:200])
    assert "all loads have failed, 3 times in a row" in oracle.engine.off
    ask(oracle, "goes on", SHARED[:200])
    oracle.engine.off = ""  # as it should be at rest; and so it was meant
    oracle.engine.faults.clear()


def test_under_the_default_policy_a_failed_load_ends_in_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make(policy="fail")
    ask(oracle, "a", SHARED[:200])

    def fail(plan: object) -> None:
        raise CopyFailed("the bus is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(oracle.engine.copiers[0], "load", fail)
        oracle.submit("b", SHARED[:200])
        oracle.run()
    assert oracle.errors == {"b"}
    ask(oracle, "c", SHARED[:200])


def test_vllms_own_prefix_cache_is_counted_first(make: Make) -> None:
    oracle = make(prefix_caching=True)
    ask(oracle, "a", SHARED[:200])
    ask(oracle, "b", [*SHARED[:200], 5])
    assert loaded(oracle) == 0
    assert oracle.scheduler.reset_prefix_cache()
    ask(oracle, "c", [*SHARED[:70], 6])  # brings the first two blocks back to vLLM
    before = loaded(oracle)
    ask(oracle, "d", [*SHARED[:200], 7])
    assert loaded(oracle) == before + 192 - 64


def test_a_prefix_that_many_want_at_once_is_loaded_once(make: Make) -> None:
    oracle = make(prefix_caching=True)
    ask(oracle, "a", SHARED[:200])
    assert oracle.scheduler.reset_prefix_cache()
    for number in range(6):
        oracle.submit(f"r{number}", [*SHARED[: 200 - number], number, 9])
    oracle.run()
    assert loaded(oracle) == 192
    assert oracle.engine.scheduler is not None and oracle.engine.scheduler.counts.loads_shared == 5
    for number in range(6):
        assert oracle.generated[f"r{number}"] == oracle.expected_tokens(f"r{number}", 202 - number, 4)


def test_a_reset_of_the_connector_forgets_everything(make: Make) -> None:
    oracle = make()
    ask(oracle, "a", SHARED[:200])
    assert oracle.scheduler.reset_prefix_cache(reset_connector=True)
    ask(oracle, "b", SHARED[:200])
    assert loaded(oracle) == 0
    ask(oracle, "c", SHARED[:200])
    assert loaded(oracle) == 192


@pytest.mark.parametrize("of_connector", [False, True])
def test_after_a_reset_what_follows_vllms_own_hits_is_stored_again(make: Make, of_connector: bool) -> None:
    """Until vLLM has forgotten the blocks of other weights, it is not."""
    oracle = make(prefix_caching=True)
    cache, weights = oracle.engine.cache, oracle.engine.weights
    assert cache is not None and weights is not None
    ask(oracle, "a", SHARED[:64])
    weights.identity.changed("an update in place")
    ask(oracle, "b", SHARED[:200])  # with vLLM's blocks of before
    stored = cache.counts().chunks_committed
    assert stored == 1
    assert oracle.scheduler.reset_prefix_cache(reset_connector=of_connector)
    ask(oracle, "c", SHARED[:64])
    ask(oracle, "d", SHARED[:200])  # two of its blocks are vLLM's
    assert cache.counts().chunks_committed == stored + 3


def test_a_promise_that_expired_in_the_queue_is_looked_up_again(make: Make) -> None:
    """An engine may hold a promised request for long; the lease is renewed by being asked for, not by luck."""
    oracle = make(blocks=12)
    ask(oracle, "a", SHARED[:128])
    oracle.submit("long", [1, *SHARED[:250]], new_tokens=40)
    oracle.step()
    oracle.submit("waits", [*SHARED[:128], 2, *SHARED[:120]], new_tokens=4)
    oracle.step()
    cache = oracle.engine.cache
    assert cache is not None and oracle.engine.scheduler is not None
    cache.end(f"{oracle.engine.id}/waits")  # what expiry does, without the wait
    cache.clear()
    oracle.run()
    assert oracle.generated["waits"] == oracle.expected_tokens("waits", 249, 4)


def test_a_pool_of_three_chunks_serves_what_it_can(make: Make) -> None:
    oracle = make(host={"capacity_bytes": 3 * 64 * 2 * 2 * 32 * 4 * 2})
    for number in range(6):
        ask(oracle, f"r{number}", [*SHARED[: 130 + 10 * number], number])
    assert loaded(oracle) > 0
    assert oracle.engine.cache is not None
    assert oracle.engine.cache.counts().slots_total == 3


def test_a_plan_is_read_once_in_a_step_and_only_if_it_says_something(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    real = StepPlan.from_plain
    monkeypatch.setattr(StepPlan, "from_plain", lambda plain: read.append(plain) or real(plain))
    oracle = make()
    oracle.scheduler.connector._in_process = False
    ask(oracle, "a", SHARED[:70], new_tokens=30)
    assert len(read) == 1  # one step completes a chunk, and thirty do not
    ask(oracle, "b", [*SHARED[:64], 9], new_tokens=30)
    assert len(read) == 3  # one loads, and the next sees that the prompt's chunk is computed
    oracle.scheduler.connector._in_process = True
    ask(oracle, "c", [*SHARED[:64], 8], new_tokens=30)
    assert len(read) == 3  # where the worker has the plan itself, there is nothing to read


def test_opaque_blocks(make: Make) -> None:
    oracle = make(format="blocks")
    ask(oracle, "a", SHARED[:200])
    ask(oracle, "b", [*SHARED[:200], 4])
    assert loaded(oracle) == 192
    ask(oracle, "c", SHARED[:192])
    assert oracle.engine.facts is not None and oracle.engine.facts.formats == ("blocks",)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_anything_that_can_happen_in_any_order(make: Make, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come, grow, are aborted and preempted, loads fail, chunks are forgotten: every token stays right."""
    chance = random.Random(seed)
    oracle = make(
        blocks=chance.choice([14, 20, 40]),
        prefix_caching=chance.random() < 0.5,
        save_decode=chance.random() < 0.5,
        host={"capacity_bytes": f"{chance.choice([1, 2, 8])}MiB"},
    )
    copier, cache = oracle.engine.copiers[0], oracle.engine.cache
    assert cache is not None
    real_load = copier.load

    def sometimes(plan: Any) -> Any:
        if chance.random() < 0.2:
            raise CopyFailed("not this time")
        return real_load(plan)

    monkeypatch.setattr(copier, "load", sometimes)
    sizes: dict[str, tuple[int, int]] = {}
    aborted = set()
    for number in range(40):
        request_id = f"r{number}"
        prompt = [*SHARED[: chance.randrange(1, 280)], *([chance.randrange(3, 40)] * chance.randrange(0, 30))]
        new_tokens = chance.randrange(1, 60)
        sizes[request_id] = (len(prompt), new_tokens)
        oracle.submit(request_id, prompt, new_tokens, **({"cache_salt": "tenant"} if chance.random() < 0.2 else {}))
        for _ in range(chance.randrange(0, 12)):
            oracle.step()
        if chance.random() < 0.15:
            doomed = chance.choice(list(sizes))
            if doomed in oracle.scheduler.requests:
                oracle.abort(doomed)
                aborted.add(doomed)
        if chance.random() < 0.1:
            cache.forget(cache.admin.resident_keys()[:: chance.randrange(1, 4)])
    oracle.run(steps=5000)
    for request_id, (prompt_tokens, new_tokens) in sizes.items():
        expected = oracle.expected_tokens(request_id, prompt_tokens, new_tokens)
        made = oracle.generated[request_id]
        assert made == expected or (request_id in aborted and made == expected[: len(made)]), request_id


def test_salts_and_adapters_never_meet(make: Make) -> None:
    oracle = make()
    strangers: list[dict[str, Any]] = [
        {},
        {"cache_salt": "tenant b"},
        {"lora_request": LoRARequest("helper", 1, "/nowhere/a")},
        {"lora_request": LoRARequest("helper", 2, "/nowhere/b")},
        {"lora_request": LoRARequest("helper", 1, "/nowhere/a"), "cache_salt": "tenant b"},
    ]
    weights = oracle.engine.weights
    assert weights is not None
    for number, stranger in enumerate(strangers):
        if lora := stranger.get("lora_request"):
            weights.adapter(lora)  # an adapter's first request is not cached: its files are being read
            assert weights.adapters.wait(30)
        oracle.submit(f"first{number}", SHARED[:200], **stranger)
        oracle.run()
        assert loaded(oracle) == 192 * number
        oracle.submit(f"again{number}", SHARED[:200], **stranger)
        oracle.run()
        assert loaded(oracle) == 192 * (number + 1)


def media(name: str, at: int) -> list[MultiModalFeatureSpec]:
    return [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(at, 1))]


@pytest.mark.parametrize(
    "stranger",
    [
        {"cache_salt": "\udcff"},
        {"lora_request": LoRARequest("\udcff", 1, "/nowhere")},
        {"mm_features": media("\udcff", 1000)},
        {"mm_features": media("a", 2**63)},
    ],
    ids=["salt", "adapter", "media", "place"],
)
def test_what_has_no_identity_costs_its_own_request_the_cache_alone(make: Make, stranger: dict[str, Any]) -> None:
    """A name of a file need not be Unicode, of which a program makes a salt; a client may say where an image stands."""
    oracle = make()
    if lora := stranger.get("lora_request"):
        assert oracle.engine.weights is not None
        oracle.engine.weights.adapter(lora)
        assert oracle.engine.weights.adapters.wait(30)
    oracle.submit("stranger", SHARED[:200], **stranger)
    oracle.run()
    assert oracle.generated["stranger"] == oracle.expected_tokens("stranger", 200, 4)
    assert oracle.engine.off == ""
    ask(oracle, "a", SHARED[:200])
    ask(oracle, "b", [*SHARED[:200], 9])
    assert loaded(oracle) == 192


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cache_that_also_fails_while_it_is_turned_off_leaves_the_engine_alone(
    tiny_llama: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What has broken it is met again by what gives everything back."""
    oracle = Oracle(tiny_llama, asynchronous=asynchronous)
    ask(oracle, "a", SHARED[:200])

    def broken(*_arguments: Any, **_named: Any) -> Any:
        raise ZeroDivisionError("in the index")

    for verb in ("lookup", "end"):
        monkeypatch.setattr(oracle.engine.cache, verb, broken)
    ask(oracle, "b", [*SHARED[:200], 9])
    assert oracle.engine.off == "get_num_new_matched_tokens raised ZeroDivisionError: in the index"
    assert "could not be given back" in caplog.text
    ask(oracle, "c", [*SHARED[:200], 8])
    monkeypatch.undo()
    oracle.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_oracle_sees_a_single_wrong_byte(tiny_llama: str, asynchronous: bool) -> None:
    """The control: without it none of the tests here could fail."""
    oracle = Oracle(tiny_llama, asynchronous=asynchronous)
    ask(oracle, "a", SHARED[:200])
    assert oracle.engine.cache is not None
    oracle.engine.cache.pool.view[5000] ^= 1
    oracle.submit("b", SHARED[:200])
    with pytest.raises(AssertionError, match=r"wrong [KV]: request b"):
        oracle.run()
    oracle.close(drain=False)


def test_a_chunk_that_is_no_whole_number_of_blocks_is_refused_with_the_nearest(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match=f"not a multiple of the engine's block of {BLOCK_TOKENS} tokens.*96"):
        Oracle(tiny_llama, chunk_tokens=100)


def test_an_unknown_setting_names_the_nearest(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'chunk_tokens'"):
        Oracle(tiny_llama, chunk_token=64)


def test_a_pool_larger_than_memory_is_refused(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match="100"):
        Oracle(tiny_llama, host={"capacity_bytes": "100TiB"})
