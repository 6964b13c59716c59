"""Text from outside does not reach a terminal as it is: errors, logs, tracebacks and what the commands print."""

import logging

import pytest
from kv_core.errors import ConfigError, CopyFailed, InputError, MisuseError, TierDown
from kv_core.log import limited_logger, say

HOSTILE = "\x1b]0;a title\x07\x1b[2Jcleared\r\nkv: all is well\x9b31m\u202e\u2028"
HARMLESS = r"\x1b]0;a title\x07\x1b[2Jcleared\r\nkv: all is well\x9b31m\u202e\u2028"


@pytest.mark.parametrize("family", [TierDown, InputError, ConfigError, MisuseError, CopyFailed])
def test_an_error_says_what_came_from_outside_on_one_line(family: type[Exception]) -> None:
    assert str(family(f"a peer says {HOSTILE}")) == f"a peer says {HARMLESS}"


def test_what_is_printed_is_one_line_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"moved: {HOSTILE}", 5, "grüße", end="!\n")
    say("one", HOSTILE, sep="\n")
    assert capsys.readouterr().out == f"moved: {HARMLESS} 5 grüße!\none\n{HARMLESS}\n"


def test_a_traceback_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    log = limited_logger("kv_core.test_terminal")
    try:
        try:
            raise ValueError(HOSTILE)
        except ValueError as cause:
            raise OSError(HOSTILE) from cause
    except OSError:
        log.exception("a bug")
    lines = caplog.text.split("\n")
    assert sum(line.startswith("kv: all is well") for line in lines) == 0
    assert f"ValueError: {HARMLESS}" in lines and f"OSError: {HARMLESS}" in lines
    assert all(line.isprintable() for line in lines) and "Traceback (most recent call last):" in lines


def test_a_line_of_several_lines_controls_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    limited_logger("kv_core.test_terminal").error("a bug:\n%s", "Traceback:\n  \x1b[2J", extra={"at": logging.ERROR})
    assert caplog.messages == ["a bug:\nTraceback:\n  \\x1b[2J"]
