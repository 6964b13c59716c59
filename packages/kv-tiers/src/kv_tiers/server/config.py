"""A server's settings, where its socket is, and how both are read from a file or a caller's mapping."""

import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from kv_core.errors import ConfigError

from kv_tiers.config import ColdConfig, HostConfig
from kv_tiers.options import read_options
from kv_tiers.server.address import user_directory
from kv_tiers.server.http.config import HttpConfig
from kv_tiers.tenants import Tenant, read_tenants
from kv_tiers.watch.config import ObserveConfig

_MAX_PATH_BYTES: Final = 107
"""What the kernel takes for a socket's path."""
_HTTP_DESCRIPTORS: Final = 96
_OTHER_DESCRIPTORS: Final = 128


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server: a host pool and the tiers below it for each format of chunks that clients register."""

    host: HostConfig
    """Each format's pool may become as large as `capacity_bytes`; memory is taken as it is used."""
    tiers: list[dict[str, object]] = []
    cold: ColdConfig = ColdConfig()
    observe: ObserveConfig = ObserveConfig()
    """What watches the caches. A trace's file and the log are the server's own."""
    http: HttpConfig = HttpConfig()
    tenants: list[Tenant] = []
    """Of each format's pool. In the file: a list of `TenantConfig`."""
    socket: str = ""
    """Where it listens; empty: a file `NAME.sock` in a directory of the user's own."""
    name: str = "default"
    """Tells servers of one user apart."""
    max_formats: int = 4
    """How many formats are served at once. The machine must be able to hold so many pools."""
    max_sessions: int = 128
    """How many clients are served at once."""

    def descriptors(self) -> int:
        """How many it may have open with all its clients: a socket and a pidfd each, HTTP's, and some for the tiers."""
        return 2 * self.max_sessions + (_HTTP_DESCRIPTORS if self.http.listen else 0) + _OTHER_DESCRIPTORS

    def socket_path(self) -> Path:
        return Path(self.socket) if self.socket else default_socket(self.name)


def default_socket(name: str = "default") -> Path:
    """Where a server of this name is looked for if nothing else is said."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    parent = Path(runtime) if Path(runtime).is_dir() else Path(tempfile.gettempdir())
    return user_directory(parent) / f"{name}.sock"


def read_config(options: Mapping[str, object]) -> ServerConfig:
    """The settings that a mapping says, as it comes from a file. Bytes may be spelled as in "4GiB".

    Raises:
        ConfigError: an unknown option, or a value of the wrong type or out of range.
    """
    given = dict(options)
    host = given.get("host", {})
    if (
        isinstance(host, Mapping)
        and "capacity_bytes" not in host
        and not host.keys() - set(HostConfig.__struct_fields__)
    ):
        raise ConfigError(
            "host: capacity_bytes is not given: how much memory may chunks take? Write --capacity 4GiB on the command "
            'line, or capacity_bytes = "4GiB" under [host] in the settings (--config FILE)'
        )
    for name, settings in (
        ("host", HostConfig),
        ("cold", ColdConfig),
        ("http", HttpConfig),
        ("observe", ObserveConfig),
    ):
        part = given.get(name)
        if isinstance(part, Mapping):
            given[name] = msgspec.to_builtins(read_options(settings, part, name))
    tenants = given.pop("tenants", [])
    config = read_options(ServerConfig, given, "server")
    config = msgspec.structs.replace(config, tenants=read_tenants(tenants, capacity_bytes=config.host.capacity_bytes))
    if config.max_formats < 1 or config.max_sessions < 1:
        raise ConfigError("server: max_formats and max_sessions are at least 1")
    if config.host.name:
        raise ConfigError(f"host: a pool that a server shares has no name; leave out name: {config.host.name}")
    if "/" in config.name or not config.name or config.name.startswith("."):
        raise ConfigError(f"server: name is {config.name!r}; write a plain word")
    if len(os.fsencode(config.socket_path())) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"server: {config.socket_path()} is longer than the {_MAX_PATH_BYTES} bytes that a socket's path may have"
        )
    return config


def read_config_text(text: str, where: str, changes: Mapping[str, Any] | None = None) -> ServerConfig:
    """As `read_config`, from JSON (what begins with a brace) or TOML. where: the file, for the errors.

    changes: what a command line says instead; a mapping is merged with the file's.
    """
    try:
        options = msgspec.json.decode(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (msgspec.DecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{where} is neither JSON nor TOML: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"{where} holds no settings")
    for name, value in (changes or {}).items():
        before = options.get(name)
        options[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return read_config(options)
