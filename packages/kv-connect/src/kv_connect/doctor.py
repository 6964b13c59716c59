"""`kv doctor` on the servers of this machine and the engines that use them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from kv_core.errors import ConfigError, TierDown
from kv_core.tools.doctor import DoctorOptions, Finding
from kv_server import wire
from kv_server.config import default_socket
from kv_server.connection import ask_server_for

from kv_connect.engine import EngineFacts


def check(_options: DoctorOptions) -> Iterator[Finding]:
    """For the entry-point group `kv_core.doctor`."""
    yield from servers(default_socket().parent)


def servers(directory: Path) -> Iterator[Finding]:
    """For each server that listens there, its engines and what their groups of layers need of a prefix."""
    for socket in sorted(directory.glob("*.sock")):
        what = f"server {socket.stem}"
        try:
            answer = ask_server_for(socket, wire.Registered(""), wire.Registrations)
        except (TierDown, ConfigError) as error:
            yield Finding(
                "note", what, f"{socket} does not answer: {error}", "if its process has ended, remove the file"
            )
            continue
        engines: dict[str, dict[str, str]] = {}
        for session in answer.sessions:  # of an engine's processes, one or several describe its chunks
            engines[session.engine] = engines.get(session.engine, {}) | session.facts
        if not engines:
            yield Finding("ok", what, f"{socket}, no engine uses it")
        for engine, facts in engines.items():
            yield _engine(what, engine, facts)


def _engine(what: str, engine: str, facts: Mapping[str, str]) -> Finding:
    """facts: as an engine of any package and release registers them."""
    description = f"engine {engine or 'without a name'}" + (
        f", chunks of {facts['chunk_tokens']} tokens" if "chunk_tokens" in facts else ""
    )
    if "groups" not in facts:  # SGLang's are all alike
        return Finding("ok", what, description)
    try:
        return Finding("ok", what, f"{description}: {EngineFacts.from_text(facts).described}")
    except (KeyError, msgspec.MsgspecError) as error:
        advice = "install the engine's release here to see how its chunks are made up"
        return Finding("note", what, f"{description}, described in another way: {error!r}", advice)
