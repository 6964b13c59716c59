"""What requests say, by the pages of their prompts."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
from kv_connect.request_options import NO_CONTROLS, Controls
from kv_core.log import LIMIT
from kv_sglang import scheduler_calls
from kv_sglang.scheduler_calls import RequestPages

PAGE = 4
PROMPT = list(range(17))  # four pages and a token


def hashes(tokens: Sequence[int]) -> list[str]:
    pages = [tokens[at : at + PAGE] for at in range(0, len(tokens) - PAGE + 1, PAGE)]
    return list(accumulate(pages, lambda name, page: hashlib.sha256(f"{name}{page}".encode()).hexdigest(), initial=""))[
        1:
    ]


class Pages:
    def __init__(self) -> None:
        self.pages = RequestPages("auto", PAGE, lambda: ("host", "disk"))
        self.hashed = 0

    def note(self, tokens: Sequence[int] = PROMPT, **kv_tiers: Any) -> None:
        self.pages.note("req-7", {"kv_tiers": kv_tiers} if kv_tiers else None, len(tokens), self._hashes(tokens))

    def _hashes(self, tokens: Sequence[int]) -> Callable[[], list[str]]:
        def compute() -> list[str]:
            self.hashed += 1
            return hashes(tokens)

        return compute

    def stored(self, tokens: Sequence[int] = PROMPT) -> list[bool]:
        return [controls.store for controls in self.pages.of(hashes(tokens))]


@pytest.fixture
def pages() -> Pages:
    LIMIT.reset()
    return Pages()


def test_where_no_request_says_anything_nothing_is_hashed(pages: Pages) -> None:
    pages.note()
    assert pages.pages.of(hashes(PROMPT)) == [NO_CONTROLS] * 4
    assert pages.hashed == 0


@pytest.mark.parametrize(
    ("said", "controls"),
    [
        ({"store": False}, Controls(save_decode=True, store=False)),
        ({"load": False}, Controls(save_decode=True, load=False)),
        ({"promote": False}, Controls(save_decode=True, promote=False)),
        ({"use": "always"}, Controls(save_decode=True, use="always")),
        ({"tiers": ["disk"]}, Controls(save_decode=True, tiers=("disk",))),
    ],
)
def test_all_pages_of_a_prompt_have_what_its_request_says(
    pages: Pages, said: dict[str, Any], controls: Controls
) -> None:
    pages.note(**said)
    assert pages.pages.of(hashes(PROMPT)) == [controls] * 4
    assert pages.pages.of(hashes(range(50, 60))) == [NO_CONTROLS] * 2


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"max_store_tokens": 11}, [True, True, False, False]),
        ({"min_store_tokens": 18}, [False] * 4),
        ({"min_store_tokens": 17}, [True] * 4),
    ],
)
def test_how_much_of_a_prompt_is_stored(pages: Pages, said: dict[str, Any], kept: list[bool]) -> None:
    pages.note(**said)
    assert pages.stored() == kept


@pytest.mark.parametrize("said", [{"store": False}, {"save_decode": False}, {"max_store_tokens": 16}])
def test_generated_pages_go_by_the_page_in_front_of_them(pages: Pages, said: dict[str, Any]) -> None:
    """However many calls tell of them."""
    pages.note(**said)
    longer = [*PROMPT, *range(100, 115)]  # eight pages
    generated = hashes(longer)[4:]
    assert [each.store for each in pages.pages.of(generated[:2], before=hashes(PROMPT))] == [False] * 2
    assert [each.store for each in pages.pages.of(generated[2:], before=hashes(longer)[:6])] == [False] * 2
    assert pages.stored() == [said != {"store": False}] * 4


def test_the_latest_request_with_a_page_decides(pages: Pages) -> None:
    pages.note(store=False)
    pages.note(PROMPT[:9])
    assert pages.stored() == [True, True, False, False]
    pages.note(tiers=[])
    assert [each.tiers for each in pages.pages.of(hashes(PROMPT))] == [()] * 4
    pages.note(retain_s=60)
    assert [each.retain_s for each in pages.pages.of(hashes(PROMPT))] == [60.0] * 4
    # What the first one generates is its own, also where its prompt has become another's.
    pages.note(PROMPT[:16], store=False)
    pages.note(PROMPT[:16])
    generated = hashes([*PROMPT[:16], 7, 7, 7, 7])[4:]
    assert [each.store for each in pages.pages.of(generated, before=hashes(PROMPT))] == [False]


def test_hints_become_options_and_what_is_rejected_is_logged(pages: Pages, caplog: pytest.LogCaptureFixture) -> None:
    def action(kind: str, **payload: Any) -> dict[str, Any]:
        return {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}

    def note(*actions: dict[str, Any]) -> list[Controls]:
        envelope = {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}
        pages.pages.note("req-7", None, len(PROMPT), lambda: hashes(PROMPT), hints=envelope)
        return pages.pages.of(hashes(PROMPT))

    with caplog.at_level(logging.WARNING):
        assert note(action("kv.prefetch")) == [NO_CONTROLS] * 4
        assert note(action("kv.retain", ttl_seconds=60)) == [Controls(save_decode=True, retain_s=60.0)] * 4
        assert note(action("kv.demote")) == [Controls(save_decode=True, is_demoted=True)] * 4
        assert caplog.messages == []
        note(action("kv.share"), action("kv.demote"), action("kv.pin", name="x"))
    (line,) = caplog.messages
    assert line.startswith("request req-7: hint 'a' (kv.share) and 1 others are rejected: every engine")


def test_what_cannot_be_followed_is_said_and_tags_are_not_ignored(
    pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pages.note(tags={"a": "b"}, min_load_tokens=5, tiers=["dsk"])
    line, tagged = caplog.messages
    assert tagged.startswith("request req-7: its tags are in no page's name, so nothing of it is loaded or stored")
    assert "min_load_tokens is not supported by this engine; it is ignored" in line
    assert "there is no tier 'dsk'" in line
    assert pages.pages.of(hashes(PROMPT)) == [Controls(save_decode=True, load=False, store=False, tiers=())] * 4


def test_the_pages_noted_longest_ago_are_forgotten_first(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_calls, "MAX_PAGES", 6)
    others = range(50, 66)
    pages.note(store=False)
    pages.note(others, store=False)
    assert pages.stored() == [True, True, False, False]
    assert pages.stored(others) == [False] * 4


@pytest.mark.parametrize(("tokens", "last_page"), [(PROMPT, hashes(PROMPT)[-1]), (PROMPT[:3], "")])
def test_the_rest_of_a_prompt_that_was_handed_over_is_released(pages: Pages, tokens: list[int], last_page: str) -> None:
    """SGLang reads whole pages only. All of a short prompt is such a rest."""
    released: list[str] = []
    pages.pages.listeners.append(released.extend)
    params = {"do_remote_prefill": True}
    pages.pages.note("req-7", params, len(tokens), lambda: hashes(tokens), lambda last: f"after {last}")
    assert released == [f"after {last_page}"]
