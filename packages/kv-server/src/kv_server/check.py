"""Checks a server's settings as its start would, without listening, writing or sending anything: for `kv config`."""

from kv_tiers.settings import Settings

from kv_server.config import server_config
from kv_server.http.start import check_http


def check_server(settings: Settings) -> None:
    """Check what only `kv-server` uses. Whether an address is free shows when it is bound.

    Raises:
        ConfigError: a server would refuse to start with these settings.
    """
    config = server_config(settings)
    check_http(config.http)
    if config.peers.listen:
        from kv_server.peers.server import read_peers  # here, because it imports TLS

        read_peers(config.peers)
