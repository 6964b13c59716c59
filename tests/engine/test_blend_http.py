"""Blending asked for over HTTP, in text: real vLLM's server with our middleware in front of it."""

import json
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_blend.plan import KEY
from kv_blend.vllm.scheduler import BLEND_FIGURES
from kv_testing.documents import MARK, TEMPLATE, text
from kv_testing.wait import until
from test_api_server import api_server


@pytest.fixture(scope="module")
def url(spelling_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("blend")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    arguments = ("--chat-template", str(template), "--middleware", "kv_blend.middleware.SegmentsMiddleware")
    cache = {"host": {"capacity_bytes": "64MiB"}, "chunk_tokens": 256}
    with (
        tempfile.TemporaryDirectory(prefix="kv") as runtime,
        api_server(spelling_llama, cache, directory, Path(runtime), *arguments, connector="KVBlendConnector") as (
            _,
            url,
            _,
        ),
    ):
        until(lambda: "refused" not in complete(url, text(2), share=0.0)[1], 60)  # the weights are known
        yield url


def post(url: str, request: dict[str, Any]) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        request["model"] = json.load(answer)["data"][0]["id"]
    path = "chat/completions" if "messages" in request else "completions"
    asked = urllib.request.Request(
        f"{url}/v1/{path}", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


def complete(url: str, text: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """The answer, and what it says of blending. options: of blending; none for an exact request."""
    request: dict[str, Any] = {"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = json.loads(post(url, request | ({KEY: {"separator": MARK} | options} if options else {})))
    assert "choices" in answer, answer
    return answer["choices"][0]["text"], (answer.get("kv_transfer_params") or {}).get(KEY, {})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_documents_in_the_text_are_reused_in_any_order(url: str) -> None:
    exact, _ = complete(url, text(0, 1))
    answer, report = complete(url, text(0, 1), share=1.0)
    assert answer == exact
    assert report == {"segment_tokens": 600, "held_tokens": 0, "recomputed_tokens": 300}
    answer, report = complete(url, text(1, 0), share=0.0)
    assert report == {"segment_tokens": 600, "held_tokens": 600, "recomputed_tokens": 0}
    exact, _ = complete(url, text(1, 0))
    assert answer != exact  # with random weights any approximation shows


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_reused_is_in_the_metrics(url: str) -> None:
    def figures() -> dict[str, float]:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = re.findall(r"^vllm:kv_tiers_(blend_\w+)_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    complete(url, text(0, 2), share=0.25)
    before = figures()
    assert before.keys() == BLEND_FIGURES.keys()
    complete(url, text(2, 0), share=0.25)
    changes = [1, 0, 600, 600, 75]  # the first one is exact
    until(lambda: [figures()[name] - before[name] for name in BLEND_FIGURES] == changes, 30)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_messages_and_streams(url: str) -> None:
    messages = [{"role": "system", "content": "w5 w6"}, {"role": "user", "content": text(2, 1)}]
    request: dict[str, Any] = {"messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}

    def said(**more: Any) -> str:
        lines = [line[6:] for line in post(url, request | more).splitlines() if line.startswith("data: {")]
        return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)

    exact = said()
    assert exact
    assert said(kv_blend={"separator": MARK, "share": 1.0}) == exact
    assert said(kv_blend={"separator": MARK, "share": 0.0}) != exact
    assert said() == exact


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_be_is_refused_by_name_and_nothing_else(url: str) -> None:
    refused = json.loads(post(url, {"prompt": "w1 w2", "max_tokens": 1, KEY: {"separator": MARK}}))
    assert refused["error"]["code"] == 400
    assert "the prompt has 0 separators" in refused["error"]["message"]
    refused = json.loads(post(url, {"prompt": [text(1), text(2)], "max_tokens": 1, KEY: {"separator": MARK}}))
    assert "cannot be tokenized" in refused["error"]["message"]
    assert json.loads(post(url, {"prompt": "w1 w2", "max_tokens": 1}))["choices"]
