"""The thread that serves HTTP next to the serving thread: its socket, the limits of its connections, its shutdown."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import uvicorn
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.config import HttpConfig
from kv_tiers.host_port import LOOPBACK_NAME, HostPort, read_host_port
from kv_tiers.threads import must_start

from kv_server.accepting import Acceptor, listen_at
from kv_server.http.app import make_app
from kv_server.http.connections import HEAD_BYTES, IDLE_S, BoundedProtocol, HttpConnections, peer_of
from kv_server.http.relay import Relay
from kv_server.http.tenants import TenantNames
from kv_server.http.token import read_token
from kv_server.server import CacheServer

_log = limited_logger(__name__)

_END_S: Final = 2
_START_S: Final = 20.0
"""How long `start` waits, on a busy machine: it takes a tenth of a second. A server has 30 s until it must be ready."""
_NO_ROOM: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)


class HttpThread:
    """Binds its address at once, and serves from `start` until `stop`."""

    def __init__(self, config: HttpConfig) -> None:
        """
        Raises:
            ConfigError: the settings cannot be honoured, or the address is taken.
        """
        listen = read_listen(config)
        # Host names in requests that do not come from a page of another origin.
        names = {LOOPBACK_NAME, "127.0.0.1", "::1", listen.host.lower()} if listen.is_loopback else set()
        self._make_app = partial(
            make_app,
            token=read_token(Path(config.token_file)) if config.token_file else "",
            hosts=frozenset(names | {name.lower() for name in config.hosts}),
            archive_directory=read_archive_directory(config),
        )
        self._listener = listen_at(listen, "http: listen")
        self.url = f"http://{HostPort(listen.host, self._listener.getsockname()[1])}/"
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
                self._make_app(self._relay, names=TenantNames(server.tenant_names)),
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
        must_start(self._thread)
        if not self._has_started.wait(_START_S):
            _log.warning("HTTP is not served yet, after %g s", _START_S)

    def stop(self) -> None:
        """Finish requests in progress, for a short time, and close."""
        if self._server is None or self._relay is None:
            self._listener.close()
            return
        if self._accepting is not None:
            self._accepting.close()
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
        try:
            await self._server.serve(sockets=[])
        finally:
            accepting.close_now()


class _Server(uvicorn.Server):
    def __init__(self, on_started: Callable[[], object], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


class _HttpListener:
    """Accepts connections from the listener, closes it at the end, and creates a protocol for each that is admitted."""

    def __init__(self, listener: socket.socket, server: uvicorn.Server) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._config = server.config
        self._state = server.server_state
        self._room = HttpConnections()
        self._entering: set[asyncio.Task[object]] = set()
        self._acceptor = Acceptor(listener, greet=self._greet, turn_away=_turn_away)
        self._is_closed = False
        listener.setblocking(False)
        self._watch()

    def close(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop has ended, by a bug
            self._loop.call_soon_threadsafe(self.close_now)

    def close_now(self) -> None:
        """On the loop's thread."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            self._acceptor.close()
            self._listener.close()

    def _watch(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        backoff_s = self._acceptor.accept()
        if backoff_s:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(backoff_s, self._watch)

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
            _loop=self._loop,
            room=self._room,
            peer=peer,
            is_health_only=is_health_only,
        )
        self._room.enter(protocol)
        entering = self._loop.create_task(self._loop.connect_accepted_socket(lambda: protocol, accepted))
        self._entering.add(entering)
        entering.add_done_callback(partial(self._entered, protocol, accepted))

    def _entered(self, protocol: BoundedProtocol, accepted: socket.socket, entering: asyncio.Task[object]) -> None:
        self._entering.discard(entering)
        if entering.cancelled() or entering.exception() is not None:
            self._room.leave(protocol)  # which nothing else will tell of its end
            accepted.close()


def read_listen(config: HttpConfig) -> HostPort:
    """
    Raises:
        ConfigError: `listen` is not a host and port, or open to other machines without a token.
    """
    listen = read_host_port(config.listen, "http: listen")
    if not listen.is_loopback and not config.token_file:
        raise ConfigError(
            f"http: listen is {config.listen}, which other machines can reach; write a token_file, or listen at "
            f"127.0.0.1:{listen.port}"
        )
    return listen


def read_archive_directory(config: HttpConfig) -> str:
    """
    Raises:
        ConfigError: it cannot be written to.
    """
    path = config.archive_directory
    if path and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"http: archive_directory: {path} is not a directory that can be written to; create it")
    return path


def _turn_away(accepted: socket.socket) -> None:
    with suppress(OSError):
        accepted.send(_NO_ROOM)
