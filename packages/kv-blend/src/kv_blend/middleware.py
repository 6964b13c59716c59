"""Plans for clients that send text: marks in a prompt become segments, within the engine's OpenAI server.

    vllm serve MODEL --middleware kv_blend.middleware.SegmentsMiddleware …

SGLang's server has it wherever kv-blend is installed.

A request that has `kv_blend` in its body gives a separator, which stands before, between and behind the documents of
its prompt or messages. The server itself tokenizes the prompt, the middleware finds the separators among the tokens,
and the request goes on with the plan and its salt. Every other request passes as it came.
"""

import asyncio
import copy
import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from kv_core.asgi import App, Message, Receive, Scope, Send, endpoint_of, read_body, replay, with_length
from kv_core.errors import InputError

from kv_blend.plan import FIELDS, KEY, MAX_QUESTION, Engine, request_fields

_PATHS: Final = ("/v1/completions", "/v1/chat/completions")
_TOKENIZE: Final = "/tokenize"
_TOKENIZE_FIELDS: Final = (
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
"""Fields of a request that decide its prompt's tokens and that `/tokenize` also accepts."""
_TEMPLATE_FIELDS: Final = ("documents", "reasoning_effort")
"""Fields of a chat request that vLLM passes to the chat template, and SGLang's `/tokenize` takes as they are."""
_MAX_SEPARATOR: Final = 256
_RESERVED: Final = {"edits", "engine", "question", "segments", "tenant", "tokens"}
"""What the middleware fills in itself."""


class SegmentsMiddleware:
    """An ASGI application in front of the engine's."""

    def __init__(self, app: App, engine: Engine = "vllm") -> None:
        self._app = app
        self._engine: Engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoint_of(scope, _PATHS)
        if not endpoint:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:  # the client has gone
            return
        if f'"{KEY}"'.encode() in body:
            try:
                body = await self._planned(scope, str(scope["path"]).removesuffix(endpoint), body)
            except InputError as error:
                await _refuse(send, str(error))
                return
        await self._app(with_length(scope, body), replay(body, receive), send)

    async def _planned(self, scope: Scope, root: str, body: bytes) -> bytes:
        """The body with a plan and its salt in place of the client's options.

        Raises:
            InputError: the options are wrong, or the separators are not to be found among the prompt's tokens.
        """
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            return body  # the engine says what is wrong with it
        if not isinstance(request, dict) or KEY not in request:
            return body
        options = request.pop(KEY)
        field = FIELDS[self._engine]
        tenant, params = request.get("cache_salt") or "", request.get(field) or {}
        if not isinstance(options, dict):
            raise InputError(f"{KEY} is not an object")
        if not isinstance(tenant, str) or not isinstance(params, dict):
            raise InputError(f"cache_salt is not a text, or {field} is not an object")
        separator = options.pop("separator", None)
        if not isinstance(separator, str) or not separator.strip() or len(separator) > _MAX_SEPARATOR:
            raise InputError(
                f"{KEY}.separator is not a text of 1 to {_MAX_SEPARATOR} characters, or is only white space"
            )
        if reserved := _RESERVED & options.keys():
            raise InputError(f"{KEY}: {', '.join(sorted(reserved))} cannot be given together with a separator")
        marks = sum(text.count(separator) for text in _texts(request))
        if marks < 2:
            raise InputError(
                f"the prompt has {marks} separators {separator!r}; there is one before and one behind each document"
            )
        tokens = await self._tokens(scope, root, self._for_tokenize(request))
        for text in _forms(separator):
            query = {"model": request.get("model"), "prompt": text, "add_special_tokens": False}
            mark = await self._tokens(scope, root, query)
            places = list(_places(tokens, mark))
            if len(places) == marks:
                break
        else:
            raise InputError(
                f"the {marks} separators {separator!r} cannot be found among the prompt's tokens, because the "
                "tokenizer joins them to the text around them: use one that it keeps apart, such as a line of its "
                "own or a special token"
            )
        between = itertools.pairwise(places)
        segments = [(first + len(mark), end) for first, end in between if end > first + len(mark)]
        if options.get("select") == "question":
            options["question"] = tokens[places[-1] :][-MAX_QUESTION:]
        fields = request_fields(segments, tokens=len(tokens), tenant=tenant, engine=self._engine, **options)
        request["cache_salt"] = fields["cache_salt"]
        request[field] = params | fields[field]
        return json.dumps(request).encode()

    def _for_tokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        """The body of a request to `/tokenize` for the same prompt."""
        query = {name: request.get(name) for name in _TOKENIZE_FIELDS}
        in_template = {name: request[name] for name in _TEMPLATE_FIELDS if request.get(name)}
        if self._engine == "sglang":
            return query | in_template
        if "messages" in request and in_template:
            query["chat_template_kwargs"] = in_template | (query["chat_template_kwargs"] or {})
        return query

    async def _tokens(self, scope: Scope, root: str, query: dict[str, Any]) -> list[int]:
        """What the server answers at `/tokenize`.

        Raises:
            InputError: it refuses.
        """
        body = json.dumps({name: value for name, value in query.items() if value is not None}).encode()
        inner = with_length(scope, body) | {"path": root + _TOKENIZE, "raw_path": (root + _TOKENIZE).encode()}
        inner |= {"query_string": b"", "state": copy.copy(scope.get("state", {}))}
        status, answer = 0, bytearray()

        async def keep(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))

        async def nothing_more() -> Message:
            await asyncio.Event().wait()  # the engine reads any further message as a disconnect, and cancels
            raise AssertionError

        await self._app(inner, replay(body, nothing_more), keep)
        try:
            tokens = json.loads(bytes(answer))["tokens"] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            tokens = None
        if not isinstance(tokens, list):
            raise InputError(
                f"the prompt cannot be tokenized (status {status}): {bytes(answer[:1000]).decode(errors='replace')}"
            )
        return tokens


def _texts(request: dict[str, Any]) -> Iterator[str]:
    """The texts of a prompt, and of messages' contents and their parts."""
    messages = request.get("messages")
    contents = (
        [message.get("content") for message in messages if isinstance(message, dict)]
        if isinstance(messages, list)
        else []
    )
    for content in (request.get("prompt"), *contents):
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def _forms(separator: str) -> Iterator[str]:
    """The separator, and with other white space around it: tokenizers join white space to the text beside it."""
    core = separator.strip()
    yield from dict.fromkeys((separator, core, f" {core}", f"\n{core}"))


def _places(tokens: list[int], mark: list[int]) -> Iterator[int]:
    """Where the mark stands, without overlaps. None if the mark is empty."""
    at = 0
    with suppress(ValueError):  # there is no further one
        while mark:
            at = tokens.index(mark[0], at)
            if tokens[at : at + len(mark)] == mark:
                yield at
                at += len(mark)
            else:
                at += 1


async def _refuse(send: Send, why: str) -> None:
    """As the engine refuses a request."""
    error = {"error": {"message": why, "type": "BadRequestError", "param": KEY, "code": 400}}
    body = json.dumps(error).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
