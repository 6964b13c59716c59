"""The options that select the running server that a command queries."""

import argparse
from pathlib import Path
from typing import Any


def add_server_options(parser: Any) -> None:
    """Add `--name`, `--socket` and `--config`. parser: a parser, or a group of one."""
    parser.add_argument("--name", help="of the server, as kv-server's --name (default: default)")
    parser.add_argument("--socket", metavar="PATH", help="where it listens, instead of the place that the name gives")
    parser.add_argument(
        "--config",
        "--file",
        metavar="FILE",
        dest="server_config",
        help="the settings of the server or its engines, which name it",
    )


def socket_of(options: argparse.Namespace) -> Path:
    """
    Raises:
        ConfigError: the file of settings cannot be read.
    """
    from kv_server.config import default_socket  # too much to import for every command's --help

    socket, name = options.socket, options.name
    if options.server_config is not None and not socket and name is None:
        from kv_tiers.settings import load

        server = load({"config_file": options.server_config}, {})[0].server
        socket, name = server.socket, server.name
    return Path(socket) if socket else default_socket(name or "default")
