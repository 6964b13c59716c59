"""What a cache passes on to another process: first its chunks, then what has changed since and everything else.

Both are taken under the cache's lock. Slots keep their numbers, and leases theirs, so that clients go on with them.
"""

import re
from dataclasses import asdict, dataclass
from typing import Final

from kv_core.coverage import ChunkShape, Coverage
from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_tiers.cache.host import CacheTotals
from kv_tiers.cache.leases import ReadEntry, WriteEntry
from kv_tiers.cache.local import LocalCache
from kv_tiers.events.changes import Change, ChangeLog
from kv_tiers.index.journal import Journal
from kv_tiers.pool.directory import slots_least_worth_first
from kv_tiers.tier import RemembersRemoved, Removed

from kv_server.session import release
from kv_server.wire import Format

_OF_A_SESSION: Final = re.compile(r"[0-9a-f]{8}\.\d+l?/.*", re.DOTALL)
"""The holders of clients (`kv_server.session`)."""


@dataclass(slots=True)
class PoolImage:
    """The chunks of a pool, and the pool.

    format, name, slots, mapped_slots: of the cache and its pool.
    keys, at: the chunks, the least worth first, and their slots.
    shapes: by key space, what a hit needs: tokens of a chunk, coverages as text, shards.
    """

    format: Format
    name: str
    slots: int
    mapped_slots: int
    keys: list[ChunkKey]
    at: list[int]
    shapes: dict[bytes, tuple[int, list[str], int]]


@dataclass(slots=True)
class CacheImage:
    """The rest of a cache.

    changed: chunks that came or left since the `PoolImage`, and where each is now; -1: it is not here.
    leaving: slots of chunks that were forgotten and are still read, with their tenants.
    orphaned: slots of those that were forgotten while they are written.
    reads, writes, last_lease: the open leases, and the last number of one.
    pins, holds: slots by name, and until when each is held and retained.
    waiting, removals: by tier, what it is still to get and to remove.
    removed: by tier, what it does not read any more of those that fill it.
    cleared_s: when everything was cleared last.
    parts: of approximations, by slot.
    unverified: checksums of chunks that an earlier process left, by slot, as far as their bytes were not verified yet.
    moved: slots that are not at their places.
    totals: the counters.
    record: of changes, for engines that follow them.
    """

    changed: list[tuple[ChunkKey, int]]
    leaving: list[tuple[int, bytes]]
    orphaned: list[int]
    reads: list[ReadEntry]
    writes: list[WriteEntry]
    last_lease: int
    pins: dict[str, list[int]]
    holds: dict[int, tuple[float, float]]
    waiting: dict[str, list[tuple[int, ChunkKey, ChunkKey | None]]]
    removals: dict[str, tuple[bool, list[bytes], list[ChunkKey]]]
    removed: dict[str, Removed]
    cleared_s: float | None
    parts: dict[int, int]
    unverified: dict[int, bytes]
    moved: dict[int, int]
    totals: CacheTotals
    record: tuple[int, list[Change]] | None


class Passed:
    """One cache that is passed on."""

    def __init__(self, wanted: Format, cache: LocalCache) -> None:
        self.cache = cache
        self._format = wanted
        self._journal = Journal()

    def pool_image(self) -> PoolImage:
        """Takes the lock itself. Changes are recorded from now on, until `end`."""
        parts, pool = self.cache.parts, self.cache.pool
        with parts.host.lock:
            self._journal.take()
            parts.index.journal = self._journal
            keys = parts.index.keys()
            slots = [slot for key in keys if (slot := parts.index.find(key)) is not None]
            shapes = parts.bounded.shapes()
        number_of = {slot: number for number, slot in enumerate(slots)}
        key_at = dict(zip(slots, keys, strict=True))
        parents = parts.index.parents()
        ordered = slots_least_worth_first(number_of, {slot: parents.get(slot, -1) for slot in slots})
        spelled = {
            space_id: (shape.chunk_tokens, list(map(str, shape.groups)), shape.shards)
            for space_id, shape in shapes.items()
        }
        ordered_keys = [key_at[slot] for slot in ordered]
        return PoolImage(self._format, pool.name, pool.slots, pool.mapped_slots, ordered_keys, ordered, spelled)

    def cache_image(self) -> CacheImage:
        """Under the lock. Raises `TierDown`: it cannot be taken now."""
        cache, parts = self.cache, self.cache.parts
        index, leases = parts.index, parts.leases
        changed = self._journal.take()
        if changed is None:
            raise TierDown("more has changed than can be passed on at once")
        if index.replaced:
            raise TierDown("bytes are still read that better ones have replaced")
        reads, writes, last_lease = leases.entries()
        leased = {slot for read in reads for slot in read.slots}.union(*cache.admin.pinned.values())
        shares = parts.host.shares
        names = cache.tiers[1:]
        record = None if cache.events.log is None else cache.events.log.since(0)
        return CacheImage(
            [(key, -1 if (slot := index.find(key)) is None else slot) for key in changed],
            [(slot, shares.tenant_at(slot)) for slot in index.leaving() if slot in leased],
            [slot for write in writes for slot in index.orphaned(write.slots)],
            reads,
            writes,
            last_lease,
            cache.admin.pinned,
            parts.holds.until_s(),
            dict(zip(names, parts.lower.spills.waiting(), strict=True)),
            {lane.name: lane.removals() for lane in parts.lower.lanes},
            {lane.name: lane.tier.removed() for lane in parts.lower.lanes if isinstance(lane.tier, RemembersRemoved)},
            parts.host.cleared_s,
            {slot: one.parts for slot, one in parts.lower.upgrades.by_slot.items()},
            parts.host.unverified(),
            cache.pool.places.moved,
            parts.totals,
            None if record is None else (record.upto, list(record.changes)),
        )

    def end(self) -> None:
        """Record nothing more."""
        if self.cache.parts.index.journal is self._journal:
            self.cache.parts.index.journal = None


def restore_pool(cache: LocalCache, image: PoolImage) -> None:
    """In a new cache on the same pool, that nobody uses yet."""
    parts = cache.parts
    with parts.host.lock:
        parts.bounded.restore(
            {
                space_id: ChunkShape(tokens, tuple(map(Coverage.parse, groups)), shards)
                for space_id, (tokens, groups, shards) in image.shapes.items()
            }
        )
        for key, slot in zip(image.keys, image.at, strict=True):
            parts.host.shares.took([slot], key.tenant)
            parts.index.adopt(key, slot)
        cache.pool.take(image.at)


def restore_cache(cache: LocalCache, image: CacheImage) -> None:
    """After `restore_pool`: all but what `restore_tiers` does."""
    parts = cache.parts
    host, index, shares = parts.host, parts.index, parts.host.shares
    with host.lock:
        used: list[int] = []  # those that `restore_pool` has not taken: it has, while the other process served, most
        for key, slot in image.changed:
            old = index.find(key)
            if old is not None and old != slot:
                index.empty(old)
                host.free([old])
        for key, slot in image.changed:
            if slot >= 0 and index.find(key) is None:
                shares.took([slot], key.tenant)
                index.adopt(key, slot)
                used.append(slot)
        index.restore_leaving(slot for slot, _ in image.leaving)
        for slot, tenant in image.leaving:
            shares.took([slot], tenant)
            used.append(slot)
        orphaned = set(image.orphaned)
        for is_orphan in (True, False):  # its chunk may be written again elsewhere
            for write in image.writes:
                pairs = [
                    pair for pair in zip(write.keys, write.slots, strict=True) if (pair[1] in orphaned) == is_orphan
                ]
                keys, slots = [key for key, _ in pairs], [slot for _, slot in pairs]
                index.reserve(keys, slots)
                if is_orphan:
                    index.orphan(keys, slots)
                for key, slot in pairs:
                    shares.took([slot], key.tenant)
                used += slots
        parts.leases.restore(image.reads, image.writes, image.last_lease)
        for read in image.reads:
            read.since = 0  # of replaced bytes, of which there are none
            (index.lease_bytes if read.kind == "load" else index.lease)(read.slots)
        for name, slots in image.pins.items():
            index.lease(slots)
            cache.admin.pinned[name] = slots
        now_s = parts.clock.now_s()
        for slot, (until_s, retained_s) in image.holds.items():
            if index.key_at(slot) is not None:
                parts.holds.hold([slot], until_s, now_s)
                if retained_s:
                    parts.holds.hold([slot], retained_s, now_s, retain=True)
        cache.pool.places.moved.update(image.moved)
        cache.pool.take(used)
        for name, count in asdict(image.totals).items():
            setattr(parts.totals, name, count)
        if image.record is not None:
            cache.events.log = ChangeLog.restored(*image.record)
            cache.events.on = True
        host.cleared_s = image.cleared_s
        for lane in parts.lower.lanes:
            if lane.name in image.removed and isinstance(lane.tier, RemembersRemoved):
                lane.tier.remove(image.removed[lane.name])
        host.adopted_parts.update(image.parts)
        host.doubt(image.unverified)
        shares.note_over()  # these settings may have other quotas, and another capacity


def restore_tiers(cache: LocalCache, image: CacheImage) -> None:
    """Once this process serves: have its tiers get and remove what those of the other process had not yet."""
    parts = cache.parts
    with parts.host.lock:
        for number, name in enumerate(cache.tiers[1:]):
            if name in image.removals:
                is_clearing, tenants, keys = image.removals[name]
                lane = parts.lower.lanes[number]
                if is_clearing:
                    lane.clear()
                for tenant in tenants:
                    lane.clear_tenant(tenant)
                lane.discard(keys)
            parts.lower.spills.restore(number, image.waiting.get(name, ()))
        parts.lower.upgrades.adopt()
    cache.admin.trim()


def end_inherited_leases(cache: LocalCache) -> None:
    """The other process has ended: give back what its own threads had leased."""
    leases = cache.parts.leases
    with cache.parts.host.lock:
        reads, writes, _ = leases.entries()
    both: list[ReadEntry | WriteEntry] = [*reads, *writes]
    for lease in both:
        if lease.number <= leases.restored_upto and not _OF_A_SESSION.fullmatch(lease.holder):
            release(cache, lease, ends_holds=False)
