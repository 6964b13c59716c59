"""Streaming sessions: requests of vLLM whose prompt grows while they live.

When a turn has ended, vLLM keeps the computed tokens, drops the last sampled one, and appends the next input; all of
that is the prompt from then on. No stored chunk becomes wrong: only computed tokens are stored, and the prompt of a
lookup is computed before the turn ends. The exception is a session that lost its blocks before its next input arrived:
vLLM then restarts it, and so do we.
"""

from dataclasses import replace
from typing import Any

from kv_connect.halves.inputs import RequestTokens


class Sessions:
    """The sessions of one scheduler, with the length of their prompts when they were last examined."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[str, int] = {}

    def is_another(self, request: Any) -> bool:
        """Whether vLLM restarts the session with a different prompt. Called when vLLM looks the request up, which it
        does only if the request has no blocks.
        """
        return request.resumable and self._update(request) not in (None, request.num_prompt_tokens)

    def follow(self, output: Any, requests: dict[str, tuple[Any, RequestTokens]]) -> list[str]:
        """Give the sessions that continue in this step their longer prompts. Returns those that can no longer be named,
        because media came with their input.

        output: vLLM's `SchedulerOutput`.
        requests: vLLM's and our requests, by id.
        """
        dropped = []
        for scheduled in output.scheduled_new_reqs:
            request, tokens = requests.get(scheduled.req_id, (None, None))
            if request is None or tokens is None or not request.resumable:
                continue
            previous_tokens = self._update(request)
            if request.mm_features:
                dropped.append(scheduled.req_id)
            elif tokens.keep_tokens == previous_tokens:  # else generated tokens are stored as well
                requests[scheduled.req_id] = (request, replace(tokens, keep_tokens=request.num_prompt_tokens))
        return dropped

    def forget(self, request_id: str) -> None:
        self._prompt_tokens.pop(request_id, None)

    def _update(self, request: Any) -> int | None:
        """Note the length of the session's prompt; returns the length noted before."""
        previous_tokens = self._prompt_tokens.get(request.request_id)
        self._prompt_tokens[request.request_id] = request.num_prompt_tokens
        return previous_tokens
