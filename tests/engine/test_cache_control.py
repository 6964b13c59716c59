"""Anthropic's marks, KV hints and calls of tools at real vLLM's server: what is marked outlives what fills the pool,
what is not marked does not, and the policy of the pool learns which answers call no tool."""

import json
import random
import re
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_testing.turns import assert_turns_end_without_calls
from kv_testing.wait import until
from test_api_server import api_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} "
    "{% else %}{% for part in m.content %}{{ part.text }} {% endfor %}{% endif %}{% endfor %}"
)
WORDS = 300
"""Of a prompt: two chunks and some."""


@pytest.fixture(scope="module")
def url(spelling_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("marks")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    arguments = ("--chat-template", str(template), "--middleware", "kv_connect.cache_control.CacheControlMiddleware")
    cache = {"host": {"capacity_bytes": "12MiB"}, "chunk_tokens": 128, "min_load_tokens": 128}
    with (
        tempfile.TemporaryDirectory(prefix="kv") as runtime,
        api_server(spelling_llama, cache, directory, Path(runtime), *arguments) as (_, url, _),
    ):
        once = prompt("warm up")
        until(lambda: found(url, "chat/completions", once)[1] > 0, 60)  # the weights are known
        yield url


def prompt(name: str) -> str:
    chance = random.Random(name)
    return " ".join(f"w{chance.randrange(100)}" for _ in range(WORDS))


def found(
    url: str, endpoint: str, text: str, mark: dict[str, str] | None = None, hint: dict[str, Any] | None = None
) -> tuple[str, int]:
    """The answer, and how many of its prompt's tokens were loaded. hint: an action; it has to be accepted."""

    def tokens() -> int:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
        (line,) = re.findall(r"^vllm:external_prefix_cache_hits_total\S* (\S+)$", metrics, re.MULTILINE)
        return int(float(line))

    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    part: dict[str, Any] = {"type": "text", "text": text} | ({} if mark is None else {"cache_control": mark})
    request = {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 4, "temperature": 0}
    if hint is not None:
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": [hint]}
        request["kv_transfer_params"] = {"kv_tiers": {"hints": hints}}
    before = tokens()
    asked = urllib.request.Request(
        f"{url}/v1/{endpoint}", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        body = json.load(answer)
    if hint is not None:
        assert [one["outcome"] for one in body["kv_transfer_params"]["kv_hints"]["outcomes"]] == ["accepted"]
    said = body["content"][0]["text"] if endpoint == "messages" else body["choices"][0]["message"]["content"]
    return said, tokens() - before


def test_what_a_hint_retains_is_found_after_others_have_filled_the_pool(url: str) -> None:
    hint = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": {"ttl_seconds": 600}}
    text = prompt("hinted")
    first, cold = found(url, "chat/completions", text, hint=hint)
    for number in range(30):
        found(url, "chat/completions", prompt(f"hinted {number}"))
    again, warm = found(url, "chat/completions", text)
    assert cold == 0 and again == first and warm >= 128


@pytest.mark.parametrize("endpoint", ["messages", "chat/completions"])
def test_what_is_marked_is_found_after_others_have_filled_the_pool(url: str, endpoint: str) -> None:
    def returns(name: str, mark: dict[str, str] | None) -> int:
        text = prompt(f"{endpoint} {name}")
        first, cold = found(url, endpoint, text, mark)
        assert cold == 0
        for number in range(30):
            found(url, endpoint, prompt(f"{endpoint} {name} {number}"))
        again, warm = found(url, endpoint, text, mark)
        assert again == first
        return warm

    assert returns("without a mark", None) == 0
    assert returns("marked", {"type": "ephemeral"}) >= 128
    assert returns("for an hour", {"type": "ephemeral", "ttl": "1h"}) >= 128


def test_the_policy_learns_which_answers_call_no_tool_once_one_has(url: str) -> None:
    def ended() -> int:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            found = re.findall(r"^vllm:kv_tiers_turns_ended_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
        return sum(int(float(count)) for count in found)

    def answer(name: str, token: int) -> None:
        request = {"prompt": prompt(name), "max_tokens": 2, "allowed_token_ids": [token], "stop_token_ids": [token]}
        asked = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answered:
            assert json.load(answered)["choices"][0]["finish_reason"] == "stop"

    assert_turns_end_without_calls(answer, ended)
