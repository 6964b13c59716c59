"""Windows and states under vLLM's real schedulers and hybrid block managers, with the content oracle.

No byte is read that computing would not have written, no block is touched after vLLM has given it away, and
no lease is left.
"""

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_connect.halves.request import EngineState, RequestTokens
from kv_core.errors import CopyFailed
from kv_core.hashing import ChainScheme
from kv_core.shape import ConnectShape, GroupShape
from kv_vllm.translate import StepReader
from models import BY_NAME
from oracle import BLOCK_TOKENS, HAS_NEWER_RUNNER, NGRAM, Oracle

pytestmark = pytest.mark.usefixtures("newer_runner")

CHUNK = 64
SHARED = [3 + (7 * i) % 40 for i in range(400)]
WINDOWS = ("window:20", "window:64", "window:100", "window:300")
KINDS = [
    *(("full", window) for window in WINDOWS),
    ("full", "state"),
    ("state",),
    ("full", "window:100", "state", "state"),
    ("reference:64",),
    ("full", "replayed:40"),
]
Make = Callable[..., Oracle]


@pytest.fixture(scope="session")
def linear_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Whose configuration vLLM takes for that of a model with states; the layers are the oracle's."""
    return str(BY_NAME["Qwen3-Next"].write(tmp_path_factory.mktemp("tiny-qwen3-next")))


def built(kinds: tuple[str, ...], llama: str, linear: str, **options: Any) -> Oracle:
    has_states = "state" in kinds
    if options.get("drafter") == DRAFT_MODEL:
        options["drafter"] = DRAFT_MODEL | {"model": llama}
    return Oracle(linear if has_states else llama, kinds=kinds, **({"prefix_caching": has_states} | options))


def finish(oracle: Oracle) -> None:
    oracle.drain()
    oracle.run(steps=5000)
    oracle.assert_at_rest()
    oracle.close()


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def make(request: pytest.FixtureRequest, tiny_llama: str, linear_model: str) -> Iterator[Make]:
    made: list[Oracle] = []

    def build(kinds: tuple[str, ...], **options: Any) -> Oracle:
        made.append(built(kinds, tiny_llama, linear_model, asynchronous=request.param, **options))
        return made[-1]

    yield build
    for oracle in made:
        finish(oracle)


def ask(oracle: Oracle, name: str, prompt: list[int], new_tokens: int = 4) -> int:
    """Without what vLLM itself has kept."""
    if oracle.vllm_config.cache_config.enable_prefix_caching:
        assert oracle.scheduler.reset_prefix_cache()
    return oracle.ask(name, prompt, new_tokens)


@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
@pytest.mark.parametrize("batch_tokens", [40, 96, 512])
def test_what_one_request_stored_another_loads(make: Make, kinds: tuple[str, ...], batch_tokens: int) -> None:
    """Whatever the steps: smaller than a block's half, between chunks, or the whole prompt."""
    if "state" in kinds and batch_tokens < 2 * BLOCK_TOKENS:
        batch_tokens = 2 * BLOCK_TOKENS  # vLLM ends steps at blocks
    oracle = make(kinds, batch_tokens=batch_tokens)
    assert ask(oracle, "a", SHARED[:330]) == 0
    assert ask(oracle, "b", SHARED[:330]) == 320


@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
def test_a_hit_of_every_length(make: Make, kinds: tuple[str, ...]) -> None:
    oracle = make(kinds)
    for tokens in range(CHUNK + 1, 340, 27):
        ask(oracle, f"a{tokens}", SHARED[:tokens])
    for tokens in range(CHUNK + 1, 340, 19):
        assert ask(oracle, f"b{tokens}", [*SHARED[:tokens], 9]) >= (tokens - 27) // CHUNK * CHUNK - CHUNK


@pytest.mark.parametrize("kinds", [kinds for kinds in KINDS if "state" in kinds and "full" in kinds], ids=" ".join)
def test_where_prompts_part_a_state_is_left_by_the_second_and_found_by_the_third(
    make: Make, kinds: tuple[str, ...]
) -> None:
    oracle = make(kinds, batch_tokens=512)
    for shared in (64, 100, 130, 200, 255, 256, 300):
        found = [ask(oracle, f"{shared} {n}", [*SHARED[shared:][:shared], *([3 + n] * 90)]) for n in range(4)]
        shared = min(shared, len(SHARED) - shared)
        assert found[2:] == [shared // CHUNK * CHUNK] * 2, (shared, found)


def test_a_window_is_loaded_no_further_back_than_it_sees(make: Make) -> None:
    oracle = make(("full", "window:100"))
    ask(oracle, "a", SHARED[:330])
    moved: list[list[int]] = [[], []]
    for group, copier in enumerate(oracle.engine.copiers):
        real = copier.load

        def load(plan: Any, real: Any = real, group: int = group) -> Any:
            moved[group].append(plan.tokens)
            return real(plan)

        copier.load = load  # type: ignore[method-assign]
    assert ask(oracle, "b", SHARED[:330]) == 320
    blocks = -(-99 // BLOCK_TOKENS) * BLOCK_TOKENS
    assert moved == [[320], [blocks]]


def test_a_window_that_was_evicted_shortens_the_hit_and_is_stored_again(make: Make) -> None:
    oracle = make(("full", "window:100"), batch_tokens=512)
    ask(oracle, "a", SHARED[:330])
    cache = oracle.engine.cache
    assert cache is not None
    windows = [key for key in cache.admin.resident_keys() if key.group == 1]
    cache.forget(windows[-1:])
    assert ask(oracle, "b", SHARED[:330]) == 256
    assert ask(oracle, "c", SHARED[:330]) == 320


@pytest.mark.parametrize("kinds", [("full", "window:100"), ("full", "state")], ids=" ".join)
@pytest.mark.parametrize("group", [0, 1])
def test_the_oracle_sees_a_single_wrong_byte_of_either_group(
    tiny_llama: str, linear_model: str, kinds: tuple[str, ...], group: int
) -> None:
    """The control."""
    oracle = built(kinds, tiny_llama, linear_model)
    ask(oracle, "a", SHARED[:330])
    cache = oracle.engine.cache
    assert cache is not None
    keys = [key for key in cache.admin.resident_keys() if key.group == group]
    lease = cache.load(keys[-1:], "the control")
    (extent,) = lease.extents  # type: ignore[union-attr]
    oracle.engine.cache.pool.view[extent.offset + extent.nbytes - 1] ^= 1
    cache.release(lease)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"wrong ([KV]|state): request b"):
        ask(oracle, "b", SHARED[:330])
    oracle.close(drain=False)


WITH_GUESSES = [kinds for kinds in KINDS if "state" in kinds or kinds == ("full", "window:100")]
NGRAM_GPU = NGRAM | {"method": "ngram_gpu"}
DRAFT_MODEL = {"method": "draft_model"}
"""A tiny Llama. vLLM reserves blocks for its tokens besides."""
MTP = {"method": "mtp"}
"""The model's own head."""
NGRAMS = [
    ("Scheduler", NGRAM),
    ("AsyncScheduler", NGRAM_GPU),
    *([("AsyncScheduler", NGRAM)] if HAS_NEWER_RUNNER else []),
]
DRAFTERS = [*NGRAMS, ("Scheduler", DRAFT_MODEL), ("AsyncScheduler", DRAFT_MODEL)]
by_name = "{0[0]} {0[1][method]}".format


@pytest.fixture(params=NGRAMS, ids=by_name)
def make_guessing(request: pytest.FixtureRequest, tiny_llama: str, linear_model: str) -> Iterator[Make]:
    """As `make`, with three guesses a step."""
    scheduler, drafter = request.param
    made: list[Oracle] = []

    def build(kinds: tuple[str, ...], **options: Any) -> Oracle:
        guessing = {"guesses": 3, "drafter": drafter, "asynchronous": scheduler == "AsyncScheduler"}
        made.append(built(kinds, tiny_llama, linear_model, **guessing, **options))
        return made[-1]

    yield build
    for oracle in made:
        finish(oracle)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(kinds, id=" ".join(kinds), marks=() if "window:100" in kinds else pytest.mark.slow)
        for kinds in WITH_GUESSES
    ],
)
def test_with_guesses_what_one_request_stored_another_loads(make_guessing: Make, kinds: tuple[str, ...]) -> None:
    """Right ones and wrong ones, over blocks' ends, while decoded tokens are kept: their states only where vLLM offers
    them once they are settled."""
    oracle = make_guessing(kinds, save_decode=True)
    for number, prompt_tokens in enumerate((64, 65, 90, 128, 150)):
        prompt = [3 + number, *SHARED[: prompt_tokens - 1]]
        assert ask(oracle, f"a{number}", prompt, 150) == 0
        again = [*prompt, *oracle.generated[f"a{number}"]]
        states = prompt_tokens // CHUNK * CHUNK
        prompts_only = "state" in kinds and not oracle.asynchronous
        kept = states if prompts_only else (len(again) - 1) // CHUNK * CHUNK
        assert ask(oracle, f"b{number}", again, 150) == kept, number
        assert ask(oracle, f"c{number}", [*prompt, 9], 150) == states


@pytest.mark.parametrize("scheduler", ["Scheduler", "AsyncScheduler"])
def test_with_a_head_for_guesses_a_hit_of_states_ends_a_block_earlier(
    tiny_llama: str, linear_model: str, scheduler: str
) -> None:
    """vLLM computes a prompt's last whole block again for the head, so it ends a step before it and keeps a state."""
    guessing = {"guesses": 3, "drafter": MTP, "asynchronous": scheduler == "AsyncScheduler"}
    oracle = built(("full", "state"), tiny_llama, linear_model, chunk_tokens=BLOCK_TOKENS, **guessing)
    for prompt_tokens in (65, 90, 150, 200):
        prompt = [3 + prompt_tokens % 40, *SHARED[: prompt_tokens - 1]]
        assert ask(oracle, f"a{prompt_tokens}", prompt, 50) == 0
        assert ask(oracle, f"b{prompt_tokens}", prompt, 50) == (prompt_tokens // BLOCK_TOKENS - 1) * BLOCK_TOKENS
    finish(oracle)


def test_a_state_that_is_taken_while_tokens_are_guessed_may_be_anothers(
    tiny_llama: str, linear_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what the synchronous scheduler offers in a step with guesses is not there when the forward pass has
    ended."""

    def all_of_them(config: Any, output: Any, request: Any) -> tuple[EngineState, ...]:
        offered = output.kv_connector_block_state.boundary_state_offloads
        return tuple(EngineState(*state) for state in offered.get(request.request_id, ()))

    monkeypatch.setattr("kv_vllm.translate.settled_states", all_of_them)
    oracle = built(("full", "state"), tiny_llama, linear_model, guesses=3, save_decode=True)
    prompts = [[3 + number, *SHARED[:99]] for number in range(12)]
    for number, prompt in enumerate(prompts):
        ask(oracle, f"a{number}", prompt, 200)

    def ask_again() -> None:
        for number, prompt in enumerate(prompts):
            ask(oracle, f"b{number}", [*prompt, *oracle.generated[f"a{number}"]])

    with pytest.raises(AssertionError, match="wrong state: request b"):
        ask_again()
    oracle.close(drain=False)


@pytest.mark.skipif(HAS_NEWER_RUNNER, reason="this vLLM's newer model runner takes them")
def test_vllm_itself_refuses_ngrams_on_the_host_with_an_asynchronous_scheduler(tiny_llama: str) -> None:
    """They are guessed from tokens that only the device knows by then."""
    with pytest.raises(ValueError, match="async scheduling is only supported with EAGLE/MTP/Draft Model/NGram GPU"):
        Oracle(tiny_llama, guesses=3, drafter=NGRAM, asynchronous=True, connector=False)


def test_under_a_reference_window_only_prompts_are_kept(make: Make) -> None:
    """A generated token has seen less than it would as a part of a prompt."""
    oracle = make(("reference:64",), save_decode=True)
    prompt = SHARED[:200]
    assert ask(oracle, "a", prompt, 200) == 0
    assert ask(oracle, "b", [*prompt, *oracle.generated["a"]], 200) == 192
    assert ask(oracle, "c", [*prompt, *oracle.generated["a"]], 4) == 384


def test_a_generated_tokens_kv_under_a_reference_window_is_not_a_prompts(
    tiny_llama: str, linear_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr("kv_vllm.translate.keeps_prompts_only", lambda config: False)
    oracle = built(("reference:64",), tiny_llama, linear_model, save_decode=True)
    ask(oracle, "a", SHARED[:200], 100)
    with pytest.raises(AssertionError, match="wrong K: request b"):
        ask(oracle, "b", [*SHARED[:200], *oracle.generated["a"]])
    oracle.close(drain=False)


@settings(
    max_examples=16,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_anything_that_can_happen_in_any_order(tiny_llama: str, linear_model: str, data: st.DataObject) -> None:
    """Requests come, grow, are aborted and preempted, loads fail, chunks of any group are forgotten."""
    kinds = data.draw(st.sampled_from(KINDS))
    has_states = "state" in kinds
    heads = [(scheduler, MTP) for scheduler in ("Scheduler", "AsyncScheduler") if has_states]
    scheduler, drafter = data.draw(st.sampled_from([*DRAFTERS, *heads]))
    options = {
        "asynchronous": scheduler == "AsyncScheduler",
        "guesses": data.draw(st.sampled_from([0, 1, 4])),
        "drafter": drafter,
        "blocks": data.draw(st.sampled_from([36, 48, 90])) * len(kinds),
        "batch_tokens": data.draw(st.sampled_from([64, 96, 200, 512])),
        "prefix_caching": has_states or data.draw(st.booleans()),
        "save_decode": data.draw(st.booleans()),
        "host": {"capacity_bytes": data.draw(st.sampled_from(["2MiB", "4MiB", "16MiB"]))},
    }
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    oracle = built(kinds, tiny_llama, linear_model, **options)
    try:
        _anything(oracle, chance)
    except BaseException:
        oracle.close(drain=False)  # or the engine would be found by the tests after this one
        raise
    finish(oracle)


def _anything(oracle: Oracle, chance: random.Random) -> None:
    cache = oracle.engine.cache
    assert cache is not None
    for copier in oracle.engine.copiers:
        real = copier.load

        def sometimes(plan: Any, real: Any = real) -> Any:
            if chance.random() < 0.1:
                raise CopyFailed("not this time")
            return real(plan)

        copier.load = sometimes  # type: ignore[method-assign]
    sizes: dict[str, tuple[int, int]] = {}
    aborted = set()
    for number in range(25):
        name = f"r{number}"
        prompt = [*SHARED[: chance.randrange(1, 380)], *([chance.randrange(3, 40)] * chance.randrange(0, 60))]
        new_tokens = chance.randrange(1, 60)
        sizes[name] = (len(prompt), new_tokens)
        oracle.submit(name, prompt, new_tokens)
        for _ in range(chance.randrange(0, 12)):
            oracle.step()
        if chance.random() < 0.15:
            doomed = chance.choice(list(sizes))
            if doomed in oracle.scheduler.requests:
                oracle.abort(doomed)
                aborted.add(doomed)
        if chance.random() < 0.2:
            keys = cache.admin.resident_keys()
            cache.forget([key for key in keys if chance.random() < 0.3])
    oracle.run(steps=5000)
    for name, (prompt_tokens, new_tokens) in sizes.items():
        expected = oracle.expected_tokens(name, prompt_tokens, new_tokens)
        generated = oracle.generated[name]
        assert generated == expected or (name in aborted and generated == expected[: len(generated)]), name


def test_a_state_is_stored_although_its_request_is_not_in_the_step_that_offers_it() -> None:
    """An asynchronous scheduler offers it once its tokens are known. The next step leaves the request out if it has all
    its tokens but the last, which is in flight."""
    offered = {"out": [(1, 7, CHUNK)], "unknown": [(1, 8, CHUNK)]}
    blocks = SimpleNamespace(boundary_state_offloads=offered, get_block_ids=lambda _request_id: ([1, 2], [0, 7]))
    half = SimpleNamespace(
        shape=ConnectShape(ChainScheme(chunk_tokens=CHUNK), None, (GroupShape(BLOCK_TOKENS),)),
        completes_chunk=lambda _request, _computed_tokens: False,
        costs=None,
    )
    config = SimpleNamespace(speculative_config=None)
    output = SimpleNamespace(
        num_scheduled_tokens={"in": 1},
        total_num_scheduled_tokens=1,
        kv_connector_block_state=blocks,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=[]),
    )
    requests: dict[str, Any] = {
        name: (SimpleNamespace(request_id=name, num_computed_tokens=70), RequestTokens(name, SHARED[:71], 71))
        for name in ("in", "out")
    }
    step = StepReader(config, half).read(output, requests)
    assert [(each.request.request_id, each.computed_tokens, each.states) for each in step.scheduled] == [
        ("out", 70, (EngineState(1, 7, CHUNK),))
    ]
