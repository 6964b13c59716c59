"""Offers from hosts that are about to leave: this host fetches the offered chunks, as far as it has room.

An offer is a list of keys. This side looks for them where every lookup does, in the tier of its peers, and reads,
verifies and commits them like every promotion. Offered chunks that were not used yet take at most half of a share, so a
departing host cannot cause everything that is in use here to be evicted. Those that this host's own tiers have by then
make room in the pool for more, as long as the tiers have free space.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from kv_core.keys import ChunkKey
from kv_eviction.shares import Share
from kv_tiers.cache.host import TIER, HostTier
from kv_tiers.cache.lower_tiers import LowerTiers
from kv_tiers.index.residency import Residency

from kv_server.drain.takers import OfferAnswer, OfferFate
from kv_server.peers.tier import PeersTier

_MAX_REVIEWED: Final = 256
"""Chunks of earlier offers that are re-examined with each offer."""


class Offers:
    """The offers made to one cache. Safe to call from any thread."""

    def __init__(self, host: HostTier, index: Residency, lower: LowerTiers) -> None:
        self._host = host
        self._index = index
        self._lower = lower
        self._tier = next((number for number, _ in lower.tiers_that(PeersTier)), None)
        self._unused: dict[ChunkKey, Share] = {}  # arriving or in the pool, and not used yet
        self._to_review: deque[ChunkKey] = deque()
        self._unused_of: Counter[Share] = Counter()
        self.is_refused = False
        """This host is about to leave as well."""

    def take(self, chain: Sequence[ChunkKey], first: int, *, fetches: bool = True) -> OfferAnswer:
        """Fetch the chunks of this chain from `first` on, unless they are here. Repeating the call reports progress.

        chain: one group's and shard's keys of a prompt, from its first chunk on.
        fetches: if not, this only reports what is here.
        """
        wanted = list(chain[first:])
        if not wanted or self.is_refused:
            # What is here will leave, too: of two hosts that leave at once, neither may count on the other.
            return OfferAnswer([OfferFate.NOT_TAKEN] * len(wanted), 0)
        held_here = self._lower.held_here(wanted)
        tier = self._tier if fetches else None
        room_below = 0 if tier is None else self._lower.free_chunks(above=tier)
        with self._host.lock:
            reviewed = self._review_unused()
        is_below = self._lower.held_here(reviewed) if room_below else [False] * len(reviewed)
        with self._host.lock:
            share = self._host.share_of(wanted[0].tenant)
            pairs = zip(wanted, held_here, strict=True)
            missing = [key for key, is_here in pairs if not is_here and not self._index.is_held(key)]
            lacking = len(missing) - (share.slots // 2 - self._unused_of[share])
            if lacking > 0:
                below = [key for key, is_there in zip(reviewed, is_below, strict=True) if is_there]
                self._leave_to_tiers(below, share, min(lacking, room_below))
            missing = missing[: self._room(share, tier)]
            for key in missing:
                self._drop(key)
                self._unused[key] = share
                self._to_review.append(key)
                self._unused_of[share] += 1
        if tier is not None and missing:
            self._lower.promotions.prefetch(tier, chain, first, only=frozenset(missing))
        with self._host.lock:
            for key in missing:
                if not self._index.is_held(key):
                    self._drop(key)
            room_left = self._room(share, tier) + room_below
            requested = set(missing)  # these may have arrived already, but were not here when they were offered
            fates = [self._fate(key, is_here, key in requested) for key, is_here in zip(wanted, held_here, strict=True)]
            return OfferAnswer(fates, room_left)

    def _fate(self, key: ChunkKey, is_here: bool, is_begun: bool) -> OfferFate:
        if is_here or (self._index.find(key) is not None and not is_begun):
            return OfferFate.HERE
        return OfferFate.COMING if self._index.is_held(key) else OfferFate.NOT_TAKEN

    def _room(self, share: Share, tier: int | None) -> int:
        """For how many more chunks there is room in the pool."""
        return 0 if tier is None else max(0, share.slots // 2 - self._unused_of[share])

    def _review_unused(self) -> list[ChunkKey]:
        """Drop chunks that have left the pool or were used, which counts them as this host's own from now on. Returns
        those that were looked at and stay."""
        stay: dict[ChunkKey, None] = {}
        for _ in range(min(_MAX_REVIEWED, len(self._to_review))):
            key = self._to_review.popleft()
            slot = self._index.find(key)
            is_used = slot is not None and self._lower.promotions.sources([slot]) == [TIER]
            if is_used or not self._index.is_held(key):
                self._drop(key)
            elif key in self._unused:
                stay[key] = None
        self._to_review += stay
        return list(stay)

    def _leave_to_tiers(self, below: Sequence[ChunkKey], share: Share, chunks: int) -> None:
        """Evict this many of these, which this host's own tiers have. The last ones first: a host that leaves offers
        what is worth most before the rest."""
        for key in reversed(below):
            slot = self._index.find(key)
            if chunks <= 0:
                break
            if slot is None or self._unused.get(key) is not share or self._index.is_leased(slot):
                continue
            self._drop(key)
            self._host.evict(slot)
            self._host.free([slot])
            chunks -= 1
        self._host.publish_evicted("promotion")

    def _drop(self, key: ChunkKey) -> None:
        if (share := self._unused.pop(key, None)) is not None:
            self._unused_of[share] -= 1
