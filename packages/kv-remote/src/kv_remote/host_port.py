"""A host and a port, as written in a setting."""

import ipaddress
from typing import Final

import msgspec
from kv_core.errors import ConfigError

LOOPBACK_NAME: Final = "localhost"


class HostPort(msgspec.Struct, frozen=True):
    """host: a name or an address, without brackets. port 0: any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """None: the host is a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def identity(self) -> bytes:
        """Of the host: the same however it is spelled."""
        return self.host.lower().encode() if self.address is None else self.address.packed

    @property
    def is_loopback(self) -> bool:
        return self.host == LOOPBACK_NAME or (self.address is not None and self.address.is_loopback)

    @property
    def is_unspecified(self) -> bool:
        """It stands for all addresses of this machine."""
        return self.address is not None and self.address.is_unspecified


def read_host_port(text: str, where: str) -> HostPort:
    """where: the user's name for this setting, for the error.
    Raises `ConfigError`: the text is not a host and a port."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    if not colon or not bare or not bare.isprintable() or not is_port or (":" in bare) != (bare != host):
        raise ConfigError(f"{where} is {text!r}; write a host and a port, such as 127.0.0.1:9400 or [::1]:9400")
    try:
        bare.encode("idna")  # as the resolver does; it limits the length of each label
    except UnicodeError as error:
        raise ConfigError(f"{where} is {text!r}, whose host is no name of one: {error}") from error
    return HostPort(bare, int(port))
