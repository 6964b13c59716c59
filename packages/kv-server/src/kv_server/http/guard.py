"""Checks around every request: the host name before it, a time limit, and safe headers on the answer."""

import asyncio
from ipaddress import ip_address
from typing import Final

from kv_core.log import limited_logger
from kv_tiers.host_port import LOOPBACK_NAME
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kv_server.http.connections import HEAD_BYTES, IS_HEALTH_ONLY, IS_LAST
from kv_server.http.problem import Problem, problem_response

_log = limited_logger(__name__)

REQUEST_S: Final = 60.0
"""How long answering may take, even for a client that reads slowly."""

_HEALTH: Final = {"/healthz", "/readyz"}
_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_NOTHING_LOADS: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _check_head(scope: Scope) -> None:
    """The limit that uvicorn is given is of a head that comes in pieces: one that comes at once may be as long as what
    is read at once."""
    names_and_values = sum(len(name) + len(value) + len(b": \r\n") for name, value in scope["headers"])
    if names_and_values + len(scope["raw_path"]) + len(scope["query_string"]) > HEAD_BYTES:
        raise Problem(431, f"the request's line and headers have more than {HEAD_BYTES} bytes")


class Guard:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        """hosts: host names that requests may have; empty: any."""
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"nothing is served over {scope['type']}")
        connection = scope.get("state", {})
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("content-security-policy", _NOTHING_LOADS)
                if connection.get(IS_LAST):
                    headers["connection"] = "close"
            await send(message)

        try:
            async with asyncio.timeout(REQUEST_S):
                _check_head(scope)
                self._check_host(scope)
                if connection.get(IS_HEALTH_ONLY) and scope["path"] not in _HEALTH:
                    raise Problem(503, "there are as many connections as allowed; ask again", {"retry-after": "1"})
                await self._app(scope, receive, send_with_headers)
        except Problem as problem:
            await problem_response(problem)(scope, receive, send_with_headers)
        except TimeoutError:
            _log.warning("a request for %s is abandoned after %g s", scope["path"], REQUEST_S)
            if not started:
                await problem_response(Problem(503, f"no answer within {REQUEST_S:g} s; ask again later"))(
                    scope, receive, send_with_headers
                )
        except Exception:  # noqa: BLE001  # whatever it is, it affects only this request
            _log.exception("a request for %s hit a bug", scope["path"])

    def _check_host(self, scope: Scope) -> None:
        """Refuse DNS rebinding: any site can have its own name resolve to our address, but the browser still sends that
        name. The address itself is no such name: a health check may know nothing else."""
        if not self._hosts:
            return
        host = Headers(scope=scope).get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if scope["path"] in _HEALTH and (name.lower() in ("", LOOPBACK_NAME) or _is_address(name)):
            return  # no name that a site could have: probes send what they connect to, or nothing
        own_address = (scope.get("server") or ("",))[0]
        if name.lower() not in self._hosts and (not name or name != own_address):
            raise Problem(
                421, f"this server is not called {name[:100]!r}; use localhost, or add the name to http.hosts"
            )
