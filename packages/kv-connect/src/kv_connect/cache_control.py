"""Anthropic's `cache_control` marks become the option `retain_s`, within the engine's HTTP server.

    vllm serve MODEL --middleware kv_connect.cache_control.CacheControlMiddleware …

SGLang's server has it with `python -m kv_sglang flags --cache-control`.

Clients such as coding agents mark what will be sent again, with a time to live of five minutes or an hour. Engines
ignore the marks. Here a request that has any is retained for the longest of their times, as far as its tenant's share
of the pool allows (docs/requests.md): all of its prompt, because what follows a mark costs little beside it. A request
that says `retain_s` itself, one without marks, and one that is not JSON pass as they came.
"""

import json
from collections.abc import Iterator
from typing import Any, Final, Literal

from kv_core.asgi import App, Receive, Scope, Send, endpoint_of, read_body, replay, with_length

Engine = Literal["vllm", "sglang"]
_ENDPOINTS: Final = ("/v1/messages", "/v1/chat/completions", "/v1/completions")
_SECONDS: Final = {None: 300, "5m": 300, "1h": 3600}
"""By `ttl`, of which Anthropic has these two."""
_FIELD: Final = "kv_transfer_params"
_OPTIONS: Final = "kv_tiers"
RETAIN_S: Final = "kv_tiers.retain_s"
"""In the scope of a request to SGLang, whose endpoint for Anthropic's messages drops all fields that it does not know:
what the marks ask for, for the plugin to read where requests enter (`kv_sglang.plugin`)."""


class CacheControlMiddleware:
    """An ASGI application in front of the engine's."""

    def __init__(self, app: App, engine: Engine = "vllm") -> None:
        self._app = app
        self._is_vllm = engine == "vllm"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not endpoint_of(scope, _ENDPOINTS):
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:
            return
        if request := _marked(body):
            seconds = max(_times(request), default=0)
            if not self._is_vllm:
                scope = {**scope, RETAIN_S: seconds}
            elif (params := retained(request.get(_FIELD), seconds)) is not None:
                body = json.dumps(request | {_FIELD: params}).encode()
        await self._app(with_length(scope, body), replay(body, receive), send)


def retained(params: object, seconds: int) -> dict[str, Any] | None:
    """A request's options for connectors, with `retain_s`. None: they stay as they are, because there is nothing to
    retain, they say it themselves, or the engine has to say what is wrong with them."""
    params = params or {}
    options = params.get(_OPTIONS, {}) if isinstance(params, dict) else None
    if not seconds or not isinstance(params, dict) or not isinstance(options, dict) or "retain_s" in options:
        return None
    return {**params, _OPTIONS: {**options, "retain_s": seconds}}


def _marked(body: bytes) -> dict[str, Any]:
    """The request, if it may have marks."""
    if b'"cache_control"' not in body:
        return {}
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return {}  # the engine says what is wrong with it
    return request if isinstance(request, dict) else {}


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
