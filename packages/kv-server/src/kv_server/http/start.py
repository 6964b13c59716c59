"""Starts HTTP, or reports which setting or package stands in the way. Only `open_http` needs the extra's packages."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_core.errors import ConfigError
from kv_tiers.config import HttpConfig
from kv_tiers.pool.private_files import read_secret

from kv_server.address import Ports

if TYPE_CHECKING:
    from kv_server.http.thread import HttpThread


_MIN_CHARS: Final = 16


def read_token(path: Path) -> str:
    """The token in the file, without surrounding white space. A file that does not exist is created with a new token.
    Raises `ConfigError`: others could read it, or it is empty."""
    return _make_token(path) if not os.path.lexists(path) else _read(path)


def check_token(path: Path) -> None:
    """Check what `read_token` would refuse, without creating anything. Raises `ConfigError`: as for `read_token`."""
    if os.path.lexists(path):
        _read(path)
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        raise _cannot_make(path, f"{path.parent} cannot be written to")


def _read(path: Path) -> str:
    secret = read_secret(path, "http: token_file:", empty_hint="remove the file, and a new one is created")
    token = secret.decode("ascii", "replace").strip()
    if len(token) < _MIN_CHARS or not all("!" <= char <= "~" for char in token):
        raise ConfigError(
            f"http: token_file: {path} holds no token of at least {_MIN_CHARS} visible characters; remove the file, "
            "and a new one is created"
        )
    return token


def _make_token(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{token}\n")
    except OSError as error:
        raise _cannot_make(path, error.strerror or str(error)) from None
    return token


def _cannot_make(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"http: token_file: {path} does not exist and cannot be made: {why}; write a path in a directory that this "
        "user can write to"
    )


def open_http(config: HttpConfig, ports: Ports | None = None) -> "HttpThread | None":
    """Listen at the address in the settings; None: they have none. Raises `ConfigError`: that is not possible, a
    setting cannot be honoured, or the extra is not installed."""
    if not config.listen:
        return None
    _check_extra()
    from kv_server.http.thread import HttpThread

    return HttpThread(config, ports or Ports())


def check_http(config: HttpConfig) -> None:
    """Check what `open_http` would refuse, without binding the address or creating a token. Raises `ConfigError`: a
    setting cannot be honoured, or the extra is not installed."""
    if config.listen:
        _check_extra()
        from kv_server.http.endpoints import read_endpoints
        from kv_server.http.thread import read_archive_directory, read_listen

        read_listen(config)
        read_archive_directory(config)
        read_endpoints(config.endpoints)
        if config.token_file:
            check_token(Path(config.token_file))


def _check_extra() -> None:
    try:
        import kv_server.http.thread  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"http: {error.name} is not installed; pip install 'kv-server[http]'") from error
