"""Exceptions, in families by who has to act.

`MisuseError` is a bug in this process and is never caught. `TierDown` is a fault of the outside world; it is counted
and becomes a miss. `InputError` and `ConfigError` are the caller's mistakes: their text says what was wrong, where, and
what to do.
"""

import difflib
from collections.abc import Iterable
from typing import Final

from kv_core.log import on_one_line

_LONGEST_NAME: Final = 100
"""How much of a name is compared with others: some names come from an engine's clients, and may be of any length."""


class KVError(Exception):
    """The base of all exceptions that these packages raise on purpose.

    Their texts repeat what came from outside, and end in logs, reports and terminals: each is one line.
    """

    def __init__(self, *texts: object) -> None:
        super().__init__(*(on_one_line(text) if isinstance(text, str) else text for text in texts))


class MisuseError(KVError):
    """A contract between our own components was broken. A bug to be fixed, never a state to recover from."""


class TierDown(KVError):  # noqa: N818  # it names a state of the world, and reads so where it is caught
    """A tier's medium cannot be reached."""


class CopyFailed(KVError):  # noqa: N818  # as above
    """Bytes could not be carried between host and device. The destination holds unspecified bytes."""


class InputError(KVError, ValueError):
    """Outside data (tokens, a key's spelling, a plan off the wire) that we cannot accept."""


class ConfigError(KVError, ValueError):
    """A setting that cannot be honoured; the text names the setting and says what to write instead."""


def shortened(value: object) -> str:
    """A value from outside, as the text of an error shows it."""
    if isinstance(value, int) and value.bit_length() > 512:
        return f"a number of {value.bit_length()} bits"  # the interpreter itself refuses the repr of a huge int
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The helpful half of an error about a name that is none: the one probably meant, or all that exist."""
    known = sorted(known)
    close = difflib.get_close_matches(name[:_LONGEST_NAME], known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
