"""Anthropic's marks, tags, tenants and the ends of turns at real SGLang's server: what is marked or within its tenant's
quota outlives what fills the pool, what is not does not, and only equal tags and salts share pages."""

import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from engines import PAGE
from kv_core.keys import tenant_tag
from kv_testing.documents import TEMPLATE
from kv_testing.spelling import with_words
from kv_testing.tiny import TinyLlama
from kv_testing.turns import assert_turns_end_without_calls
from test_http import ON_A_CPU, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORDS = 300
SALT = "a's"
OTHERS = 18
"""Prompts that fill the pool: over 18 pages each, of the 192 that are nobody's quota."""


class Marked(Server):
    __test__ = False

    @classmethod
    def _get_spec_server_args(cls) -> list[str]:
        return [*cls.flags, *(flag for flag in ON_A_CPU if flag != "--skip-tokenizer-init")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marked]:
    directory = tmp_path_factory.mktemp("marks")
    Marked.model = with_words(TinyLlama().write(tmp_path_factory.mktemp("spelling-llama")))
    (directory / "template.jinja").write_text(TEMPLATE)
    tenant = {"name": "a", "tag": tenant_tag(SALT).hex(), "quota_bytes": "2MiB"}
    settings = {"host": {"capacity_bytes": "8MiB", "policy": "lru"}, "tenants": [tenant]}
    (directory / "kv.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "kv_sglang", "flags", "--config-file", str(directory / "kv.json")]
    command += ["--page-size", str(PAGE), "--hicache-size", "1", "--cache-control"]
    flags = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    Marked.flags = [*shlex.split(flags), "--enable-metrics", "--chat-template", str(directory / "template.jinja")]
    Marked._launch_spec_server()
    yield Marked()
    Marked._stop_spec_server()


def found(
    server: Marked, endpoint: str, name: str, mark: dict[str, str] | None = None, **fields: Any
) -> tuple[str, int]:
    """The answer to a prompt of this name, and how many of its tokens were loaded from our storage."""
    server.flush()
    chance = random.Random(name)
    text = " ".join(f"w{chance.randrange(100)}" for _ in range(WORDS))
    part = {"type": "text", "text": text} | ({} if mark is None else {"cache_control": mark})
    request = {"model": "m", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": [part]}]}
    answer = requests.post(f"{server.base_url}/v1/{endpoint}", json=request | fields, timeout=60).json()
    if endpoint == "messages":
        return answer["content"][0]["text"], answer["usage"].get("cache_read_input_tokens", 0)
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["message"]["content"], details.get("cached_tokens", 0)


@pytest.mark.parametrize("endpoint", ["messages", "chat/completions"])
def test_what_is_marked_is_found_after_others_have_filled_the_pool(server: Marked, endpoint: str) -> None:
    def returns(name: str, mark: dict[str, str] | None) -> int:
        name = f"{endpoint} {name}"
        first, cold = found(server, endpoint, name, mark)
        assert cold == 0
        for number in range(OTHERS):
            found(server, endpoint, f"{name} {number}")
        again, warm = found(server, endpoint, name, mark)
        assert again == first
        return warm

    assert returns("without a mark", None) == 0
    assert returns("marked", {"type": "ephemeral", "ttl": "1h"}) >= WORDS // PAGE * PAGE


def test_pages_are_found_by_the_same_tags_alone(server: Marked) -> None:
    def ask(**kv_tiers: Any) -> tuple[str, int]:
        return found(server, "chat/completions", "tagged", custom_params={"kv_tiers": kv_tiers})

    first, cold = ask(tags={"session": "1", "user": "u"})
    assert cold == 0
    for other in ({"tags": {"session": "2", "user": "u"}}, {"tags": {"session": "1"}}, {}):
        assert ask(**other, store=False) == (first, 0)
    again, warm = ask(tags={"user": "u", "session": "1"})
    assert again == first and warm >= WORDS // PAGE * PAGE
    assert ask(tags={"session 1": ""}) == ask(tags={"session 1": ""}) == (first, 0), "not stored: the tags are invalid"


def test_a_tenants_pages_stay_within_its_quota_while_others_fill_the_pool(server: Marked) -> None:
    def ask(name: str, **salt: str) -> tuple[str, int]:
        return found(server, "chat/completions", name, **salt)

    first, cold = ask("of a tenant", cache_salt=SALT)
    assert cold == 0 and ask("of a tenant", cache_salt="b's") == ask("of a tenant") == (first, 0)
    for number in range(OTHERS):
        ask(f"beside a tenant {number}")
    again, warm = ask("of a tenant", cache_salt=SALT)
    assert again == first and warm >= WORDS // PAGE * PAGE
    assert ask("of a tenant", cache_salt="b's") == (first, 0)


def test_the_policy_learns_which_answers_call_no_tool_once_one_has(server: Marked) -> None:
    def ended() -> int:
        text = requests.get(f"{server.base_url}/metrics", timeout=30).text
        counts = re.findall(r"^sglang:kv_tiers_turns_ended_total\S* (\S+)$", text, re.MULTILINE)
        return sum(int(float(count)) for count in counts)

    def answer(name: str, token: int) -> None:
        found(server, "chat/completions", name, logit_bias={token: 100}, max_tokens=2, stop_token_ids=[token])

    assert_turns_end_without_calls(answer, ended)
