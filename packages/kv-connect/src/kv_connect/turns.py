"""Which answers call a tool, recognised by their tokens: agents come back from a tool within seconds, and users
only once they have read.

Templates of models that call tools mark a call with tokens of their own, such as `</tool_call>`, `<|python_tag|>` or
`<|call|>`. Those are among the tokens that a tokenizer has in addition to its vocabulary. A model that writes its calls
as plain text has none: its answers tell nothing. Nor do those of an engine that has not seen a call yet, nor those that
follow a JSON schema, as engines have them do where a client requires a call: that is JSON alone.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from kv_core.log import limited_logger

_log = limited_logger(__name__)
_CALL: Final = re.compile(
    r"tool[_▁ ]?calls?(?!.*(response|output|result))|python_tag|\|call\||function_?call", re.IGNORECASE
)


def marks_a_call(token: str) -> bool:
    """Whether a token of this text is part of a call."""
    return _CALL.search(token) is not None


class Turns:
    """Of one engine's requests."""

    def __init__(self, call_tokens: Iterable[int] = ()) -> None:
        """call_tokens: any of them is part of a call."""
        self._call_tokens = frozenset(call_tokens)
        self._has_seen_calls = False

    @classmethod
    def of(cls, tokenizer: Callable[[], Any]) -> "Turns":
        """tokenizer: returns that of the model, or None. If it cannot be read, no turn is known to have ended."""
        try:
            read = tokenizer()
            added = {} if read is None else read.get_added_vocab()
            return cls(number for text, number in added.items() if marks_a_call(text))
        except Exception as error:  # noqa: BLE001  # a tokenizer may bring code of its own
            _log.warning("the tokenizer cannot be read, so calls of tools are not recognised: %s", error)
            return cls()

    def has_ended(self, answer: Iterable[int], *, has_stopped: bool, is_json: bool) -> bool:
        """Whether a request ended its user's turn.

        answer: its tokens. has_stopped: by itself, not for its length or because it was aborted.
        is_json: it had to follow a JSON schema.
        """
        if not self._call_tokens:
            return False
        if not self._call_tokens.isdisjoint(answer):
            self._has_seen_calls = True
            return False
        return self._has_seen_calls and has_stopped and not is_json
