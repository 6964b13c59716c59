"""`POST /drain`: before this host leaves, offer what it holds to its peers; `POST /drain/end`: stay after all."""

from functools import partial
from typing import Annotated

import msgspec
from kv_core.errors import InputError
from msgspec import UNSET, Meta, UnsetType

from kv_server.drain.state import DrainState
from kv_server.http.operation import Operation
from kv_server.http.problem import Problem
from kv_server.http.relay import Relay
from kv_server.peers.side import peer_side
from kv_server.server import CacheServer


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """timeout_s: how long it may take. max_bytes: how much may be moved, of each format; all if it is not given."""

    timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    max_bytes: Annotated[int, Meta(ge=0, lt=1 << 62)] | UnsetType = UNSET


class Drains(msgspec.Struct, frozen=True):
    """The progress of each cache; empty if this host is not to leave."""

    caches: list[DrainState]


def operations(relay: Relay) -> list[Operation]:
    async def drain(body: DrainRequest) -> Drains:
        max_bytes = None if body.max_bytes is UNSET else body.max_bytes

        def begin(server: CacheServer) -> Drains:
            server.formats.drain(body.timeout_s, max_bytes)
            return _state(server)

        try:
            return await relay.on_server(begin)
        except InputError as error:  # nowhere to go, whatever was asked
            raise Problem(409, str(error)) from None

    async def end() -> Drains:
        def stop(server: CacheServer) -> Drains:
            server.formats.end_drain()
            return _state(server)

        return await relay.on_server(stop)

    async def state() -> Drains:
        return await relay.on_server(_state)

    describe = partial(Operation, answer=Drains, failures=(503,))
    about = "Store nothing new, and offer what is here to peers"
    return [
        describe("GET", "/drain", "How far the drain of this host is", state),
        Operation("POST", "/drain", about, drain, Drains, DrainRequest, status=202, failures=(409, 503)),
        describe("POST", "/drain/end", "Stop offering, and store as before", end),
    ]


def _state(server: CacheServer) -> Drains:
    states = [peer_side(cache).drain.state() for cache in server.caches.values()]
    return Drains([one for one in states if one is not None])
