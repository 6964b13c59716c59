"""Starts HTTP, or reports which packages to install."""

from pathlib import Path
from typing import TYPE_CHECKING

from kv_core.errors import ConfigError
from kv_tiers.config import HttpConfig

if TYPE_CHECKING:
    from kv_server.http.thread import HttpThread


def open_http(config: HttpConfig) -> "HttpThread | None":
    """Bind the address in the settings; None: they have none.

    Raises:
        ConfigError: it cannot be bound, a setting cannot be honoured, or the extra is not installed.
    """
    if not config.listen:
        return None
    _check_extra()
    from kv_server.http.thread import HttpThread

    return HttpThread(config)


def check_http(config: HttpConfig) -> None:
    """Check what `open_http` would refuse, without binding the address or creating a token.

    Raises:
        ConfigError: a setting cannot be honoured, or the extra is not installed.
    """
    if config.listen:
        _check_extra()
        from kv_server.http.thread import read_archive_directory, read_listen
        from kv_server.http.token import check_token

        read_listen(config)
        read_archive_directory(config)
        if config.token_file:
            check_token(Path(config.token_file))


def _check_extra() -> None:
    try:
        import kv_server.http.thread  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"http: {error.name} is not installed; pip install 'kv-tiers[http]'") from error
