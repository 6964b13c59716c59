"""Holds: chunks kept in the pool for another engine until it has read them or a deadline has passed.

They belong to a prompt that one engine has computed and another will decode (docs/adr/0025). The engine that stored
them may have ended by then, so no lease of a holder keeps them in place: the cache holds them itself, for a given time.
Holds take at most half of the pool, or half of a tenant's quota.

A prompt is stored in several steps, and each step names all of its chunks so far. A chunk that has been read is
therefore not held again for the same engine process before the deadline of its first hold. Several processes may hand
over one chunk: ranks that all have the same KV do, and each has a reader of its own. So a hold lasts until the chunk
has been read as often as processes have handed it over.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

from kv_core.keys import ChunkKey
from kv_core.service import Holder

from kv_tiers.cache.host import HostTier
from kv_tiers.eviction.shares import Share, Shares
from kv_tiers.index.residency import Residency


@dataclass(slots=True)
class _Hold:
    """tenant: of the chunk. until_s: when it ends. due_s: when to look whether it has ended, which may be earlier.
    by: who has handed the chunk over. reads: how often it has been read since."""

    tenant: bytes
    until_s: float
    due_s: float
    by: tuple[Holder, ...]
    reads: int


class _WasRead(NamedTuple):
    """A chunk that has been read: which one, when its hold would have ended, and who had handed it over."""

    key: ChunkKey | None
    until_s: float
    by: tuple[Holder, ...]


_NEVER_READ: Final = _WasRead(None, 0.0, ())


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
        self._read: dict[int, _WasRead] = {}  # by slot

    @property
    def chunks(self) -> int:
        """How many are held now."""
        return len(self._held)

    def hold(self, slots: Sequence[int], until_s: float, now_s: float, by: Holder) -> list[int]:
        """Hold the leading ones of these resident slots for which there is room, at least until then. Returns those
        that were not held before.

        by: who hands them over.
        """
        room: dict[int, int] = {}
        new: list[int] = []
        alone = (by,)
        for slot in slots:
            if (one := self._held.get(slot)) is not None:
                one.until_s = max(one.until_s, until_s)
                if by not in one.by:
                    one.by = (*one.by, by)
                continue
            key = self._index.key_at(slot)
            assert key is not None
            before = self._read.get(slot, _NEVER_READ)
            if before.key != key or now_s >= before.until_s:
                before = _NEVER_READ
            if by in before.by:
                continue
            share = self._shares.of(key.tenant)
            if id(share) not in room:
                room[id(share)] = share.slots // 2 - self._held_in(share)
            if room[id(share)] <= 0:
                break
            room[id(share)] -= 1
            self._index.lease([slot])
            all_of_them = (*before.by, by) if before.by else alone
            self._held[slot] = _Hold(key.tenant, until_s, until_s, all_of_them, reads=len(before.by))
            self._held_of[key.tenant] += 1
            heappush(self._due, (until_s, next(self._numbers), slot))
            new.append(slot)
        return new

    def read(self, slots: Sequence[int], *, for_all: bool = False) -> None:
        """These have been read, or are not needed: end the holds of those that have no other reader.

        for_all: by or for every reader.
        """
        if not self._held:
            return
        done: list[int] = []
        # Once each: a client or a peer may name a chunk repeatedly, and there is only one lease to end.
        for slot in dict.fromkeys(slots):
            if (one := self._held.get(slot)) is not None:
                one.reads += 1
                if for_all or one.reads >= len(one.by):
                    self._read[slot] = _WasRead(self._index.key_at(slot), one.until_s, one.by)
                    done.append(slot)
        self._let_go(done)

    def expire(self, now_s: float) -> None:
        """End the holds whose time is up."""
        late: dict[int, None] = {}  # once each: an earlier hold of a slot may have been due at the same time
        while self._due and self._due[0][0] <= now_s:
            due_s, number, slot = heappop(self._due)
            one = self._held.get(slot)
            if one is None or one.due_s != due_s:
                continue  # of an earlier hold of this slot
            if one.until_s > now_s:
                one.due_s = one.until_s
                heappush(self._due, (one.due_s, number, slot))
            else:
                late[slot] = None
        self._let_go(list(late))

    def drop_forgotten(self) -> None:
        """End the holds of chunks that were forgotten."""
        self._let_go([slot for slot in self._held if self._index.was_forgotten(slot)])

    def clear(self) -> None:
        """The cache is being closed: the slots are freed with all others."""
        self._held.clear()
        self._held_of.clear()
        self._due.clear()
        self._read.clear()

    def _held_in(self, share: Share) -> int:
        return sum(held for tenant, held in self._held_of.items() if self._shares.of(tenant) is share)

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
