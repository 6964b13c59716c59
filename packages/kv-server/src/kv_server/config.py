"""A server's settings, validated, and the path of its socket."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from kv_core.errors import ConfigError
from kv_remote.host_port import read_host_port
from kv_tiers.config import ColdConfig, HostConfig, HttpConfig, ObserveConfig, PeersConfig, ServerSettings
from kv_tiers.settings import Layer, Settings, resolve
from kv_tiers.tenants import Tenant, read_tenants

from kv_server.address import user_directory
from kv_server.programs import check_programs

_MAX_PATH_BYTES: Final = 107
"""The longest path that the kernel accepts for a socket."""
_HTTP_DESCRIPTORS: Final = 96
_ENDPOINTS_DESCRIPTORS: Final = 256
"""What four verbs of kv-cluster take at once, a socket for each of 64 servers."""
_OTHER_DESCRIPTORS: Final = 128


class ServerConfig(ServerSettings, msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server: a host pool and lower tiers for each format of chunks that clients register.

    host: the pool of each format.
    tiers, cold, tenants: as in the settings, for each format.
    observe: subscribers. The trace file and the log belong to the server.
    http: the address and options of HTTP.
    peers: the address and options for other hosts' servers.
    """

    host: HostConfig
    tiers: list[dict[str, object]] = []
    cold: ColdConfig = ColdConfig()
    tenants: list[Tenant] = []
    observe: ObserveConfig = ObserveConfig()
    http: HttpConfig = HttpConfig()
    peers: PeersConfig = PeersConfig()

    def descriptors(self) -> int:
        """How many it may have open with all its clients: a socket and a pidfd each, a socket for each peer, HTTP's and
        its endpoints', and some for the tiers."""
        peers = self.peers.max_connections if self.peers.listen else 0
        http = _HTTP_DESCRIPTORS if self.http.listen else 0
        http += _ENDPOINTS_DESCRIPTORS if self.http.listen and self.http.endpoints else 0
        return 2 * self.max_sessions + peers + http + _OTHER_DESCRIPTORS

    def socket_path(self) -> Path:
        return Path(self.socket) if self.socket else default_socket(self.name)


def default_socket(name: str = "default") -> Path:
    """The default path of a server's socket, by the server's name: in the user's runtime directory, or in the one for
    temporary files, or in /tmp if that path is too long for a socket, as it may be on batch systems."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    parents = [Path("/tmp")]  # noqa: S108  # the directory made in it is the user's alone
    with suppress(FileNotFoundError):  # a container's file system may be read-only, and have no place for such files
        parents.insert(0, Path(tempfile.gettempdir()))
    # Another user's remains in the environment after `su` and `sudo`.
    if os.path.isdir(runtime) and os.access(runtime, os.W_OK | os.X_OK, effective_ids=True):
        parents.insert(0, Path(runtime))
    paths = [user_directory(parent) / f"{name}.sock" for parent in parents]
    return next((path for path in paths if len(os.fsencode(path)) <= _MAX_PATH_BYTES), paths[0])


def read_config(tree: Mapping[str, object]) -> ServerConfig:
    """The settings in a mapping, in the shape that they have in a file. Raises like `server_config`."""
    return server_config(resolve([Layer("the server's settings", tree)], {})[0])


def server_config(settings: Settings) -> ServerConfig:
    """The server's part of the settings. Raises `ConfigError`: a setting is invalid for a server."""
    config = ServerConfig(
        host=settings.host,
        tiers=settings.tiers,
        cold=settings.cold,
        tenants=read_tenants(settings.tenants, capacity_bytes=settings.host.capacity_bytes),
        observe=settings.observe,
        http=settings.http,
        peers=settings.peers,
        **msgspec.structs.asdict(settings.server),
    )
    _check_address(config)
    if config.url:
        raise ConfigError("server.url is for an engine whose host has no kv-server: leave it out for a server")
    check_programs(config.programs)
    if "/" in config.name or not config.name or config.name.startswith("."):
        raise ConfigError(f"server.name is {config.name!r}; write a plain word")
    if len(os.fsencode(config.socket_path())) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"server.socket: {config.socket_path()} is longer than the {_MAX_PATH_BYTES} bytes that it may have"
        )
    return config


def _check_address(config: ServerConfig) -> None:
    """Raises `ConfigError`: the directory would name the wildcard address as the one to read from."""
    if not config.peers.listen or not read_host_port(config.peers.listen, "peers: listen").is_unspecified:
        return
    for number, options in enumerate(config.tiers):
        directory = options.get("directory")
        if options.get("type") == "peers" and isinstance(directory, Mapping) and not directory.get("address"):
            raise ConfigError(
                f"tiers[{number}]: directory: other hosts cannot reach {config.peers.listen}; "
                "write address: the host and port where they can"
            )
