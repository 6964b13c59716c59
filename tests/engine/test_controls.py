"""What requests say for themselves, under vLLM's real schedulers and on its real engine."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, SHARED, Engine, started
from kv_connect.engine import engines
from kv_connect.request_options import Controls, chosen
from kv_core.log import LIMIT
from kv_tiers.settings import Settings
from oracle import Oracle

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
    whole = Oracle(tiny_llama)
    assert whole.engine.cache is not None
    slot_bytes = whole.engine.cache.pool.slot_bytes
    whole.close()
    made = Oracle(tiny_llama, host={"capacity_bytes": 16 * slot_bytes})
    assert made.ask("retains", PROMPT, asked={"retain_s": retain_s}) == 0
    made.ask("hits", PROMPT)
    for number in range(8):
        made.ask(f"crowd {number}", [50 + number, *PROMPT[1:]])
    assert made.ask("returns", PROMPT) == (192 if retain_s else 0)
    made.run()
    made.assert_at_rest()
    made.close()


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
    assert f"\n{caplog.messages[0]}\n" in PAGE


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
