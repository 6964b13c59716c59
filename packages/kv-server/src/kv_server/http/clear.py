"""`POST /clear`: remove everything, one format's chunks, or one tenant's."""

from collections import Counter
from functools import partial
from typing import Annotated

import msgspec
from kv_tiers.cache.local import LocalCache
from msgspec import UNSET, Meta, UnsetType

from kv_server.http.operation import Operation
from kv_server.http.problem import Problem
from kv_server.http.relay import Relay
from kv_server.http.selector import FormatSelector, check_opened, select_caches
from kv_server.http.tenants import TenantNames


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


def operations(relay: Relay, names: TenantNames) -> list[Operation]:
    async def clear(body: ClearRequest) -> Cleared:
        if body.tenant is UNSET and body.matches_any and not body.everything:
            about = "this removes every chunk from the pool and from all tiers: if that is meant, send"
            raise Problem(409, f'{about} {{"everything": true}}; else name a tenant, a fingerprint or chunk_bytes')
        if body.everything and not (body.tenant is UNSET and body.matches_any):
            raise Problem(409, "everything was asked for, and a part of it: leave one of them out")
        tag = None if body.tenant is UNSET else names.tag(body.tenant)
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
