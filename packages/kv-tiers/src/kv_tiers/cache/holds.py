"""Holds: chunks kept in the pool for another engine until it has read them or a deadline has passed, or retained.

They belong to a prompt that one engine has computed and another will decode (docs/adr/0011). The engine that stored
them may have ended by then, so no lease of a holder keeps them in place: the cache holds them itself, for a given time.
Holds take at most half of the pool, or half of a tenant's quota. Chunks that a request asks to retain are held however
often they are read, in at most half of that, besides those that are handed over too.

A prompt is stored in several steps, and each step names all of its chunks so far. A chunk that has been read is
therefore not held again until no step has named it for as long as it would be held: a prompt may take longer than that.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kv_core.keys import ChunkKey
from kv_eviction.shares import Shares

from kv_tiers.cache.host import HostTier
from kv_tiers.index.residency import Residency


@dataclass(slots=True)
class _Hold:
    """tenant: of the chunk. until_s: when the hold ends. due_s: when to check that, which may be earlier.
    retained_s: until when reading does not end it."""

    tenant: bytes
    until_s: float
    due_s: float
    retained_s: float = 0.0


class Holds:
    """The holds of one cache. Every method is called under the host's lock.

    Each step of a prompt names all of its chunks, so renewing a hold only sets its end, and counting those of a share
    takes no look at each.
    """

    def __init__(self, host: HostTier, index: Residency, shares: Shares) -> None:
        self._host = host
        self._index = index
        self._shares = shares
        self._held: dict[int, _Hold] = {}  # by slot, each leased once
        self._held_of: Counter[bytes] = Counter()  # by tenant
        self._due: list[tuple[float, int, int]] = []  # a heap: one of each hold, and some of holds that have ended
        self._numbers = itertools.count()  # of holds, so that those that end together end in the prompt's order
        self._read: dict[int, tuple[ChunkKey | None, float]] = {}  # by slot: the chunk that was read, and until when

    @property
    def chunks(self) -> int:
        """How many are held now."""
        return len(self._held)

    def hold(self, slots: Sequence[int], until_s: float, now_s: float, *, retain: bool = False) -> list[int]:
        """Hold the leading ones of these resident slots for which there is room, at least until then. Returns those
        that were not held before.

        retain: however often they are read.
        """
        room: dict[int, int] = {}
        new: list[int] = []
        for slot in slots:
            if (hold := self._held.get(slot)) is not None:
                hold.until_s = max(hold.until_s, until_s)
                hold.retained_s = max(hold.retained_s, until_s * retain)
                continue
            key = self._index.key_at(slot)
            assert key is not None
            read_key, read_until_s = self._read.get(slot, (None, 0.0))
            if now_s < read_until_s and read_key == key and not retain:
                self._read[slot] = key, max(read_until_s, until_s)
                continue
            share = self._shares.of(key.tenant)
            if id(share) not in room:
                held = sum(count for tenant, count in self._held_of.items() if self._shares.of(tenant) is share)
                room[id(share)] = share.slots // (4 if retain else 2) - held
            if room[id(share)] <= 0:
                break
            room[id(share)] -= 1
            self._index.lease([slot])
            self._held[slot] = _Hold(key.tenant, until_s, until_s, until_s * retain)
            self._held_of[key.tenant] += 1
            heappush(self._due, (until_s, next(self._numbers), slot))
            new.append(slot)
        return new

    def until_s(self) -> dict[int, tuple[float, float]]:
        """By slot, until when each chunk is held, and until when it is retained."""
        return {slot: (hold.until_s, hold.retained_s) for slot, hold in self._held.items()}

    def read(self, slots: Sequence[int]) -> None:
        """End the holds of these, which have been read or are not needed."""
        if self._held:
            # Once each: a client or a peer may name a chunk repeatedly, and there is only one lease to end.
            held = [slot for slot in dict.fromkeys(slots) if slot in self._held]
            self._read.update((slot, (self._index.key_at(slot), self._held[slot].until_s)) for slot in held)
            for slot in held:
                hold = self._held[slot]
                if hold.retained_s and hold.until_s != hold.retained_s:
                    hold.until_s = hold.due_s = hold.retained_s
                    heappush(self._due, (hold.due_s, next(self._numbers), slot))
            self._let_go([slot for slot in held if not self._held[slot].retained_s])

    def expire(self, now_s: float) -> None:
        """End the holds whose time is up."""
        expired: dict[int, None] = {}  # once each: an earlier hold of a slot may have been due at the same time
        while self._due and self._due[0][0] <= now_s:
            due_s, number, slot = heappop(self._due)
            hold = self._held.get(slot)
            if hold is None or hold.due_s != due_s:
                continue  # the entry is of an earlier hold of this slot
            if hold.until_s > now_s:
                hold.due_s = hold.until_s
                heappush(self._due, (hold.due_s, number, slot))
            else:
                expired[slot] = None
        self._let_go(list(expired))

    def drop_forgotten(self) -> None:
        """End the holds of chunks that were forgotten."""
        self._let_go([slot for slot in self._held if self._index.was_forgotten(slot)])

    def clear(self) -> None:
        """Forget all holds: the cache is being closed, which frees their slots too."""
        self._held.clear()
        self._held_of.clear()
        self._due.clear()
        self._read.clear()

    def _let_go(self, slots: Sequence[int]) -> None:
        for slot in slots:
            tenant = self._held.pop(slot).tenant
            self._held_of[tenant] -= 1
            if not self._held_of[tenant]:
                del self._held_of[tenant]
        if slots:
            self._host.unlease(slots)
        if not self._held:
            self._due.clear()
