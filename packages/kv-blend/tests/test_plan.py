"""Plans, their salts, and what is refused."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kv_blend.plan import KEY, BlendPlan, Moved, edited, read_plan, request_fields, segment_salt
from kv_core.errors import InputError

SEGMENTS = [(10, 300), (301, 500)]


def read(fields: dict[str, Any], tokens: int = 600) -> tuple[BlendPlan, str] | None:
    return read_plan(fields["kv_transfer_params"], fields["cache_salt"], tokens)


def test_what_is_asked_for_is_read() -> None:
    fields = request_fields(SEGMENTS, tokens=600, tenant="acme", share=0.3, select="first", behind="alone")
    plan = BlendPlan(tokens=600, segments=((10, 300), (301, 500)), share=0.3, select="first", behind="alone")
    assert read(fields) == (plan, "acme")
    assert (plan.end, plan.context_tokens, plan.recomputed(Moved(10, 300, 0))) == (500, 0, 87)
    assert msgspec.structs.replace(plan, behind="prefix").context_tokens == 10


def test_a_tenants_name_may_look_like_ours() -> None:
    tenant = request_fields(SEGMENTS, tokens=600)["cache_salt"]
    assert read(request_fields(SEGMENTS, tokens=600, tenant=tenant)) == (
        BlendPlan(tokens=600, segments=tuple(SEGMENTS)),
        tenant,
    )


def test_a_request_without_a_plan_has_none() -> None:
    assert read_plan(None, "salt", 10) is None
    assert read_plan({"kv_tiers": {}}, None, 10) is None


@pytest.mark.parametrize(
    ("options", "why"),
    [({"engine": "foo"}, "engine is 'foo'; it can be vllm or sglang"), ({"tenant": None}, "tenant is None")],
)
def test_a_tenant_that_is_no_text_and_an_unknown_engine_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        request_fields(SEGMENTS, tokens=600, **options)


COMMON = [list(range(at, at + 100)) for at in range(0, 1000, 100)]
"""Texts without a token in common."""


def test_an_edit_is_found_by_itself() -> None:
    system, tool, answer, other, question, summary = COMMON[:6]
    before = [*system, *tool, *answer, *other, *question]
    now = [*system, *answer, *summary[:9], *question, 7, 8]
    found = edited(before, now)
    assert found == {
        "tokens": 311,
        "edits": [(100, 100, tool), (200, 209, other)],
        "segments": [(100, 200), (209, 309)],
    }
    read_back = read(request_fields(**found, tenant="acme"), tokens=311)
    assert read_back is not None
    plan, _ = read_back
    assert plan.conversation(now) == before
    assert plan.moved == [Moved(0, 100, 0), Moved(100, 200, 200), Moved(209, 309, 400)]
    assert [plan.recomputed(each) for each in plan.moved] == [0, 15, 15]


@given(st.data())
def test_what_is_said_to_be_left_of_a_conversation_is(data: st.DataObject) -> None:
    draw = data.draw
    before = [token for text in draw(st.lists(st.sampled_from(COMMON), min_size=1)) for token in text]
    now = [token for text in draw(st.lists(st.sampled_from(COMMON), min_size=1)) for token in text]
    found: dict[str, Any] = {}
    with suppress(InputError):
        found = edited(before, now)
    assume(found)
    read_back = read(request_fields(**found), len(now))
    assert read_back is not None
    plan, _ = read_back
    was = plan.conversation(now)
    assert was == before[: len(was)]
    for each in plan.moved:
        assert now[each.first : each.end] == before[each.source : each.source + each.end - each.first]


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (COMMON[0], COMMON[0], "was not edited, it went on from 100 to 100 tokens"),
        (COMMON[0], COMMON[0] + COMMON[1], "was not edited, it went on from 100 to 200 tokens"),
        (COMMON[0] + COMMON[1], COMMON[0], "behind the first 100 tokens, which are equal"),
        (COMMON[0] + COMMON[1], COMMON[0] + COMMON[2] + COMMON[1][:31], "no 32 tokens in a row in common"),
        ([], COMMON[0], "was not edited, it went on from 0"),
    ],
)
def test_an_edit_that_is_none_is_said(before: list[int], now: list[int], why: str) -> None:
    with pytest.raises(InputError, match=f"{why}.*send it without a plan"):
        edited(before, now)


@pytest.mark.parametrize("other", [{"share": 0.2}, {"select": "question", "question": [7]}, {"behind": "alone"}])
def test_whatever_decides_the_kv_is_in_its_salt(other: dict[str, Any]) -> None:
    """Or two requests with equal tokens and different KV would share the engine's blocks. The next turn of a
    conversation shares them."""
    salt = request_fields(SEGMENTS, tokens=600)["cache_salt"]
    assert request_fields(SEGMENTS, tokens=600, **other)["cache_salt"] != salt
    assert request_fields([(10, 300), (302, 500)], tokens=600)["cache_salt"] != salt
    questions = [
        request_fields(SEGMENTS, tokens=600, select="question", question=[number])["cache_salt"] for number in (7, 8)
    ]
    edits = [request_fields(SEGMENTS, tokens=600, edits=[(9, 10, was)])["cache_salt"] for was in ([], [1], [2])]
    assert len({salt, *questions, *edits}) == 6
    assert request_fields(SEGMENTS, tokens=700)["cache_salt"] == salt


@pytest.mark.parametrize("salt", [None, "", "acme", "acme:kv-blend:", segment_salt("acme")])
def test_a_plan_without_its_salt_is_refused(salt: str | None) -> None:
    params = request_fields(SEGMENTS, tokens=600, tenant="acme")["kv_transfer_params"]
    with pytest.raises(InputError, match="cache_salt is not this plan's"):
        read_plan(params, salt, 600)


def test_salts_are_such_as_an_engine_takes() -> None:
    """vLLM's server: at most 128 characters, none of them @, / or a backslash."""
    salt = request_fields(SEGMENTS, tokens=600, tenant="t" * 86)["cache_salt"]
    assert len(salt) == 128
    assert not set(salt) & set("@/\\\0")
    with pytest.raises(InputError, match="has 87 characters, and the plan's leaves room for 86"):
        request_fields(SEGMENTS, tokens=600, tenant="t" * 87)


def test_a_plan_for_another_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="for a prompt of 600 tokens, and this one has 601"):
        read(request_fields(SEGMENTS, tokens=600), tokens=601)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"segments": []}, "0 segments"),
        ({"segments": [(5, 5)]}, r"segment 0 is \[5, 5\), which has no tokens"),
        ({"segments": [(0, 5), (4, 9)]}, "segment 1 begins at token 4, before segment 0 ends at 5"),
        ({"segments": [(6, 9), (0, 5)]}, "segment 1 begins at token 0, before segment 0 ends at 9"),
        ({"segments": [(0, 600)]}, "ends at token 600 of 600; at least one token"),
        ({"segments": [(0, 5)] * 257}, "257 segments"),
        ({"segments": [(-1, 5)]}, "Expected `int` >= 0"),
        ({"segments": [(0, 5)], "share": 1.5}, "Expected `float` <= 1"),
        ({"segments": [(0, 5)], "select": "best"}, "Invalid enum value 'best'"),
        ({"segments": [(0, 5)], "select": "question"}, "needs the tokens of the `question`"),
        ({"segments": [(0, 5)], "question": [1]}, "needs the tokens of the `question`"),
        ({"segments": [(0, 5)], "select": "question", "question": [1] * 257}, "257 tokens; it can have 256"),
        ({"segments": [(0, 5)], "depth": 1}, "unknown field `depth`"),
        ({"segments": [(5, 9)], "edits": [(4, 4, [])]}, "edit 0 at token 4 neither removes nor adds a token"),
        ({"segments": [(5, 9)], "edits": [(4, 3, [1])]}, r"edit 0 is \[4, 3\), which is no range behind token 0"),
        (
            {"segments": [(5, 9)], "edits": [(2, 4, []), (3, 5, [])]},
            r"edit 1 is \[3, 5\), which is no range behind token 4",
        ),
        (
            {"segments": [(5, 9)], "edits": [(9, 9, [1])]},
            "segment 0 begins at token 5, before the first edit ends at 9",
        ),
        (
            {"segments": [(5, 9)], "edits": [(5, 5, [1]), (7, 7, [1])]},
            r"segment 0, \[5, 9\), contains a part of an edit",
        ),
        ({"segments": [(5, 9)], "edits": [(5, 5, [-1])]}, "Expected `int` >= 0"),
        ({"segments": [(5, 9)], "edits": [(5, 5, [1 << 31])]}, "Expected `int` <= 2147483647"),
        ({"segments": [(5, 9)], "edits": [(5, 5)]}, "Expected `array` of at least length 3"),
        ({"segments": [(5, 9)], "edits": [(5, 5, [1])], "behind": "alone"}, "leave out `behind`"),
        ({"segments": [(300, 400)], "edits": [(at, at, [1]) for at in range(257)]}, "257 edits; there can be 256"),
        ({"segments": "all"}, "Expected `array`"),
        ("all", "Expected `object`"),
    ],
)
def test_what_cannot_be_is_refused_by_name(plan: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_plan({KEY: {"tokens": 600} | plan if isinstance(plan, dict) else plan}, "salt", 600)
    if isinstance(plan, dict):
        with pytest.raises(InputError, match=why):
            request_fields(**plan, tokens=600)
