"""The operations of the API on the server as a whole: its state, clearing, a drain, tenants' quotas, routing."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Annotated, Final

import msgspec
from kv_core.errors import ConfigError, InputError
from kv_core.keys import TENANT_BYTES
from kv_observe.metrics import Metrics
from kv_tiers.cache.local import LocalCache
from kv_tiers.options import BYTES_PATTERN, byte_count, spelled_as
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from kv_server.caches import set_quotas
from kv_server.engine_loads import EngineEstimate, EngineLoads, ServedSpace, estimate
from kv_server.http.operation import Operation, Problem
from kv_server.http.relay import FormatSelector, Relay, check_opened, select_caches
from kv_server.http.timeline import SPANS, Past
from kv_server.peers.side import peer_side
from kv_server.report import DrainState, ReloadReport, Report
from kv_server.server import CacheServer
from kv_server.wire import Format


class Alive(msgspec.Struct, frozen=True):
    """The process runs."""

    alive: bool


class Ready(msgspec.Struct, frozen=True):
    """Clients are served."""

    ready: bool


def state_operations(relay: Relay) -> list[Operation]:
    """Metrics that come from events are counted from this call on."""
    known: list[LocalCache] = []
    counted = Metrics(relay.server.bus, lambda: list(known), lambda: relay.server.network_metrics(known))

    async def healthz() -> Alive:
        return Alive(True)

    async def readyz() -> Ready:
        if relay.server.is_stopping:
            raise Problem(503, "the server is stopping; ask its successor")
        report = await relay.report()
        if report.opening:
            raise Problem(503, f"{report.opening} caches are being opened; ask again soon", {"retry-after": "1"})
        return Ready(True)

    async def history(span: str) -> Past:
        if span not in SPANS:
            raise Problem(404, f"no history of a {span[:100]!r}; there are those of {', '.join(SPANS)}")
        return relay.timeline.past(span)

    async def metrics() -> Response:
        known[:] = (await relay.caches()).values()
        text, media_type = await relay.call(counted.exposition)
        return Response(text, headers={"content-type": media_type})

    about = "The server, its sessions, and each cache's counts and tiers"
    past = "What was looked up, loaded and stored during the last hour, day or month"
    return [
        Operation("GET", "/healthz", "Whether the process is alive", healthz, Alive),
        Operation("GET", "/readyz", "Whether clients are served; if not, why", readyz, Ready, failures=(503,)),
        Operation("GET", "/status", about, relay.report, Report, failures=(503,)),
        Operation("GET", "/history/{span}", past, history, Past, failures=(404,)),
        Operation("GET", "/metrics", "Counters and gauges for Prometheus", metrics, Response, failures=(503,)),
    ]


class Frozen(msgspec.Struct, frozen=True):
    """Whether nothing new is stored, and nothing evicted."""

    frozen: bool


def freeze_operations(relay: Relay) -> list[Operation]:
    async def change(is_frozen: bool) -> Frozen:
        await relay.on_server(lambda server: server.formats.freeze(is_frozen))
        return Frozen(is_frozen)

    about = "Store nothing new and evict nothing, until that is ended or the server ends"
    return [
        Operation("POST", "/freeze", about, partial(change, True), Frozen, failures=(503,)),
        Operation("POST", "/freeze/end", "Store and evict as before", partial(change, False), Frozen, failures=(503,)),
    ]


class ReloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """take_over: have another process take over, with all of the settings."""

    take_over: bool = False


def reload_operations(relay: Relay) -> list[Operation]:
    async def reload(body: ReloadRequest) -> ReloadReport:
        outcome: Future[ReloadReport] = Future()
        relay.server.reload(outcome.set_result, take_over=body.take_over)
        report = await asyncio.shield(asyncio.wrap_future(outcome))  # which a client that leaves must not cancel
        if report.why:
            raise Problem(503 if relay.server.is_stopping else 409, f"the settings stay as they are: {report.why}")
        return report

    about = "Read the settings file again, as on SIGHUP: what has changed, and what needs more than that"
    return [Operation("POST", "/reload", about, reload, ReloadReport, ReloadRequest, failures=(409, 503))]


class Quota(FormatSelector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """quota_bytes: the tenant's own part of each format's pool, as a number or a text such as "4GiB"; only whole chunks
    count, and 0 means none at all."""

    quota_bytes: (
        Annotated[int, Meta(ge=0, lt=1 << 60)]
        | Annotated[str, spelled_as(BYTES_PATTERN, "a number of bytes, such as 4GiB")]
    )


class Use(msgspec.Struct, frozen=True):
    """A tenant's use of one format's pool. quota_bytes: null if the tenant uses the common share."""

    chunk_bytes: int
    fingerprint: str
    chunks: int
    used_bytes: int
    quota_bytes: int | None


class TenantState(msgspec.Struct, frozen=True):
    """name: from the settings, "" if it is not there. tag: as in the paths of keys."""

    name: str
    tag: str
    caches: list[Use]
    note: str = "a quota set here lasts until the server ends; what it starts with is in its settings (tenants)"


def tag_of(tenant: str, names: Mapping[bytes, str]) -> bytes:
    """The tag of the tenant that has this name in the settings, or this tag, as hex, in its keys. names: by tag. Raises
    `Problem`: there is no such tenant."""
    tags = {name: tag for tag, name in names.items()}
    if tenant in tags:
        return tags[tenant]
    if len(tenant) == 2 * TENANT_BYTES and set(tenant) <= set("0123456789abcdef"):
        return bytes.fromhex(tenant)
    raise Problem(
        404,
        f"no tenant is called {tenant[:100]!r}; the settings list {', '.join(sorted(tags)) or 'none'}. Otherwise write "
        f"the tag, {2 * TENANT_BYTES} hex digits, as /status shows it",
    )


def quota_operations(relay: Relay) -> list[Operation]:
    async def state(tag: bytes) -> TenantState:
        caches = await relay.caches()
        uses = [await relay.call(partial(_use, format_, cache, tag)) for format_, cache in caches.items()]
        return TenantState(relay.server.tenant_names.get(tag, ""), tag.hex(), uses)

    async def set_quota(tag: bytes, quota_bytes: int | None, of: FormatSelector) -> None:
        """In the caches that there are, and in those that are opened later."""
        caches = await select_caches(relay, of)
        await relay.call(partial(set_quotas, caches.values(), {tag: quota_bytes}))
        formats = None if of.matches_any else caches.keys()
        await relay.on_server(lambda server: server.formats.keep_quota(tag, quota_bytes, formats))
        if of.matches_any:
            opened = {format_: cache for format_, cache in (await relay.caches()).items() if format_ not in caches}
            await relay.call(partial(set_quotas, opened.values(), {tag: quota_bytes}))

    async def get(tenant: str) -> TenantState:
        return await state(tag_of(tenant, relay.server.tenant_names))

    async def put(body: Quota, tenant: str) -> TenantState:
        tag = tag_of(tenant, relay.server.tenant_names)
        try:
            await set_quota(tag, byte_count(body.quota_bytes, "quota_bytes"), body)
        except ConfigError as error:
            raise Problem(409, str(error)) from None
        return await state(tag)

    async def delete(tenant: str) -> TenantState:
        tag = tag_of(tenant, relay.server.tenant_names)
        await set_quota(tag, None, FormatSelector())
        return await state(tag)

    path, failures = "/quota/{tenant}", (404, 503)
    reserve = "Reserve a part of the pool for a tenant until the server ends"
    share = "Have a tenant share with all others until the server ends"
    return [
        Operation("GET", path, "What a tenant has of the pool", get, TenantState, failures=failures),
        Operation("PUT", path, reserve, put, TenantState, Quota, failures=(404, 409, 503)),
        Operation("DELETE", path, share, delete, TenantState, failures=failures),
    ]


def _use(format_: Format, cache: LocalCache, tag: bytes) -> Use:
    uses = [(use.chunks, use.used_bytes, use.quota_bytes) for use in cache.admin.tenants() if use.tenant == tag]
    return Use(max(format_[0]), format_[1], *(uses[0] if uses else (0, 0, None)))


class ClearRequest(FormatSelector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to remove: one tenant's chunks, those of the formats that match, or, if that is said, everything.

    tenant: its name in the settings, or its tag.
    everything: needed if no other field is given.
    """

    tenant: Annotated[str, Meta(min_length=1, max_length=256)] | UnsetType = UNSET
    everything: bool = False


class Cleared(msgspec.Struct, frozen=True):
    """caches: how many were cleared. chunks: how many the pools had held. below: how many each tier below had held, as
    far as it says; a chunk may be in several. Not known for one tenant. All of them are gone.
    """

    caches: int
    chunks: int
    below: dict[str, int]


def clear_operations(relay: Relay) -> list[Operation]:
    async def clear(body: ClearRequest) -> Cleared:
        if body.tenant is UNSET and body.matches_any and not body.everything:
            about = "this removes every chunk from the pool and from all tiers: if that is meant, send"
            raise Problem(409, f'{about} {{"everything": true}}; else name a tenant, a fingerprint or chunk_bytes')
        if body.everything and not (body.tenant is UNSET and body.matches_any):
            raise Problem(409, "everything was asked for, and a part of it: leave one of them out")
        tag = None if body.tenant is UNSET else tag_of(body.tenant, relay.server.tenant_names)
        await check_opened(relay, body)
        caches = await select_caches(relay, body)
        cleared = [await relay.call(partial(_clear, cache, tag)) for cache in caches.values()]
        below = sum((tiers for _, tiers in cleared), Counter[str]())
        return Cleared(len(cleared), sum(chunks for chunks, _ in cleared), dict(below))

    about = "Forget chunks, in the pool and in all tiers: a tenant's, a format's, or everything"
    return [Operation("POST", "/clear", about, clear, Cleared, ClearRequest, failures=(404, 409, 503))]


def _clear(cache: LocalCache, tag: bytes | None) -> tuple[int, Counter[str]]:
    """How many chunks the pool had held, and each tier."""
    if tag is not None:
        return cache.admin.clear_tenant(tag), Counter()
    chunks = cache.counts().chunks_resident
    below = Counter({tier.name: tier.usage.chunks or 0 for tier in cache.lower.states() if tier.usage.chunks})
    cache.clear()
    return chunks, below


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """timeout_s: how long it may take. max_bytes: how much may be moved, of each format; all if it is not given."""

    timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    max_bytes: Annotated[int, Meta(ge=0, lt=1 << 62)] | UnsetType = UNSET


class Drains(msgspec.Struct, frozen=True):
    """The progress of each cache; empty if this host is not to leave."""

    caches: list[DrainState]


def drain_operations(relay: Relay) -> list[Operation]:
    async def drain(body: DrainRequest) -> Drains:
        max_bytes = None if body.max_bytes is UNSET else body.max_bytes
        try:
            await relay.on_server(lambda server: server.formats.drain(body.timeout_s, max_bytes))
        except InputError as error:  # nowhere to go, whatever was asked
            raise Problem(409, str(error)) from None
        return await state()

    async def end() -> Drains:
        await relay.on_server(lambda server: server.formats.end_drain())
        return await state()

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


MAX_DIGESTS: Final = 1 << 15

Digest = Annotated[
    str,
    spelled_as(
        r"(?:[0-9a-f]{32}|[0-9a-f]{64})", "a digest as kv keys prints it", description="As `kv keys` prints it."
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
        str, spelled_as(rf"[0-9a-f]{{{2 * TENANT_BYTES}}}", f"a tag of {2 * TENANT_BYTES} lower-case hex digits")
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


def route_operations(relay: Relay) -> list[Operation]:
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
