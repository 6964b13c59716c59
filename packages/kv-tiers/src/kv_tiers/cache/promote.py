"""Promotion: chunks that only a lower tier holds are loaded into the pool before anything is promised.

A lookup whose hit is shorter than its prompt queries the lower tiers (`Presence`). The target is the
longest boundary that the pool and the tiers can serve together, and only what that boundary needs is loaded: the last
chunks of a window, the one state at the boundary. All slots of one promotion are reserved under one lock, as many as
there is room for, so two promotions never wait for each other. The lookup answers "pending" for at most `wait_s`; then
the engine gets what has arrived. Chunks that arrive later are there for the next request. With a `wait_s` of 0 they
all are, of those tiers that answer from memory: the loads are started, and nothing is pending.

Waiting has to pay. With an engine's costs (`kv_core.cost`), a lookup waits only for a boundary that arrives sooner than
it is computed, as far as the tier's lane has measured, and gives up when that is late. Chunks whose load does not pay
are not loaded at all, because the engine stores what it computes. Two exceptions: a few chunks are loaded now and then
to measure whether the tier is still as slow, and for an engine that stores nothing the chunks are loaded for the next
request if the tier is idle.

A chunk that a tier fails to deliver is requested from the tiers below it. If none has it, the boundaries that need it
are out of reach, and the wait continues for the next shorter one while there is time. Chunks of the whole prefix after
a missing one are useless and are given up. So are those that a tier that hangs in a call was to deliver: requests would
wait for them in vain, and an engine that has computed one could not store it.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from threading import Lock
from typing import Final

from kv_core.clock import Clock
from kv_core.cost import Costs, Skipped
from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded
from kv_core.service import Holder

from kv_tiers import chunk_header
from kv_tiers.cache.hits import columns_of, fitting, last_boundary, needed_count, whole_prefix
from kv_tiers.cache.host import TIER, HostTier
from kv_tiers.cache.leases import owner_of
from kv_tiers.cache.spill import Spills
from kv_tiers.cache.upgrade import Upgrades
from kv_tiers.cache.worth import Part, Worth, probe_chunks, worth_waiting
from kv_tiers.events import events
from kv_tiers.index.residency import Residency
from kv_tiers.lanes.jobs import Arrival
from kv_tiers.lanes.lane import Lane
from kv_tiers.tier import Read
from kv_tiers.tier_state import SERVING

# When to probe a tier that no request waits for: soon at first, then ever less often while it stays slow.

_FIRST_S: Final = 10.0
_MAX_S: Final = 300.0
_SOON_S: Final = 0.5


class Probes:
    """The probes of one tier. Not thread-safe."""

    def __init__(self) -> None:
        self._after_s = _FIRST_S
        self._due_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether to probe it now, if its lane is idle. If so, the next one is due after this one has ended, or in a
        while if there is no room for it."""
        if now_s < self._due_s:
            return False
        self._due_s = now_s + _FIRST_S
        return True

    def ended(self, now_s: float, *, was_right: bool) -> None:
        """was_right: the tier was about as slow as estimated; else another probe is due soon."""
        if was_right:
            self._due_s = now_s + self._after_s
            self._after_s = min(2 * self._after_s, _MAX_S)
        else:
            self._due_s = now_s + _SOON_S
            self._after_s = _FIRST_S


# Which of the keys that a lookup waits for the lower tiers hold, and how long each tier is waited for.
#
# Tiers are queried hottest first, each for the keys that the tiers above it lack. A tier that answers from memory is
# queried in place, a remote one on another thread: until it answers, its keys count as absent.
#
# Each tier has a time limit of its own. A wait that ends before everything has arrived halves it, and an arrival in
# time doubles it again, up to `wait_s`: a tier that is always too slow soon costs next to nothing, and what it
# delivers late still serves later requests. What comes late, but within `wait_s`, shows how long the tier needs, so
# that one that was slow for a moment is not waited for in vain from then on. A remote tier that answers slowly and
# hardly ever has a key is still queried, but its answer is not waited for until it has had one again.

_MIN_LIMIT_S: Final = 0.01
_HEADROOM: Final = 1.5
"""How many times as long as a tier needed it may take the next time."""
_MIN_HIT_RATE: Final = 0.05
_QUICK_S: Final = 0.005
_SAMPLES: Final = 16


@dataclass(slots=True)
class _RecentAnswers:
    """Moving averages over a remote tier's last answers.

    hit_rate: the share of answers that found any key, from 0 to 1.
    seconds: from query to answer.
    """

    hit_rate: float = 1.0
    seconds: float = 0.0

    def add(self, found_any: bool, seconds: float) -> None:
        self.hit_rate += (float(found_any) - self.hit_rate) / _SAMPLES
        self.seconds += (seconds - self.seconds) / _SAMPLES

    def is_worth_waiting_for(self) -> bool:
        return self.hit_rate > _MIN_HIT_RATE or self.seconds < _QUICK_S


@dataclass(slots=True)
class Answers:
    """The tiers' answers to one holder.

    began_s: when its wait began.
    by_tier: for each remote tier, by its index, whether it holds a key; None until it has answered.
    lost: (tier, key) of chunks that a tier claimed to hold but did not deliver.
    max_wait_s: how long to wait for an answer; beyond that computing is quicker.
    lower: the numbers of the tiers that may be read for this holder; None: all.
    """

    began_s: float
    by_tier: dict[int, dict[ChunkKey, bool | None]] = field(default_factory=dict)
    lost: set[tuple[int, ChunkKey]] = field(default_factory=set)
    max_wait_s: float = inf
    lower: frozenset[int] | None = None

    def may_read(self, tier: int) -> bool:
        return self.lower is None or tier in self.lower

    def pending_tiers(self) -> set[int]:
        """The tiers that have not answered yet."""
        return {tier for tier, held in self.by_tier.items() if None in held.values()}


class Presence:
    """Queries all tiers below one pool. Called without the host's lock."""

    def __init__(self, lanes: Sequence[Lane], lock: Lock, clock: Clock, wait_s: float) -> None:
        """lock: the host's, taken to record how quick an answer was. wait_s: the longest wait for any tier."""
        self._lanes = lanes
        self._lock = lock
        self._clock = clock
        self._wait_s = wait_s
        self._recent = [_RecentAnswers() for _ in lanes]
        self.limit_s = [wait_s] * len(lanes)
        """How long to wait for each tier."""

    def was_late(self, tier: int) -> None:
        """A wait ended before this tier had answered or delivered."""
        self.limit_s[tier] = max(self.limit_s[tier] / 2, min(_MIN_LIMIT_S, self._wait_s))

    def was_in_time(self, tier: int) -> None:
        self.limit_s[tier] = min(2 * self.limit_s[tier], self._wait_s)

    def measured(self, tier: int, seconds: float) -> None:
        """An answer or chunks came from this tier, this long after they were requested, whether in time or too late."""
        if seconds <= self._wait_s:
            self.limit_s[tier] = max(self.limit_s[tier], min(_HEADROOM * seconds, self._wait_s))

    def find(self, keys: Sequence[ChunkKey], answers: Answers, now_s: float) -> tuple[dict[ChunkKey, int], bool]:
        """The hottest tier of each key that any tier holds; and whether every tier has answered."""
        found: dict[ChunkKey, int] = {}
        missing = list(keys)
        for tier, lane in enumerate(self._lanes):
            if not missing:
                break
            if not answers.may_read(tier):
                continue
            held = lane.holds(missing) if lane.holds_is_local else self._held(tier, missing, answers, now_s)
            if held is None:
                return found, False
            found.update(
                (key, tier)
                for key, is_held in zip(missing, held, strict=True)
                if is_held and (tier, key) not in answers.lost
            )
            missing = [key for key in missing if key not in found]
        return found, True

    def _held(self, tier: int, keys: Sequence[ChunkKey], answers: Answers, now_s: float) -> list[bool] | None:
        """Which of these a remote tier holds. None: it has not answered yet, and waiting for it pays."""
        held = answers.by_tier.setdefault(tier, {})
        if new := [key for key in keys if key not in held]:
            held.update(dict.fromkeys(new, None))
            self._query(tier, new, held)
        if any(held[key] is None for key in keys):
            recent = self._recent[tier]
            if now_s >= answers.began_s + min(self.limit_s[tier], answers.max_wait_s):
                held.update((key, False) for key in keys if held[key] is None)
                self.was_late(tier)
            elif recent.is_worth_waiting_for() and recent.seconds < answers.max_wait_s:
                return None
        return [bool(held[key]) for key in keys]

    def _query(self, tier: int, keys: list[ChunkKey], held: dict[ChunkKey, bool | None]) -> None:
        sent_s = self._clock.now_s()

        def answered(holds: Sequence[bool]) -> None:
            took_s = self._clock.now_s() - sent_s
            with self._lock:
                self._recent[tier].add(any(holds), took_s)
                self.measured(tier, took_s)
            for key, is_there in zip(keys, holds, strict=True):
                if held[key] is None:
                    held[key] = is_there

        if not self._lanes[tier].ask(keys, answered):
            held.update(dict.fromkeys(keys, False))


# Records of promotions: where a prompt's chunks are, which are being loaded, which holders wait, and counters.


@dataclass(slots=True)
class PromoteCounts:
    """Counters of promotion. They only grow.

    requested: chunks that loads were submitted for.
    arrived: of those, the chunks that entered the pool.
    given_up: of those, the chunks that were not delivered, or were behind one that was not.
    """

    requested: int = 0
    arrived: int = 0
    given_up: int = 0


@dataclass(slots=True)
class Promotion:
    """The loads of one boundary.

    holder: whose lookup started them.
    broken_at: the first chunk that a group of the whole prefix did not get: everything from there on is worthless.
    divisor: of each chunk one of this many parts is read (`Lane.divisors`); None: the smallest.
    on_arrived: called under the lock with the slots of chunks that have arrived.
    lower: the numbers of the tiers that the chunks may be written to; None: all.
    """

    holder: Holder
    broken_at: int
    divisor: int | None = None
    on_arrived: Callable[[Sequence[int]], object] | None = None
    lower: frozenset[int] | None = None


@dataclass(slots=True)
class Job:
    """One load from one tier: consecutive chunks of one group and shard.

    tier: the index of its lane.
    start: the chunk of the first key.
    is_whole: the group needs the whole prefix.
    chain: all keys of this group and shard up to the last one loaded.
    touched_from: the first chunk of the chain that the boundary needs.
    keys: the keys that are loaded.
    slots: their reserved slots, in the order of `keys`.
    began_s: when the load was submitted.
    estimated_s: the estimate of its duration; None: the tier was not measured yet.
    is_probe: it is loaded only to measure the tier.
    given_up_slots: how many of the chunks are no longer awaited: the tier hangs, or an engine stores them. Their slots
        stay reserved until the load ends.
    """

    tier: int
    start: int
    is_whole: bool
    chain: list[ChunkKey]
    touched_from: int
    keys: list[ChunkKey]
    slots: list[int]
    began_s: float
    estimated_s: float | None = None
    is_probe: bool = False
    given_up_slots: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


@dataclass(slots=True)
class View:
    """Where the chunks of a prompt are.

    keys: the prompt's keys, chunk-major.
    in_pool: for each key, whether the pool has it or is loading it.
    writing: keys that engines are storing now, or that come from a tier that may not be read for this request. They
        count as absent: they are available to the next request.
    in_tiers: for the remaining keys, the index of the tier that has it.
    all_answered: every tier that was queried has answered.
    """

    keys: Sequence[ChunkKey]
    in_pool: list[bool]
    writing: set[ChunkKey]
    in_tiers: dict[ChunkKey, int] = field(default_factory=dict)
    all_answered: bool = True

    def has(self, place: int) -> bool:
        return self.in_pool[place] or self.keys[place] in self.in_tiers


@dataclass(slots=True)
class PromotionWait:
    """One holder's wait.

    answers: what the tiers have answered, and when the wait began.
    until_s: when the wait times out.
    over: the wait has ended.
    slots: of chunks that arrived for this holder, leased until they are promised to it or the wait ends.
    needed: the keys that the current target boundary needs from the tiers.
    tiers: the indices of the tiers that load something for this holder.
    skipped: what it does not wait for.
    awaited: what it waits for; becomes `skipped` when the wait times out.
    """

    answers: Answers
    until_s: float
    over: bool = False
    slots: list[int] = field(default_factory=list)
    needed: set[ChunkKey] = field(default_factory=set)
    tiers: set[int] = field(default_factory=set)
    skipped: Skipped | None = None
    awaited: Skipped | None = None


MAX_WAITS: Final = 1 << 16
"""Waits at a time; beyond that, the oldest of the same owner ends."""
_MAX_LOAD_CHUNKS = 256
"""The most chunks of one load. A lane takes four such loads at a time, and never a load larger than four of them."""


class Promotions:
    """All promotions into one host tier. Methods take the host's lock themselves, unless they say "under the lock"."""

    def __init__(
        self,
        host: HostTier,
        index: Residency,
        lanes: Sequence[Lane],
        spills: Spills,
        upgrades: Upgrades,
        *,
        wait_s: float,
        keep_s: float,
        max_slots: int,
        batch_bytes: int,
        clock: Clock,
    ) -> None:
        """wait_s: the longest time that a holder waits.
        keep_s: how long chunks that arrived stay leased for a holder that does not return.
        max_slots: how many of the pool's slots may be reserved for loads at a time.
        """
        self._host = host
        self._index = index
        self._lanes = list(lanes)
        self._spills = spills
        self._upgrades = upgrades
        self._wait_s, self._keep_s = wait_s, keep_s
        self._presence = Presence(self._lanes, host.lock, clock, wait_s)
        self._max_slots = max_slots
        self._batch_bytes = batch_bytes
        self._clock = clock
        self._waits: OrderedDict[Holder, PromotionWait] = OrderedDict()
        self._arriving: dict[ChunkKey, Job] = {}  # key → the load that is to deliver it
        self._given_up_slots = 0  # still reserved by loads whose chunks others may deliver
        self._probes = [Probes() for _ in self._lanes]
        # By slot, its chunk and the tier that the chunk came from, until the chunk's first use.
        self._source: dict[int, tuple[ChunkKey, str]] = {}
        self.counts = PromoteCounts()

    def is_pending(
        self,
        keys: Sequence[ChunkKey],
        shape: ChunkShape,
        have: int,
        holder: Holder,
        now_s: float,
        *,
        costs: Costs | None = None,
        lower: frozenset[int] | None = None,
    ) -> bool:
        """Start the loads that make the hit longer than `have` chunks, if waiting for them pays. Whether to wait: then
        the lookup is pending.

        have: how many leading chunks the pool or the engine has.
        lower: the numbers of the tiers that may be read; None: all.
        keys: whole chunks, chunk-major. Called without the lock, repeatedly while the answer is True.
        """
        with self._host.lock:
            wait = self._wait_of(holder, now_s)
            wait.answers.lower = lower
            if not wait.over and now_s >= wait.until_s and self._wait_s:
                wait.skipped = wait.skipped or wait.awaited
                for tier in wait.tiers | wait.answers.pending_tiers():
                    self._presence.was_late(tier)
                self._end_wait(wait)
            if wait.over:
                return False
            self._give_up_hanging()
            if not wait.needed.isdisjoint(self._arriving):
                return True
            view = self._look(keys, wait.answers)
        requested = len(keys) // shape.keys_per_chunk
        if costs is not None and costs.compute is not None:
            tokens = shape.chunk_tokens
            wait.answers.max_wait_s = costs.compute_s(have * tokens, requested * tokens) or 0.0
        best = self._best_boundary(view, shape, wait, now_s)
        if best <= have:
            if view.all_answered:
                with self._host.lock:
                    self._end_wait(wait)
            return not view.all_answered
        jobs = self._jobs(view, shape, best)
        if not view.all_answered:
            # Whole-prefix groups need their chunks whatever the others answer; windows and states need only the last.
            jobs = [job for job in jobs if job.is_whole]
        limit_s, divisor = self._wait_s, None
        if costs is not None and costs.compute is not None:
            worth = self._worth(view, shape, jobs, costs, have=have, best=best)
            wait.skipped, wait.awaited = worth.skipped, worth.awaited
            if worth.chunks <= have:
                if not view.all_answered:
                    return True
                with self._host.lock:
                    self._end_wait(wait)
                self._load_unawaited(Promotion(holder, requested, lower=lower), jobs, costs, now_s)
                return False
            best, limit_s, divisor = worth.chunks, worth.limit_s, worth.divisor
            jobs = [job for job in jobs if job.start < best]
        wait.needed = {key for job in jobs for key in job.keys}
        wait.needed.update(self._arriving_of(view, shape, best))
        if not jobs:
            return True  # everything has arrived since the lookup, or is being loaded for another holder
        wait.tiers.update(job.tier for job in jobs)
        tiers_limit_s = max(self._presence.limit_s[tier] for tier in wait.tiers)
        wait.until_s = wait.answers.began_s + min(self._wait_s, tiers_limit_s, limit_s)
        return self._start(Promotion(holder, requested, divisor, lower=lower), jobs)

    def prefetch(
        self,
        tier: int,
        chain: Sequence[ChunkKey],
        first: int,
        on_arrived: Callable[[Sequence[int]], object] | None = None,
        *,
        only: Container[ChunkKey] | None = None,
    ) -> bool:
        """Load those chunks of a chain from index `first` on that the pool lacks, before a lookup needs them. False:
        the tier takes no requests for now.

        on_arrived: as in `Promotion`.
        only: load only these keys; None: all.
        """
        if self._lanes[tier].health()[0] not in SERVING:
            return False
        began_s, batch, chain = self._clock.now_s(), self._batch_chunks(self._lanes[tier]), list(chain)
        jobs: list[Job] = []
        with self._host.lock:
            is_held, end = self._index.is_held, len(chain) if self._host.is_open else 0
            missing = [position for position in range(first, end) if not is_held(chain[position])]
        if only is not None:
            missing = [position for position in missing if chain[position] in only]
        for position in missing:
            if not jobs or jobs[-1].end != position or len(jobs[-1].keys) == batch:
                jobs.append(Job(tier, position, False, chain, position, [], [], began_s))
            jobs[-1].keys.append(chain[position])
        if jobs:
            self._start(Promotion("handed over", len(chain), on_arrived=on_arrived), jobs)
        return True

    def skipped(self, holder: Holder) -> Skipped | None:
        """What lower tiers hold but the holder does not wait for. Called under the lock."""
        wait = self._waits.get(holder)
        return None if wait is None else wait.skipped

    def promised(self, holder: Holder, slots: Sequence[int], *, may_wait: bool) -> None:
        """The holder now has a lease on these slots. Under the lock.

        may_wait: the holder continues to wait, so other chunks that arrived for it stay leased.
        """
        if (wait := self._waits.get(holder)) is not None and wait.slots:
            leased = set(slots) if may_wait else set(wait.slots)
            granted = [slot for slot in wait.slots if slot in leased]
            wait.slots = [slot for slot in wait.slots if slot not in leased]
            self._host.unlease(granted)

    def end(self, holder: Holder) -> None:
        """End the holder's wait. Loads in flight finish regardless. Under the lock."""
        if (wait := self._waits.pop(holder, None)) is not None:
            self._end_wait(wait)

    def give_up(self, keys: Sequence[ChunkKey]) -> None:
        """Stop expecting those of these chunks that are being loaded, so that an engine can store them. What the loads
        still deliver of them is discarded. Under the lock."""
        for key in keys if self._arriving else ():
            if (job := self._arriving.pop(key, None)) is not None:
                job.given_up_slots += 1
                self._given_up_slots += 1
                self._host.orphan([key], [job.slots[job.keys.index(key)]])

    def forget_wait(self, holder: Holder) -> None:
        """Let the holder start a new wait. Takes the lock."""
        with self._host.lock:
            self.end(holder)

    def expire(self, now_s: float) -> None:
        """End the waits of holders that did not return. Called under the lock."""
        while self._waits:
            oldest, wait = next(iter(self._waits.items()))
            if now_s < wait.until_s + self._keep_s:
                return
            self.end(oldest)

    def sources(self, slots: Sequence[int]) -> list[str]:
        """For each slot the tier that its chunk was promoted from, until its first use; then the host tier. Under the
        lock."""
        if not self._source:
            return [TIER] * len(slots)
        key_at = self._index.key_at
        known = (self._source.get(slot, (None, TIER)) for slot in slots)
        return [name if key == key_at(slot) else TIER for slot, (key, name) in zip(slots, known, strict=True)]

    def used(self, slots: Sequence[int]) -> None:
        """Note the first use of these slots: from now on their source is the host tier. Under the lock."""
        if self._source:
            for slot in slots:
                self._source.pop(slot, None)

    def waiting(self) -> set[Holder]:
        """Holders that wait, or did lately. Under the lock."""
        return set(self._waits)

    def _wait_of(self, holder: Holder, now_s: float) -> PromotionWait:
        wait = self._waits.get(holder)
        if wait is None:
            if len(self._waits) >= MAX_WAITS:
                own = (one for one in self._waits if owner_of(one) == owner_of(holder))
                self.end(next(own, None) or next(iter(self._waits)))
            wait = self._waits[holder] = PromotionWait(Answers(now_s), now_s + self._wait_s)
        return wait

    def _end_wait(self, wait: PromotionWait) -> None:
        """Under the lock."""
        wait.over = True
        slots, wait.slots = wait.slots, []
        self._host.unlease(slots)

    # What to load.

    def _look(self, keys: Sequence[ChunkKey], answers: Answers) -> View:
        """Under the lock."""
        find, arriving, is_held = self._index.find, self._arriving, self._index.is_held
        in_pool = [find(key) is not None or (key in arriving and answers.may_read(arriving[key].tier)) for key in keys]
        writing = {key for key, is_there in zip(keys, in_pool, strict=True) if not is_there and is_held(key)}
        return View(keys, in_pool, writing)

    def _best_boundary(self, view: View, shape: ChunkShape, wait: PromotionWait, now_s: float) -> int:
        """The longest boundary that the pool and the tiers can serve, as far as these have answered. Groups that need
        the whole prefix are queried first: their chunks limit what is worth querying for the others."""
        stride = shape.keys_per_chunk
        requested = len(view.keys) // stride
        if columns := [column for group in shape.whole_groups for column in columns_of(group, shape)]:
            self._query(
                view, [chunk * stride + column for chunk in range(requested) for column in columns], wait, now_s
            )
        room = self._host.shares.of(view.keys[0].tenant).slots
        prefix = fitting(shape, whole_prefix(shape, requested, view.has), room)
        others = shape.other_groups
        best = prefix
        for is_all in (False, True):  # first what the longest boundary needs, then what shorter ones need
            if best == prefix and is_all:
                break
            places = [
                chunk * stride + column
                for group in others
                for chunk in range(0 if is_all else shape.first_chunk(group, prefix), prefix)
                for column in columns_of(group, shape)
            ]
            self._query(view, places, wait, now_s)
            best, _ = last_boundary(shape, prefix, view.has)
        while needed_count(shape, best) > room:  # local attention may need more for a shorter prefix
            best, _ = last_boundary(shape, fitting(shape, best, room), view.has)
        return best

    def _query(self, view: View, places: Sequence[int], wait: PromotionWait, now_s: float) -> None:
        missing = [key for place in places if not view.has(place) and (key := view.keys[place]) not in view.writing]
        if missing:
            tier_of, all_answered = self._presence.find(missing, wait.answers, now_s)
            view.in_tiers.update(tier_of)
            view.all_answered = view.all_answered and all_answered

    def _jobs(self, view: View, shape: ChunkShape, chunks: int) -> list[Job]:
        """The loads that a boundary of this many chunks needs: groups of the whole prefix first, in the prompt's order,
        so that whatever has arrived when the wait times out is usable.
        """
        began_s = self._clock.now_s()
        jobs: list[Job] = []
        batches = [self._batch_chunks(lane) for lane in self._lanes]
        for group, needed in enumerate(shape.needed(chunks)):
            for column in columns_of(group, shape):
                keys = list(view.keys[column : chunks * shape.keys_per_chunk : shape.keys_per_chunk])
                job: Job | None = None
                for chunk in needed:
                    tier = (
                        None if view.in_pool[chunk * shape.keys_per_chunk + column] else view.in_tiers.get(keys[chunk])
                    )
                    if tier is None:
                        job = None
                        continue
                    if job is None or job.tier != tier or len(job.keys) == batches[tier]:
                        is_whole = shape.groups[group].kind == "all"
                        job = Job(tier, chunk, is_whole, keys, needed.start, [], [], began_s)
                        jobs.append(job)
                    job.keys.append(keys[chunk])
        return sorted(jobs, key=lambda job: (not job.is_whole, job.start))

    def _batch_chunks(self, lane: Lane) -> int:
        return max(1, min(_MAX_LOAD_CHUNKS, lane.batch_bytes(self._batch_bytes) // self._host.pool.slot_bytes))

    def _worth(
        self, view: View, shape: ChunkShape, jobs: Sequence[Job], costs: Costs, *, have: int, best: int
    ) -> Worth:
        """jobs: for `best`."""
        with self._host.lock:
            loads = map(self._arriving.get, self._arriving_of(view, shape, best))
            tiers = {job.tier for job in loads if job is not None}
        total = self._host.pool.sizes.total
        return worth_waiting(
            self._lanes,
            [Part(job.tier, job.start, job.end, total(job.keys)) for job in jobs],
            {tier: self._lanes[tier].load_s(0) or 0.0 for tier in tiers},
            shape=shape,
            have=have,
            best=best,
            costs=costs,
            max_wait_s=self._wait_s,
        )

    def _load_unawaited(self, promotion: Promotion, jobs: Sequence[Job], costs: Costs, now_s: float) -> None:
        """Load what is worth loading for a boundary that no request waits for: the two exceptions in the module's
        docstring.
        """
        wanted = []
        for job in jobs:
            lane = self._lanes[job.tier]
            if not costs.stores:
                wanted += [job] if lane.is_idle() else []
            elif lane.is_idle() and self._probes[job.tier].is_due(now_s):
                del job.keys[probe_chunks(lane, self._host.pool.sizes.of(job.keys[0])) :]
                job.is_probe = True
                wanted.append(job)
                break
        if wanted:
            self._start(promotion, wanted)

    def _arriving_of(self, view: View, shape: ChunkShape, chunks: int) -> list[ChunkKey]:
        """The keys that a boundary needs and that are already being loaded."""
        if not self._arriving:
            return []
        keys = (view.keys[place] for place in shape.needed_places(chunks))
        return [key for key in keys if key in self._arriving]

    def _start(self, promotion: Promotion, wanted: Sequence[Job]) -> bool:
        """Reserve slots and submit the loads. False: nothing is in flight, so there is nothing to wait for."""
        jobs: list[Job] = []
        with self._host.lock:
            skipped: set[int] = set()
            room = self._max_slots - len(self._arriving) - self._given_up_slots
            for job in wanted:
                wanted_keys = list(job.keys)
                job.keys.clear()
                for key in wanted_keys:
                    if room <= 0 or self._index.is_held(key):
                        break
                    slots = self._host.reserve([key], (), skipped)
                    if not slots:
                        room = 0
                        break
                    job.keys.append(key)
                    job.slots.extend(slots)
                    room -= 1
                if job.keys:
                    jobs.append(job)
                    self._arriving.update(dict.fromkeys(job.keys, job))
            self.counts.requested += sum(len(job.keys) for job in jobs)
            self._host.publish_evicted("promotion", promotion.holder)
            if not jobs:
                return bool(self._arriving)  # loads for others are in flight; when they end there will be room
        short = self._host.pool.back([slot for job in jobs for slot in job.slots])
        submitted = False
        for job in jobs:
            refused = bool(short.intersection(job.slots)) or not self._submit(promotion, job)
            if refused:
                self._arrived(promotion, job, [])
            submitted = submitted or not refused
        return submitted

    def _give_up_hanging(self) -> None:
        """Give up the loads from tiers that hang, so that others may deliver their chunks: another tier, or an engine
        that computes them. Under the lock.
        """
        hanging = [number for number, lane in enumerate(self._lanes) if lane.hangs()] if self._arriving else []
        if hanging:
            self.give_up([key for key, job in self._arriving.items() if job.tier in hanging])

    def _submit(self, promotion: Promotion, job: Job) -> bool:
        pool = self._host.pool
        reads = [
            Read(key, bytearray(chunk_header.HEADER_BYTES), pool.pages(slot), pool.chunk_bytes, pool.sizes.of(key))
            for key, slot in zip(job.keys, job.slots, strict=True)
        ]
        lane = self._lanes[job.tier]
        nbytes = pool.sizes.total(job.keys)
        job.estimated_s = lane.load_s(nbytes, promotion.divisor)
        keeps = self._upgrades.keeps(job.tier, nbytes)

        return lane.load(reads, partial(self._arrived, promotion, job), divisor=promotion.divisor, keeps=keeps)

    def _arrived(self, promotion: Promotion, job: Job, arrivals: Sequence[Arrival]) -> None:
        """On the lane's thread. arrivals: empty if the lane refused the job, which it may take later if it serves."""
        with self._host.lock:
            for key in job.keys:
                if self._arriving.get(key) is job:  # else it was forgotten, and another load may be under way
                    del self._arriving[key]
            self._given_up_slots -= job.given_up_slots
            wait = self._waits.get(promotion.holder)
            is_usable = [isinstance(arrival.outcome, Loaded) for arrival in arrivals] or [False] * len(job.keys)
            if wait is not None and (arrivals or self._lanes[job.tier].health()[0] not in SERVING):
                wait.answers.lost.update((job.tier, key) for key, ok in zip(job.keys, is_usable, strict=True) if not ok)
            if job.is_whole and False in is_usable:
                promotion.broken_at = min(promotion.broken_at, job.start + is_usable.index(False))
            is_usable = [ok and chunk < promotion.broken_at for chunk, ok in enumerate(is_usable, job.start)]
            self._commit(promotion, job, arrivals, is_usable, wait)
            if job.is_probe:
                took_s, now_s = self._clock.now_s() - job.began_s, self._clock.now_s()
                self._probes[job.tier].ended(now_s, was_right=not job.estimated_s or took_s > 0.67 * job.estimated_s)

    def _commit(
        self,
        promotion: Promotion,
        job: Job,
        arrivals: Sequence[Arrival],
        is_usable: Sequence[bool],
        wait: PromotionWait | None,
    ) -> None:
        """Under the lock. is_usable: for each of the job's chunks, whether it arrived and can be used."""
        pairs = list(zip(job.keys, job.slots, strict=True))
        given_up = [pair for pair, ok in zip(pairs, is_usable, strict=True) if not ok]
        pairs = [pair for pair, ok in zip(pairs, is_usable, strict=True) if ok]
        keys, slots = [key for key, _ in pairs], [slot for _, slot in pairs]
        self._host.abort([key for key, _ in given_up], [slot for _, slot in given_up])
        self.counts.given_up += len(given_up)
        if pairs:
            chain = job.chain[: job.start + len(job.keys)]
            arrivals = [arrival for arrival, ok in zip(arrivals, is_usable, strict=True) if ok]
            self._host.commit(keys, slots, chain, [arrival.checksum for arrival in arrivals])
            self._upgrades.arrived(job.tier, slots, arrivals, promotion.divisor)
            self._host.touch(chain[job.touched_from :])
            self.counts.arrived += len(pairs)
            self._source.update((slot, (key, self._lanes[job.tier].name)) for key, slot in pairs)
            pairs = [(key, slot) for key, slot in pairs if self._index.key_at(slot) == key]  # not forgotten meanwhile
            arrived_slots = [slot for _, slot in pairs]
            if promotion.on_arrived is not None:
                promotion.on_arrived(arrived_slots)
            began_s = job.began_s if wait is None else min(job.began_s, wait.answers.began_s)
            self._presence.measured(job.tier, self._clock.now_s() - began_s)
            if wait is not None and not wait.over:
                self._presence.was_in_time(job.tier)
                self._index.lease(arrived_slots)
                wait.slots += arrived_slots
        if arrivals and self._host.events.on:
            promoted_keys = [key for key, _ in pairs]
            self._host.events.publish(
                events.Promoted(
                    promotion.holder,
                    self._lanes[job.tier].name,
                    promoted_keys,
                    len(given_up),
                    self._host.pool.sizes.total(promoted_keys),
                    self._clock.now_s() - job.began_s,
                    job.estimated_s,
                )
            )
        # Last, because it keeps slots free, for which it may evict these chunks too.
        self._spills.committed(keys, slots, job.chain, above=job.tier, lower=promotion.lower)
