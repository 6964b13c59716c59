"""What the world can make us say again and again is said a few times, and counted."""

import logging

import pytest
from kv_core.log import BURST, EVERY_S, RateLimit, limited_logger


def test_a_thousand_events_of_one_kind_are_a_few_lines() -> None:
    limit = RateLimit(burst=3, every_s=60.0)
    assert [limit.admit("a", 0.0) for _ in range(1000)] == [0, 0, 0] + [None] * 997
    assert limit.admit("b", 0.0) == 0  # another kind is another matter
    assert limit.admit("a", 59.9) is None
    assert limit.admit("a", 60.0) == 998
    assert limit.admit("a", 60.1) is None
    assert limit.admit("a", 119.0) is None
    assert limit.admit("a", 120.0) == 2


def test_after_a_silence_the_first_are_said_as_they_come() -> None:
    limit = RateLimit(burst=2, every_s=60.0)
    assert [limit.admit("a", at) for at in (0.0, 0.0, 1.0)] == [0, 0, None]
    assert [limit.admit("a", at) for at in (61.0, 61.0, 61.0)] == [1, 0, None]


def test_a_clock_that_is_set_back_silences_nobody() -> None:
    limit = RateLimit(burst=1, every_s=60.0)
    assert [limit.admit("a", 1e9), limit.admit("a", 1e9 + 1)] == [0, None]
    assert limit.admit("a", 1000.0) == 1
    assert limit.admit("a", 1001.0) is None


def test_a_line_says_how_many_were_left_out_before_it(caplog: pytest.LogCaptureFixture) -> None:
    log = limited_logger("kv_core.test_log")
    assert limited_logger("kv_core.test_log") is log and len(log.filters) == 1
    for number in range(100):
        log.warning("client %d did 100%% of %s", number, "it")
    assert len(caplog.messages) == BURST
    assert caplog.messages[0] == "client 0 did 100% of it"
    assert (
        caplog.messages[-1]
        == f"client {BURST - 1} did 100% of it (from now on at most one line like this in {EVERY_S:g} s)"
    )
    late = logging.LogRecord(log.name, logging.WARNING, "", 0, "client %d did 100%% of %s", (100, "it"), None)
    late.created += EVERY_S
    log.handle(late)
    assert caplog.messages[-1] == f"client 100 did 100% of it ({100 - BURST} more like this were suppressed before)"


def test_who_asks_for_everything_gets_it(caplog: pytest.LogCaptureFixture) -> None:
    log = limited_logger("kv_core.test_log")
    with caplog.at_level(logging.DEBUG, log.name):
        for number in range(100):
            log.debug("step %d", number)
    assert len(caplog.messages) == 100


def test_whatever_comes_from_outside_stays_on_its_line(caplog: pytest.LogCaptureFixture) -> None:
    log = limited_logger("kv_core.test_log")
    with caplog.at_level(logging.DEBUG, log.name):
        log.warning("a peer is refused: %s", "Invalid value 'x\n2026-11-26 ERROR kv_core: 100% lost\x1b[2J'")
        log.debug("a peer has gone: %s", "für immer\r…")
        log.error("a bug:\n%s", "Traceback:\n  its lines")
    assert caplog.messages == [
        "a peer is refused: Invalid value 'x\\n2026-11-26 ERROR kv_core: 100% lost\\x1b[2J'",
        "a peer has gone: für immer\\r…",
        "a bug:\nTraceback:\n  its lines",
    ]


def test_a_line_that_cannot_be_made_harms_nobody() -> None:
    log = limited_logger("kv_core.test_log")
    assert log.filter(logging.LogRecord(log.name, logging.WARNING, "", 0, "client %d", ("nobody",), None))
