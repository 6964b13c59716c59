"""Quiet steps: steps in which no request can complete a chunk, so that requests need not be examined one by one.

Most steps of an engine decode one token for each request. After a step in which all requests were examined, it is known
how many more tokens each needs before something of it could be stored. The smallest of these numbers says how many of
the following steps are quiet. So a step costs the same for one request as for hundreds.
"""

from typing import Final

from kv_core.shape import ConnectShape

from kv_connect.halves.inputs import RequestTokens

_NEVER: Final = 1 << 62


class QuietSteps:
    """The quiet steps of one scheduler. Not thread-safe."""

    def __init__(self, shape: ConnectShape) -> None:
        self._shape = shape
        self._quiet_tokens = 0

    def passes(self, tokens: int) -> bool:
        """Whether a step that computes at most `tokens` tokens of any request completes nothing. It may contain only
        requests that were examined.
        """
        self._quiet_tokens -= tokens
        return self._quiet_tokens > 0

    def begin(self) -> None:
        """Begin a step in which every request is examined."""
        self._quiet_tokens = _NEVER

    def looked_at(self, request: RequestTokens, computed_tokens: int) -> None:
        """A request of that step was examined: after the step it has `computed_tokens`, and the chunks that they
        complete are stored."""
        if (needed := tokens_to_store(self._shape, request, computed_tokens)) < self._quiet_tokens:
            self._quiet_tokens = needed

    def end(self) -> None:
        """Something other than tokens has changed: examine every request in the next step."""
        self._quiet_tokens = 0


def tokens_to_store(shape: ConnectShape, request: RequestTokens, computed_tokens: int) -> int:
    """The least number of further tokens of this request after which a step may have a chunk of it to store.

    A computed chunk whose last tokens are not known yet (in a step scheduled ahead) may be stored by any step.
    """
    needed, chunk_tokens = _NEVER, shape.chunk_tokens
    limit = request.controls.storable(request.keep_tokens) if shape.stores else 0
    boundary = (computed_tokens // chunk_tokens + 1) * chunk_tokens
    if boundary <= limit:
        needed = boundary - computed_tokens
    if min(computed_tokens, limit) // chunk_tokens > request.kept_tokens // chunk_tokens:
        needed = 1
    if request.controls.hands_over_tokens > computed_tokens:
        needed = min(needed, request.controls.hands_over_tokens - computed_tokens)
    return needed
