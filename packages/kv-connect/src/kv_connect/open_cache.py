"""Where an engine's cache runs: in its process, in a private server that ends with it, or in a server that it joins.

The cache runs in process wherever a single process uses it, because that is fastest. Otherwise the first rank of each
node starts a private server that ends with it, and all ranks there find it at a socket named after the engine. A server
named in the settings is joined instead and shared with every engine that names it.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from kv_core.errors import ConfigError, TierDown
from kv_core.log import limited_logger
from kv_observe.build import build_bus
from kv_server import wire
from kv_server.address import PRIVATE_PREFIX
from kv_server.config import default_socket
from kv_server.connection import NoServerError, ask_server_for
from kv_server.process import SupervisedServer, launch
from kv_server.remote_cache import MappedPool, RemoteCache
from kv_server.report import Registration
from kv_tiers.approximate import fingerprint_above
from kv_tiers.build import build_local_cache
from kv_tiers.cache.extension import Extension
from kv_tiers.cache.local import LocalCache
from kv_tiers.events.bus import EventBus
from kv_tiers.settings import Settings
from kv_tiers.tenants import read_tenants

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_log = limited_logger(__name__)

_WAIT_FOR_FIRST_S = 60.0
"""How long the other ranks wait for the private server that the first one starts."""
_WAIT_FOR_LEADER_S = 600.0
"""How long a replica waits for the server that the leading one starts, once that has loaded and compiled its model: on
its own, and perhaps from a colder cache of files."""
_WAIT_FOR_SERVER_S = 30.0
"""How long a starting engine waits for the server that it is configured to join, which may be starting, too."""


@dataclass(frozen=True, slots=True)
class Format:
    """The format of an engine's chunks: the chunk size of each group of layers, and the fingerprint."""

    group_bytes: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One of an engine's data-parallel replicas on this host, which share a private server.

    of: the name of the engine that they are replicas of.
    leads: whether this one starts the server.
    """

    of: str
    leads: bool


def socket_of(settings: Settings, engine_id: str, replica: Replica | None = None, node: int = 0) -> Path:
    """The path of the socket at which the engine's processes on a node find their server.

    node: its number, part of the name because two nodes may be on one host, and the engine's id is the same on all.
    """
    if settings.server.socket:
        return Path(settings.server.socket)
    name = engine_id if replica is None else replica.of
    return default_socket(f"{PRIVATE_PREFIX}{name}" + (f"-node{node}" if node else ""))


def open_in_process(
    settings: Settings, chunks: Format, extensions: Sequence[Extension] = ()
) -> tuple[LocalCache, EventBus]:
    """The cache in this process, and the bus that delivers its events: close it after the cache.

    Raises:
        ConfigError: the settings cannot be honoured on this machine.
    """
    # `kv explain` queries a server: a history in this process could not be queried, but would have a cost.
    opened: list[LocalCache] = []

    def network() -> "Iterable[Metric]":
        from kv_server.peers.metrics import network_families

        return network_families(opened)

    bus, _ = build_bus(msgspec.structs.replace(settings.observe, history_keys=0), lambda: opened, network)
    try:
        cache = build_local_cache(
            settings.host,
            group_bytes=chunks.group_bytes,
            fingerprint=fingerprint_above(settings.tiers, chunks.fingerprint),
            tiers=settings.tiers,
            cold=settings.cold,
            tenants=read_tenants(settings.tenants, capacity_bytes=settings.host.capacity_bytes),
            events=bus.source("", chunks.group_bytes, settings.chunk_tokens),
            extensions=extensions,
        )
    except BaseException:
        bus.close()
        raise
    opened.append(cache)
    return cache, bus


def open_remote(
    settings: Settings,
    chunks: Format,
    *,
    engine_id: str,
    is_first: bool,
    facts: Mapping[str, str],
    replica: Replica | None = None,
    node: int = 0,
    on_new_pool: Callable[[MappedPool], None] | None = None,
) -> tuple[RemoteCache, SupervisedServer | None]:
    """The cache at the engine's server, and the server if it is a private one and this process starts it.

    is_first: this is the worker that starts it: the first rank of a node.
    facts: about this process, for the engine's other processes (`workers_of`).
    replica: for an engine that has several: the leader's first rank starts the server that they share.

    Raises:
        ConfigError: no server could be started or joined; the text says why.
    """
    socket = socket_of(settings, engine_id, replica, node)
    # A server that is joined has tiers of its own.
    fingerprint = fingerprint_above(() if settings.server.socket else settings.tiers, chunks.fingerprint)
    server = None
    if not settings.server.socket and is_first and (replica is None or replica.leads):
        if settings.host.name:
            raise ConfigError("host.name keeps a pool for the next engine, which a private server cannot: leave it out")
        config = {name: getattr(settings, name) for name in ("host", "tiers", "cold", "tenants", "observe")}
        # Outside the engine's process tree: whatever kills that leaves the server time to finish pending spills. It
        # ends on its own when this process does.
        start = partial(launch, msgspec.to_builtins(config), socket=socket, log_level="info", detached=True)
        server = SupervisedServer(start)
    joins = bool(settings.server.socket)
    follows = not joins and replica is not None and not replica.leads
    wait_s = _WAIT_FOR_SERVER_S if joins else _WAIT_FOR_LEADER_S if follows else _WAIT_FOR_FIRST_S
    until = time.monotonic() + (wait_s if server is None else 0)
    is_waiting = False
    while True:
        try:
            remote = RemoteCache(
                socket,
                group_bytes=chunks.group_bytes,
                fingerprint=fingerprint,
                engine=engine_id,
                facts=facts,
                on_new_pool=on_new_pool,
                timeout_s=settings.server.answer_s,
                core_dump=settings.host.core_dump,
            )
        except ConfigError as error:
            # A server that has refused once would refuse again.
            if time.monotonic() > until or ((joins or follows) and not isinstance(error, NoServerError)):
                if server is not None:
                    server.stop()
                raise
            if (joins or follows) and not is_waiting:
                is_waiting = True
                level = logging.WARNING if joins else logging.INFO  # replicas never start in the same instant
                _log.log(level, "no kv-server listens at %s yet; waiting for it, up to %d s", socket, wait_s)
            time.sleep(0.05)
        else:
            return remote, server


def check_replicas(settings: Settings) -> None:
    """Check the settings for one of several data-parallel replicas of an engine.

    Raises:
        ConfigError: each of them would open something that only one process can own.
    """
    if settings.server.socket:
        return
    types = [tier.get("type") for tier in settings.tiers]
    owned = [f"tiers[{number}] ({kind})" for number, kind in enumerate(types) if kind in ("disk", "gds")]
    owned += ["host.name"] if settings.host.name else []
    if owned:
        raise ConfigError(
            f"the engine has data-parallel replicas, which cannot each own {' and '.join(owned)}: start kv-server with "
            "these settings and give its server.socket to the engine"
        )


_ASK_S: Final = 10.0
"""For a server's answer while engines start, which keep every core busy. Without one the cache would stay off."""


def workers_of(settings: Settings, engine_id: str, replica: Replica | None = None) -> list[Registration]:
    """The workers that have registered, by rank; none if there is no server.

    Raises:
        ConfigError: the server is another user's, or refuses us.
    """
    try:
        address = socket_of(settings, engine_id, replica)
        answer = ask_server_for(address, wire.Registered(engine_id), wire.Registrations, timeout_s=_ASK_S)
    except TierDown as why:
        _log.debug("engine %s has no server: %s", engine_id, why)
        return []
    workers = [session for session in answer.sessions if "rank" in session.facts]
    return sorted(workers, key=lambda session: int(session.facts["rank"]))
