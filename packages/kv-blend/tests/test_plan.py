"""Plans, their salts, and what is refused."""

from typing import Any

import msgspec
import pytest
from kv_blend.plan import KEY, BlendPlan, read_plan, request_fields, segment_salt
from kv_core.errors import InputError

SEGMENTS = [(10, 300), (301, 500)]


def read(fields: dict[str, Any], tokens: int = 600) -> tuple[BlendPlan, str] | None:
    return read_plan(fields["kv_transfer_params"], fields["cache_salt"], tokens)


def test_what_is_asked_for_is_read() -> None:
    fields = request_fields(SEGMENTS, tokens=600, tenant="acme", share=0.3, select="first", behind="alone")
    plan = BlendPlan(tokens=600, segments=((10, 300), (301, 500)), share=0.3, select="first", behind="alone")
    assert read(fields) == (plan, "acme")
    assert (plan.end, plan.context_tokens, plan.recomputed(290)) == (500, 0, 87)
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


@pytest.mark.parametrize("other", [{"share": 0.2}, {"select": "deviation"}, {"behind": "alone"}])
def test_whatever_decides_the_kv_is_in_its_salt(other: dict[str, Any]) -> None:
    """Or two requests with equal tokens and different KV would share the engine's blocks. The next turn of a
    conversation shares them."""
    salt = request_fields(SEGMENTS, tokens=600)["cache_salt"]
    assert request_fields(SEGMENTS, tokens=600, **other)["cache_salt"] != salt
    assert request_fields([(10, 300), (302, 500)], tokens=600)["cache_salt"] != salt
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
        ({"segments": [(0, 5)], "depth": 1}, "unknown field `depth`"),
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
