"""The thread that serves HTTP beside the relay: its socket, its connections' bounds, its end."""

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import uvicorn
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kv_tiers.server.http.app import make_app
from kv_tiers.server.http.config import HttpConfig, Listen, read_listen
from kv_tiers.server.http.relay import Relay
from kv_tiers.server.http.tenants import Names
from kv_tiers.server.http.token import read_token
from kv_tiers.server.server import CacheServer
from kv_tiers.tenants import Tenant

_log = limited_logger(__name__)

MAX_CONNECTIONS: Final = 64
"""At once; more are closed unheard."""
HEAD_S: Final = 10.0
"""How long a request's line and headers may take to arrive."""
_IDLE_S: Final = 15
_HEAD_NBYTES: Final = 16 << 10
_END_S: Final = 2


class HttpThread:
    """Takes its address at once, serves from `start` until `stop`."""

    def __init__(self, config: HttpConfig, tenants: Sequence[Tenant]) -> None:
        """tenants: those that the settings name.

        Raises:
            ConfigError: the settings cannot be honoured, or the address is taken.
        """
        listen = read_listen(config)
        self._token = read_token(Path(config.token_file)) if config.token_file else ""
        names = listen.names()
        self._names = Names({tenant.tag: tenant.name for tenant in tenants})
        self._archive_dir = _checked_directory(config.archive_dir)
        self._hosts = names | {name.lower() for name in config.hosts} if names or config.hosts else names
        self._listener = _bound(listen)
        self.url = listen.url(self._listener.getsockname()[1])
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._serve, name="kv-http", daemon=True)
        self._app: ASGIApp | None = None
        self._relay: Relay | None = None

    def start(self, server: CacheServer) -> None:
        self._relay = Relay(server)
        self._app = make_app(
            self._relay, names=self._names, token=self._token, hosts=self._hosts, archive_dir=self._archive_dir
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                loop="asyncio",
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="critical",  # what others send us is not worth a line in the log
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_END_S,
                h11_max_incomplete_event_size=_HEAD_NBYTES,
            )
        )
        self._thread.start()

    def stop(self) -> None:
        """Answer what is being asked, for a moment, and close."""
        if self._server is None or self._relay is None:
            self._listener.close()
            return
        self._server.should_exit = True
        self._thread.join(2 * _END_S + 1)
        self._relay.close()

    def _serve(self) -> None:
        assert self._server is not None
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        except Exception:  # noqa: BLE001  # the relay goes on
            _log.exception("HTTP has ended by a bug; engines are served as before")


def _checked_directory(archive_dir: str) -> str:
    if archive_dir and not os.access(archive_dir, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"http: archive_dir: {archive_dir} is no directory that can be written to; make it")
    return archive_dir


def _bound(listen: Listen) -> socket.socket:
    try:
        found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError(
            f"http: nobody can listen at {listen.host} port {listen.port}: {error.strerror or error}"
        ) from None


class BoundedProtocol(H11Protocol):
    """uvicorn's, which waits for ever for a request's head and for any number of clients."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_head()
        elif self._head_timer is None and not self.transport.is_closing():
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
