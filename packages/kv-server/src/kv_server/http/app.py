"""The application: every operation at its path, described by an OpenAPI document, and the status page."""

import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kv_server.http.document import openapi_document
from kv_server.http.endpoints import Endpoints
from kv_server.http.explain import explain_operations
from kv_server.http.hints import hint_operations
from kv_server.http.operation import Operation, Problem, perform, problem_response
from kv_server.http.operations import (
    clear_operations,
    drain_operations,
    freeze_operations,
    quota_operations,
    reload_operations,
    route_operations,
    state_operations,
)
from kv_server.http.prefixes import prefix_operations
from kv_server.http.relay import Relay

_FILE: Final = Path(__file__).with_name("page.html")


class Page:
    """The status page at /: a single file that polls /status every second.

    It loads nothing else. Its content security policy allows its own script and style only, by hash.
    """

    def __init__(self) -> None:
        self._text = _FILE.read_text()
        script, style = (self._hash_of(tag) for tag in ("script", "style"))
        self._policy = (
            f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
            "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )

    async def answer(self, request: Request) -> Response:
        headers = {"content-security-policy": self._policy}
        return Response(self._text, headers=headers, media_type="text/html")

    def _hash_of(self, tag: str) -> str:
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", self._text, flags=re.DOTALL)
        return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"


def make_app(relay: Relay, *, token: str, archive_directory: str, endpoints: Sequence[Operation] = ()) -> ASGIApp:
    """token: empty if nothing may be changed.
    archive_directory: for exported prefixes; empty: none.
    endpoints: as `read_endpoints` returns them.
    """
    operations = [
        *state_operations(relay),
        *clear_operations(relay),
        *drain_operations(relay),
        *freeze_operations(relay),
        *reload_operations(relay),
        *quota_operations(relay),
        *prefix_operations(relay, archive_directory),
        *hint_operations(relay),
        *route_operations(relay),
        *explain_operations(relay),
        *Endpoints(relay).bound(endpoints),
    ]
    described = msgspec.json.encode(openapi_document(operations))

    async def document(request: Request) -> Response:
        return Response(described, media_type="application/json")

    by_path = sorted(operations, key=lambda operation: operation.path)
    routes = [
        _route(path, list(of_path), token) for path, of_path in groupby(by_path, key=lambda operation: operation.path)
    ]
    routes += [Route("/", Page().answer), Route("/openapi.json", document)]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: _no_such, Problem: _problem, Exception: _internal_error}
    )
    app.router.redirect_slashes = False  # curl takes a redirection for success, and nothing would have been done
    return app


def _route(path: str, operations: Sequence[Operation], token: str) -> Route:
    """All methods of one path, so that the refusal of another method lists them."""
    by_method = {operation.method: operation for operation in operations}

    async def endpoint(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await perform(by_method[method], request, token)

    # Paths are matched after %2F has become a slash, which the name of a tenant may contain.
    return Route(path.replace("{tenant}", "{tenant:path}"), endpoint, methods=list(by_method))


async def _problem(request: Request, problem: Any) -> Response:
    return problem_response(problem)


async def _internal_error(request: Request, error: Exception) -> Response:
    """The guard, which the error reaches next, logs it."""
    return problem_response(Problem(500, "a bug in the server; its log has the rest"))


async def _no_such(request: Request, error: Any) -> Response:
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 404:
        detail = f"there is nothing at {request.url.path[:200]}; GET /openapi.json lists what there is"
    else:
        detail = f"{request.method} is not allowed for {request.url.path}; use {headers.get('allow')}"
    return problem_response(Problem(error.status_code, detail, headers))
