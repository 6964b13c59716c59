"""What the verbs need of each server, at its endpoint `cluster`: what of a prefix is on this host, and dropping it.

All else that they ask for, a server's own HTTP has. A request is about one tenant's chunks.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

import msgspec
from kv_core.coverage import ChunkShape
from kv_core.keys import TENANT_BYTES, ChunkKey
from kv_server.http.endpoints import ServerView
from kv_server.http.operation import Operation, Problem
from kv_server.http.prefixes import MAX_KEYS, Key, Shaped, keys_of
from kv_server.peers.tier import PeersTier
from kv_tiers.cache.hits import last_boundary, slowest_tiers, whole_prefix
from kv_tiers.cache.host import AT_ONCE, TIER
from kv_tiers.cache.local import LocalCache
from kv_tiers.events import events
from kv_tiers.lanes.lane import Lane
from kv_tiers.options import spelled_as
from msgspec import Meta

AWAITED_S: Final = 15.0
"""Longer than a move takes from asking the target what it holds to dropping the source's copy."""
_CLEARING_S: Final = 5.0
"""How long `all_cleared` waits for tiers that have not been cleared yet."""


class HeldHere(msgspec.Struct, frozen=True):
    """chunks: of the longest hit that this host alone can serve: from its pool, and tiers that only it has.
    tiers: how many of these are in each, a chunk in the slowest of those that its keys are in.
    fingerprint, chunk_bytes: the format of the cache that has most of the prefix.
    """

    chunks: int
    tiers: dict[str, int]
    fingerprint: str
    chunk_bytes: int


class WhereRequest(Shaped, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """for_move: another host drops its copy if this one has all of it: for a while this one drops none."""

    for_move: bool = False


class DropRequest(Shaped, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """everywhere: from tiers that other hosts share, too, and what peers have is not read again until it is stored
    anew."""

    everywhere: bool = False


class DroppedHere(msgspec.Struct, frozen=True):
    """chunks: of the longest hit that this host had before."""

    chunks: int


class AllCleared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every server was cleared of a tenant, a prefix or (neither is given) everything.

    tenant: its tag, hex.
    """

    tenant: Annotated[str, spelled_as(rf"([0-9a-f]{{{2 * TENANT_BYTES}}})?", "a tag, or nothing")] = ""
    keys: Annotated[list[Key], Meta(max_length=MAX_KEYS)] = []


class ReadsPeers(msgspec.Struct, frozen=True):
    """caches: that read of other hosts what they were cleared of, as far as it was stored there again."""

    caches: int


class Moves:
    """The moves to this host that may be about to drop the source's copy. Two in opposite directions would else drop
    both copies, and one between two names of a host its only one. Thread-safe.

    A target is announced before it says what it holds, and `lock` is held while a copy is dropped, so of two such
    moves at most one finds the other's copy and may drop its own.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._awaited: list[tuple[float, frozenset[ChunkKey]]] = []

    def announce(self, keys: Sequence[ChunkKey]) -> None:
        now_s = time.monotonic()
        with self.lock:
            self._awaited = [one for one in self._awaited if one[0] > now_s] + [(now_s + AWAITED_S, frozenset(keys))]

    def check(self, keys: Sequence[ChunkKey]) -> None:
        """Under the lock. Raises `Problem`: a move to this host relies on them."""
        if any(until_s > time.monotonic() and not awaited.isdisjoint(keys) for until_s, awaited in self._awaited):
            detail = f"chunks of it were moved to this very host within the last {AWAITED_S:g} s; keep it, or try later"
            raise Problem(409, detail)


def operations_here() -> list[Operation]:
    where = "How many leading chunks of a prefix this host holds, by tier"
    cleared = "Read of other hosts again what all have been cleared of"
    drop = "Drop a prefix from this host, or from all tiers"
    moves = Moves()
    return [
        Operation("POST", "/where", where, partial(held_here, moves), HeldHere, WhereRequest, failures=(409,)),
        Operation("POST", "/drop", drop, partial(drop_here, moves), DroppedHere, DropRequest, failures=(409,)),
        Operation("POST", "/cleared", cleared, all_cleared, ReadsPeers, AllCleared),
    ]


def held_here(moves: Moves, view: ServerView, body: WhereRequest) -> HeldHere:
    keys, shape = _keys(body), body.shape()
    if body.for_move:
        moves.announce(keys)
    found = [
        HeldHere(sum(tiers.values()), dict(tiers), fingerprint, max(group_bytes))
        for (group_bytes, fingerprint), cache in view.caches().items()
        if body.matches((group_bytes, fingerprint)) and (tiers := _held(cache, keys, shape))
    ]
    return max(found, key=lambda held: held.chunks, default=HeldHere(0, {}, "", 0))


def drop_here(moves: Moves, view: ServerView, body: DropRequest) -> DroppedHere:
    keys, shape, chunks = _keys(body), body.shape(), 0
    caches = [cache for one, cache in view.caches().items() if body.matches(one)]
    with moves.lock:
        if not body.everywhere:
            moves.check(keys)
        for cache in caches:
            chunks = max(chunks, sum(_held(cache, keys, shape).values()))
            if body.everywhere:
                cache.forget(keys)
            else:
                _drop_own(cache, keys)
    return DroppedHere(chunks)


def all_cleared(view: ServerView, body: AllCleared) -> ReadsPeers:
    caches, keys = view.caches().values(), keys_of(body.keys)
    tenants = {bytes.fromhex(body.tenant)} if body.tenant else set()
    tiers = [
        (cache.lower.lanes[number], tier) for cache in caches for number, tier in cache.lower.tiers_that(PeersTier)
    ]
    until_s = time.monotonic() + _CLEARING_S
    for lane, tier in tiers:
        while _is_clearing(lane, tenants, keys):  # or what it was asked for before this would hide chunks after it
            if time.monotonic() > until_s:
                raise Problem(503, f"tier {lane.name} has not been cleared within {_CLEARING_S:g} s; send this again")
            time.sleep(0.005)
        tier.all_cleared(tenants, keys)
    return ReadsPeers(len(tiers))


def _is_clearing(lane: Lane, tenants: set[bytes], keys: Sequence[ChunkKey]) -> bool:
    """Whether the tier has still to remove any of these; none: everything."""
    everything, of_tenants, removed = lane.removals()
    if tenants or keys:
        return not tenants.isdisjoint(of_tenants) or not set(keys).isdisjoint(removed)
    return everything


def _keys(body: Shaped) -> list[ChunkKey]:
    keys = keys_of(body.keys)
    if len({key.tenant for key in keys}) > 1:
        raise Problem(409, "these keys are of several tenants; send those of one prompt")
    return keys


def _held(cache: LocalCache, keys: Sequence[ChunkKey], shape: ChunkShape) -> Counter[str]:
    """How many chunks of the longest hit are in each tier of this host."""
    parts = cache.parts
    places: list[str] = []
    for start in range(0, len(keys), AT_ONCE):  # engines get the lock in between
        with parts.host.lock:
            parts.host.check_open()
            places += ["" if parts.index.find(key) is None else TIER for key in keys[start : start + AT_ONCE]]
    places = parts.lower.locate(keys, places, only_here=True)
    order = [TIER, *(lane.name for lane in parts.lower.local_lanes())]

    def is_there(place: int) -> bool:
        return bool(places[place])

    chunks, _ = last_boundary(shape, whole_prefix(shape, len(keys) // shape.keys_per_chunk, is_there), is_there)
    sources = [places[place] for place in shape.needed_places(chunks)]
    return Counter(slowest_tiers(chunks, shape, sources, order.index, TIER))


def _drop_own(cache: LocalCache, keys: Sequence[ChunkKey]) -> None:
    """As `LocalCache.forget`, but of what this host alone has: what peers and shared tiers hold is still found.
    Raises `Problem`: some is pinned, which would end here and begin nowhere."""
    parts = cache.parts
    with parts.host.lock:
        parts.host.check_open()
        slots = {slot for key in keys if (slot := parts.index.find(key)) is not None}
        for name, pinned in cache.admin.pinned.items():
            if not slots.isdisjoint(pinned):
                raise Problem(409, f"it is pinned as {name.rpartition('.')[2]!r}: unpin it, and pin it where it goes")
        forgotten = parts.host.forget(keys)
        cache.admin.unpin_forgotten()
        parts.lower.discard(keys, only_here=True)
        if cache.events.on:
            cache.events.publish(events.Forgotten(forgotten))
