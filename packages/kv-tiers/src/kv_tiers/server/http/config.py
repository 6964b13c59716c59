"""Where HTTP is served, out of `http.listen`."""

import ipaddress
from typing import Final

import msgspec
from kv_core.errors import ConfigError

from kv_tiers.config import HttpConfig

_LOOPBACK_NAME: Final = "localhost"


class Listen(msgspec.Struct, frozen=True):
    """port 0: one that is free."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        if self.host == _LOOPBACK_NAME:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def url(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}/"

    def names(self) -> frozenset[str]:
        """What the host is called in requests that nobody else's page has made; empty: it cannot be known."""
        own = {_LOOPBACK_NAME, "127.0.0.1", "::1", self.host.lower()}
        return frozenset(own) if self.is_loopback else frozenset()


def read_listen(config: HttpConfig) -> Listen:
    """
    Raises:
        ConfigError: `listen` is no host and port, or open to other machines without a token.
    """
    host, colon, port = config.listen.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    if not colon or not bare or not is_port or (":" in bare) != (bare != host):
        raise ConfigError(
            f"http: listen is {config.listen!r}; write a host and a port, such as 127.0.0.1:9400 or [::1]:9400"
        )
    listen = Listen(bare, int(port))
    if not listen.is_loopback and not config.token_file:
        raise ConfigError(
            f"http: listen is {config.listen}, which other machines can reach; write a token_file, or listen at "
            f"127.0.0.1:{port}"
        )
    return listen
