"""However much of a request's options is wrong, little is made of it: the engine's scheduler waits meanwhile."""

import difflib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from kv_connect.request_options import chosen
from kv_core.log import LIMIT
from kv_tiers.settings import Settings

MANY = 2000


@pytest.fixture
def compared() -> Iterator[list[tuple[int, int]]]:
    """For each name that is compared with others: its length, and their number."""
    sizes: list[tuple[int, int]] = []
    real = difflib.get_close_matches

    def compare(word: str, possibilities: Any, **named: Any) -> list[str]:
        names = list(possibilities)
        sizes.append((len(word), len(names)))
        found: list[str] = real(word, names, **named)
        return found

    LIMIT.reset()
    with mock.patch.object(difflib, "get_close_matches", compare):
        yield sizes


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"kv_tiers": {"store": False, **{f"stor{number}": 1 for number in range(MANY)}}}, "1984 more names"),
        ({"kv_tiers": {"store": False, "stor" * MANY: 1}}, "there are load"),
        ({"kv_tiers": {"store": False, "tiers": ["disk" * MANY]}}, "there are disk, host"),
    ],
)
def test_what_is_wrong_is_compared_and_logged_only_as_far_as_a_person_reads(
    compared: list[tuple[int, int]], params: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="kv_connect.request_options"):
        assert not chosen(Settings(), params, "r", tiers=("host", "disk")).store
    (line,) = caplog.messages
    assert said in line and len(line) < 3000
    assert len(compared) <= 16 and max(compared)[0] <= 100


def test_the_names_of_other_connectors_are_passed_over(compared: list[tuple[int, int]]) -> None:
    others = {f"kv_tier{number}": 1 for number in range(MANY)}
    assert chosen(Settings(), others, "r").store
    assert [names for _, names in compared] == [16]


def test_the_name_that_a_tag_may_have_is_said_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    LIMIT.reset()
    with caplog.at_level(logging.WARNING, logger="kv_connect.request_options"):
        assert not chosen(Settings(), {"kv_tiers": {"tags": {"Who am I": "x"}}}, "r").store
    (line,) = caplog.messages
    assert "a name of up to 64 letters, digits, dots, dashes and underscores" in line and "regex" not in line
