"""The options by which a command is told which running server to ask."""

import argparse
from pathlib import Path
from typing import Any


def add_server_options(parser: Any) -> None:
    """`--name` and `--socket`. parser: or a group of one."""
    parser.add_argument("--name", default="default", help="of the server, as kv-server's --name (default: default)")
    parser.add_argument("--socket", metavar="PATH", help="where it listens, instead of the place that the name gives")


def socket_of(options: argparse.Namespace) -> Path:
    """Where that server listens."""
    from kv_tiers.server.config import default_socket  # what it needs is not for every command's --help

    return Path(options.socket) if options.socket else default_socket(options.name)
