"""Holds: chunks kept in the pool for another engine until it has read them or a deadline has passed.

They were stored for a prompt that one engine has computed and another goes on with (docs/adr/0025). The engine that
stored them may have ended by then, so nobody's lease keeps them: the cache does, for a time that was said beforehand.
They may be half of the pool, or half of a tenant's quota, at most.

A prompt is stored in several steps, and each step names all of its chunks so far. So a chunk that has been read is not
kept again before the time that it was kept for is over.
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
        self._deadlines: list[tuple[float, int]] = []  # a heap, with some that were renewed or have ended
        self._read: dict[int, tuple[ChunkKey | None, float]] = {}  # by slot: which chunk was read, and kept until when

    @property
    def chunks(self) -> int:
        """How many are kept now."""
        return len(self._until_s)

    def hold(self, slots: Sequence[int], until_s: float, now_s: float) -> list[int]:
        """Keep the leading ones of these resident slots that there is room for, until then at least; those that were
        not kept before."""
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
        """They have been read, or are not needed: they are kept no longer."""
        if self._until_s:
            kept = [slot for slot in slots if slot in self._until_s]
            self._read.update((slot, (self._index.key_at(slot), self._until_s[slot])) for slot in kept)
            self._let_go(kept)

    def expire(self, now_s: float) -> None:
        """End the holds whose time is up."""
        late: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            until_s, slot = heappop(self._deadlines)
            if self._until_s.get(slot) == until_s:
                late.append(slot)
        self._let_go(late)

    def drop_forgotten(self) -> None:
        """End the holds of chunks that were forgotten."""
        self._let_go([slot for slot in self._until_s if self._index.was_forgotten(slot)])

    def clear(self) -> None:
        """The cache is being closed: the slots are given back with all others."""
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
