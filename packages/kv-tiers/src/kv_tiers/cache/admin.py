"""Operators' verbs on a live cache: pins, quotas, tenants, warm-up, and where chunks are.

Nothing here is called on an engine's thread. Large changes yield the lock in between, and `warm_up` waits.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kv_core.coverage import PLAIN, ChunkShape
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.service import CacheService, Ended
from kv_eviction.shares import Shares

from kv_tiers.cache.extension import CacheParts
from kv_tiers.cache.hits import find_hit, fitting, needed_count
from kv_tiers.cache.host import AT_ONCE, TIER
from kv_tiers.events import events
from kv_tiers.index.life import BEING_WRITTEN
from kv_tiers.tier_state import Held

_log = limited_logger(__name__)


@dataclass(frozen=True, slots=True)
class TenantUse:
    """A tenant's use of the pool, in whole slots: chunks that are held, being written, or still being read after they
    were removed.

    tenant: its tag.
    chunks: number of slots.
    used_bytes: of those.
    quota_bytes: None for a tenant that uses the common share.
    """

    tenant: bytes
    chunks: int
    used_bytes: int
    quota_bytes: int | None


class Administration:
    """Operators' verbs of one cache. Methods may be called on any thread and take the lock themselves unless stated
    otherwise.
    """

    def __init__(self, cache: CacheService, parts: CacheParts) -> None:
        """cache: to which the parts belong, for operations that an engine could do as well."""
        self._cache, self._clock = cache, parts.clock
        self._host, self._index, self._holds, self._lower = parts.host, parts.index, parts.holds, parts.lower
        self._shares, self._promotions = parts.host.shares, parts.lower.promotions
        self.pinned: dict[str, list[int]] = {}
        """By the pin's name, its slots. Under the lock."""
        self._quota_lock = threading.Lock()  # serialises changes of quotas; taken before the host's lock

    def check_open(self) -> None:
        """Raises `MisuseError`: the cache is closed."""
        self._host.check_open()

    def pin(self, keys: Sequence[ChunkKey], name: str, *, shape: ChunkShape = PLAIN) -> int:
        """Pin what the longest hit among `keys` in the pool needs, until `unpin`; returns the length of that hit in
        chunks.

        An earlier pin of this name is replaced. Pins do not expire, so all together may take at most half the pool, or
        half of a tenant's quota: if the hit needs more, a shorter one is pinned.

        keys: whole chunks, chunk-major.
        """
        with self._host.lock:
            self._host.check_open()
            old_slots = self.pinned.pop(name, [])
            hit = find_hit(self._index, list(keys), shape)
            if hit.slots:
                share_at = self._shares.at
                share = share_at(hit.slots[0])
                pinned = sum(len(pin) for pin in self.pinned.values() if share_at(pin[0]) is share)
                room = max(0, share.slots // 2 - pinned)
                while needed_count(shape, hit.chunks) > room:
                    chunks = fitting(shape, hit.chunks, room)
                    hit = find_hit(self._index, list(keys[: chunks * shape.keys_per_chunk]), shape)
            slots = list(hit.slots)
            self._index.lease(slots)
            self._host.unlease(old_slots)
            if slots:
                self.pinned[name] = slots
            return hit.chunks

    def unpin(self, name: str) -> bool:
        """Make the pinned chunks evictable again. False: there is no pin of this name."""
        with self._host.lock:
            slots = self.pinned.pop(name, None)
            if slots is not None:
                self._host.unlease(slots)
            return slots is not None

    def pins(self) -> dict[str, int]:
        """How many chunks each name pins."""
        with self._host.lock:
            return {name: len(slots) for name, slots in self.pinned.items()}

    def unpin_forgotten(self) -> None:
        """End the pins of chunks that were forgotten. Called under the lock."""
        self._holds.drop_forgotten()
        was_forgotten = self._index.was_forgotten
        for name, slots in list(self.pinned.items()):
            forgotten = [slot for slot in slots if was_forgotten(slot)]
            if forgotten:
                remaining = [slot for slot in slots if not was_forgotten(slot)]
                if remaining:
                    self.pinned[name] = remaining
                else:
                    del self.pinned[name]
                self._host.unlease(forgotten)

    def warm_up(
        self, keys: Sequence[ChunkKey], name: str, *, timeout_s: float = 60.0, shape: ChunkShape = PLAIN
    ) -> int:
        """Promote a prefix from the lower tiers and pin it; returns how many chunks of it are pinned.

        It blocks, so it is for operators and tools, never for an engine's thread.
        """
        holder = f"warm-up/{name}"
        try:
            self._promote(keys, holder, timeout_s, shape)
            return self.pin(keys, name, shape=shape)
        finally:
            self._cache.end(holder)

    def prefetch(self, keys: Sequence[ChunkKey], *, timeout_s: float = 60.0, shape: ChunkShape = PLAIN) -> int:
        """The same without a pin; returns how many leading chunks the pool then has."""
        holder = f"prefetch/{id(keys)}"
        try:
            return self._promote(keys, holder, timeout_s, shape)
        finally:
            self._cache.end(holder)

    def _promote(self, keys: Sequence[ChunkKey], holder: str, timeout_s: float, shape: ChunkShape) -> int:
        """What is promoted stays leased until the holder ends."""
        until, best, plan = time.monotonic() + timeout_s, -1, None
        while time.monotonic() < until:
            plan = self._cache.lookup(keys, holder, shape=shape, wait_for_promotion=True)
            if plan.ended is Ended.PENDING:
                time.sleep(0.002)
            elif plan.chunks > best:  # the cache bounds each wait, and `timeout_s` all of them: wait once more
                best = plan.chunks
                self._promotions.forget_wait(holder)
            else:
                break
        return 0 if plan is None else plan.chunks

    def retain(self, keys: Sequence[ChunkKey], seconds: float, *, shape: ChunkShape = PLAIN) -> int:
        """Retain what the longest hit in the pool needs, as a store does (`StoreOptions`); returns how many leading
        chunks of it there was room for."""
        with self._host.lock:
            self._host.check_open()
            hit = find_hit(self._index, list(keys), shape)
            now_s = self._clock.now_s()
            self._holds.hold(hit.slots, now_s + seconds, now_s, retain=True)
            held = self._holds.until_s().keys()
            retained = next((place for place, slot in enumerate(hit.slots) if slot not in held), len(hit.slots))
            if retained == len(hit.slots):
                return hit.chunks
            return retained // shape.keys_per_chunk if shape.is_plain else 0  # a window is useless in part

    def demote(self, keys: Sequence[ChunkKey]) -> int:
        """Make those of these chunks that the pool has the first to be evicted; returns how many keys those are."""
        with self._host.lock:
            self._host.check_open()
            _, slots = self._index.resident(keys)
            self._host.demote(slots)
            return len(slots)

    def freeze(self, is_frozen: bool) -> None:
        """Store nothing new and evict nothing, here and in the lower tiers, until it is called again: then what was put
        off goes on. Stores that have begun are completed, and promotions go into free slots.
        """
        with self._host.lock:
            self._host.check_open()
            self._host.is_frozen = is_frozen
            if not is_frozen:
                self._host.trim(AT_ONCE)
                self._lower.spills.submit_waiting()

    def resident_keys(self) -> list[ChunkKey]:
        """The keys that a lookup could find now. Copies the index."""
        with self._host.lock:
            self._host.check_open()
            return self._index.keys()

    def held(self) -> Held:
        """How many chunks a lookup could find in the pool now, and their bytes."""
        with self._host.lock:
            return self._host.held()

    def where(self, keys: Sequence[ChunkKey]) -> list[str]:
        """The fastest tier that holds each key, `BEING_WRITTEN`, or "" for nowhere. Leases and touches nothing.

        Remote tiers are skipped.
        """
        with self._host.lock:
            self._host.check_open()
            index = self._index
            places = [
                TIER if index.find(key) is not None else BEING_WRITTEN if index.is_held(key) else "" for key in keys
            ]
        return self._lower.locate(keys, places)

    def clear(self) -> None:
        """Forget every chunk on all tiers, also those being written."""
        with self._without(self._index.forgettable):
            self._lower.clear()
            self._host.cleared_s = self._clock.now_s()
            if self._host.events.on:
                self._host.events.publish(events.Forgotten((), everything=True))

    def clear_tenant(self, tenant: bytes) -> int:
        """The same for chunks with this tag; returns how many the pool held. A tier that cannot tell tenants apart is
        cleared as a whole.
        """
        with self._without(lambda: [key for key in self._index.forgettable() if key.tenant == tenant]) as forgotten:
            self._lower.clear_tenant(tenant)
            if self._host.events.on:
                self._host.events.publish(events.Forgotten(forgotten))
            return len(forgotten)

    @contextmanager
    def _without(self, remaining: Callable[[], list[ChunkKey]]) -> Iterator[list[ChunkKey]]:
        """Forget the pool's `remaining` chunks, a few at a time, so that other calls can run in between; what those
        bring back is forgotten as the body begins, which runs under the lock. Yields those that were resident."""
        with self._host.lock:
            self._host.check_open()
            keys = remaining()
        forgotten: list[ChunkKey] = []
        for start in range(0, len(keys), AT_ONCE):
            with self._host.lock:
                self._host.check_open()
                forgotten += self._host.forget(keys[start : start + AT_ONCE])
            _yield_lock()
        with self._host.lock:
            self._host.check_open()
            forgotten += self._host.forget(remaining())
            self.unpin_forgotten()
            yield forgotten

    def tenants(self) -> list[TenantUse]:
        """The use of every tenant that has chunks or a quota, by tag. Their chunks add up to the slots used."""
        slot_bytes = self._host.pool.slot_bytes
        with self._host.lock:
            self._host.check_open()
            uses = self._shares.uses()
        return [
            TenantUse(
                use.tenant,
                use.slots_used,
                use.slots_used * slot_bytes,
                None if use.slots_quota is None else use.slots_quota * slot_bytes,
            )
            for use in uses
        ]

    def set_quota(self, tenant: bytes, quota_bytes: int | None) -> None:
        """Reserve a part of the pool for the tenant with this tag: no other tenant's chunks go there, and this tenant's
        go nowhere else. Rounded to whole chunks. None: the tenant uses the common share. Raises `ConfigError`:
        negative, less than one chunk (0 means no room at all), or more than the other quotas leave.

        Chunks that no longer fit are evicted at once, except those being read or written, which are evicted when that
        ends. For a tenant with many chunks this takes seconds; it proceeds a few chunks at a time, so that other calls
        can run in between.
        """
        slots = None if quota_bytes is None else quota_slots(quota_bytes, self._host.pool.slot_bytes)
        with self._quota_lock:
            with self._host.lock:
                self._host.check_open()
                self._shares.set_quota(tenant, slots)
            to_move = self._host.to_move()
            for start in range(0, len(to_move), AT_ONCE):
                with self._host.lock:
                    self._host.check_open()
                    self._host.move(to_move[start : start + AT_ONCE])
                _yield_lock()
            with self._host.lock:
                self._shares.end_move()
            self.trim()
            warn_if_all_taken(self._shares)

    def trim(self) -> None:
        """Evict what shares have beyond their size and no lease keeps, a few chunks at a time."""
        is_too_much = True
        while is_too_much:
            with self._host.lock:
                self._host.check_open()
                is_too_much = self._host.trim(AT_ONCE)
            _yield_lock()


def warn_if_all_taken(shares: Shares) -> None:
    """Quotas that take the whole pool are allowed, but hardly ever meant."""
    if not shares.common.slots:
        _log.warning(
            "the quotas take the whole pool: nothing is stored for other tenants, nor for requests without a salt; "
            "write smaller quota_bytes"
        )


def quota_slots(quota_bytes: int, slot_bytes: int) -> int:
    """How many slots a quota is. Raises `ConfigError`: the quota is negative, or less than one chunk of this size."""
    slots, remainder = divmod(quota_bytes, slot_bytes)
    if slots < 0 or (remainder and not slots):
        raise ConfigError(
            f"a quota of {quota_bytes} bytes holds no chunk of this model, which takes {slot_bytes}; "
            "write at least that, or 0 for a tenant that keeps nothing"
        )
    return slots


def _yield_lock() -> None:
    """Let waiting threads take the lock just released: without a pause we would take it again before they wake."""
    time.sleep(0.0001)
