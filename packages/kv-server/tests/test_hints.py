"""Envelopes of KV hints: what is valid is read, and whatever else comes is rejected by name and raises nothing."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_server.hints import (
    MAX_ACTIONS,
    DemoteHint,
    Hint,
    HintOutcome,
    HintOutcomes,
    PinHint,
    PrefetchHint,
    RetainHint,
    read_hints,
)
from kv_testing.calls import calls_of


def action(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_id": f"the {kind}", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: Any, version: Any = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def rejected(*actions: Any, **about: Any) -> str:
    """Why the only action is."""
    (outcome,) = read_hints(envelope(*actions, **about)).actions
    assert isinstance(outcome, HintOutcome) and outcome.outcome == "rejected"
    return outcome.why


def test_actions_are_read_in_their_order() -> None:
    hints = read_hints(
        envelope(
            action("kv.retain", ttl_seconds=60), action("kv.prefetch"), action("kv.demote"), action("kv.pin", name="a")
        )
    )
    assert hints.message_id == "m"
    assert [hint.payload for hint in hints.actions if isinstance(hint, Hint)] == [
        RetainHint(60), PrefetchHint(), DemoteHint(), PinHint("a"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "seconds"),
    [
        ({"ttl_seconds": 90, "priority": 50}, 90),
        ({}, math.inf),
        ({"directives": [{"start": 0, "end": 32, "priority": 80, "duration": 60}]}, 60),
        (
            {"scope": "a", "directives": [{"priority": 9, "duration": 5}, {"covers_output": True, "priority": 1}]},
            math.inf,
        ),
        ({"directives": [{"priority": 0, "duration": 99}, {"priority": 1, "duration": 7.5}]}, 7.5),
    ],
)
def test_a_prompt_is_retained_for_the_longest_of_the_times(payload: dict[str, Any], seconds: float) -> None:
    (hint,) = read_hints(envelope(action("kv.retain", **payload))).actions
    assert isinstance(hint, Hint) and isinstance(hint.payload, RetainHint) and hint.payload.seconds == seconds


@pytest.mark.parametrize(
    ("kind", "payload", "why"),
    [
        ("kv.retain", {"ttl_seconds": 0}, "it retains nothing"),
        ("kv.retain", {"ttl_seconds": 60, "priority": 0}, "it retains nothing"),
        ("kv.retain", {"ttl_seconds": -1}, "`float` >= 0"),
        ("kv.retain", {"ttl_seconds": math.nan}, ">= 0"),
        ("kv.retain", {"ttl_seconds": 10**400}, "out of range"),
        ("kv.retain", {"ttl_seconds": "60"}, "got `str`"),
        ("kv.retain", {"directives": [{"priority": 1}] * 129}, "length <= 128"),
        ("kv.retain", {"block_hashes": [1]}, "unknown field `block_hashes`"),
        ("kv.demote", {"session_id": "s"}, "unknown field `session_id`"),
        ("kv.pin", {"name": "a/b"}, "a name of up to 64"),
        ("kv.share", {}, "name the same tiers or peers"),
        ("kv.fetch", {"source": "elsewhere:1"}, "the settings name the peers"),
        ("kv.retian", {}, "did you mean 'kv.retain'?"),
        ("kv.nothing", {}, "there is no action 'kv.nothing'"),
    ],
)
def test_what_is_wrong_is_rejected_by_name(kind: str, payload: dict[str, Any], why: str) -> None:
    assert why in rejected(action(kind, **payload))


def test_versions_are_checked_and_one_action_does_not_reject_another() -> None:
    assert "this cache has 1.0" in rejected(action("kv.demote", version="2.0"))
    assert "protocol_version is '2.0'" in rejected(action("kv.demote"), version="2.0")
    wrong, right = read_hints(envelope(action("kv.demote", version="2.0"), action("kv.demote"))).actions
    assert isinstance(wrong, HintOutcome) and isinstance(right, Hint)
    assert f"length <= {MAX_ACTIONS}" in rejected(*[action("kv.demote")] * (MAX_ACTIONS + 1))
    assert "message_id" in str(read_hints({"protocol_version": "0.1"}).actions[0])


def test_a_large_envelope_costs_little() -> None:
    """It is read on the thread on which the engine schedules."""
    many = envelope(*[action("kv.retain", directives=[{"priority": 1, "duration": 1.0}] * 128)] * MAX_ACTIONS)
    assert all(isinstance(hint, Hint) for hint in read_hints(many).actions)
    assert calls_of(lambda: read_hints(many)) < 2 * 128 * MAX_ACTIONS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
KINDS = st.sampled_from(["kv.retain", "kv.prefetch", "kv.demote", "kv.pin", "kv.unpin", "kv.share", "", "x" * 99])
FIELDS = st.sampled_from(["ttl_seconds", "priority", "directives", "duration", "name", "scope"])
ACTIONS = JSON | st.fixed_dictionaries(
    {"action_id": st.just("a") | JSON, "action_type": KINDS | JSON, "action_version": st.just("1.0") | JSON},
    optional={"payload": st.dictionaries(FIELDS, JSON, max_size=2) | JSON},
)
ENVELOPES = JSON | st.fixed_dictionaries(
    {"protocol_version": st.just("0.1") | JSON, "message_id": st.just("m") | JSON},
    optional={"actions": st.lists(ACTIONS, max_size=4) | JSON},
)


@given(ENVELOPES)
def test_whatever_comes_is_read_and_can_be_answered(sent: Any) -> None:
    hints = read_hints(sent)
    outcomes = [one if isinstance(one, HintOutcome) else one.accepted() for one in hints.actions]
    said = msgspec.json.encode(HintOutcomes(hints.message_id, tuple(outcomes)))
    assert len(said) < 300 + 1500 * len(outcomes)
    said.decode("ascii" if all("…" not in one.why for one in outcomes) else "utf-8")
    for hint in hints.actions:
        assert not (isinstance(hint, Hint) and isinstance(hint.payload, RetainHint)) or hint.payload.seconds > 0


class Hostile:
    """An object of a caller's own, as the offline engine takes one."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_an_object_that_raises_is_rejected() -> None:
    assert "not read" in rejected_object(Hostile())
    (outcome,) = read_hints(envelope(Hostile())).actions
    assert isinstance(outcome, HintOutcome)


def rejected_object(sent: object) -> str:
    (outcome,) = read_hints(sent).actions
    assert isinstance(outcome, HintOutcome)
    return outcome.why
