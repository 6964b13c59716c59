"""`/hints`: KV hints while no request carries them, such as for an agent whose tool is running.

The token's owner says whose chunks they are about, and they reach no other tenant's: neither its chunks, nor its pins,
which are named after the tenant that set them.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey
from kv_tiers.cache.local import LocalCache
from msgspec import Meta

from kv_server.hints import (
    MAX_TTL_S,
    RETAINED,
    DemoteHint,
    Hint,
    HintOutcome,
    HintOutcomes,
    PinHint,
    PrefetchHint,
    RetainHint,
    UnpinHint,
    read_hints,
)
from kv_server.http.operation import Operation, Problem
from kv_server.http.operations import tag_of
from kv_server.http.prefixes import Shaped, keys_of
from kv_server.http.relay import ANSWER_S, Outcome, Relay, select_cache


class HintedPrefix(Shaped, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tenant: its name in the settings, or its tag: fourteen zeros for prompts without a salt.
    hints: an envelope as a request carries it (docs/requests.md).
    """

    tenant: Annotated[str, Meta(min_length=1, max_length=256)]
    hints: dict[str, Any]


def hint_operations(relay: Relay) -> list[Operation]:
    async def hint(body: HintedPrefix) -> HintOutcomes:
        tag, keys, shape = tag_of(body.tenant, relay.server.tenant_names), keys_of(body.keys), body.shape()
        if any(key.tenant != tag for key in keys):
            raise Problem(409, "not all of these keys are of this tenant; kv keys prints a tenant's with its --salt")
        _, cache = await select_cache(relay, body)

        async def outcome_of(action: Hint | HintOutcome) -> HintOutcome:
            if isinstance(action, HintOutcome):
                return action
            if isinstance(action.payload, PrefetchHint):
                return await _prefetch(relay, cache, keys, shape, action)
            return await relay.call(partial(_do, cache, keys, shape, action, tag.hex()))

        hints = read_hints(body.hints)
        return HintOutcomes(hints.message_id, tuple([await outcome_of(action) for action in hints.actions]))

    about = "Retain, promote, demote or pin a tenant's prefix as KV hints say"
    return [Operation("POST", "/hints", about, hint, HintOutcomes, HintedPrefix, failures=(404, 409, 503))]


def _do(cache: LocalCache, keys: Sequence[ChunkKey], shape: ChunkShape, hint: Hint, tenant: str) -> HintOutcome:
    admin, requested = cache.admin, len(keys) // shape.keys_per_chunk
    match hint.payload:
        case UnpinHint(name):
            pinned = admin.unpin(f"{tenant}.{name}")
            return hint.accepted() if pinned else hint.rejected(f"this tenant has no pin {name!r}")
        case PinHint(name):
            chunks = admin.pin(keys, f"{tenant}.{name}", shape=shape)
            return _of(hint, chunks, requested, "pins take half of the pool or quota at most")
        case RetainHint(seconds=requested_s):
            seconds = min(requested_s, MAX_TTL_S)
            chunks = admin.retain(keys, seconds, shape=shape)
            enough = requested if requested_s == seconds else requested + 1
            return _of(hint, chunks, enough, RETAINED, ttl_seconds=seconds)
        case DemoteHint():
            chunks = -(-admin.demote(keys) // shape.keys_per_chunk)
            return _of(hint, chunks, requested, "the pool holds no more of it")
    raise AssertionError(hint)


def _of(hint: Hint, chunks: int, requested: int, limits: str, **granted: float) -> HintOutcome:
    if not chunks:
        return hint.rejected(f"the pool has none of it, or no room: {limits}")
    granted["chunks"] = chunks
    return hint.accepted(**granted) if chunks >= requested else hint.clipped(limits, **granted)


async def _prefetch(
    relay: Relay, cache: LocalCache, keys: Sequence[ChunkKey], shape: ChunkShape, hint: Hint
) -> HintOutcome:
    """A job, because a tier may be slow; answered with its end if that is soon."""

    def work() -> Outcome:
        return cache.admin.prefetch(keys, shape=shape), ""

    try:
        job = relay.jobs.start("prefetch", hint.action_id, work)
    except Problem as why:
        return hint.rejected(why.detail)
    until_s = time.monotonic() + ANSWER_S
    while (job := relay.jobs.find(job.id)).state == "running":
        if time.monotonic() >= until_s:
            return hint.deferred(f"GET /prefixes/jobs/{job.id} says when it is done")
        await asyncio.sleep(0.005)
    if job.state == "failed":
        return hint.rejected(job.reason)
    return _of(hint, job.chunks, len(keys) // shape.keys_per_chunk, "no tier holds more of it, or the pool is full")
