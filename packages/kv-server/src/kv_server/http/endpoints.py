"""Endpoints of other packages, at /endpoints/NAME/…: entry points in the group `kv_server.endpoints` that the settings
name, each an `EndpointFactory`.

Their functions are ordinary ones, `(view, body if there is one, **parameters of the path) → answer`, and run on a
thread each: one that blocks or fails delays neither engines nor other requests.
"""

import asyncio
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
from kv_core.errors import ConfigError, InputError
from kv_core.log import limited_logger
from kv_core.plugins import load_plugin, name_and_parameters
from kv_tiers.cache.local import LocalCache
from kv_tiers.threads import start_thread
from starlette.responses import Response

from kv_server.config import ServerConfig
from kv_server.http.document import openapi_document
from kv_server.http.operation import Operation, Problem
from kv_server.http.relay import ANSWER_S, Relay
from kv_server.report import Report
from kv_server.wire import Format

_log = limited_logger(__name__)

GROUP: Final = "kv_server.endpoints"
MAX_RUNNING: Final = 8
"""Requests for endpoints that are answered at once."""
_METHODS: Final = ("DELETE", "GET", "PATCH", "POST", "PUT")
_NAME: Final = "[A-Za-z0-9._-]+"
_PATH: Final = rf"(/({_NAME}|{{[a-z_]+}}))+"


class ServerView:
    """What an endpoint may ask of the server. For its own thread."""

    def __init__(self, relay: Relay, loop: asyncio.AbstractEventLoop) -> None:
        self._relay, self._loop = relay, loop

    def report(self) -> Report:
        """As /status has it. Raises `Problem`: the server is stopping, or does not answer."""
        return asyncio.run_coroutine_threadsafe(self._relay.report(), self._loop).result(2 * ANSWER_S)

    def settings(self) -> ServerConfig:
        """Those in force."""
        return self._relay.server.formats.config

    def caches(self) -> dict[Format, LocalCache]:
        """One for each format, to be called on any thread. Raises `Problem`: as for `report`."""
        return asyncio.run_coroutine_threadsafe(self._relay.caches(), self._loop).result(2 * ANSWER_S)


EndpointFactory = Callable[[Mapping[str, object]], Sequence[Operation]]
"""The parameters that the user wrote → operations, with paths below that of the entry point: "/top". It raises
`ConfigError` for parameters that it does not take."""


def read_endpoints(specs: Sequence[str | Mapping[str, Any]]) -> list[Operation]:
    """The operations of the setting http.endpoints, each at its whole path. Raises `ConfigError`: an entry point cannot
    be used."""
    operations = [operation for spec in specs for operation in _operations(spec)]
    seen = set()
    for operation in operations:
        place = operation.method, re.sub(r"{\w+}", "{}", operation.path)
        if place in seen:
            raise ConfigError(f"http.endpoints: there are two {operation.method} {operation.path}; name each only once")
        seen.add(place)
    return operations


def _operations(spec: str | Mapping[str, Any]) -> Iterator[Operation]:
    name, parameters = name_and_parameters(spec, "http.endpoints")
    factory: EndpointFactory = load_plugin(GROUP, "endpoint", name)
    if not re.fullmatch(_NAME, name):
        raise ConfigError(f"the endpoint {name!r} cannot be served: its name is part of a path; let it be a plain word")
    try:
        made = list(factory(parameters))
    except ConfigError:
        raise
    except Exception as error:  # whatever another package's factory does
        raise ConfigError(f"the endpoint {name!r} cannot be used: {error}") from error
    for operation in made:
        if why := _why_wrong(operation):
            raise ConfigError(f"the endpoint {name!r} cannot be served: {why}")
        path = f"/endpoints/{name}{operation.path}"
        yield replace(operation, path=path, failures=(*operation.failures, 500, 503))


def _why_wrong(operation: object) -> str:
    """Empty: it can be served."""
    if not isinstance(operation, Operation):
        return f"it has a {type(operation).__name__}, which is not an Operation"
    if operation.method not in _METHODS:
        return f"the method {operation.method!r} is none of {', '.join(_METHODS)}"
    if not re.fullmatch(_PATH, str(operation.path)):
        return f"the path {operation.path!r} is not one such as /top or /of/{{engine}}"
    where = f"{operation.method} {operation.path}"
    if inspect.iscoroutinefunction(operation.answer_with):
        return f"{where} is answered by an async function; write an ordinary one, which has a thread of its own"
    names = re.findall(r"{(\w+)}", operation.path)
    if len(set(names)) < len(names):
        return f"{where} has two parameters of one name"
    try:
        arguments = [None] * (1 if operation.body is None else 2)
        inspect.signature(operation.answer_with).bind(*arguments, **dict.fromkeys(names))
        msgspec.json.encode(openapi_document([operation]))
    except Exception as error:  # noqa: BLE001  # the function takes others, or a type is none of JSON's
        return f"{where}: {type(error).__name__}: {error}"
    return ""


class Endpoints:
    """Answers with them. For HTTP's loop only."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._places = threading.BoundedSemaphore(MAX_RUNNING)

    def bound(self, operations: Sequence[Operation]) -> list[Operation]:
        return [replace(one, answer_with=partial(self._answer, one)) for one in operations]

    async def _answer(self, operation: Operation, /, *body: msgspec.Struct, **parameters: str) -> Response:
        """Raises `Problem` and `InputError` as the endpoint does, and `Problem`: it failed, or cannot be called now."""
        if not self._places.acquire(blocking=False):
            raise Problem(503, f"{MAX_RUNNING} requests for endpoints are being answered; ask again", _SOON)
        answered: Future[Response] = Future()
        answered.set_running_or_notify_cancel()  # so that a client that leaves does not cancel it
        call = partial(operation.answer_with, ServerView(self._relay, asyncio.get_running_loop()), *body, **parameters)

        def run() -> None:
            try:
                answer = call()
                is_whole = isinstance(answer, Response)
                answered.set_result(answer if is_whole else _encoded(answer, operation.status))
            except (Problem, InputError) as error:
                answered.set_exception(error)
            except BaseException:  # noqa: BLE001  # whatever it is, it ends this request only
                _log.exception("the endpoint %s %s has failed", operation.method, operation.path)
                answered.set_exception(Problem(500, f"{operation.path} has failed; the server's log says how"))
            finally:
                self._places.release()

        thread = threading.Thread(target=run, name="kv-endpoint", daemon=True)
        if why := start_thread(thread):
            self._places.release()
            raise Problem(503, f"no endpoint can be called now: {why}", _SOON)
        return await asyncio.wrap_future(answered)


_SOON: Final = {"retry-after": "1"}


def _encoded(answer: object, status: int) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
