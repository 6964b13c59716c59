"""Anthropic's `cache_control` marks become the option `retain_s`, within the engine's HTTP server.

    vllm serve MODEL --middleware kv_connect.cache_control.CacheControlMiddleware …

Clients such as coding agents mark what will be sent again, with a time to live of five minutes or an hour. Engines
ignore the marks. Here a request that has any is retained for the longest of their times, as far as its tenant's share
of the pool allows (docs/requests.md): all of its prompt, because what follows a mark costs little beside it. A request
that says `retain_s` itself, one without marks, and one that is not JSON pass as they came.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from kv_core.asgi import App, Receive, Scope, Send, endpoint_of, read_body, replay, with_length

_ENDPOINTS: Final = ("/v1/messages", "/v1/chat/completions", "/v1/completions")
_SECONDS: Final = {None: 300, "5m": 300, "1h": 3600}
"""By `ttl`, of which Anthropic has these two."""
_FIELD: Final = "kv_transfer_params"
_OPTIONS: Final = "kv_tiers"


class CacheControlMiddleware:
    """An ASGI application in front of vLLM's."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not endpoint_of(scope, _ENDPOINTS):
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:
            return
        if b'"cache_control"' in body:
            body = _retained(body)
        await self._app(with_length(scope, body), replay(body, receive), send)


def _retained(body: bytes) -> bytes:
    """The body with what its marks ask for in the engine's terms."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body  # the engine says what is wrong with it
    if not isinstance(request, dict):
        return body
    params = request.get(_FIELD) or {}
    options = params.get(_OPTIONS, {}) if isinstance(params, dict) else None
    seconds = max(_times(request), default=0)
    if not seconds or not isinstance(options, dict) or "retain_s" in options:
        return body
    request[_FIELD] = {**params, _OPTIONS: {**options, "retain_s": seconds}}
    return json.dumps(request).encode()


def _times(request: dict[str, Any]) -> Iterator[int]:
    """The time to live of each mark, wherever it is: in tools, the system prompt, messages, or at the top."""
    unseen: list[object] = [request]
    while unseen:
        part = unseen.pop()
        if isinstance(part, dict):
            mark = part.get("cache_control")
            if isinstance(mark, dict) and mark.get("type") == "ephemeral" and isinstance(mark.get("ttl"), str | None):
                yield _SECONDS.get(mark.get("ttl"), 0)
            unseen += part.values()
        elif isinstance(part, list):
            unseen += part
