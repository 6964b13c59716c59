"""Plans for clients that send text: marks in a prompt become segments, within vLLM's OpenAI server.

    vllm serve MODEL --middleware kv_blend.middleware.SegmentsMiddleware …

A request that has `kv_blend` in its body gives a separator, which stands before, between and behind the documents of
its prompt or messages. The server itself tokenizes the prompt, the middleware finds the separators among the tokens,
and the request goes on with the plan and its salt. Every other request passes as it came.
"""

import asyncio
import copy
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final

from kv_core.errors import InputError

from kv_blend.plan import KEY, request_fields

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_PATHS: Final = ("/v1/completions", "/v1/chat/completions")
_TOKENIZE: Final = "/tokenize"
_OF_TOKENIZE: Final = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "messages",
    "model",
    "prompt",
    "tools",
)
"""What of a request decides its prompt's tokens, and vLLM's `/tokenize` takes as well."""
_OF_TEMPLATE: Final = ("documents", "reasoning_effort")
"""What vLLM passes on to the chat template by these names."""
_MAX_SEPARATOR: Final = 256


class SegmentsMiddleware:
    """An ASGI application in front of vLLM's."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = str(scope.get("path", ""))
        served = next((each for each in _PATHS if path.endswith(each)), "")
        if scope["type"] != "http" or scope.get("method") != "POST" or not served:
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:  # the client has gone
            return
        if f'"{KEY}"'.encode() in body:
            try:
                body = await self._planned(scope, path.removesuffix(served), body)
            except InputError as error:
                await _refuse(send, str(error))
                return
        await self._app(_with_length(scope, body), _replay(body, receive), send)

    async def _planned(self, scope: MutableMapping[str, Any], root: str, body: bytes) -> bytes:
        """The body with a plan and its salt in place of the client's options.

        Raises:
            InputError: the options are wrong, or the separators are not to be found among the prompt's tokens.
        """
        try:
            request = json.loads(body)
        except ValueError:
            return body  # vLLM says what is wrong with it
        if not isinstance(request, dict) or KEY not in request:
            return body
        options = request.pop(KEY)
        if not isinstance(options, dict):
            raise InputError(f"{KEY} is not an object")
        separator = options.pop("separator", None)
        if not isinstance(separator, str) or not 0 < len(separator) <= _MAX_SEPARATOR:
            raise InputError(f"{KEY}.separator is not a text of 1 to {_MAX_SEPARATOR} characters")
        if reserved := {"segments", "tokens"} & options.keys():
            raise InputError(f"{KEY}: {', '.join(sorted(reserved))} cannot be given together with a separator")
        given = [*_texts(request.get("messages")), *_texts(request.get("prompt"))]
        marks = sum(text.count(separator) for text in given)
        if marks < 2:
            raise InputError(
                f"the prompt has {marks} separators {separator!r}; there is one before and one behind each document"
            )
        tokens = await self._tokens(scope, root, _for_tokenize(request))
        for text in _forms(separator):
            asked = {"model": request.get("model"), "prompt": text, "add_special_tokens": False}
            mark = await self._tokens(scope, root, asked)
            places = list(_places(tokens, mark))
            if len(places) == marks:
                break
        else:
            raise InputError(
                f"the {marks} separators {separator!r} are not to be found among the prompt's tokens, where they are "
                "joined to the text around them: use one that the tokenizer keeps apart, such as a line of its own or "
                "a special token"
            )
        between = itertools.pairwise(places)
        segments = [(first + len(mark), end) for first, end in between if end > first + len(mark)]
        fields = request_fields(segments, tokens=len(tokens), tenant=request.get("cache_salt") or "", **options)
        request["cache_salt"] = fields["cache_salt"]
        request["kv_transfer_params"] = (request.get("kv_transfer_params") or {}) | fields["kv_transfer_params"]
        return json.dumps(request).encode()

    async def _tokens(self, scope: MutableMapping[str, Any], root: str, asked: dict[str, Any]) -> list[int]:
        """What the server answers at `/tokenize`.

        Raises:
            InputError: it refuses.
        """
        body = json.dumps({name: value for name, value in asked.items() if value is not None}).encode()
        inner = _with_length(scope, body) | {"path": root + _TOKENIZE, "raw_path": (root + _TOKENIZE).encode()}
        inner |= {"query_string": b"", "state": copy.copy(scope.get("state", {}))}
        status, answer = 0, bytearray()

        async def keep(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))

        async def nothing_more() -> Message:
            await asyncio.Event().wait()  # vLLM takes an answer for the news that its client has gone, and stops
            raise AssertionError

        await self._app(inner, _replay(body, nothing_more), keep)
        try:
            tokens = json.loads(bytes(answer))["tokens"] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            tokens = None
        if not isinstance(tokens, list):
            raise InputError(
                f"the prompt cannot be tokenized (status {status}): {bytes(answer[:1000]).decode(errors='replace')}"
            )
        return tokens


def _for_tokenize(request: dict[str, Any]) -> dict[str, Any]:
    asked = {name: request.get(name) for name in _OF_TOKENIZE}
    if "messages" in request and (of_template := {name: request[name] for name in _OF_TEMPLATE if request.get(name)}):
        asked["chat_template_kwargs"] = of_template | (asked["chat_template_kwargs"] or {})
    return asked


def _texts(given: Any) -> Iterator[str]:
    """All texts that a prompt or messages consist of."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, dict):
        for name in ("content", "text"):
            yield from _texts(given.get(name))
    elif isinstance(given, list):
        for each in given:
            yield from _texts(each)


def _forms(separator: str) -> Iterator[str]:
    """What of a separator may be tokens of its own: tokenizers join white space to what is around it."""
    core = separator.strip()
    yield from dict.fromkeys(text for text in (separator, core, f" {core}", f"\n{core}") if text)


def _places(tokens: Sequence[int], mark: Sequence[int]) -> Iterator[int]:
    """Where the mark stands, without overlaps."""
    at = 0
    while at + len(mark) <= len(tokens):
        if tokens[at : at + len(mark)] == mark:
            yield at
            at += len(mark)
        else:
            at += 1


async def _read(receive: Receive) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes, then: Receive) -> Receive:
    """The body in one message, and then what else comes, such as that the client has gone."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await then()

    return receive


def _with_length(scope: MutableMapping[str, Any], body: bytes) -> dict[str, Any]:
    changed = (b"content-length", b"transfer-encoding")
    headers = [header for header in scope["headers"] if header[0].lower() not in changed]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}


async def _refuse(send: Send, why: str) -> None:
    """As vLLM refuses a request."""
    error = {"error": {"message": why, "type": "BadRequestError", "param": KEY, "code": 400}}
    body = json.dumps(error).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
