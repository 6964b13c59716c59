"""Servers as `kv_server.launch` starts them, forked instead of started (`kv_testing.forked`): a tenth of a second
instead of six."""

import importlib
import secrets
from typing import Final

from kv_server.peers import hosts, wire
from kv_server.process import module_command

from kv_testing.forked import Kind, be_nursery

_IMPORTED: Final = (
    "kv_observe.metrics",
    "kv_server.cli",
    "kv_server.http.thread",
    "kv_server.peers.metrics",
    "kv_server.peers.server",
    "kv_tiers.tiers.disk",
    "kv_tiers.tiers.dram",
)
_STARTED: Final = module_command("kv_server")[1:]


def import_server() -> None:
    """What most servers import."""
    for name in _IMPORTED:
        importlib.import_module(name)


def begin_server() -> None:
    """Have an identity of its own."""
    identity = secrets.token_bytes(len(wire.PROCESS))
    for module in (wire, hosts):
        vars(module)["PROCESS"] = identity


def runs_server(arguments: list[str]) -> bool:
    """Whether an interpreter is given these to run a server, with this process's modules and none of where it is."""
    code = _STARTED.index("-c") + 1
    return arguments[: code + 2] == _STARTED[: code + 2]


SERVERS: Final = Kind(__file__, runs_server, import_server, begin_server)

if __name__ == "__main__":
    be_nursery(SERVERS)
