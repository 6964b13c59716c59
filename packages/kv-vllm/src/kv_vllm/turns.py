"""Which answers call a tool, recognised by their tokens: agents come back from a tool within seconds, and users
only once they have read.

Templates of models that call tools mark a call with tokens of their own, such as `</tool_call>`, `<|python_tag|>` or
`<|call|>`. Those are among the tokens that a tokenizer has in addition to its vocabulary. A model that writes its calls
as plain text has none: its answers tell nothing. Nor do those of an engine that has not seen a call yet, nor those that
vLLM has follow a JSON schema, as it does where a client requires a call: that is JSON alone.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

from kv_core.log import limited_logger
from vllm.v1.request import RequestStatus

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
    def of(cls, model_config: Any) -> "Turns":
        """For the model's tokenizer; if it cannot be read, no turn is known to have ended."""
        try:
            if model_config.skip_tokenizer_init:
                return cls()
            from vllm.tokenizers import cached_tokenizer_from_config

            added = cached_tokenizer_from_config(model_config).get_added_vocab()
            return cls(number for text, number in added.items() if marks_a_call(text))
        except Exception as error:  # noqa: BLE001  # a tokenizer may bring code of its own
            _log.warning("the tokenizer cannot be read, so calls of tools are not recognised: %s", error)
            return cls()

    def has_ended(self, request: Any) -> bool:
        """Whether this request, which has finished, ended its user's turn."""
        if not self._call_tokens:
            return False
        if not self._call_tokens.isdisjoint(request.output_token_ids):
            self._has_seen_calls = True
            return False
        sampling = request.sampling_params
        structure = None if sampling is None else sampling.structured_outputs
        if structure is not None and structure.json is not None:
            return False
        return self._has_seen_calls and request.status is RequestStatus.FINISHED_STOPPED
