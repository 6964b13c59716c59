"""The address of HTTP, parsed from `http.listen`."""

from kv_core.errors import ConfigError

from kv_tiers.config import HttpConfig
from kv_tiers.host_port import LOOPBACK_NAME, HostPort, read_host_port


class Listen(HostPort, frozen=True):
    """The address, and the names by which it is called."""

    def url(self, port: int) -> str:
        return f"http://{HostPort(self.host, port)}/"

    def names(self) -> frozenset[str]:
        """The host names in requests that do not come from a page of another origin; empty: unknown."""
        own = {LOOPBACK_NAME, "127.0.0.1", "::1", self.host.lower()}
        return frozenset(own) if self.is_loopback else frozenset()


def read_listen(config: HttpConfig) -> Listen:
    """
    Raises:
        ConfigError: `listen` is not a host and port, or open to other machines without a token.
    """
    found = read_host_port(config.listen, "http: listen")
    listen = Listen(found.host, found.port)
    if not listen.is_loopback and not config.token_file:
        raise ConfigError(
            f"http: listen is {config.listen}, which other machines can reach; write a token_file, or listen at "
            f"127.0.0.1:{listen.port}"
        )
    return listen
