"""`POST /clear`: remove everything, one format's chunks, or one tenant's."""

from functools import partial
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kv_tiers.cache.local import LocalCache
from kv_tiers.server.http.operation import Operation
from kv_tiers.server.http.relay import Relay
from kv_tiers.server.http.selector import FormatSelector, check_opened, select_caches
from kv_tiers.server.http.tenants import Names


class Clear(FormatSelector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to remove; everything if no field is given.

    tenant: its name in the settings, or its tag.
    """

    tenant: Annotated[str, Meta(min_length=1, max_length=256)] | UnsetType = UNSET


class Cleared(msgspec.Struct, frozen=True):
    """caches: how many were cleared. chunks: how many the pools had held; those in lower tiers are gone too."""

    caches: int
    chunks: int


def operations(relay: Relay, names: Names) -> list[Operation]:
    async def clear(body: Clear) -> Cleared:
        tag = None if body.tenant is UNSET else names.tag(body.tenant)
        await check_opened(relay, body)
        caches = await select_caches(relay, body)
        chunks = [await relay.call(partial(_clear, cache, tag)) for cache in caches.values()]
        return Cleared(len(chunks), sum(chunks))

    about = "Forget every chunk, in the pool and in all tiers"
    return [Operation("POST", "/clear", about, clear, Cleared, Clear, failures=(404, 503))]


def _clear(cache: LocalCache, tag: bytes | None) -> int:
    if tag is not None:
        return cache.admin.clear_tenant(tag)
    chunks = cache.counts().chunks_resident
    cache.clear()
    return chunks
