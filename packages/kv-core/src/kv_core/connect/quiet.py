"""Steps in which no request can complete a chunk, so that nobody needs to look at each.

Most steps of an engine decode one token for each of its requests. After a step in which all of them were looked at it
is known how many more tokens each needs before something of it could be stored, and the least of these numbers says for
how many steps there is nothing to look at. So a step costs the same for one request as for hundreds.
"""

from typing import Final

from kv_core.connect.inputs import RequestTokens
from kv_core.connect.shape import ConnectShape

_NEVER: Final = 1 << 62


class QuietSteps:
    """The quiet steps of one scheduler. Not thread-safe."""

    def __init__(self, shape: ConnectShape) -> None:
        self._shape = shape
        self._left = 0

    def passes(self, tokens: int) -> bool:
        """Whether a step that computes at most `tokens` tokens of any request completes nothing. Only requests that
        were looked at may be in it."""
        self._left -= tokens
        return self._left > 0

    def begin(self) -> None:
        """A step in which every request is looked at."""
        self._left = _NEVER

    def looked_at(self, request: RequestTokens, computed_tokens: int) -> None:
        """A request of that step, which ends at `computed_tokens`, and what it completes is stored."""
        if (left := tokens_to_store(self._shape, request, computed_tokens)) < self._left:
            self._left = left

    def end(self) -> None:
        """Something else than tokens has changed: look at every request of the next step."""
        self._left = 0


def tokens_to_store(shape: ConnectShape, request: RequestTokens, computed_tokens: int) -> int:
    """After at least how many more tokens of this request a step may have something of it to store.

    A chunk that is computed and whose last tokens are not known yet (a step scheduled ahead) may be stored by any step.
    """
    left, chunk_tokens = _NEVER, shape.chunk_tokens
    limit = request.controls.storable(request.keep_tokens) if shape.stores else 0
    boundary = (computed_tokens // chunk_tokens + 1) * chunk_tokens
    if boundary <= limit:
        left = boundary - computed_tokens
    if min(computed_tokens, limit) // chunk_tokens > request.kept_tokens // chunk_tokens:
        left = 1
    if request.controls.hands_over_tokens > computed_tokens:
        left = min(left, request.controls.hands_over_tokens - computed_tokens)
    return left
