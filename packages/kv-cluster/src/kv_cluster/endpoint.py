"""The endpoint `cluster` of a server: what of a prefix is on this host, and dropping it.

All else that `kv cluster` asks for, a server's own HTTP has. A request is about one tenant's chunks.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from kv_core.coverage import ChunkShape
from kv_core.keys import TENANT_BYTES, ChunkKey
from kv_server.http.endpoints import ServerView
from kv_server.http.operation import Operation, Problem
from kv_server.http.prefixes import MAX_KEYS, Key, Shaped, keys_of
from kv_server.peers.tier import PeersTier
from kv_tiers.cache.hits import last_boundary, whole_prefix
from kv_tiers.cache.host import AT_ONCE, TIER
from kv_tiers.cache.local import LocalCache
from kv_tiers.events import events
from kv_tiers.options import read_options, spelled_as
from msgspec import Meta


class ClusterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The endpoint takes none."""


class HeldHere(msgspec.Struct, frozen=True):
    """chunks: of the longest hit that this host alone can serve: from its pool, and tiers that only it has.
    tiers: how many of these are in each, a chunk in the slowest of those that its keys are in.
    fingerprint, chunk_bytes: the format of the cache that has most of the prefix.
    """

    chunks: int = 0
    tiers: dict[str, int] = {}
    fingerprint: str = ""
    chunk_bytes: int = 0


class DropRequest(Shaped, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """everywhere: from tiers that other hosts share, too, and what peers have is not read again until it is stored
    anew."""

    everywhere: bool = False


class DroppedHere(msgspec.Struct, frozen=True):
    """chunks: of the longest hit that this host had before."""

    chunks: int


class AllCleared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every server was cleared of a tenant, a prefix or (neither is given) everything.

    tenant: its tag, hex. ago_s: since when they have been, at the earliest.
    """

    tenant: Annotated[str, spelled_as(rf"^([0-9a-f]{{{2 * TENANT_BYTES}}})?$", "a tag, or nothing")] = ""
    keys: Annotated[list[Key], Meta(max_length=MAX_KEYS)] = []
    ago_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0


class ReadsPeers(msgspec.Struct, frozen=True):
    """caches: that read of other hosts what they were cleared of, as far as it was stored there again."""

    caches: int


def make_cluster(parameters: Mapping[str, object]) -> Sequence[Operation]:
    """The factory that `http.endpoints: [cluster]` names. Raises `ConfigError`: it takes no parameters."""
    read_options(ClusterOptions, parameters, "endpoint cluster")
    where = "How many leading chunks of a prefix this host holds, by tier"
    cleared = "Read of other hosts again what all have been cleared of"
    drop = "Drop a prefix from this host, or from all tiers"
    return [
        Operation("POST", "/where", where, held_here, HeldHere, Shaped, failures=(409,)),
        Operation("POST", "/drop", drop, drop_here, DroppedHere, DropRequest, failures=(409,)),
        Operation("POST", "/cleared", cleared, all_cleared, ReadsPeers, AllCleared),
    ]


def held_here(view: ServerView, body: Shaped) -> HeldHere:
    keys, shape = _keys(body), body.shape()
    found = [
        HeldHere(sum(tiers.values()), dict(tiers), fingerprint, max(group_bytes))
        for (group_bytes, fingerprint), cache in view.caches().items()
        if body.matches((group_bytes, fingerprint)) and (tiers := _held(cache, keys, shape))
    ]
    return max(found, key=lambda held: held.chunks, default=HeldHere())


def drop_here(view: ServerView, body: DropRequest) -> DroppedHere:
    keys, shape, chunks = _keys(body), body.shape(), 0
    for one, cache in view.caches().items():
        if body.matches(one):
            chunks = max(chunks, sum(_held(cache, keys, shape).values()))
            if body.everywhere:
                cache.forget(keys)
            else:
                _drop_own(cache, keys)
    return DroppedHere(chunks)


def all_cleared(view: ServerView, body: AllCleared) -> ReadsPeers:
    caches, keys = view.caches().values(), keys_of(body.keys)
    tenants = {bytes.fromhex(body.tenant)} if body.tenant else set()
    began_s = math.inf if tenants or keys else time.monotonic() - body.ago_s
    tiers = [tier for cache in caches for _, tier in cache.lower.tiers_that(PeersTier)]
    for tier in tiers:
        tier.all_cleared(began_s, tenants, keys)
    return ReadsPeers(len(tiers))


def _keys(body: Shaped) -> list[ChunkKey]:
    keys = keys_of(body.keys)
    if len({key.tenant for key in keys}) > 1:
        raise Problem(409, "these keys are of several tenants; send those of one prompt")
    return keys


def _held(cache: LocalCache, keys: Sequence[ChunkKey], shape: ChunkShape) -> Counter[str]:
    """How many chunks of the longest hit are in each tier of this host."""
    parts, places = cache.parts, [""] * len(keys)
    for start in range(0, len(keys), AT_ONCE):  # engines get the lock in between
        with parts.host.lock:
            parts.host.check_open()
            for place in range(start, min(start + AT_ONCE, len(keys))):
                places[place] = TIER if parts.index.find(keys[place]) is not None else ""
    order = [TIER]
    for lane in cache.lower.local_lanes():
        order.append(lane.name)
        missing = [place for place, tier in enumerate(places) if not tier]
        for place, is_held in zip(missing, lane.holds([keys[place] for place in missing]), strict=True):
            places[place] = lane.name if is_held else ""

    def is_there(place: int) -> bool:
        return bool(places[place])

    chunks, _ = last_boundary(shape, whole_prefix(shape, len(keys) // shape.keys_per_chunk, is_there), is_there)
    tiers = [TIER] * chunks
    for place in shape.needed_places(chunks):
        chunk = place // shape.keys_per_chunk
        tiers[chunk] = max(tiers[chunk], places[place], key=order.index)
    return Counter(tiers)


def _drop_own(cache: LocalCache, keys: Sequence[ChunkKey]) -> None:
    """As `LocalCache.forget`, but of what this host alone has: what peers and shared tiers hold is still found."""
    parts = cache.parts
    with parts.host.lock:
        parts.host.check_open()
        forgotten = parts.host.forget(keys)
        cache.admin.unpin_forgotten()
        parts.lower.on_forgotten(set(keys).__contains__)
        for lane in parts.lower.local_lanes():
            lane.discard(keys)
        if cache.events.on:
            cache.events.publish(events.Forgotten(forgotten))
