"""Forgetting."""

from functools import partial

import msgspec

from kv_tiers.local import LocalCache
from kv_tiers.server.http.chosen import Which, chosen
from kv_tiers.server.http.operation import Operation
from kv_tiers.server.http.relay import Relay


class Clear(Which, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to forget; everything where nothing is said."""


class Cleared(msgspec.Struct, frozen=True):
    """caches: how many were cleared. chunks: how many the pools had held; those below are gone too."""

    caches: int
    chunks: int


def operations(relay: Relay) -> list[Operation]:
    async def clear(body: Clear) -> Cleared:
        caches = await chosen(relay, body)
        chunks = [await relay.call(partial(_clear, cache)) for cache in caches.values()]
        return Cleared(len(chunks), sum(chunks))

    return [
        Operation(
            "POST",
            "/clear",
            "Forget every chunk, in the pool and in all tiers",
            clear,
            Cleared,
            Clear,
            failures=(404, 503),
        )
    ]


def _clear(cache: LocalCache) -> int:
    chunks = cache.counts().chunks_resident
    cache.clear()
    return chunks
