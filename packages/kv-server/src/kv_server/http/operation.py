"""One operation of the API: its types, how a request becomes a call, and how the outcome becomes a response.

The OpenAPI document (`openapi_document`) is generated from what is enforced here.
"""

import asyncio
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec
from kv_core.errors import InputError
from kv_tiers.options import in_words
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response


class ProblemDocument(msgspec.Struct, frozen=True):
    """title: the status in words. detail: what was wrong with this request, and what to do."""

    title: str
    status: int
    detail: str


class Problem(Exception):  # noqa: N818  # an answer, not a fault of ours
    """Raised while a request is answered, and becomes its answer: a problem document (RFC 9457) that says what was
    wrong, and what to do about it."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})


def problem_response(problem: Problem) -> Response:
    document = ProblemDocument(HTTPStatus(problem.status).phrase, problem.status, problem.detail)
    return Response(
        msgspec.json.encode(document), problem.status, problem.headers, media_type="application/problem+json"
    )


MAX_BODY_BYTES: Final = 4 << 20
"""Room for thirty thousand keys."""
MAX_READ_BYTES: Final = 4 * MAX_BODY_BYTES
"""A body that is too long is still read up to this size: closing a connection with unread bytes resets it, and then the
client may never see the answer."""
BODY_S: Final = 10.0
"""Seconds that a body may take to arrive."""


def _number(text: str) -> float:
    """In the OpenAPI document 4096.0 is an integer, so it is one here."""
    value = float(text)
    return int(value) if value.is_integer() else value


_BODIES: Final = msgspec.json.Decoder(float_hook=_number)


@dataclass(frozen=True, slots=True)
class Operation:
    """method, path, summary: as in the document.

    answer_with: called with the body, if there is one, and the path's parameters by name; it may raise `Problem` and
        `InputError`. A coroutine function, but of an endpoint of another package an ordinary one (`endpoints`).
    answer: the type that it returns; a `Response` is sent as it is.
    body: the type of the body; None if the operation takes none.
    status: of success.
    failures: the statuses of its own problems.
    """

    method: str
    path: str
    summary: str
    answer_with: Callable[..., Any]
    answer: Any
    body: type[msgspec.Struct] | None = None
    status: int = 200
    failures: tuple[int, ...] = ()

    @property
    def changes_something(self) -> bool:
        return self.method != "GET"

    @property
    def needs_body(self) -> bool:
        return self.body is not None and any(field.required for field in msgspec.structs.fields(self.body))


async def perform(operation: Operation, request: Request, token: str) -> Response:
    """Raises `Problem`: the request is wrong, or cannot be granted now."""
    if operation.changes_something:
        _authorize(request, token)
    arguments = []
    if operation.body is not None:
        arguments.append(_decoded(operation, request, await _body(request)))
    try:
        answer = await operation.answer_with(*arguments, **request.path_params)
    except InputError as error:
        raise Problem(400, str(error)) from None
    if isinstance(answer, Response):
        return answer
    return Response(msgspec.json.encode(answer), operation.status, media_type="application/json")


def _authorize(request: Request, token: str) -> None:
    if not token:
        raise Problem(403, "this server has no token, so nothing can be changed; start it with http.token_file")
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), token.encode()):
        raise Problem(
            401,
            "show the token of the server's http.token_file: Authorization: Bearer TOKEN",
            {"www-authenticate": 'Bearer realm="kv-server"'},
        )


async def _body(request: Request) -> bytes:
    """The whole body, within its limits."""
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:12]) > MAX_READ_BYTES:
        raise _too_long()
    body, read = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                read += len(part)
                if read > MAX_READ_BYTES:
                    raise _too_long()
                if read <= MAX_BODY_BYTES:
                    body += part
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {BODY_S:g} s", {"connection": "close"}) from None
    except ClientDisconnect:
        raise Problem(400, "the body ended early") from None
    if read > MAX_BODY_BYTES:
        raise _too_long()
    return bytes(body)


def _too_long() -> Problem:
    return Problem(413, f"a body has at most {MAX_BODY_BYTES} bytes; name fewer keys at once", {"connection": "close"})


def _decoded(operation: Operation, request: Request, body: bytes) -> msgspec.Struct:
    assert operation.body is not None
    if not body and not operation.needs_body:
        return operation.body()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise Problem(415, "write the body as JSON, and say so: Content-Type: application/json (curl --json)")
    try:
        return msgspec.convert(_BODIES.decode(body), type=operation.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is not what {operation.path} takes: {in_words(error)}") from None
