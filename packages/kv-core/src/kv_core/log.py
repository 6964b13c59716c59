"""Rate-limited loggers: a line that repeats is logged a few times, then once a minute with the number suppressed.

Every module takes its logger from here. Lines are the same kind if their format strings are equal, before the arguments
are filled in, so a line per client, chunk or request is one kind. The time is that of the log record.

Names and reasons in a line may come from clients, peers and servers. Whatever they contain, a line remains one line,
unless its format string has several, and nothing in it controls a terminal. The same holds for a traceback's last line.
"""

import logging
import traceback
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, TextIO

BURST: Final = 10
"""Lines of one kind that are logged at once."""
EVERY_S: Final = 60.0
"""After those, one line per this time; a kind that was silent for this long may burst again."""


@dataclass(slots=True)
class _Kind:
    """One kind of line. logged: lines logged since its last silence. left_out: lines suppressed since the last one."""

    last_s: float
    next_s: float = 0.0
    logged: int = 0
    left_out: int = 0


class RateLimit:
    """Decides which lines are logged. Under concurrent calls it may miscount slightly, but never logs many."""

    def __init__(self, *, burst: int = BURST, every_s: float = EVERY_S) -> None:
        self._burst, self._every_s = burst, every_s
        self._kinds: dict[Hashable, _Kind] = {}

    def admit(self, kind: Hashable, now_s: float) -> int | None:
        """How many lines of this kind were left out before this one; None: this one is left out too."""
        state = self._kinds.get(kind)
        if state is None:
            state = self._kinds[kind] = _Kind(now_s)
        if now_s < state.last_s:  # the machine's clock was set back
            state.next_s = now_s
        if state.logged >= self._burst and now_s - state.last_s >= self._every_s:
            state.logged = 0
        state.last_s = now_s
        if state.logged >= self._burst and now_s < state.next_s:
            state.left_out += 1
            return None
        left_out, state.left_out = state.left_out, 0
        state.logged += 1
        state.next_s = now_s + self._every_s
        return left_out

    def is_last_of_burst(self, kind: Hashable) -> bool:
        """Whether the line admitted last is the one after which lines of this kind are left out."""
        return self._kinds[kind].logged == self._burst

    def reset(self) -> None:
        self._kinds.clear()


LIMIT: Final = RateLimit()
"""The limit of this process. Tests reset it."""


def limit_line(record: logging.LogRecord) -> bool:
    """A filter: puts `LIMIT` in front of a logger, appends the number of lines left out to the next one's text, and
    keeps each on one line."""
    note = ""
    if logging.INFO <= record.levelno <= logging.CRITICAL:  # where DEBUG lines are enabled, all are wanted
        kind = (record.name, record.msg)
        left_out = LIMIT.admit(kind, record.created)
        if left_out is None:
            return False
        if left_out:
            note = f" ({left_out} more like this were suppressed before)"
        elif LIMIT.is_last_of_burst(kind):
            note = f" (from now on at most one line like this in {EVERY_S:g} s)"
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001  # a bug in a line costs that line: its handler reports it
        return True
    line = on_lines(text) if "\n" in str(record.msg) else on_one_line(text)
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = traceback_of(record.exc_info[1])  # which formatters use instead of their own
    if note or line != text:
        # The arguments are filled in first: they may contain a per cent sign.
        record.msg, record.args = line + note, None
    return True


def on_one_line(text: str) -> str:
    """The text, with escapes in place of what ends a line or controls a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def on_lines(text: str) -> str:
    """The text with its lines, each as by `on_one_line`."""
    return "\n".join(map(on_one_line, text.split("\n")))


def traceback_of(error: BaseException) -> str:
    """As Python prints it; what the exceptions say stays on one line each."""
    parts = traceback.TracebackException.from_exception(error).format()
    return "\n".join(
        (on_lines if part[:1].isspace() or part.startswith("Traceback ") else on_one_line)(part.removesuffix("\n"))
        for part in parts
    )


def limited_logger(name: str) -> logging.Logger:
    """The logger of this name, limited. name: the module's `__name__`."""
    logger = logging.getLogger(name)
    logger.addFilter(limit_line)  # once, however often
    return logger


# What the commands print.
#
# Names and reasons come from peers, servers, files and engines: nothing in them may move the cursor, clear the screen,
# set a title, or look like another line.


def say(
    *texts: object, file: TextIO | None = None, start: str = "", sep: str = " ", end: str = "\n", flush: bool = False
) -> None:
    """As `print`, with each text on one line. start: comes first, as it is."""
    said = sep.join(on_one_line(str(text)) for text in texts)
    print(start + said, file=file, end=end, flush=flush)
