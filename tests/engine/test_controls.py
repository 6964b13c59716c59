"""What requests say for themselves, under vLLM's real schedulers and on its real engine."""

import itertools
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import PROMPTS, SHARED, Engine, started
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_connect.engine import engines
from kv_connect.request_options import Controls, chosen
from kv_core.keys import tenant_tag
from kv_core.log import LIMIT
from kv_testing.wait import until
from kv_tiers import LocalCache
from kv_tiers.settings import Settings
from oracle import Oracle
from vllm.v1.kv_hints import KvHintsEnvelope

PAGE = (Path(__file__).parents[2] / "docs" / "requests.md").read_text()
PROMPT = [3 + (7 * i) % 40 for i in range(200)]  # three chunks of 64 and some tokens


@pytest.fixture(autouse=True)
def _all_lines() -> None:
    LIMIT.reset()


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def oracle(request: pytest.FixtureRequest, tiny_llama: str) -> Iterator[Oracle]:
    """Generated tokens are kept, unless a request says otherwise."""
    made = Oracle(tiny_llama, asynchronous=request.param, save_decode=True, min_store_tokens=20)
    yield made
    made.run()
    made.assert_at_rest()
    made.close()


def resident(oracle: Oracle) -> int:
    assert oracle.engine.cache is not None
    return oracle.engine.cache.counts().chunks_resident


def test_every_control_under_the_schedulers(oracle: Oracle) -> None:
    """Whatever a request says, what it generates is right: `ask` checks it."""
    assert oracle.ask("not stored", PROMPT, asked={"store": False}) == 0
    assert resident(oracle) == 0
    assert oracle.ask("not so far", PROMPT, asked={"max_store_tokens": 130}) == 0
    assert resident(oracle) == 2
    assert oracle.ask("not loaded", PROMPT, asked={"load": False}) == 0
    assert resident(oracle) == 3
    assert oracle.ask("never used", PROMPT, asked={"use": "never"}) == 0
    assert oracle.ask("too little", PROMPT, asked={"min_load_tokens": 193}) == 0
    assert oracle.ask("just enough", PROMPT, asked={"min_load_tokens": 192}) == 192
    assert oracle.ask("from the pool", PROMPT, asked={"promote": False}) == 192
    assert oracle.ask("not decoded", PROMPT, 60, asked={"save_decode": False}) == 192
    assert resident(oracle) == 3
    assert oracle.ask("decoded", PROMPT, 60) == 192
    assert resident(oracle) == 4
    assert oracle.ask("short", PROMPT[100:180], 2, asked={"min_store_tokens": 90}) == 0
    assert resident(oracle) == 4


@pytest.mark.parametrize("retain_s", [0, 3600])
def test_what_a_request_has_retained_is_found_though_others_fill_the_pool(tiny_llama: str, retain_s: float) -> None:
    with small(tiny_llama, 16) as made:
        assert made.ask("retains", PROMPT, asked={"retain_s": retain_s}) == 0
        made.ask("hits", PROMPT)
        for number in range(8):
            made.ask(f"crowd {number}", [50 + number, *PROMPT[1:]])
        assert made.ask("returns", PROMPT) == (192 if retain_s else 0)


def envelope(kind: str, **payload: Any) -> dict[str, Any]:
    action = {"action_id": "a1", "action_type": kind, "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m1", "actions": [action]}


def outcome(oracle: Oracle, request_id: str) -> dict[str, Any]:
    """Of the only action of this request's hints."""
    hinted = oracle.answers[request_id]["kv_hints"]
    (found,) = hinted["outcomes"]
    assert (hinted["message_id"], found["action_id"]) == ("m1", "a1")
    return dict(found)


@contextmanager
def small(model: str, chunks: int, **settings: Any) -> Iterator[Oracle]:
    """An engine whose pool has so many chunks."""
    whole = Oracle(model)
    assert whole.engine.cache is not None
    slot_bytes = whole.engine.cache.pool.slot_bytes
    whole.close()
    made = Oracle(model, host={"capacity_bytes": chunks * slot_bytes}, **settings)
    yield made
    made.run()
    made.assert_at_rest()
    made.close()


def test_a_hint_in_vllms_own_field_retains_what_a_flood_would_evict(tiny_llama: str) -> None:
    """In an envelope that vLLM's own classes have decoded."""
    with small(tiny_llama, 16) as made:
        for kind in (None, "kv.retain"):
            prompt = [40 + bool(kind), *PROMPT[1:]]
            hints = None if kind is None else msgspec.convert(envelope(kind, ttl_seconds=60), KvHintsEnvelope)
            made.submit(f"hints {kind}", prompt, kv_hints=hints)
            made.run()
            for number in range(8):
                made.ask(f"{kind} {number}", [5 + number, *PROMPT[1:]])
            assert made.ask(f"returns {kind}", prompt) == (192 if kind else 0)
        assert outcome(made, "hints kv.retain") == {
            "action_id": "a1", "action_type": "kv.retain", "outcome": "accepted", "granted": {"ttl_seconds": 60},
        }  # fmt: skip
        assert "hints None" not in made.answers and "returns None" not in made.answers
        assert made.engine.scheduler is not None
        assert (made.engine.scheduler.counts.hints, made.engine.scheduler.counts.hints_rejected) == (1, 0)


def test_a_hint_that_retains_more_than_there_is_room_for_is_answered_with_what_is_retained(tiny_llama: str) -> None:
    with small(tiny_llama, 8) as made:
        hints = envelope("kv.retain", ttl_seconds=60)
        made.ask("larger", PROMPT, asked={"hints": hints})
        clipped = outcome(made, "larger")
        assert (clipped["outcome"], clipped["granted"]) == ("clipped", {"ttl_seconds": 60, "chunks": 2})
        assert "a quarter of the pool or quota" in clipped["why"]
        assert made.ask("the same", PROMPT, asked={"hints": hints}) == 192 and outcome(made, "the same") == clipped
        made.ask("another", [44, *PROMPT[1:]], asked={"hints": hints})
        rejected = outcome(made, "another")
        assert rejected["outcome"] == "rejected" and "no room" in rejected["why"]
        for number in range(8):
            made.ask(f"crowd {number}", [50 + number, *PROMPT[1:]])
        assert made.ask("returns", PROMPT) == 128, "what was granted"


@pytest.mark.parametrize("is_held_before", [False, True], ids=["stored", "held"])
def test_what_a_hint_demotes_leaves_before_what_is_older(tiny_llama: str, *, is_held_before: bool) -> None:
    with small(tiny_llama, 12) as made:
        older, newer = [40, *PROMPT[1:]], [41, *PROMPT[1:]]
        made.ask("older", older)
        if is_held_before:
            made.ask("newer", newer)
        made.ask("demoted", newer, asked={"hints": envelope("kv.demote")})
        assert outcome(made, "demoted")["outcome"] == "accepted"
        made.ask("fills the pool", [42, *PROMPT[1:]])
        made.ask("evicts", [43, *PROMPT[1:]])
        made.ask("evicts more", [44, *PROMPT[1:]])
        assert made.ask("older returns", older, asked={"store": False}) == 192
        assert made.ask("demoted returns", newer, asked={"store": False}) == 0


def test_a_hint_promotes_a_prompt_before_vllm_asks_for_it(tiny_llama: str, tmp_path: Path) -> None:
    """While another request has the engine to itself."""
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    with small(tiny_llama, 9, tiers=[disk], sequences=1, cold={"wait_s": 20.0}) as made:
        cache = made.engine.cache
        assert isinstance(cache, LocalCache)

        def leaves_the_pool(round_: int) -> None:
            for number in range(3):
                made.ask(f"crowd {round_} {number}", [5 + 3 * round_ + number, *PROMPT[1:]])
                cache.lower.drain(10)

        def promoted_before_it_is_asked_for(name: str, hints: dict[str, Any] | None) -> int:
            counts = cache.lower.promotions.counts
            before = counts.requested
            made.submit(f"runs before {name}", [49, *PROMPT[1:20]], 8)
            made.submit(name, PROMPT, asked={"store": False} | ({"hints": hints} if hints else {}))
            made.step()
            until(lambda: counts.arrived == counts.requested)
            promoted = counts.arrived - before
            made.run()
            return promoted

        made.ask("stores", PROMPT)
        leaves_the_pool(0)
        assert promoted_before_it_is_asked_for("unhinted", None) == 0
        leaves_the_pool(1)
        loaded = made.loaded
        assert promoted_before_it_is_asked_for("hinted", envelope("kv.prefetch")) == 3
        assert made.loaded - loaded == 192
        assert outcome(made, "hinted")["outcome"] == "accepted"


def test_no_hint_of_one_tenant_changes_what_another_with_a_quota_finds(tiny_llama: str) -> None:
    def found(hinted: str) -> list[int]:
        salt = "salt of a tenant"
        tenants = [{"name": "b", "tag": tenant_tag(salt).hex(), "quota_bytes": "1MiB"}]
        finds = []
        with small(tiny_llama, 24, tenants=tenants) as made:
            for number in range(4):
                hints = {"hints": envelope(hinted, **({"ttl_seconds": 60} if "retain" in hinted else {}))}
                for prompt in (PROMPT, [9 + number, *PROMPT[1:]]):
                    made.ask(f"a {number} {prompt[0]}", prompt, asked=hints if hinted else None)
                before = made.loaded
                for part in range(3):
                    made.submit(f"b {number} {part}", [5 + part, *PROMPT[1 : 100 + 50 * part]], cache_salt=salt)
                    made.run()
                finds.append(made.loaded - before)
        return finds

    alone = found("")
    assert any(alone)
    for kind in ("kv.retain", "kv.demote", "kv.prefetch"):
        assert found(kind) == alone


def test_whatever_comes_as_hints_every_token_is_right(tiny_llama: str) -> None:
    words = st.sampled_from(["0.1", "1.0", "kv.retain", "kv.demote", "kv.prefetch", "kv.pin", "a"])
    fields = st.sampled_from(["ttl_seconds", "priority", "name", "directives", "duration"])
    numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.floats()  # larger ones vLLM itself refuses
    payloads = st.dictionaries(fields, numbers | words | st.lists(st.dictionaries(fields, numbers, max_size=3)))
    names = ("action_id", "action_type", "action_version")
    actions = st.fixed_dictionaries(dict.fromkeys(names, words) | {"payload": payloads}) | payloads
    seen = itertools.count()
    with small(tiny_llama, 6) as made:

        @settings(max_examples=30, deadline=None, database=None)
        @given(st.lists(actions, max_size=3) | words, st.booleans())
        def ask(sent: Any, kept: bool) -> None:
            hints = {"protocol_version": "0.1", "message_id": "m", "actions": sent}
            number = next(seen)
            made.ask(f"request {number}", [5 + number % 4, *PROMPT[1:]], asked={"hints": hints, "store": kept})
            assert made.answers[f"request {number}"]["kv_hints"]["message_id"] in ("m", "")

        ask()
        assert made.loaded > 0


HINTS: list[tuple[dict[str, Any], Any, str, str]] = [
    ({}, envelope("kv.retain", ttl_seconds=99999), "clipped", "an hour"),
    ({}, envelope("kv.retain"), "clipped", "an hour"),
    ({"store": False}, envelope("kv.retain", ttl_seconds=1), "rejected", "stores nothing"),
    ({"store": False}, envelope("kv.demote"), "rejected", "stores nothing"),
    ({"promote": False}, envelope("kv.prefetch"), "rejected", "lower tiers"),
    ({"tags": {"a b": "c"}}, envelope("kv.prefetch"), "rejected", "lower tiers"),
    ({}, envelope("kv.pin", name="a"), "rejected", "POST /hints"),
    ({}, envelope("kv.share"), "rejected", "tiers or peers"),
    ({}, [1], "rejected", "the envelope is not read"),
]


@pytest.mark.parametrize(("asked", "hints", "became", "why"), HINTS)
def test_a_hint_that_cannot_be_followed_says_why(asked: dict[str, Any], hints: Any, became: str, why: str) -> None:
    hinted = chosen(Settings(), {"kv_tiers": asked | {"hints": hints}}, "req-7").hinted
    assert hinted is not None
    (one,) = hinted.outcomes
    assert one.outcome == became and why in one.why


def test_the_longer_of_a_hint_and_an_option_retains() -> None:
    for option, hint in ((60, 30), (30, 60)):
        params = {"kv_tiers": {"retain_s": option, "hints": envelope("kv.retain", ttl_seconds=hint)}}
        assert chosen(Settings(), params, "req-7").retain_s == 60


def test_the_settings_hold_where_a_request_says_nothing(tiny_llama: str) -> None:
    made = Oracle(tiny_llama, min_load_tokens=100, min_store_tokens=90, max_store_tokens=128)
    try:
        made.ask("short", PROMPT[100:180])
        assert resident(made) == 0
        made.ask("first", PROMPT)
        assert resident(made) == 2
        assert made.ask("second", PROMPT) == 128
        assert made.ask("little", PROMPT[:100]) == 0
        assert made.ask("little, but welcome", PROMPT[:100], asked={"min_load_tokens": 0}) == 64
        made.ask("all of it", PROMPT, asked={"max_store_tokens": 0})
        assert resident(made) == 3
        made.assert_at_rest()
    finally:
        made.close()


def test_tags_set_requests_apart(oracle: Oracle) -> None:
    draft = {"tags": {"kind": "draft"}}
    oracle.ask("stores", PROMPT, asked=draft)
    assert oracle.ask("untagged", PROMPT) == 0
    assert oracle.ask("of another kind", PROMPT, asked={"tags": {"kind": "final"}}) == 0
    assert oracle.ask("with one more", PROMPT, asked={"tags": {"kind": "draft", "by": "me"}}) == 0
    assert oracle.ask("alike", PROMPT, asked=draft) == 192
    assert oracle.ask("without tags at all", PROMPT, asked={"tags": {}}) == 192  # as the untagged one


WRONG: list[tuple[Any, str, Controls]] = [
    ({"kv_tiers": {"stor": False}}, "kv_tiers has no 'stor', which is ignored; did you mean 'store'?", Controls()),
    ({"kv_tiers": {"store": "no", "load": False}}, "store is 'no', expected `bool`", Controls(load=False)),
    ({"kv_tiers": {"min_load_tokens": -1}}, "min_load_tokens is -1, expected `int` >= 0", Controls()),
    ({"kv_tiers": {"max_store_tokens": True}}, "max_store_tokens is True, expected `int | null`", Controls()),
    ({"kv_tiers": {3: 4}}, "kv_tiers has no 3", Controls()),
    ({"kv_tiers": ["store"]}, "kv_tiers is ['store'] and is ignored", Controls()),
    ({"kv_tier": {"store": False}}, "'kv_tier' is ignored; did you mean 'kv_tiers'?", Controls()),
    ([1], "[1] is ignored", Controls()),
    ({"kv_tiers": {"tags": {"a": 1}}}, "nothing of this request is loaded", Controls(load=False, store=False)),
    ({"kv_tiers": {"tags": {"a b": "c"}}}, "nothing of this request", Controls(load=False, store=False)),
    ({"kv_tiers": {"tiers": ["disc"]}}, "no tier 'disc', which is ignored; did you mean 'disk'", Controls(tiers=())),
    ({"kv_tiers": {"tiers": ["disk", "nvme"]}}, "there are disk, host", Controls(tiers=("disk",))),
    ({"kv_tiers": {"tiers": "disk"}}, "only the pool is read and written", Controls(tiers=())),
    ({"kv_tiers": {"tiers": [1]}}, "only the pool is read and written", Controls(tiers=())),
    ({"kv_tiers": {"use": "\ud800", "load": False}}, "use is '\\ud800', ", Controls(load=False)),
    ({"kv_tiers": {"tags": {"a": "\ud800"}, "load": True}}, "not valid Unicode", Controls(load=False, store=False)),
]


@pytest.mark.parametrize(("params", "said", "controls"), WRONG)
def test_what_is_wrong_is_one_line_and_the_rest_holds(
    params: Any, said: str, controls: Controls, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="kv_connect.request_options"):
        assert chosen(Settings(), params, "req-7", tiers=("host", "disk")) == controls
    (line,) = caplog.messages
    assert line.startswith("request req-7: kv_transfer_params: ") and said in line


def test_the_line_on_the_page_is_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    chosen(Settings(), {"kv_tiers": {"stor": False}}, "cmpl-7")
    assert f"`{caplog.messages[0].removeprefix('request cmpl-7: kv_transfer_params: ')}`" in PAGE


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"kv_tiers": {}}])
def test_what_is_other_connectors_is_theirs(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(Settings(), params, "req-7") == Controls()
    assert caplog.messages == []


@pytest.fixture(scope="module")
def engine(tiny_llama: str) -> Iterator[Engine]:
    with started(tiny_llama, cache={"host": {"capacity_bytes": "256MiB"}}) as running:
        yield running


def with_kv_tiers(asked: Any) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": {"kv_tiers": asked}}}


def test_the_real_engine_goes_by_what_a_request_says(engine: Engine) -> None:
    """Words that are wrong among them: every request is served, with the same tokens."""
    prompt = PROMPTS[0]
    tagged = {"tags": {"session": "a"}}
    asked_and_hits: list[tuple[Any, int]] = [
        ({"store": False}, 0),
        ({"stor": False}, 0),  # unknown: so it is stored
        ({"load": False}, 0),
        ({"min_load_tokens": 513}, 0),
        ({"min_load_tokens": 512}, 512),
        (tagged, 0),
        (tagged | {"nonsense": 1}, 512),
        ({"tags": {"session": "b"}}, 0),
        ({"tags": "b"}, 0),
        ({"hints": envelope("kv.retain", ttl_seconds=1)}, 512),
        ({"hints": envelope("kv.demote")}, 512),
        ({"hints": envelope("kv.prefetch")}, 512),
        ({"hints": "nonsense"}, 512),
        ("nonsense", 512),
    ]
    answers, hits = set(), []
    for asked, _ in asked_and_hits:
        answers.update(engine.ask([prompt], **with_kv_tiers(asked)))
        hits += engine.hits
    assert hits == [found for _, found in asked_and_hits]
    assert len(answers) == 1
    engine.assert_at_rest()


def test_a_router_finds_tagged_chunks_by_the_command(engine: Engine) -> None:
    """The digests that `kv keys --tag` prints are those that the engine has stored under."""
    prompt = SHARED[100:700]
    engine.ask([prompt], **with_kv_tiers({"tags": {"session": "r", "kind": "x"}}))
    command = [str(Path(sys.executable).with_name("kv")), "keys", "-", "--output", "json"]
    command += ["--tag", "kind=x", "--tag", "session=r"]
    text = " ".join(map(str, prompt))
    printed = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60).stdout
    digests = [json.loads(line)["digest"] for line in printed.splitlines()]
    assert len(digests) == 2
    (inner,) = engines().values()
    assert inner.cache is not None
    held = {key.digest.hex() for key in inner.cache._index.held()}  # type: ignore[union-attr]
    assert set(digests) <= held


def test_the_offline_example_on_the_page_runs_as_it_is(engine: Engine) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {"llm": engine.llm, "document": SHARED[300:900], "question": [7, 8, 9]}
    exec(compile(example, "docs/requests.md", "exec"), found)
    assert [output.num_cached_tokens for output in found["outputs"]] == [512]
