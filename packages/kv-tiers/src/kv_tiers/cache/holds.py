"""Holds: chunks kept in the pool for another engine until it has read them or a deadline has passed.

They belong to a prompt that one engine has computed and another will decode (docs/adr/0025). The engine that stored
them may have ended by then, so no lease of a holder keeps them in place: the cache holds them itself, for a given time.
Holds take at most half of the pool, or half of a tenant's quota.

A prompt is stored in several steps, and each step names all of its chunks so far. A chunk that has been read is
therefore not held again before the deadline of its first hold.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from kv_core.keys import ChunkKey

from kv_tiers.cache.host import HostTier
from kv_tiers.eviction.shares import Shares
from kv_tiers.index.residency import Residency


class Holds:
    """The holds of one cache. Every method is called under the host's lock."""

    def __init__(self, host: HostTier, index: Residency, shares: Shares) -> None:
        self._host = host
        self._index = index
        self._shares = shares
        self._until_s: dict[int, float] = {}  # by slot, each leased once
        self._deadlines: list[tuple[float, int]] = []  # a heap, which includes some that were renewed or have ended
        self._read: dict[int, tuple[ChunkKey | None, float]] = {}  # by slot: the chunk that was read, and its deadline

    @property
    def chunks(self) -> int:
        """How many are held now."""
        return len(self._until_s)

    def hold(self, slots: Sequence[int], until_s: float, now_s: float) -> list[int]:
        """Hold the leading ones of these resident slots for which there is room, at least until then. Returns those
        that were not held before."""
        room: dict[int, int] = {}
        new: list[int] = []
        for slot in slots:
            if slot not in self._until_s:
                key, read_until_s = self._read.get(slot, (None, 0.0))
                if now_s < read_until_s and key == self._index.key_at(slot):
                    continue
                share = self._shares.at(slot)
                if id(share) not in room:
                    held = sum(1 for other in self._until_s if self._shares.at(other) is share)
                    room[id(share)] = share.slots // 2 - held
                if room[id(share)] <= 0:
                    break
                room[id(share)] -= 1
                self._index.lease([slot])
                new.append(slot)
            if until_s > self._until_s.get(slot, 0.0):
                self._until_s[slot] = until_s
                heappush(self._deadlines, (until_s, slot))
        return new

    def read(self, slots: Sequence[int]) -> None:
        """End the holds of these, which have been read or are not needed."""
        if self._until_s:
            # Once each: a client or a peer may name a chunk repeatedly, and there is only one lease to end.
            held = [slot for slot in dict.fromkeys(slots) if slot in self._until_s]
            self._read.update((slot, (self._index.key_at(slot), self._until_s[slot])) for slot in held)
            self._let_go(held)

    def expire(self, now_s: float) -> None:
        """End the holds whose time is up."""
        late: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            until_s, slot = heappop(self._deadlines)
            if self._until_s.get(slot) == until_s:
                del self._until_s[slot]  # once: an earlier hold of this slot may have had the same deadline
                late.append(slot)
        self._let_go(late)

    def drop_forgotten(self) -> None:
        """End the holds of chunks that were forgotten."""
        self._let_go([slot for slot in self._until_s if self._index.was_forgotten(slot)])

    def clear(self) -> None:
        """The cache is being closed: the slots are freed with all others."""
        self._until_s.clear()
        self._deadlines.clear()
        self._read.clear()

    def _let_go(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._until_s.pop(slot, None)
        if slots:
            self._host.unlease(slots)
        if not self._until_s:
            self._deadlines.clear()
