"""The options that select the running server that a command queries."""

import argparse
from pathlib import Path
from typing import Any


def add_server_options(parser: Any) -> None:
    """Add `--name` and `--socket`. parser: a parser, or a group of one."""
    parser.add_argument("--name", default="default", help="of the server, as kv-server's --name (default: default)")
    parser.add_argument("--socket", metavar="PATH", help="where it listens, instead of the place that the name gives")


def socket_of(options: argparse.Namespace) -> Path:
    from kv_tiers.server.config import default_socket  # too much to import for every command's --help

    return Path(options.socket) if options.socket else default_socket(options.name)
