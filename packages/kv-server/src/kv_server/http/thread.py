"""The thread that serves HTTP: its socket, the limits of its connections, the checks around requests, its shutdown."""

import asyncio
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import uvicorn
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_remote.host_port import LOOPBACK_NAME, HostPort, read_host_port
from kv_tiers.config import HttpConfig
from kv_tiers.threads import must_start
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kv_server.address import Acceptor, Ports
from kv_server.http.app import make_app
from kv_server.http.endpoints import read_endpoints
from kv_server.http.operation import Problem, problem_response
from kv_server.http.relay import Relay
from kv_server.http.start import read_token
from kv_server.server import CacheServer

_log = limited_logger(__name__)

MAX_CONNECTIONS: Final = 64
MAX_OF_A_PEER: Final = 32
"""Of those, from one address. Behind a proxy, all come from the same one."""
HEALTH_CONNECTIONS: Final = 16
"""In addition to those, for health checks only."""
PATIENCE_S: Final = 1.0
"""A client that has kept the server waiting for this long may lose its place to a new one."""
HEALTH_S: Final = 2.0
"""How long a connection of the reserve may take in all."""
HEAD_BYTES: Final = 16 << 10
"""Of a request's line and headers."""
HEAD_S: Final = 10.0
"""How long a request's line and headers may take to arrive."""
UNREAD_S: Final = 10.0
"""How long a client may read nothing of an answer that does not fit into its socket's buffer."""
IDLE_S: Final = 15
"""How long a connection may be idle."""
CONNECTION_S: Final = 60.0
"""A connection's next answer after this long is its last."""
LAST_ANSWER_S: Final = 90.0
"""How much longer that answer may take."""

IS_LAST: Final = "kv_is_last"
IS_HEALTH_ONLY: Final = "kv_is_health_only"
"""In `state` of a request's scope, about its connection: its answer ends it; it may request health only."""


class HttpConnections:
    """How many connections there may be, for how long, and which one is replaced when the limit is reached. Used on
    HTTP's event loop only.

    At the limit a new connection replaces one whose client has kept the server waiting for a while (for a request, its
    body, or for the answer to be read): the longest waiting one of the address that has the most connections. A
    connection for which the server is working is never closed. If none can be replaced, the new one gets a place in a
    reserve that serves only the health endpoints, once and within a short time. So health checks are answered whatever
    clients do.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self.open: set[BoundedProtocol] = set()

    def admit(self, peer: str) -> bool | None:
        """Whether a new connection from this address may request health only; None: there is no place for it at all."""
        served = [one for one in self.open if not one.is_health_only]
        crowds = Counter(one.peer for one in served)
        if len(served) < MAX_CONNECTIONS and crowds[peer] < MAX_OF_A_PEER:
            return False
        if crowds[peer] >= MAX_OF_A_PEER:
            candidates = [one for one in served if one.peer == peer]
        else:
            candidates = [one for one in served if one.peer == peer or crowds[one.peer] > crowds[peer]]
        if self._give_up_one(candidates, crowds, PATIENCE_S):
            return False
        reserve = [one for one in self.open if one.is_health_only]
        if len(reserve) < HEALTH_CONNECTIONS:
            return True
        return True if self._give_up_one(reserve, Counter(one.peer for one in reserve), 0.0) else None

    def _give_up_one(self, candidates: Iterable["BoundedProtocol"], crowds: Counter[str], patience_s: float) -> bool:
        now_s = self.now_s()
        waiting = [
            (crowds[one.peer], now_s - one.awaited_since_s, number, one)
            for number, one in enumerate(candidates)
            if one.awaited_since_s is not None and now_s - one.awaited_since_s >= patience_s
        ]
        if not waiting:
            return False
        *_, chosen = max(waiting)
        self.open.discard(chosen)  # now: the loop reports its loss only after we return
        chosen.transport.abort()
        return True


def peer_of(address: Any) -> str:
    """The address by which connections are counted: for IPv6 its /64, which belongs to one customer."""
    try:
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except (ValueError, IndexError, TypeError):
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, which by itself waits forever for a request's head, for its answer to be read, and for a
    connection to end."""

    def __init__(self, *arguments: Any, room: HttpConnections, peer: str, is_health_only: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {IS_LAST: is_health_only, IS_HEALTH_ONLY: is_health_only}
        self.peer = peer
        self.is_health_only = is_health_only
        self.awaited_since_s: float | None = None
        """Since when the server has been waiting for the client; None: the client is waiting."""
        self._room = room
        self._has_begun = True  # a request: on a new connection one is expected at once
        self._phase: tuple[str, int] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ends: list[asyncio.TimerHandle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._room.open.add(self)
        if self.is_health_only:
            self._ends = [self.loop.call_later(HEALTH_S, transport.abort)]
        else:
            self._ends = [
                self.loop.call_later(CONNECTION_S, self.end_with_next_answer),
                self.loop.call_later(CONNECTION_S + LAST_ANSWER_S, transport.abort),
            ]
        self._look()

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def on_response_complete(self) -> None:
        self._has_begun = False
        super().on_response_complete()
        self._look()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._look()

    def shutdown(self) -> None:
        super().shutdown()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.open.discard(self)
        for timer in (*self._ends, self._timer):
            if timer is not None:
                timer.cancel()
        self._ends, self._timer = [], None
        super().connection_lost(exc)

    def end_with_next_answer(self) -> None:
        self.app_state[IS_LAST] = True

    def _look(self) -> None:
        """Update what the connection is waiting for, since when, and for how long it may."""
        cycle = self.cycle
        if self.transport.is_closing():
            waits_for, most_s = "end", UNREAD_S  # until what is unsent has been read
        elif self.flow.write_paused:
            waits_for, most_s = "reader", UNREAD_S
        elif cycle is None or cycle.response_complete:
            # Connections that have been idle since are ended by uvicorn's own timer.
            waits_for, most_s = ("head", HEAD_S) if self._has_begun else ("idle", 0.0)
        elif cycle.more_body:
            waits_for, most_s = "body", 0.0  # `operation` has its own limit, and reports it
        else:
            waits_for, most_s = "", 0.0
        phase = (waits_for, id(cycle))
        if phase == self._phase:
            return
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if most_s:
            self._timer = self.loop.call_later(most_s, self.transport.abort)
        self.awaited_since_s = self._room.now_s() if waits_for else None


_END_S: Final = 2
_QUIET_S: Final = 0.5
"""How long requests may take to be answered when another process takes over."""
_START_S: Final = 20.0
"""How long `start` waits, on a busy machine: it takes a tenth of a second. A server has 30 s until it must be ready."""
_NO_ROOM: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)


class HttpThread:
    """Binds its address at once, and serves from `start` until `stop`."""

    def __init__(self, config: HttpConfig, ports: Ports) -> None:
        """Raises `ConfigError`: the settings cannot be honoured, or the address is taken."""
        listen = read_listen(config)
        # Host names in requests that do not come from a page of another origin.
        own = [LOOPBACK_NAME, "127.0.0.1", "::1", listen.host, socket.gethostname()]
        is_checked = listen.is_loopback or config.hosts
        self._hosts = frozenset(name.lower() for name in (*own, *config.hosts) if is_checked)
        self._make_app = partial(
            make_app,
            token=read_token(Path(config.token_file)) if config.token_file else "",
            archive_directory=read_archive_directory(config),
            endpoints=read_endpoints(config.endpoints),
        )
        self._listener, address = ports.listen("http", config.listen)
        self.url = f"http://{address}/"
        self._server: uvicorn.Server | None = None
        self._accepting: _HttpListener | None = None
        self._thread = threading.Thread(target=self._serve, name="kv-http", daemon=True)
        self._has_started = threading.Event()
        self._relay: Relay | None = None

    def start(self, server: CacheServer) -> None:
        """Returns when HTTP is served. Only then may clients of the server's socket be: they might take the last
        descriptors, without which there would be no event loop, and nothing would answer at this address for good."""
        self._relay = Relay(server)
        self._server = _Server(
            self._has_started.set,
            uvicorn.Config(
                Guard(self._make_app(self._relay), self._hosts),
                loop="asyncio",
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="critical",  # what clients send us is not worth a log line
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=_END_S,
                h11_max_incomplete_event_size=HEAD_BYTES,
            ),
        )
        server.pause_http = self.pause
        must_start(self._thread)
        if not self._has_started.wait(_START_S):
            _log.warning("HTTP is not served yet, after %g s", _START_S)

    def pause(self, is_paused: bool) -> None:
        """Accept no connections until further notice: they wait. Returns when the requests in progress have been
        answered, or after a short time. On any thread but HTTP's own."""
        with suppress(RuntimeError, TimeoutError):  # it has ended, by a bug
            if (accepting := self._accepting) is not None:
                pausing = asyncio.run_coroutine_threadsafe(accepting.pause(is_paused), accepting.loop)
                pausing.result(2 * _QUIET_S)

    def stop(self) -> None:
        """Finish requests in progress, for a short time, and close."""
        if self._server is None or self._relay is None:
            self._listener.close()
            return
        if (accepting := self._accepting) is not None:
            with suppress(RuntimeError):  # the loop has ended, by a bug
                accepting.loop.call_soon_threadsafe(accepting.close)
        self._server.should_exit = True
        self._thread.join(2 * _END_S + 1)
        self._relay.close()

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:  # noqa: BLE001  # the server continues
            _log.exception("HTTP has ended because of a bug; engines are served as before")
        finally:
            self._has_started.set()  # or it never will

    async def _run(self) -> None:
        assert self._server is not None
        # We accept connections ourselves: uvicorn takes any number, and asyncio logs and spins when out of descriptors.
        accepting = self._accepting = _HttpListener(self._listener, self._server)
        assert self._relay is not None
        keeping = asyncio.get_running_loop().create_task(self._relay.keep_timeline())
        try:
            await self._server.serve(sockets=[])
        finally:
            keeping.cancel()
            accepting.close()


class _Server(uvicorn.Server):
    def __init__(self, on_started: Callable[[], object], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


class _HttpListener:
    """Accepts connections from the listener, closes it at the end, and creates a protocol for each that is admitted.
    For the loop's thread."""

    def __init__(self, listener: socket.socket, server: uvicorn.Server) -> None:
        self.loop = asyncio.get_running_loop()
        self._listener = listener
        self._config = server.config
        self._state = server.server_state
        self._room = HttpConnections()
        self._entering: set[asyncio.Task[object]] = set()
        self._acceptor = Acceptor(listener, greet=self._greet, turn_away=_turn_away)
        self._is_closed = self._is_paused = False
        self._watch()

    async def pause(self, is_paused: bool) -> None:
        """As `HttpThread.pause`."""
        self._is_paused = is_paused
        if not is_paused or self._is_closed:
            self._watch()
            return
        self.loop.remove_reader(self._listener)
        for one in self._room.open:
            one.end_with_next_answer()
        until_s = self.loop.time() + _QUIET_S
        while any(one.awaited_since_s is None for one in self._room.open) and self.loop.time() < until_s:
            await asyncio.sleep(_QUIET_S / 50)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.loop.remove_reader(self._listener)
            self._acceptor.close()
            self._listener.close()

    def _watch(self) -> None:
        if not self._is_closed and not self._is_paused:
            self.loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        backoff_s = self._acceptor.accept()
        if backoff_s:
            self.loop.remove_reader(self._listener)
            self.loop.call_later(backoff_s, self._watch)

    def _greet(self, accepted: socket.socket) -> None:
        try:
            peer = peer_of(accepted.getpeername())
        except OSError:  # gone already
            accepted.close()
            return
        is_health_only = self._room.admit(peer)
        if is_health_only is None:
            accepted.close()
            return
        protocol = BoundedProtocol(
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=self.loop,
            room=self._room,
            peer=peer,
            is_health_only=is_health_only,
        )
        self._room.open.add(protocol)
        entering = self.loop.create_task(self.loop.connect_accepted_socket(lambda: protocol, accepted))
        self._entering.add(entering)
        entering.add_done_callback(partial(self._entered, protocol, accepted))

    def _entered(self, protocol: BoundedProtocol, accepted: socket.socket, entering: asyncio.Task[object]) -> None:
        self._entering.discard(entering)
        if entering.cancelled() or entering.exception() is not None:
            self._room.open.discard(protocol)  # which nothing else will tell of its end
            accepted.close()


def read_listen(config: HttpConfig) -> HostPort:
    """Raises `ConfigError`: `listen` is not a host and port, or open to other machines without a token."""
    listen = read_host_port(config.listen, "http: listen")
    if not listen.is_loopback and not config.token_file:
        raise ConfigError(
            f"http: listen is {config.listen}, which other machines can reach; write a token_file, or listen at "
            f"127.0.0.1:{listen.port}"
        )
    return listen


def read_archive_directory(config: HttpConfig) -> str:
    """Raises `ConfigError`: it cannot be written to."""
    path = config.archive_directory
    if path and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"http: archive_directory: {path} is not a directory that can be written to; create it")
    return path


def _turn_away(accepted: socket.socket) -> None:
    with suppress(OSError):
        accepted.send(_NO_ROOM)


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
    """Checks around every request: the host name before it, a time limit, and safe headers on the answer."""

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
        except asyncio.CancelledError:  # ends here: uvicorn would log it as a bug, and answer with its own 500
            if not started:
                stopping = Problem(503, "the server is stopping; what this has begun may go on")
                await problem_response(stopping)(scope, receive, send_with_headers)
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
