"""The running server that a command queries: the options that select it, and its answers."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kv_core.errors import ConfigError, InputError, TierDown

if TYPE_CHECKING:
    from kv_server import wire

A = TypeVar("A", bound="wire.Answer")
_ANSWER_S: Final = 5.0


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


def ask(path: Path, request: "wire.Request", wanted: type[A], refusal: str) -> A:
    """The server's answer of this kind. refusal: what it does if it is another, in words.

    Raises:
        ConfigError: there is no server, or it refuses us.
        InputError: its answer is another.
    """
    from kv_server import wire
    from kv_server.connection import ask_server

    try:
        answer = ask_server(path, request, timeout_s=_ANSWER_S)
    except TierDown as why:
        raise ConfigError(f"{why}; give --name or --socket") from None
    if not isinstance(answer, wanted):
        response = answer.text if isinstance(answer, wire.Failed) else type(answer).__name__
        raise InputError(f"the server at {path} {refusal}: {response}")
    return answer
