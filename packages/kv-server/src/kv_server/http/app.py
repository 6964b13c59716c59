"""The application: every operation at its path, the status page, and the guard around them."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kv_server.http import clear, drain, openapi, prefixes, route, state, tenants
from kv_server.http.guard import Guard
from kv_server.http.operation import Operation, perform
from kv_server.http.page import Page
from kv_server.http.problem import Problem, problem_response
from kv_server.http.relay import Relay
from kv_server.http.tenants import TenantNames


def make_app(relay: Relay, *, names: TenantNames, token: str, hosts: frozenset[str], archive_directory: str) -> ASGIApp:
    """token: empty if nothing may be changed.
    hosts: host names that requests may have; empty: any.
    names: of tenants.
    archive_directory: for exported prefixes; empty: none.
    """
    operations = [
        *state.operations(relay),
        *clear.operations(relay, names),
        *drain.operations(relay),
        *tenants.operations(relay, names),
        *prefixes.operations(relay, relay.jobs, archive_directory),
        *route.operations(relay),
    ]
    described = msgspec.json.encode(openapi.document(operations))

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
    return Guard(app, hosts)


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
