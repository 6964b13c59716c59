"""Starts HTTP, or reports which packages to install."""

from typing import TYPE_CHECKING

from kv_core.errors import ConfigError

from kv_tiers.config import HttpConfig

if TYPE_CHECKING:
    from kv_tiers.server.http.thread import HttpThread


def open_http(config: HttpConfig) -> "HttpThread | None":
    """Bind the address in the settings; None: they have none.

    Raises:
        ConfigError: it cannot be bound, a setting cannot be honoured, or the extra is not installed.
    """
    if not config.listen:
        return None
    try:
        from kv_tiers.server.http.thread import HttpThread
    except ImportError as error:
        raise ConfigError(f"http: {error.name} is not installed; pip install 'kv-tiers[http]'") from error
    return HttpThread(config)
