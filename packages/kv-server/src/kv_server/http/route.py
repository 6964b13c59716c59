"""`POST /route`: which engine would answer a prompt soonest, for a router."""

from functools import partial
from typing import Annotated, Final

import msgspec
from kv_core.keys import TENANT_BYTES
from kv_tiers.options import spelled_as
from msgspec import UNSET, Meta, UnsetType

from kv_server.engine_loads import EngineEstimate, EngineLoads, ServedSpace, estimate
from kv_server.http.operation import Operation
from kv_server.http.relay import Relay
from kv_server.http.selector import FormatSelector, select_caches

MAX_DIGESTS: Final = 1 << 15

Digest = Annotated[
    str,
    spelled_as(
        r"^(?:[0-9a-f]{32}|[0-9a-f]{64})$", "a digest as kv keys prints it", description="As `kv keys` prints it."
    ),
]


class RouteRequest(FormatSelector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """digests: of the prompt's whole chunks, from the first: the chain that begins with its salt, if it has one.
    tokens: of the whole prompt, which show whether an engine's chunks are as long; if omitted, only whole chunks are
        counted, and digests of other chunks are not noticed.
    tenant: the tag of the salt (`kv_core.tenant_tag`), hex.
    """

    digests: Annotated[list[Digest], Meta(min_length=1, max_length=MAX_DIGESTS)]
    tokens: Annotated[int, Meta(gt=0, lt=1 << 32)] | UnsetType = UNSET
    tenant: Annotated[
        str, spelled_as(rf"^[0-9a-f]{{{2 * TENANT_BYTES}}}$", f"a tag of {2 * TENANT_BYTES} lower-case hex digits")
    ] = "0" * 2 * TENANT_BYTES


class OtherChunks(msgspec.Struct, frozen=True):
    """An engine for whose chunks a prompt of so many tokens has another number of digests.

    engine: its name, as registered.
    chunk_tokens: tokens in a chunk of its: ask again with digests of such chunks.
    """

    engine: str
    chunk_tokens: int


class Routes(msgspec.Struct, frozen=True):
    """engines: the soonest first, and last those whose costs are not known. An engine that serves several models has an
        entry for each.
    other_chunks: engines that are not estimated, as the digests are not those of their chunks.
    unknown: engines that are connected and have not looked up anything yet.
    """

    engines: list[EngineEstimate]
    other_chunks: list[OtherChunks]
    unknown: list[str]


def operations(relay: Relay) -> list[Operation]:
    async def route(body: RouteRequest) -> Routes:
        caches = await select_caches(relay, body)
        sessions = await relay.on_server(lambda server: server.registrations())
        connected = {one.engine for one in sessions if (one.group_bytes, one.fingerprint) in caches}
        queues = await relay.on_server(lambda server: _queues(server.engine_loads, connected))
        digests, tenant = [bytes.fromhex(text) for text in body.digests], bytes.fromhex(body.tenant)
        estimates, others = [], []
        for served, queue_s in queues.items():
            if served.format not in caches:
                continue  # an earlier engine of that name had it
            chunk_tokens = served.shape.chunk_tokens
            tokens = len(digests) * chunk_tokens if body.tokens is UNSET else body.tokens
            if len(digests) != min(tokens // chunk_tokens, MAX_DIGESTS):
                others.append(OtherChunks(served.engine, chunk_tokens))
                continue
            of_engine = partial(estimate, caches[served.format], served, digests, tokens=tokens, queue_s=queue_s)
            estimates.append(await relay.call(partial(of_engine, tenant=tenant)))
        estimates.sort(key=lambda one: (one.ttft_s is None, one.ttft_s or 0.0, -one.held_chunks))
        return Routes(estimates, others, sorted(connected - {served.engine for served in queues}))

    about = "The expected time to a prompt's first token, by engine"
    return [Operation("POST", "/route", about, route, Routes, RouteRequest, failures=(404, 503))]


def _queues(loads: EngineLoads, connected: set[str]) -> dict[ServedSpace, float]:
    """The key spaces and formats of connected engines, and the length of each engine's queue."""
    return {served: loads.queue_s(served.engine) for served in loads.spaces() if served.engine in connected}
