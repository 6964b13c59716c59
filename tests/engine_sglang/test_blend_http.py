"""Blending asked for over HTTP, in text: SGLang's own server, started as users start it, and one ordinary request."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from engines import PAGE
from kv_blend import request_fields
from kv_blend.figures import BLEND_FIGURES
from kv_testing.documents import MARK, TEMPLATE, text
from kv_testing.spelling import with_words
from kv_testing.tiny import TinyLlama
from test_http import ON_A_CPU, Server


class Blending(Server):
    __test__ = False

    @classmethod
    def _get_spec_server_args(cls) -> list[str]:
        return [*cls.flags, *(flag for flag in ON_A_CPU if flag != "--skip-tokenizer-init")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("blend")
    Blending.model = with_words(TinyLlama().write(tmp_path_factory.mktemp("spelling-llama")))
    (directory / "template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "kv_blend.sglang", "flags", "--capacity", "64MiB", "--page-size", str(PAGE)]
    flags = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    Blending.flags = [*shlex.split(flags), "--chat-template", str(directory / "template.jinja"), "--enable-metrics"]
    Blending._launch_spec_server()
    yield Blending.base_url
    Blending._stop_spec_server()


pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def post(url: str, request: dict[str, Any]) -> requests.Response:
    path = "chat/completions" if "messages" in request else "completions"
    return requests.post(f"{url}/v1/{path}", json={"model": "m", "temperature": 0} | request, timeout=120)


def complete(url: str, text: str, **options: Any) -> tuple[str, int]:
    """The answer, and how many tokens SGLang says were cached. options: of blending; none for an exact request."""
    request: dict[str, Any] = {"prompt": text, "max_tokens": 8, "ignore_eos": True}
    answer = post(url, request | ({"kv_blend": {"separator": MARK} | options} if options else {})).json()
    assert "choices" in answer, answer
    return answer["choices"][0]["text"], (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def test_documents_in_the_text_are_reused_in_any_order(url: str) -> None:
    exact, _ = complete(url, text(0, 1))
    first_one = (4 + 300) // PAGE * PAGE  # stands where it was computed
    assert complete(url, text(0, 1), share=1.0) == (exact, first_one)
    complete(url, text(0, 1), share=0.0)
    answer, cached = complete(url, text(1, 0), share=0.0)
    assert cached == (4 + 300 + 1 + 300) // PAGE * PAGE
    exact, _ = complete(url, text(1, 0))
    assert answer != exact  # with random weights any approximation shows


def test_messages_and_streams(url: str) -> None:
    messages = [{"role": "system", "content": "w5 w6"}, {"role": "user", "content": text(2, 1)}]
    request: dict[str, Any] = {"messages": messages, "max_tokens": 8, "stream": True}

    def said(**more: Any) -> str:
        lines = [line[6:] for line in post(url, request | more).text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    exact = said()
    assert exact
    assert said(kv_blend={"separator": MARK, "share": 1.0}) == exact
    assert said(kv_blend={"separator": MARK, "share": 0.0}) != exact
    assert said() == exact


def test_a_client_that_sends_tokens_is_told_what_was_done(url: str) -> None:
    tokens = [5, *range(300, 500), 7, *range(600, 800), 9]
    fields = request_fields([(1, 201), (202, 402)], tokens=len(tokens), engine="sglang", share=0.0)
    asked = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 2, "temperature": 0, "custom_params": fields["custom_params"]},
    }
    answer = requests.post(f"{url}/generate", json=asked | {"cache_salt": fields["cache_salt"]}, timeout=60)
    assert answer.json()["meta_info"]["kv_blend"]["segment_tokens"] == 400
    answer = requests.post(f"{url}/generate", json=asked, timeout=60)
    assert answer.status_code == 400
    assert "cache_salt is not this plan's" in answer.text


def test_what_was_reused_is_in_the_metrics(url: str) -> None:
    def figures() -> dict[str, float]:
        lines = requests.get(f"{url}/metrics", timeout=30).text.splitlines()
        found = {
            line.split("{")[0].removeprefix("sglang:kv_tiers_blend_").removesuffix("_total"): float(line.split()[-1])
            for line in lines
            if line.startswith("sglang:kv_tiers_blend_") and "_total{" in line
        }
        assert {f"blend_{name}" for name in found} == BLEND_FIGURES.keys()
        return found

    complete(url, text(0, 2), share=0.0)
    before = figures()
    complete(url, text(2, 0), share=0.5)
    complete(url, text(2, 0), select="question")
    grown = {name: value - before[name] for name, value in figures().items()}
    assert (grown["requests"], grown["refused"], grown["segment_tokens"]) == (1, 1, 600)
    assert grown["held_tokens"] == 600 - grown["recomputed_tokens"]
    assert 150 <= grown["recomputed_tokens"] < 150 + 4 * PAGE


def test_what_cannot_be_is_refused_by_name_and_nothing_else(url: str) -> None:
    refused = post(url, {"prompt": "w1 w2", "max_tokens": 1, "kv_blend": {"separator": MARK}})
    assert refused.status_code == 400
    assert "the prompt has 0 separators" in refused.text
    assert post(url, {"prompt": "w1 w2", "max_tokens": 1}).json()["choices"]
