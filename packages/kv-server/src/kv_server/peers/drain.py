"""Draining: before a host leaves, it offers its peers the chunks worth moving, and they fetch them.

Once a drain has begun, the cache takes no new chunks. It offers the pool's chunks, those most worth keeping first, and
then those that only the host's own tiers hold, unless another host has them already. A peer that takes an offer reads
the chunks like any hit, so nothing is sent unrequested, and only chunks being read are leased. Repeating an offer
reports its progress. A peer that dies, or fetches nothing for a while, loses its offers to the others.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from kv_core.errors import InputError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_eviction.shares import Share
from kv_tiers.cache.extension import CacheParts
from kv_tiers.cache.host import TIER, ClosedError, chains
from kv_tiers.index.residency import most_worth_first
from kv_tiers.threads import start_thread
from kv_tiers.tier import RankedChunk, RanksChunks

from kv_server.peers.tier import PeersTier, PeerTaker
from kv_server.peers.wire import Offered, OfferFate
from kv_server.report import DrainState

_log = limited_logger(__name__)

_WINDOW: Final = 512
"""Chunks that are looked up on other hosts in one batch, before they are offered."""
_PIECE: Final = 32
"""Chunks per offer."""
_IN_FLIGHT: Final = 64
"""Chunks that one peer fetches at a time."""
_POLL_S: Final = 0.02
_STALL_S: Final = 30.0
"""A peer that has fetched nothing for this long, although it took an offer or has room, is not waited for."""
_FULL_S: Final = 2.0
"""When no peer has taken anything for this long, none will."""
_END_S: Final = 10.0
MAX_CHAIN: Final = 1 << 13
"""Keys per offer. The chunks of longer prompts are offered without those before them."""


@dataclass(slots=True, eq=False)
class _Offer:
    """Chunks of one chain, from `first` on. left: those whose fate is not known yet. offered_s: when they were first
    offered to the current peer."""

    chain: list[ChunkKey]
    first: int
    left: set[ChunkKey]
    refused_by: set[str] = field(default_factory=set)
    offered_s: float = 0.0


class CacheDrain:
    """The drain of one cache. Safe to call from any thread; the work runs on a thread of its own."""

    def __init__(self, parts: CacheParts, *, on_change: Callable[[bool], object]) -> None:
        """on_change: called with whether this host is about to leave."""
        self._parts = parts
        self._on_change = on_change
        self._lock = threading.Lock()
        self._state: DrainState | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, timeout_s: float, max_bytes: int | None = None) -> None:
        """Take no new chunks, and offer those that are here, for at most this time and this many bytes. A drain in
        progress is restarted. Returns at once; does nothing if there is no host to offer them to (`can_begin`)."""
        with self._lock:
            if not self.can_begin:
                return
            self._stop.set()
            self._on_change(True)
            self._stop = threading.Event()
            self._state = DrainState("draining")
            job = _DrainJob(self._parts, self._state, stop=self._stop, max_bytes=max_bytes)
            thread = threading.Thread(target=job.run, args=(timeout_s,), name="kv-drain", daemon=True)
            if why := start_thread(thread):
                self._state = DrainState("stopped", why)
            else:
                self._thread = thread

    @property
    def can_begin(self) -> bool:
        """Whether a tier offers chunks to other hosts."""
        return bool(self._parts.lower.tiers_that(PeersTier))

    def end(self) -> None:
        """Stop offering, and take new chunks again. Returns at once."""
        with self._lock:
            self._stop.set()
            self._state = None
            self._on_change(False)

    def close(self) -> None:
        """Stop offering. It waits for a peer's answer, for a bounded time."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def state(self) -> DrainState | None:
        """A snapshot; None: this host is not being drained."""
        with self._lock:
            return None if self._state is None else replace(self._state)


class _DrainJob:
    """The work of the drain's thread."""

    def __init__(self, parts: CacheParts, state: DrainState, *, stop: threading.Event, max_bytes: int | None) -> None:
        self._host, self._index, self._lower = parts.host, parts.index, parts.lower
        self._tiers = [tier for _, tier in self._lower.tiers_that(PeersTier)]
        self._state = state
        self._stop = stop
        self._bytes_left = max_bytes
        ranked = [tier for lane in self._lower.local_lanes() if isinstance(tier := lane.tier, RanksChunks)]
        self._not_ranked: deque[Callable[[], list[RankedChunk]]] = deque(
            [self._rank_pool, *(tier.most_worth_first for tier in ranked)]
        )
        self._parents: dict[ChunkKey, ChunkKey] = {}
        self._ranked: set[ChunkKey] = set()
        self._order: deque[ChunkKey] = deque()
        self._todo: deque[_Offer] = deque()
        self._taken: dict[str, list[_Offer]] = {}
        self._failed: dict[str, str] = {}
        self._had_room: set[str] = set()  # peers that have taken chunks of this format, or would have
        self._silent: set[str] = set()  # peers that failed in this round, and so back off
        self._moved_s: dict[str, float] = {}  # by peer, when it last fetched something
        self._progress_s = 0.0

    def run(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        why = ""
        try:
            while True:
                settled = self._settled()
                if not self._queue_offers() and not any(self._taken.values()):
                    break
                why = self._stop_reason(until_s)
                if why:
                    break
                self._round()
                if self._settled() > settled:
                    self._progress_s = time.monotonic()
                else:
                    self._stop.wait(_POLL_S)
        except ClosedError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  # it is reported, and costs misses elsewhere
            _log.exception("a drain hit a bug")
            why = f"a bug, which is in the log: {error}"
        self._state.why = why or ("" if not self._state.refused else self._reasons("no peer took some of the chunks"))
        self._state.phase = "stopped" if why else "drained"
        _log.info("drain: %s", self._state)

    def _stop_reason(self, until_s: float) -> str:
        """Why the drain ends now; empty: it continues."""
        now_s = time.monotonic()
        if self._stop.is_set():
            return "it was ended"
        if now_s >= until_s:
            return "the time is up"
        if self._room() == 0 and not any(self._taken.values()):
            return "max_bytes have been moved"
        if now_s - self._progress_s > _FULL_S and not any(self._taken.values()):
            return self._reasons("no peer takes more")
        return ""

    def _settled(self) -> int:
        """Chunks that no longer need another host. Refusals do not count: a large tier has no end of them."""
        return self._state.elsewhere + self._state.moved + self._state.gone

    def _reasons(self, what: str) -> str:
        failed = "; ".join(f"{name}: {why}" for name, why in sorted(self._failed.items()))
        return f"{what} ({failed})" if failed else f"{what}: none is up"

    def _rank_pool(self) -> list[RankedChunk]:
        slots = most_worth_first(self._index, self._host.lock)
        parents = self._index.parents()
        with self._host.lock:
            key_at = {slot: key for slot in slots if (key := self._index.key_at(slot)) is not None}
        return [(key, key_at.get(parents.get(slot, -1))) for slot, key in key_at.items()]

    def _rank(self, chunks: Iterable[RankedChunk]) -> None:
        """Queue these for offering, except those ranked before."""
        for key, parent in chunks:
            if key not in self._ranked:
                self._ranked.add(key)
                self._order.append(key)
                if parent is not None:
                    self._parents[key] = parent
        self._state.chunks = len(self._ranked)
        self._state.left += len(self._order)
        self._progress_s = time.monotonic()

    def _queue_offers(self) -> bool:
        """Queue offers of those of the next chunks that are on no other host. False: there are no more chunks."""
        if self._todo:
            return True
        if not self._order:
            if not self._not_ranked:
                return False
            self._rank(self._not_ranked.popleft()())
        keys = self._still_here([self._order.popleft() for _ in range(min(_WINDOW, len(self._order)))])
        began_s = time.monotonic()
        wanted = []
        for key, is_there in zip(keys, self._held_by_peers(keys), strict=True):
            if is_there:
                self._settle("elsewhere")
            else:
                wanted.append(key)
        # Waiting for a peer that does not answer is no lack of progress: nothing can be taken meanwhile.
        self._progress_s += time.monotonic() - began_s
        self._todo += self._offers_of(wanted, set())
        return True

    def _offers_of(self, keys: Sequence[ChunkKey], refused_by: set[str]) -> list[_Offer]:
        offers = []
        for chain, first in chains(keys, self._parents, _PIECE):
            is_long = len(chain) > MAX_CHAIN
            offers.append(
                _Offer(chain[first:] if is_long else chain, 0 if is_long else first, set(chain[first:]), refused_by)
            )
        return offers

    def _still_here(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of the keys that this host still holds."""
        below = self._lower.locate(keys, only_here=True)
        with self._host.lock:
            self._host.check_open()
            pairs = zip(keys, below, strict=True)
            here = [key for key, tier in pairs if tier or self._index.find(key) is not None]
        self._settle("gone", len(keys) - len(here))
        return here

    def _held_by_peers(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of these another host has that is not about to leave."""
        is_elsewhere = [False] * len(keys)
        for tier in self._tiers:
            try:
                holders = tier.holders(keys)
            except TierDown as error:
                self._failed[tier.name] = str(error)
                continue
            stays: dict[str, bool] = {}
            for position, takers in enumerate(holders):
                for taker in takers:
                    if taker.name not in stays:
                        stays[taker.name] = self._stays(taker, keys[position])
                    is_elsewhere[position] = is_elsewhere[position] or stays[taker.name]
        return is_elsewhere

    def _stays(self, taker: PeerTaker, held: ChunkKey) -> bool:
        """Whether a host stays, which its answer to an offer of a chunk that it has shows."""
        try:
            return taker.offer([held], 0).fates == bytes([OfferFate.HERE])
        except (OSError, InputError) as error:
            self._failed[taker.name] = str(error) or type(error).__name__
            return False

    def _round(self) -> None:
        """Query every peer's progress, and offer it more."""
        takers = {taker.name: taker for tier in self._tiers for taker in tier.takers()}
        self._silent.clear()
        for name in self._taken.keys() - takers.keys():
            for offer in self._taken.pop(name):  # it is down: another peer may take them
                self._give_up(offer, name)
        for taker in takers.values():
            taken = self._taken.setdefault(taker.name, [])
            for offer in list(taken):
                if not self._offer(taker, offer, is_repeated=True):
                    taken.remove(offer)
        turns = [taker for taker in takers.values() if taker.name not in self._silent]
        while turns and self._todo and not self._stop.is_set():  # in turn, so that every peer has work
            turns = [taker for taker in turns if self._offer_next(taker, set(takers))]

    def _offer_next(self, taker: PeerTaker, takers: set[str]) -> bool:
        """Offer a peer one more piece, if it has capacity and there is one that it has not refused. False: it takes no
        more in this round."""
        taken, room = self._taken[taker.name], self._room()
        if room == 0 or sum(len(queued.left) for queued in taken) >= _IN_FLIGHT:
            return False
        for offer in [queued for queued in self._todo if queued.refused_by >= takers]:
            self._todo.remove(offer)
            self._settle("refused", len(offer.left))
        next_offer = next((queued for queued in self._todo if taker.name not in queued.refused_by), None)
        if next_offer is None:
            return False
        offer = next_offer
        self._todo.remove(offer)
        if room is not None and room < len(offer.chain) - offer.first:
            offer, remainder = _split(offer, offer.first + room)
            self._todo.appendleft(remainder)
        offer.offered_s = time.monotonic()
        if self._offer(taker, offer, is_repeated=False):
            taken.append(offer)
        return taker.name not in self._silent

    def _room(self) -> int | None:
        """How many more chunks may be offered within `max_bytes`; None: any number."""
        if self._bytes_left is None:
            return None
        sizes = self._host.pool.sizes
        in_flight_bytes = sum(sizes.total(list(offer.left)) for taken in self._taken.values() for offer in taken)
        return max(0, self._bytes_left - in_flight_bytes) // sizes.largest

    def _offer(self, taker: PeerTaker, offer: _Offer, *, is_repeated: bool) -> bool:
        """Make an offer, or query its progress. Returns whether the peer is fetching some of it."""
        if is_repeated:
            gone = offer.left - set(self._still_here(list(offer.left)))
            offer.left -= gone
            if not offer.left:
                return False
        try:
            answer = taker.offer(offer.chain, offer.first)
        except (OSError, InputError) as error:
            self._failed[taker.name] = str(error) or type(error).__name__
            self._silent.add(taker.name)
            self._give_up(offer, taker.name)
            return False
        fates = dict(zip(offer.chain[offer.first :], answer.fates, strict=True))
        if answer.room or OfferFate.COMING in answer.fates:
            self._had_room.add(taker.name)
        now_s = time.monotonic()
        for key in [key for key in offer.left if fates[key] == OfferFate.HERE]:
            offer.left.remove(key)
            self._moved_s[taker.name] = now_s
            if not is_repeated:
                self._settle("elsewhere")  # the peer had the chunk before it was offered
                continue
            nbytes = self._host.pool.sizes.of(key)
            self._state.moved_bytes += nbytes
            self._bytes_left = None if self._bytes_left is None else self._bytes_left - nbytes
            self._settle("moved")
        if not offer.left:
            return False
        is_coming = any(fates[key] == OfferFate.COMING for key in offer.left)
        is_doubted = all(fates[key] == OfferFate.DOUBTED for key in offer.left)
        last_s = max(offer.offered_s, self._moved_s.get(taker.name, 0.0))
        if (is_coming or answer.room) and not is_doubted and now_s - last_s <= _STALL_S:
            return True  # over a slow link chunks arrive one at a time
        self._failed[taker.name] = (
            "it was cleared after this host, and reads nothing that may be older: docs/peers.md says what to do"
            if is_doubted
            else "it fetched nothing of what it took"
            if is_coming
            else "it is busy"
            if answer.room
            else "it has no more room: what it takes fills half of its pool, and free space of its tiers above peers"
            if taker.name in self._had_room
            else "it has no room, leaves as well, or no engine has registered this format with it"
        )
        self._give_up(offer, taker.name)
        return False

    def _give_up(self, offer: _Offer, name: str) -> None:
        """Leave the rest of this offer to the other peers."""
        unsettled_keys = [key for key in offer.chain if key in offer.left]
        self._todo.extendleft(reversed(self._offers_of(unsettled_keys, offer.refused_by | {name})))

    def _settle(self, fate: Literal["elsewhere", "moved", "refused", "gone"], chunks: int = 1) -> None:
        setattr(self._state, fate, getattr(self._state, fate) + chunks)
        self._state.left -= chunks


def _split(offer: _Offer, index: int) -> tuple[_Offer, _Offer]:
    """The part before this index of its chain, and the rest."""
    before, after = set(offer.chain[offer.first : index]), set(offer.chain[index:])
    return (
        _Offer(offer.chain[:index], offer.first, offer.left & before, offer.refused_by),
        _Offer(offer.chain, index, offer.left & after, offer.refused_by),
    )


_MAX_REVIEWED: Final = 256
"""Chunks of earlier offers that are re-examined with each offer."""


class Offers:
    """The offers made to one cache by hosts that are about to leave: this host fetches the chunks, as far as it has
    room. Safe to call from any thread.

    An offer is a list of keys. This side looks for them where every lookup does, in the tier of its peers, and reads,
    verifies and commits them like every promotion. Offered chunks that were not used yet take at most half of a share,
    so a departing host cannot cause everything that is in use here to be evicted. Those that this host's own tiers have
    by then make room in the pool for more, as long as the tiers have free space.
    """

    def __init__(self, parts: CacheParts) -> None:
        self._host, self._index, self._lower = parts.host, parts.index, parts.lower
        found = self._lower.tiers_that(PeersTier)
        self._tier = found[0][0] if found else None
        self._peers = found[0][1] if found else None
        self._unused: dict[ChunkKey, Share] = {}  # arriving or in the pool, and not used yet
        self._to_review: deque[ChunkKey] = deque()
        self._unused_of: Counter[Share] = Counter()
        self.is_refused = False
        """This host is about to leave as well."""

    def take(
        self, chain: Sequence[ChunkKey], first: int, cleared_for_s: float | None = None, *, fetches: bool = True
    ) -> Offered:
        """Fetch the chunks of this chain from `first` on, unless they are here. Repeating the call reports progress.

        chain: one group's and shard's keys of a prompt, from its first chunk on.
        cleared_for_s: how long ago the other host was cleared; None: never.
        fetches: if not, this only reports what is here.
        """
        wanted = list(chain[first:])
        if not wanted or self.is_refused:
            # What is here will leave, too: of two hosts that leave at once, neither may count on the other.
            return Offered(bytes([OfferFate.NOT_TAKEN] * len(wanted)), 0)
        held_here = list(map(bool, self._lower.locate(wanted, only_here=True)))
        tier = self._tier if fetches and not self._host.is_frozen else None
        doubted = self._peers.doubted(wanted, cleared_for_s) if self._peers is not None else set()
        room_below = 0 if tier is None else self._lower.free_chunks(above=tier)
        with self._host.lock:
            reviewed = self._review_unused()
        places = self._lower.locate(reviewed, only_here=True) if room_below else []
        with self._host.lock:
            share = self._host.shares.of(wanted[0].tenant)
            pairs = zip(wanted, held_here, strict=True)
            missing = [
                key for key, is_here in pairs if not is_here and key not in doubted and not self._index.is_held(key)
            ]
            lacking = len(missing) - (share.slots // 2 - self._unused_of[share])
            if lacking > 0:
                below = [key for key, tier in zip(reviewed, places, strict=False) if tier]
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
            pairs = zip(wanted, held_here, strict=True)
            fates = [self._fate(key, is_here, key in requested, key in doubted) for key, is_here in pairs]
            return Offered(bytes(fates), room_left)

    def _fate(self, key: ChunkKey, is_here: bool, is_begun: bool, is_doubted: bool) -> OfferFate:
        if is_here or (self._index.find(key) is not None and not is_begun):
            return OfferFate.HERE
        if self._index.is_held(key):
            return OfferFate.COMING
        return OfferFate.DOUBTED if is_doubted else OfferFate.NOT_TAKEN

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
