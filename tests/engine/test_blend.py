"""Blending on real vLLM: documents in any order, and never under an exact name.

A tiny model with random weights shows every wrong bit, so what is approximate differs. What is exact must be equal: a
prompt of which everything is computed again, a segment that stands where it was computed, and every request that did
not ask for blending.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import kv_blend.vllm.scheduler
import msgspec
import pytest
from blending import CACHE, Blending, exact_answers, forget_own_blocks, interleave
from engines import Answer, empty_the_pool, started
from kv_blend import BlendPlan, edited, request_fields
from kv_blend.plan import KEY
from kv_connect.engine import engines
from kv_core.keys import ChunkKey
from kv_core.service import Ended, LookupPlan
from kv_testing.documents import BEFORE, DROPPED, FIRST, QUESTION, SECOND, SELECTIONS, UNCHANGED, WRONG_PLANS, Prompt
from kv_testing.wait import until


@pytest.fixture(scope="module")
def exact(tiny_llama: str) -> dict[Prompt, Answer]:
    return exact_answers(tiny_llama)


@pytest.fixture(scope="module")
def only_engine(tiny_llama: str, exact: dict[Prompt, Answer]) -> Iterator[Blending]:
    del exact  # asked for first: a process has one engine at a time
    with started(tiny_llama, cache=CACHE, connector="KVBlendConnector", enable_prefix_caching=True) as inner:
        yield Blending(inner.llm)


@pytest.fixture
def engine(only_engine: Blending) -> Iterator[Blending]:
    """It holds nothing."""
    empty_the_pool()
    forget_own_blocks(only_engine)
    yield only_engine
    only_engine.assert_at_rest()


def halve_the_pool() -> None:
    """Halve every number in the pool: what wrong bytes would do."""
    import torch

    (inner,) = engines().values()
    assert inner.cache is not None
    torch.frombuffer(inner.cache.pool.view, dtype=torch.float32).mul_(0.5)


def test_documents_are_reused_in_any_order(engine: Blending, exact: dict[Prompt, Answer]) -> None:
    engine.blend([FIRST])
    assert engine.reports == [{"segment_tokens": 1171, "held_tokens": 0, "recomputed_tokens": 132}]
    answers = engine.blend([SECOND, Prompt((3, 2, 1))])
    assert [report["held_tokens"] for report in engine.reports] == [1171, 871]
    assert engine.hits == [SECOND.segments[-1][1], Prompt((3, 2, 1)).segments[-1][1]]
    # A model whose answers a wrong bit changes answers differently where segments are reused without their context.
    assert answers[0] != exact[SECOND]
    forget_own_blocks(engine)
    assert engine.blend([SECOND, Prompt((3, 2, 1))]) == answers
    assert engine.blend([SECOND]) == answers[:1]  # from vLLM's own blocks, under the plan's salt


def test_what_the_question_attends_to_is_computed_again(engine: Blending, monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_blend.selection import Selection

    seen, attended = [], Selection.attended

    def watched(self: Selection, attention: Any) -> list[int]:
        seen.append((attention, attended(self, attention)))
        return seen[-1][1]

    monkeypatch.setattr(Selection, "attended", watched)
    engine.blend([FIRST])
    answers = engine.blend([SECOND], **SELECTIONS["question"])
    assert engine.reports == [{"segment_tokens": 1171, "held_tokens": 1171, "recomputed_tokens": 157}]
    ((attention, selected),) = seen
    in_segments = [token for first, end in SECOND.segments[1:] for token in range(first, end)]  # the first is exact
    assert [token for token, given in enumerate(attention) if given >= 0] == in_segments
    assert len(selected) == 157 and min(attention[selected]) >= attention[in_segments].sort().values[-157]
    heads, layers = 8, 2
    assert float(attention[in_segments].sum()) == pytest.approx(len(QUESTION) * heads * layers, rel=1e-4)
    # What the question stood on meanwhile is as it was: with nothing else selected it is as without a question.
    monkeypatch.setattr(Selection, "attended", lambda *_: [])
    forget_own_blocks(engine)
    reused = engine.blend([SECOND], **SELECTIONS["question"])
    assert reused == engine.blend([SECOND], share=0.0)
    assert reused != answers


@pytest.mark.parametrize("select", SELECTIONS)
def test_a_prompt_of_which_everything_is_computed_again_is_exact(
    select: str, engine: Blending, exact: dict[Prompt, Answer]
) -> None:
    for order in (FIRST, SECOND, Prompt((1, 0))):
        for behind in ("prefix", "alone"):
            assert engine.blend([order], share=1.0, behind=behind, **SELECTIONS[select]) == [exact[order]]


def test_a_segment_that_stands_where_it_was_computed_is_exact(engine: Blending, exact: dict[Prompt, Answer]) -> None:
    alone = [Prompt((at,)) for at in range(4)]
    expected = [exact[prompt] for prompt in alone]
    assert engine.blend(alone, share=0.0) == expected
    forget_own_blocks(engine)
    engine.blend([SECOND], share=0.0)  # elsewhere the same bytes are moved, from the original each time
    assert engine.blend(alone, share=0.0) == expected
    assert [report["held_tokens"] for report in engine.reports] == [300, 410, 128, 333]
    # The control: what is read is what the pool has.
    forget_own_blocks(engine)
    halve_the_pool()
    assert all(got != right for got, right in zip(engine.blend(alone, share=0.0), expected, strict=True))


KEPT = 1536 - DROPPED - UNCHANGED
"""Tokens of `BEFORE` behind what is dropped, in whole chunks."""


@pytest.mark.parametrize("select", SELECTIONS)
def test_an_edited_conversation_keeps_what_follows_the_edit(
    select: str, engine: Blending, exact: dict[Prompt, Answer]
) -> None:
    engine.ask([BEFORE.tokens])
    edits = edited(BEFORE.tokens, SECOND.tokens)
    assert engine.blend([SECOND], fields=request_fields(**edits, share=0.0, **SELECTIONS[select])) != [exact[SECOND]]
    assert engine.reports == [
        {"segment_tokens": len(SECOND.tokens) - 1, "held_tokens": UNCHANGED + KEPT, "recomputed_tokens": 0}
    ]
    assert engine.hits == [len(SECOND.tokens) - 1]
    everything = request_fields(**edits, share=1.0, **SELECTIONS[select])
    assert engine.blend([SECOND], fields=everything) == [exact[SECOND]]
    assert engine.reports[0]["recomputed_tokens"] == KEPT
    # What approximates has no exact name, and what was read under one is as it was.
    forget_own_blocks(engine)
    assert engine.ask([SECOND.tokens, BEFORE.tokens])[0] == exact[SECOND]
    assert engine.hits == [0, 1536]
    # The control: what precedes the edit is what the pool has.
    forget_own_blocks(engine)
    halve_the_pool()
    assert engine.blend([SECOND], fields=everything) != [exact[SECOND]]


def test_what_follows_an_edit_is_moved_as_a_segment_of_that_context_is(engine: Blending) -> None:
    """Two ways to the same KV: from a conversation into which a document was put, and as a segment behind what precedes
    it."""
    before, now = Prompt((1, 3)), Prompt((0, 1, 3))
    added = len(now.tokens) - len(before.tokens)
    first, whole = now.segments[0][0], 512 + added
    engine.ask([before.tokens])
    edits = {"edits": [(first, first + added, [])], "segments": [(first + added, whole)], "tokens": len(now.tokens)}
    answers = engine.blend([now], fields=request_fields(**edits, share=0.0))
    assert engine.reports[0]["held_tokens"] == 512
    segments = [(first, first + added), (first + added, whole)]
    assert engine.blend([now], fields=request_fields(segments, tokens=len(now.tokens), share=0.0)) == answers
    assert engine.ask([now.tokens]) != answers


def test_a_conversation_that_is_not_held_for_this_tenant_is_computed_whole(
    engine: Blending, exact: dict[Prompt, Answer]
) -> None:
    engine.ask([BEFORE.tokens], salt="one")
    edits = edited(BEFORE.tokens, SECOND.tokens)
    for tenant in ("", "two"):
        assert engine.blend([SECOND], fields=request_fields(**edits, tenant=tenant)) == [exact[SECOND]]
        assert "nothing of the conversation before its edits is held" in engine.reports[0]["refused"]
    engine.blend([SECOND], fields=request_fields(**edits, tenant="one"))
    assert engine.reports[0]["held_tokens"] == UNCHANGED + KEPT
    long = {**edits, "edits": [(at, end, was * 10) for at, end, was in edits["edits"]]}
    assert engine.blend([SECOND], fields=request_fields(**long)) == [exact[SECOND]]
    assert "more than the 4096 of the model" in engine.reports[0]["refused"]


def test_tenants_share_no_segments(engine: Blending) -> None:
    engine.blend([FIRST], tenant="one")
    engine.blend([SECOND], tenant="two")
    assert engine.reports[0]["held_tokens"] == 0
    engine.blend([SECOND], tenant="one")
    assert engine.reports[0]["held_tokens"] == 1171


def test_exact_requests_never_see_approximate_kv(engine: Blending, exact: dict[Prompt, Answer]) -> None:
    seen = interleave(engine, exact, 15)
    assert seen.wrong == 0
    assert seen.exact > 20 and seen.reused_tokens > 10000


def test_the_control_with_one_name_for_both(
    engine: Blending, exact: dict[Prompt, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a plan needed no salt of its own, exact requests would be wrong."""

    def without_salt(params: Any, _salt: str | None, tokens: int) -> tuple[BlendPlan, str] | None:
        del tokens
        return (msgspec.convert(params[KEY], BlendPlan), "") if params and KEY in params else None

    monkeypatch.setattr(kv_blend.vllm.scheduler, "read_plan", without_salt)
    assert interleave(engine, exact, 10, cache_salt="").wrong > 0
    forget_own_blocks(engine)


def test_a_question_may_be_longer_than_what_is_left_but_has_the_prompts_tokens(
    engine: Blending, exact: dict[Prompt, Answer]
) -> None:
    """An engine on a GPU does not survive a token that its model lacks."""
    long = (QUESTION * 11)[:256]
    short = request_fields([(40, 50), (51, 70)], tokens=len(SECOND.tokens), select="question", question=long)
    engine.blend([SECOND], fields=short)
    assert engine.reports == [{"segment_tokens": 29, "held_tokens": 0, "recomputed_tokens": 3}]
    for number in range(2):
        assert engine.blend([SECOND], share=1.0, select="question", question=long[number:]) == [exact[SECOND]]
    assert engine.blend([SECOND], select="question", question=[*QUESTION, 1 << 30]) == [exact[SECOND]]
    assert "the question has tokens that the prompt does not have" in engine.reports[0]["refused"]


def test_a_request_that_needs_every_token_computed_is_refused(engine: Blending, exact: dict[Prompt, Answer]) -> None:
    assert engine.blend([SECOND], sampling={"prompt_logprobs": 1}) == [exact[SECOND]]
    assert "a request with log-probabilities of its prompt cannot be blended" in engine.reports[0]["refused"]


def test_a_plan_without_its_salt_is_refused_and_its_request_exact(
    engine: Blending, exact: dict[Prompt, Answer]
) -> None:
    fields = request_fields(SECOND.segments, tokens=len(SECOND.tokens))
    for salt in ("", "other"):
        assert engine.blend([SECOND], fields=fields | {"cache_salt": salt}) == [exact[SECOND]]
        assert "cache_salt is not this plan's" in engine.reports[0]["refused"]
    for segments, why in WRONG_PLANS:
        broken = {"kv_transfer_params": {KEY: {"tokens": len(SECOND.tokens), "segments": segments}}, "cache_salt": "x"}
        assert engine.blend([SECOND], fields=broken) == [exact[SECOND]]
        assert why in engine.reports[0]["refused"]


def in_the_pool() -> set[ChunkKey]:
    (inner,) = engines().values()
    assert inner.cache is not None
    return set(inner.cache.admin.resident_keys())


def test_a_plan_that_is_refused_meets_nothing_blended(engine: Blending, exact: dict[Prompt, Answer]) -> None:
    """Its salt is right, so vLLM's own cache has blended blocks for it. Nothing of it is stored either."""
    fields = request_fields(SECOND.segments, tokens=len(SECOND.tokens), share=0.0)
    plan = fields["kv_transfer_params"][KEY]
    engine.blend([FIRST])
    assert engine.blend([SECOND], fields=fields) != [exact[SECOND]]
    held = in_the_pool()
    wrong = {"kv_transfer_params": {KEY: plan | {"tokens": plan["tokens"] + 1}}}
    for refused in (fields | wrong, fields | {"kv_transfer_params": {}}):
        for _ in range(2):
            assert engine.blend([SECOND], fields=refused) == [exact[SECOND]]
            assert engine.hits == [0]
        forget_own_blocks(engine)
        engine.blend([SECOND], fields=fields)
    assert in_the_pool() == held


def with_options(prompt: Prompt, **options: Any) -> dict[str, Any]:
    fields = request_fields(prompt.segments, tokens=len(prompt.tokens), share=0.0)
    fields["kv_transfer_params"]["kv_tiers"] = options
    return fields


def test_segments_follow_the_options_of_their_request(
    engine: Blending, exact: dict[Prompt, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (inner,) = engines().values()
    assert inner.cache is not None
    blend = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector._blend
    calls: list[dict[str, Any]] = []

    def watched(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return call(*arguments, **options)

    for name in ("lookup", "begin_store"):
        monkeypatch.setattr(inner.cache, name, partial(watched, getattr(inner.cache, name)))
    # What may not be stored is computed in its place.
    held = in_the_pool()
    for options in ({"store": False}, {"max_store_tokens": 100}):
        assert engine.blend([FIRST], fields=with_options(FIRST, **options)) == [exact[FIRST]]
        assert (engine.reports[0]["held_tokens"], in_the_pool()) == (0, held)
        forget_own_blocks(engine)
    with monkeypatch.context() as patch:
        patch.setattr(blend, "_shape", replace(blend._shape, stores=False))
        assert engine.blend([FIRST]) == [exact[FIRST]]
        assert in_the_pool() == held
    forget_own_blocks(engine)
    # How it is searched and stored.
    calls.clear()
    engine.blend([FIRST], fields=with_options(FIRST, tiers=[], promote=False, retain_s=5, tags={"a": "b"}))
    assert all(options["tiers"] == () for options in calls) and len(calls) == 8
    assert [options["wait_for_promotion"] for options in calls[:4]] == [False] * 4
    assert [options["retain_s"] for options in calls[4:]] == [5] * 4
    for options, tokens in (({}, 0), ({"tags": {"a": "b"}}, 1171)):
        engine.blend([SECOND], fields=with_options(SECOND, **options))
        assert engine.reports[0]["held_tokens"] == tokens
        forget_own_blocks(engine)
    # Nothing is loaded.
    for options in ({"load": False}, {"use": "never"}):
        assert engine.blend([SECOND], fields=with_options(SECOND, **options)) == [exact[SECOND]]
        assert "may load nothing" in engine.reports[0]["refused"]
    monkeypatch.setattr(blend, "_shape", replace(blend._shape, loads=False))
    assert engine.blend([SECOND], fields=with_options(SECOND)) == [exact[SECOND]]
    assert "may load nothing" in engine.reports[0]["refused"]


def test_a_plan_that_fails_meets_nothing_blended(
    engine: Blending, exact: dict[Prompt, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_blend.vllm.filling import Filler

    engine.blend([FIRST])
    assert engine.blend([SECOND], share=0.0) != [exact[SECOND]]
    held = in_the_pool()

    def fails(*_arguments: Any) -> Any:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Filler, "_place", fails)
    assert engine.blend([SECOND], share=0.0) == [exact[SECOND]]
    assert "computed whole" in engine.reports[0]["refused"]
    assert in_the_pool() == held


@pytest.mark.parametrize("step", ["_prepare", "_compute_alone", "_store", "_place", "_attention"])
def test_a_failure_at_any_step_costs_only_the_reuse(
    step: str, engine: Blending, exact: dict[Prompt, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_blend.vllm.filling import Filler

    def fails(*_arguments: Any, **_named: Any) -> Any:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Filler, step, fails)
    assert engine.blend([FIRST, SECOND], **SELECTIONS["question"]) == [exact[FIRST], exact[SECOND]]
    assert all("computed whole" in report["refused"] for report in engine.reports)
    monkeypatch.undo()
    forget_own_blocks(engine)
    engine.blend([FIRST])
    assert engine.reports[0]["segment_tokens"] == 1171


def test_chunks_forgotten_while_they_are_read_make_the_request_exact(
    engine: Blending, exact: dict[Prompt, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_blend.vllm.filling import Filler

    engine.blend([FIRST])
    place = Filler._place

    def forgotten(self: Filler, *arguments: Any) -> Any:
        moved = place(self, *arguments)
        assert self._engine.cache is not None
        self._engine.cache.clear()
        return moved

    monkeypatch.setattr(Filler, "_place", forgotten)
    assert engine.blend([SECOND]) == [exact[SECOND]]


def test_a_request_that_is_aborted_in_the_middle_of_its_plan_leaks_nothing(
    engine: Blending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of it is computed from then on."""
    from kv_blend.vllm.forward import EngineForward
    from vllm import SamplingParams, TokensPrompt

    compute, computed = EngineForward.compute, []

    def counted(self: EngineForward, entries: Any) -> None:
        computed.append(entries)
        compute(self, entries)

    monkeypatch.setattr(EngineForward, "compute", counted)
    fields = request_fields(FIRST.segments, tokens=len(FIRST.tokens))
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": fields["kv_transfer_params"]})
    prompt = TokensPrompt(prompt_token_ids=FIRST.tokens, cache_salt=fields["cache_salt"])
    core = engine.llm.llm_engine
    for steps in range(6):
        core.add_request(f"r{steps}", prompt, sampling)
        for _ in range(steps):
            core.step()
        core.abort_request([f"r{steps}"])
        before = len(computed)
        until(lambda: (core.step(), not core.has_unfinished_requests())[1])
        assert len(computed) == before
        forget_own_blocks(engine)
    assert computed
    engine.blend([SECOND])
    assert engine.reports[0]["held_tokens"] == 1171


def test_a_request_that_is_aborted_while_lower_tiers_are_searched_leaks_nothing(
    engine: Blending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pool has of its segments is promised meanwhile."""
    from vllm import SamplingParams, TokensPrompt

    engine.blend([FIRST])
    forget_own_blocks(engine)
    (inner,) = engines().values()
    assert inner.cache is not None
    lookup, searched = inner.cache.lookup, []

    def pending(keys: Sequence[ChunkKey], holder: str, **options: Any) -> LookupPlan:
        plan = lookup(keys, holder, **options)
        searched.append(plan.chunks)
        return replace(plan, ended=Ended.PENDING)

    monkeypatch.setattr(inner.cache, "lookup", pending)
    fields = request_fields(SECOND.segments, tokens=len(SECOND.tokens))
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": fields["kv_transfer_params"]})
    core = engine.llm.llm_engine
    core.add_request("r", TokensPrompt(prompt_token_ids=SECOND.tokens, cache_salt=fields["cache_salt"]), sampling)
    core.step()
    scheduler = core.engine_core.engine_core.scheduler
    (request,) = scheduler.requests.values()
    assert inner.cache.counts().read_leases == len(SECOND.segments)
    # Nothing is promised once vLLM has all of it itself.
    assert scheduler.connector._blend.match(request, SECOND.segments[-1][1]) == 0
    assert inner.cache.counts().read_leases == 0
    core.abort_request(["r"])
    until(lambda: (core.step(), not core.has_unfinished_requests())[1])
    assert len(searched) == len(SECOND.segments) and min(searched) > 0  # at once, not one after the other
