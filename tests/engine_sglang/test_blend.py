"""Blending on real SGLang by phases: documents in any order, and never under an exact name.

A tiny model with random weights shows every wrong bit, so what is approximate differs. What is exact must be equal.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import ON_A_CORE_EACH, PAGE, Answer, Engine, corrupt, started
from kv_blend import edited, request_fields
from kv_server.process import launch
from kv_testing import interleavings
from kv_testing.cache_servers import assert_nothing_is_leased
from kv_testing.documents import (
    BEFORE,
    DOCUMENTS,
    DROPPED,
    FIRST,
    SECOND,
    SELECTIONS,
    SYSTEM,
    UNCHANGED,
    WRONG_PLANS,
    Prompt,
)
from kv_testing.interleavings import EXACT, Seen, live_through
from kv_testing.tiny import TinyLlama
from kv_tiers.pool.host_pool import HostPool


def cache(pool: str = "") -> dict[str, Any]:
    return {"host": {"capacity_bytes": "64MiB", "name": pool}}


def fields(prompts: Sequence[Prompt], **plan: Any) -> list[dict[str, Any]]:
    return [request_fields(each.segments, tokens=len(each.tokens), engine="sglang", **plan) for each in prompts]


def blend(engine: Engine, prompts: Sequence[Prompt], **plan: Any) -> tuple[list[Answer], list[Any]]:
    return engine.blend([each.tokens for each in prompts], fields(prompts, **plan))


@pytest.fixture(scope="module")
def exact(tiny_llama: str) -> dict[Prompt, Answer]:
    """What an engine without us answers."""
    with started(tiny_llama) as plain:
        return dict(zip(EXACT, plain.ask_in_turn([prompt.tokens for prompt in EXACT]), strict=True))


@pytest.fixture(scope="module")
def pool() -> Iterator[str]:
    name = f"kv-blend-{uuid.uuid4().hex[:8]}"
    yield name
    HostPool.unlink(name)


@pytest.fixture(scope="module")
def engine(tiny_llama: str, pool: str) -> Iterator[Engine]:
    with started(tiny_llama, cache=cache(pool), blends=True) as engine:
        yield engine


def aligned_tokens(prompt: Prompt) -> int:
    """How many tokens of its documents are in whole pages of their own."""
    return sum(max(0, end // PAGE * PAGE - -(-first // PAGE) * PAGE) for first, end in prompt.segments)


def test_documents_are_reused_in_any_order(engine: Engine, exact: dict[Prompt, Answer]) -> None:
    _, (first,) = blend(engine, [FIRST], share=0.0)
    assert (first["segment_tokens"], first["held_tokens"]) == (1171, 0)
    others = [SECOND, Prompt((3, 2, 1))]
    answers, reports = blend(engine, others, share=0.0)
    for prompt, report, hit in zip(others, reports, engine.hits, strict=True):
        assert report["held_tokens"] == aligned_tokens(prompt)
        assert report["recomputed_tokens"] == prompt.documents_tokens - aligned_tokens(prompt)
        assert hit == prompt.segments[-1][1] // PAGE * PAGE
    # A model whose answers a wrong bit changes answers differently where segments are reused without their context.
    assert answers[0] != exact[SECOND]
    assert blend(engine, others, share=0.0)[0] == answers  # from SGLang's own cache, under the plan's salt
    engine.flush()
    again, reports = blend(engine, others, share=0.0)
    assert again == answers
    assert [report["held_tokens"] for report in reports] == [aligned_tokens(prompt) for prompt in others]


def test_a_prompt_of_which_everything_is_computed_again_is_exact(engine: Engine, exact: dict[Prompt, Answer]) -> None:
    prompts = [FIRST, SECOND, Prompt((1, 0))]
    for behind in ("prefix", "alone"):
        answers, reports = blend(engine, prompts, share=1.0, behind=behind)
        assert answers == [exact[prompt] for prompt in prompts]
        # The first one stands where it was computed.
        exact_tokens = [aligned_tokens(Prompt(each.order[:1])) if behind == "prefix" else 0 for each in prompts]
        assert [report["recomputed_tokens"] for report in reports] == [
            each.documents_tokens - tokens for each, tokens in zip(prompts, exact_tokens, strict=True)
        ]


def test_a_segment_that_stands_where_it_was_computed_is_exact(
    engine: Engine, exact: dict[Prompt, Answer], pool: str
) -> None:
    alone = [Prompt((at,)) for at in range(4)]
    expected = [exact[prompt] for prompt in alone]
    engine.flush()
    blend(engine, [SECOND], share=0.0)
    engine.flush()
    answers, reports = blend(engine, alone, share=0.0)
    assert answers == expected
    assert [report["held_tokens"] for report in reports] == [aligned_tokens(prompt) for prompt in alone]
    # The control: what is read is what the pool has.
    engine.flush()
    corrupt(pool)
    answers, _ = blend(engine, alone, share=0.0)
    assert all(got != right for got, right in zip(answers, expected, strict=True))
    corrupt(pool, 2.0)
    engine.flush()


def test_an_edited_conversation_keeps_what_follows_the_edit(engine: Engine, exact: dict[Prompt, Answer]) -> None:
    engine.ask([BEFORE.tokens], cache_salt=["one"])
    engine.flush()
    edits = edited(BEFORE.tokens, SECOND.tokens)
    end = min(len(BEFORE.tokens) // PAGE * PAGE - DROPPED, edits["segments"][-1][1]) // PAGE * PAGE
    held = UNCHANGED // PAGE * PAGE + end - -(-UNCHANGED // PAGE) * PAGE

    def ask(tenant: str, share: float) -> tuple[Answer, dict[str, int]]:
        made = request_fields(**edits, tenant=tenant, share=share, engine="sglang")
        answers, reports = engine.blend([SECOND.tokens], [made])
        return answers[0], reports[0]

    answer, report = ask("one", 0.0)
    assert answer != exact[SECOND]
    assert report == {
        "segment_tokens": len(SECOND.tokens) - 1,
        "held_tokens": held,
        "recomputed_tokens": len(SECOND.tokens) - 1 - held,
    }
    answer, report = ask("one", 1.0)
    assert answer == exact[SECOND]
    assert report["held_tokens"] == UNCHANGED // PAGE * PAGE
    answer, report = ask("two", 0.0)
    assert (answer, report["held_tokens"]) == (exact[SECOND], 0)
    # What approximates has no exact name.
    engine.flush()
    assert engine.ask([SECOND.tokens], cache_salt=["one"]) == [exact[SECOND]]
    long = edits | {"edits": [(at, end, was * 20) for at, end, was in edits["edits"]]}
    made = request_fields(**long, engine="sglang")
    assert "more than the 8192 of the model" in engine.refusal(SECOND.tokens, made)


def test_tenants_share_no_segments(engine: Engine) -> None:
    blend(engine, [FIRST], tenant="one")
    assert blend(engine, [SECOND], tenant="two")[1][0]["held_tokens"] == 0
    assert blend(engine, [SECOND], tenant="one")[1][0]["held_tokens"] > 900


def test_a_plan_without_its_salt_is_refused(engine: Engine) -> None:
    (right,) = fields([SECOND])
    for salt in ("", "other"):
        assert "cache_salt is not this plan's" in engine.refusal(SECOND.tokens, right | {"cache_salt": salt})
    assert "the plan is for a prompt of" in engine.refusal(FIRST.tokens[:900], right)
    for segments, why in WRONG_PLANS:
        plan = {"tokens": len(SECOND.tokens), "segments": segments}
        assert why in engine.refusal(SECOND.tokens, {"cache_salt": "x", "custom_params": {"kv_blend": plan}})
    assert engine.refusal(SECOND.tokens, right) == ""


def test_segments_follow_the_options_of_their_request(engine: Engine, exact: dict[Prompt, Answer]) -> None:
    def ask(prompt: Prompt, **options: Any) -> tuple[Answer, dict[str, Any]]:
        (made,) = fields([prompt], share=0.0, tenant="options")
        made["custom_params"]["kv_tiers"] = options
        (answer,), (report,) = engine.blend([prompt.tokens], [made])
        engine.flush()
        return answer, report

    engine.flush()
    for _ in range(2):  # what may not be stored is computed in its place
        answer, report = ask(FIRST, store=False)
        assert (answer, report["recomputed_tokens"]) == (exact[FIRST], 1171)
    assert ask(FIRST, tags={"a": "b"})[1]["held_tokens"] == 0
    assert ask(SECOND, tags={"a": "b"})[1]["held_tokens"] == aligned_tokens(SECOND)
    assert ask(SECOND)[1]["held_tokens"] == 0
    for options in ({"load": False}, {"use": "never"}):
        answer, report = ask(SECOND, **options)
        assert answer == exact[SECOND]
        assert "with options by which it may load nothing cannot be blended" in report["refused"]


def test_a_request_with_a_plans_salt_and_no_plan_stores_nothing(engine: Engine) -> None:
    """It is given the same pages of segments, and computes others behind them."""
    blend(engine, [FIRST], share=0.0)
    (made,) = fields([SECOND], share=0.0)
    engine.blend([SECOND.tokens], [made])
    for _ in range(2):
        engine.flush()
        engine.ask([SECOND.tokens], cache_salt=[made["cache_salt"]])
        assert engine.hits == [0]
    engine.flush()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"input_ids": [5, 6], "sampling_params": [{}, {}]}, "1 prompts, and 2 of sampling_params"),
        ({"input_ids": [[5, 6], [7, 8]], "sampling_params": [{}]}, "2 prompts, and 1 of sampling_params"),
        ({"text": ["a", "b"], "sampling_params": {}, "cache_salt": ["x"]}, "2 prompts, and 1 of cache_salt"),
    ],
)
def test_lists_of_another_length_than_the_prompts_are_refused(given: dict[str, Any], why: str) -> None:
    import asyncio

    from kv_blend.sglang.phases import _read
    from sglang.srt.managers.io_struct import GenerateReqInput

    (plan,) = fields([SECOND])
    for each in given["sampling_params"] if isinstance(given["sampling_params"], list) else [given["sampling_params"]]:
        each |= {"custom_params": plan["custom_params"]}
    with pytest.raises(ValueError, match=why):
        asyncio.run(_read(None, GenerateReqInput(**given)))


def test_a_request_without_a_salt_of_its_own_is_left_to_sglang() -> None:
    from kv_blend.sglang.phases import generate_request
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    (plan,) = fields([SECOND])
    embedding = EmbeddingReqInput(text="a", sampling_params={"custom_params": plan["custom_params"]})
    assert generate_request(lambda *given: given, None, embedding) == (None, embedding, None)


def test_attention_that_is_not_given_positions_cannot_be_moved() -> None:
    """As in GPT-2, whose model adds them to the hidden states before."""
    from kv_blend.rotations import CannotMoveError
    from kv_blend.sglang.storage import prove_rotations
    from sglang.srt.layers.radix_attention import RadixAttention

    class LearnedPositions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(64, 192)
            self.attn = RadixAttention(2, 32, scaling=1.0, num_kv_heads=2, layer_id=0)

        def forward(self, hidden_states: torch.Tensor, forward_batch: Any) -> Any:
            return self.attn(*self.projection(hidden_states).chunk(3, -1), forward_batch)

    with pytest.raises(CannotMoveError, match="LearnedPositions is not given positions"):
        prove_rotations(torch.nn.ModuleList([LearnedPositions()]), hidden_size=64, max_position=4096)


def test_a_request_that_cannot_be_blended_is_computed_whole(engine: Engine, exact: dict[Prompt, Answer]) -> None:
    answers, reports = blend(engine, [SECOND, FIRST], **SELECTIONS["question"])
    assert answers == [exact[SECOND], exact[FIRST]]
    assert ["with a selection by its question cannot be blended" in report["refused"] for report in reports] == [
        True
    ] * 2


def interleave(
    engine: Engine,
    exact: dict[Prompt, Answer],
    rounds: int,
    *,
    seed: int = 1,
    disturb: Callable[[bool], None] | None = None,
    **forged: Any,
) -> Seen:
    def ask(prompts: Sequence[Prompt], fields: Sequence[Mapping[str, Any]]) -> tuple[list[Answer], list[Any]]:
        return engine.blend([each.tokens for each in prompts], fields)

    return interleavings.interleave(
        ask, exact, rounds, engine="sglang", forget=engine.flush, seed=seed, disturb=disturb, forged=forged
    )


def test_exact_requests_never_see_approximate_kv(engine: Engine, exact: dict[Prompt, Answer]) -> None:
    seen = interleave(engine, exact, 10)
    assert seen.wrong == 0
    assert seen.exact > 10 and seen.reused_tokens > 5000


@pytest.mark.parametrize("rounds", [pytest.param(5), pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_exact_requests_never_see_approximate_kv_through_tiers_servers_and_restarts(
    tiny_llama: str, exact: dict[Prompt, Answer], tmp_path: Path, rounds: int
) -> None:
    live_through(
        tmp_path,
        rounds,
        lambda cache: started(tiny_llama, cache=cache, blends=True),
        lambda engine, seed, disturb: interleave(engine, exact, rounds, seed=seed, disturb=disturb),
        lambda engine: engine.flush(),  # it is another process, seen from here
    )


def test_the_control_with_one_name_for_both(tiny_llama: str, exact: dict[Prompt, Answer]) -> None:
    with started(tiny_llama, cache=cache(), blends=True, faults={"give_both_one_name": []}) as engine:
        assert interleave(engine, exact, 10, cache_salt="").wrong > 0


def test_what_is_placed_is_what_the_model_computes_further_on(
    tiny_llama: str, exact: dict[Prompt, Answer], tmp_path: Path
) -> None:
    """Another implementation of the model computes "context, then segment" with all positions as far on as the segment
    was moved; only these matter to a key, and only distances between them to what it is computed from."""
    from transformers import AutoModelForCausalLM

    with started(tiny_llama, cache=cache(), blends=True, faults={"keep_what_is_placed": [str(tmp_path)]}) as engine:
        blend(engine, [SECOND], share=0.0)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    placed = [torch.load(file) for file in tmp_path.glob("*.pt")]
    assert sum(len(firsts) for _, firsts, _ in placed) == aligned_tokens(SECOND) // PAGE
    for at, (first, _) in zip(SECOND.order, SECOND.segments, strict=True):
        distance = first - len(SYSTEM)
        ids = torch.tensor([[*SYSTEM, *DOCUMENTS[at]]])
        with torch.inference_mode():
            computed = model(ids, position_ids=torch.arange(ids.shape[1])[None] + distance, use_cache=True)
        rows = [(layer.keys[0].mT.mT, layer.values[0]) for layer in computed.past_key_values.layers]
        ours = [(firsts, pages) for its, firsts, pages in placed if its == distance]
        assert ours
        for firsts, pages in ours:
            for page, token in zip(pages, firsts, strict=True):
                row = token - distance
                for layer, (keys, values) in enumerate(rows):
                    for part, right in enumerate((keys, values)):
                        expected = right[:, row : row + PAGE].transpose(0, 1)
                        torch.testing.assert_close(page[part, layer], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("apart", ["tp_size", pytest.param("pp_size", marks=pytest.mark.long)])
def test_two_ranks_each_with_its_shard(
    apart: str, tiny_llama: str, exact: dict[Prompt, Answer], tmp_path: Path
) -> None:
    switch = tmp_path / "loses"
    faults = {"lose_segments_on_the_second_rank": [str(switch)]}
    prompts = [FIRST, SECOND, Prompt((3, 2, 1))]
    two: dict[str, Any] = {apart: 2, "environ": ON_A_CORE_EACH}
    with started(tiny_llama, cache=cache(), blends=True, faults=faults, **two) as engine:
        assert blend(engine, prompts, share=1.0)[0] == [exact[prompt] for prompt in prompts]
        blend(engine, [FIRST], share=0.0)
        engine.flush()
        answers, (report, _) = blend(engine, [SECOND, Prompt((1,))], share=0.0)
        assert answers[0] != exact[SECOND] and answers[1] == exact[Prompt((1,))]
        assert report["held_tokens"] == aligned_tokens(SECOND)
        engine.flush()
        assert engine.ask([SECOND.tokens]) == [exact[SECOND]]
        engine.ask([BEFORE.tokens])
        everything = request_fields(**edited(BEFORE.tokens, SECOND.tokens), share=1.0, engine="sglang")
        assert engine.blend([SECOND.tokens], [everything])[0] == [exact[SECOND]]
        # Nobody reads what one of them has lost.
        engine.flush()
        switch.touch()
        answers, (report,) = blend(engine, [SECOND], share=0.0)
        assert (answers, report["recomputed_tokens"]) == ([exact[SECOND]], 1171)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"lose_segments": [1]}, id="lost", marks=pytest.mark.slow),
        pytest.param({"fail_to_place": []}, id="a bug"),
    ],
)
def test_a_load_that_fails_costs_only_the_reuse(
    tiny_llama: str, exact: dict[Prompt, Answer], fault: dict[str, Any]
) -> None:
    with started(tiny_llama, cache=cache(), blends=True, faults=fault) as engine:
        answers, reports = blend(engine, [FIRST, SECOND])
        assert answers == [exact[FIRST], exact[SECOND]]
        assert [report["recomputed_tokens"] for report in reports] == [1171, 1171]
        assert engine.ask([SECOND.tokens]) == [exact[SECOND]]
        engine.flush()


@pytest.mark.slow
def test_some_loads_that_fail_leave_exact_requests_right(tiny_llama: str, exact: dict[Prompt, Answer]) -> None:
    with started(tiny_llama, cache=cache(), blends=True, faults={"lose_segments": [3]}) as engine:
        assert interleave(engine, exact, 6).wrong == 0
        engine.flush()


@pytest.mark.slow
def test_requests_that_are_retracted_answer_as_alone(tiny_llama: str, exact: dict[Prompt, Answer]) -> None:
    prompts = [FIRST, SECOND, Prompt((3, 2, 1)), SECOND]
    plans = [*fields(prompts[:-1], share=0.0), {}]
    with started(tiny_llama, cache=cache(), blends=True, faults={"retract_now_and_then": []}) as engine:
        alone = [engine.blend([each.tokens], [its])[0][0] for each, its in zip(prompts, plans, strict=True)]
        assert alone[-1] == exact[SECOND] != alone[1]
        for _ in range(2):
            engine.flush()  # SGLang empties its caches only if nothing is under way
            assert engine.blend([each.tokens for each in prompts], plans)[0] == alone
        assert "of several requests, 1 was retracted" in engine.log


@pytest.mark.slow
def test_segments_of_another_model_are_not_found(tiny_llama: str, exact: dict[Prompt, Answer], tmp_path: Path) -> None:
    """On the same server, of the same shape and under the same salt."""
    server = launch({"host": {"capacity_bytes": "64MiB"}}, socket=tmp_path / "s" / "s", detached=True)
    other = str(TinyLlama(seed=1).write(tmp_path / "other"))
    alone = Prompt((1,))
    try:
        for model, expected in ((other, None), (tiny_llama, exact[alone])):
            with started(model, cache={"server": {"socket": str(server.socket)}}, blends=True) as engine:
                answers, (report,) = blend(engine, [alone], share=0.0)
                assert report["held_tokens"] == 0
                assert expected in (None, *answers)
                engine.flush()
                again, (report,) = blend(engine, [alone], share=0.0)
                assert again == answers
                assert report["held_tokens"] == aligned_tokens(alone)
                engine.flush()
                engine.detach()
                assert_nothing_is_leased(server.socket)
    finally:
        server.stop()


@pytest.mark.slow
def test_a_request_that_is_left_in_the_middle_leaks_nothing(
    tiny_llama: str, exact: dict[Prompt, Answer], tmp_path: Path
) -> None:
    server = launch({"host": {"capacity_bytes": "64MiB"}}, socket=tmp_path / "s" / "s", detached=True)
    try:
        with started(tiny_llama, cache={"server": {"socket": str(server.socket)}}, blends=True) as engine:
            for requests in range(1, 10):
                engine.leave_in_the_middle(FIRST.tokens, fields([FIRST], share=0.0)[0], requests)
                engine.flush()  # SGLang empties its caches only if nothing is under way
            _, (report,) = blend(engine, [SECOND], share=0.0)
            assert report["held_tokens"] == aligned_tokens(SECOND)
            assert engine.ask([SECOND.tokens]) == [exact[SECOND]]
            engine.detach()
            assert_nothing_is_leased(server.socket)
    finally:
        server.stop()


@pytest.mark.slow
def test_a_model_whose_keys_cannot_be_moved_answers_without_reuse(tiny_llama: str, exact: dict[Prompt, Answer]) -> None:
    faults = {"rotate_otherwise": []}
    with started(tiny_llama, cache=cache(), blends=True, faults=faults, log_level="warning") as engine:
        answers, (report,) = blend(engine, [SECOND])
        assert answers == [exact[SECOND]]
        assert report["recomputed_tokens"] == 1171
        assert "do not move from one position to another by a rotation that is known here" in engine.log
        # After a few its segments are computed for nothing no longer, and the client reads that.
        reports = [blend(engine, [SECOND], tenant=tenant)[1][0] for tenant in "abc"]
        assert ["refused" in report for report in reports] == [False, False, True]


@pytest.mark.parametrize(
    ("fixture", "why"),
    [("tiny_deepseek", "(MLA)"), pytest.param("tiny_mellum", "sliding windows", marks=pytest.mark.slow)],
)
def test_a_model_that_cannot_be_blended_is_refused_by_name(
    fixture: str, why: str, request: pytest.FixtureRequest
) -> None:
    with started(request.getfixturevalue(fixture), cache=cache(), blends=True) as engine:
        plain = engine.ask([Prompt((2,)).tokens])
        answers, (report,) = blend(engine, [Prompt((2,))])
        assert answers == plain
        assert why in report["refused"]


def test_an_engine_that_writes_back_is_refused_by_name(tiny_llama: str, exact: dict[Prompt, Answer]) -> None:
    """What of its pages may be stored is forgotten by the time that they leave it."""
    with started(tiny_llama, cache=cache(), blends=True, hicache_write_policy="write_back") as engine:
        answers, (report,) = blend(engine, [SECOND])
        assert answers == [exact[SECOND]]
        assert "write_back" in report["refused"]


def test_a_quantised_kv_cache_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has none on this CPU. Its host pool says that it has bytes, in canonical pages."""
    from kv_blend.sglang.phases import Phases
    from kv_blend.sglang.storage import KVBlendStorage, KVStorage
    from kv_sglang.attach import KV
    from sglang.srt.managers.io_struct import GenerateReqInput

    monkeypatch.setattr(KVStorage, "on_host_pools_registered", lambda _self: None)
    storage = KVBlendStorage.__new__(KVBlendStorage)
    described = SimpleNamespace(kind="canonical", parts=("k", "v"))
    storage._pages = {KV: SimpleNamespace(format=described, dtype="uint8")}  # type: ignore[dict-item]
    storage.on_host_pools_registered()
    assert storage._segments is None

    args = SimpleNamespace(
        dp_size=1,
        speculative_algorithm=None,
        enable_lora=False,
        disaggregation_mode="null",
        kv_cache_dtype="fp8_e4m3",
        hicache_write_policy="write_through",
    )
    model = SimpleNamespace(attention_arch=SimpleNamespace(name="MHA"), is_hybrid_swa=False)
    phases = Phases(SimpleNamespace(server_args=args, model_config=model, enable_metrics=False))
    assert "(--kv-cache-dtype)" in phases._why_not(GenerateReqInput(text="a"), [])


@pytest.mark.slow
def test_an_engine_without_our_storage_computes_a_plan_whole(tiny_llama: str, exact: dict[Prompt, Answer]) -> None:
    with started(tiny_llama, cache=cache()) as engine:
        answers, (report,) = blend(engine, [SECOND])
        assert answers == [exact[SECOND]]
        assert "python -m kv_blend.sglang flags" in report["refused"]
