"""The way up: chunks that only a lower tier holds are brought into the pool before anything is promised.

A lookup that ends in the host tier asks the lower tiers, hottest first; each takes a leading run of what is left. What
they hold is loaded into slots that are reserved under one lock for as much of the run as there is room, so two
prefetches never wait for each other, and the lookup's answer is "pending" for at most `wait_s`: then the engine gets
what has arrived. What arrives later is there for the next request. A chunk that does not come breaks the run: what lies
behind it is worthless and given up.

Each tier earns its patience. A wait that ends before all has come halves what the next request will wait for that tier,
and what arrives in time doubles it again, up to `wait_s`: a tier that is always too slow soon costs next to nothing,
and what it brings late still serves later requests. And a remote tier that answers slowly and hardly ever has anything
still gets the question, but its answer is not waited for until it has something again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kv_core.clock import Clock
from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded
from kv_core.service import Holder

from kv_tiers import chunk_header
from kv_tiers.cache.host import TIER, HostTier
from kv_tiers.cache.spill import Spills
from kv_tiers.events import events
from kv_tiers.index.residency import Residency
from kv_tiers.lanes.jobs import Arrival
from kv_tiers.lanes.lane import Lane
from kv_tiers.tier import Read

_MIN_PATIENCE_S: Final = 0.01
_MIN_WORTH: Final = 0.05
_MIN_ANSWER_S: Final = 0.005
_LATELY: Final = 16


@dataclass(slots=True)
class PromoteCounts:
    """What is counted of the way up. It only grows.

    requested: chunks that lower tiers were told to load.
    arrived: those of them that came up.
    given_up: those that a break in their run made worthless.
    waits_over: holders whose time was over before all had come.
    """

    requested: int = 0
    arrived: int = 0
    given_up: int = 0
    waits_over: int = 0


@dataclass(slots=True)
class _Answers:
    """How a remote tier has answered lately.

    worth: how often with anything, from 0 to 1.
    seconds: after how long.
    """

    worth: float = 1.0
    seconds: float = 0.0

    def came(self, leading: int, seconds: float) -> None:
        self.worth += (float(leading > 0) - self.worth) / _LATELY
        self.seconds += (seconds - self.seconds) / _LATELY

    def are_worth_waiting_for(self) -> bool:
        return self.worth > _MIN_WORTH or self.seconds < _MIN_ANSWER_S


@dataclass(slots=True)
class _Wait:
    """One holder that waits.

    began_s: since when.
    until_s: how long it may.
    over: it waits no more.
    slots: of chunks that came up for it, leased until it asks again and is promised them.
    tiers: the places of those that bring something up for it.
    answers: (tier, place in the prompt) → leading chunks held there, None while the tier has not answered.
    """

    began_s: float
    until_s: float
    over: bool = False
    slots: list[int] = field(default_factory=list)
    tiers: set[int] = field(default_factory=set)
    answers: dict[tuple[int, int], int | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Promotion:
    """A leading run on its way up.

    holder: for whom.
    chain: all keys of its prompt.
    broken_at: the first place in the prompt that did not come.
    wait: the holder's.
    """

    holder: Holder
    chain: list[ChunkKey]
    broken_at: int
    wait: _Wait


@dataclass(frozen=True, slots=True)
class _Run:
    """Places `start` … `stop` (excluded) of a prompt, which a tier has."""

    tier: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Job:
    """What one call of a tier brings up.

    tier: its place among the lanes.
    start: the first key's place in the prompt.
    keys: neighbours in the prompt.
    slots: where they are going to be.
    began_s: when it was submitted.
    """

    tier: int
    start: int
    keys: list[ChunkKey]
    slots: list[int]
    began_s: float


class Promotions:
    """All prefetches into one host tier. Every method takes the host's lock itself where it needs it."""

    def __init__(
        self,
        host: HostTier,
        index: Residency,
        lanes: Sequence[Lane],
        spills: Spills,
        *,
        wait_s: float,
        keep_s: float,
        max_slots: int,
        batch_chunks: int,
        clock: Clock,
    ) -> None:
        """wait_s, keep_s: how long a holder may wait, and what came up stays put for one that does not ask again.
        max_slots: how many of the pool's slots may be waiting for bytes from below at a time."""
        self._host = host
        self._index = index
        self._lanes = list(lanes)
        self._spills = spills
        self._wait_s, self._keep_s = wait_s, keep_s
        self._patience_s = [wait_s] * len(self._lanes)
        self._answers = [_Answers() for _ in self._lanes]
        self._max_slots = max_slots
        self._batch_chunks = batch_chunks
        self._clock = clock
        self._waits: OrderedDict[Holder, _Wait] = OrderedDict()
        self._arriving: set[ChunkKey] = set()
        self._source: dict[int, tuple[ChunkKey, str]] = {}  # slot → its chunk and where it came from, until it is used
        self.counts = PromoteCounts()

    def is_pending(self, keys: Sequence[ChunkKey], shape: ChunkShape, have: int, holder: Holder, now_s: float) -> bool:
        """Whether waiting will make the first `have` chunks of `keys` more. Starts what is to be waited for.

        Without the lock. Asking again is how a holder learns that its wait is over.
        """
        if not shape.is_plain:
            return False
        with self._host.lock:
            have = len(self._index.leading(keys))
            if have == len(keys):
                return True
            wait = self._wait_of(holder, now_s)
            if not wait.over and now_s >= wait.until_s:
                wait.over = True
                self.counts.waits_over += 1
                unanswered = {tier for (tier, _), chunks in wait.answers.items() if chunks is None}
                for tier in wait.tiers | unanswered:
                    self._disappoint(tier)
            if wait.over:
                return False
            if keys[have] in self._arriving or self._index.find(keys[have]) is not None:
                return True  # the latter arrived since the lookup
            if self._index.is_held(keys[have]):
                return False  # an engine is storing it: it will be there for the next request
        runs = self._where(wait, keys, have, now_s)
        if runs is None:
            return True
        if not runs:
            wait.over = True
            return False
        wait.tiers.update(run.tier for run in runs)
        patience_s = max(self._patience_s[tier] for tier in wait.tiers)
        wait.until_s = wait.began_s + min(self._wait_s, patience_s)
        return self._start(_Promotion(holder, list(keys), len(keys), wait), runs)

    def promised(self, holder: Holder) -> None:
        """What came up for this holder so far is in its promise. Under the lock."""
        if (wait := self._waits.get(holder)) is not None and wait.slots:
            slots, wait.slots = wait.slots, []
            self._host.unlease(slots)

    def end(self, holder: Holder) -> None:
        """The holder waits no more. What is on its way arrives all the same. Under the lock."""
        self.promised(holder)
        self._waits.pop(holder, None)

    def forget_wait(self, holder: Holder) -> None:
        """The holder may wait anew. Takes the lock."""
        with self._host.lock:
            self.end(holder)

    def expire(self, now_s: float) -> None:
        """End the waits of holders that never said so. Under the lock."""
        while self._waits:
            oldest, wait = next(iter(self._waits.items()))
            if now_s < wait.until_s + self._keep_s:
                return
            self.end(oldest)

    def sources(self, slots: Sequence[int]) -> list[str]:
        """The tier that each slot's chunk came from, if it was not used since; else the host tier. Under the lock."""
        if not self._source:
            return [TIER] * len(slots)
        key_at = self._index.key_at
        known = (self._source.get(slot, (None, TIER)) for slot in slots)
        return [name if key == key_at(slot) else TIER for slot, (key, name) in zip(slots, known, strict=True)]

    def used(self, slots: Sequence[int]) -> None:
        """From now these are chunks of the host tier like any other. Under the lock."""
        if self._source:
            for slot in slots:
                self._source.pop(slot, None)

    def _wait_of(self, holder: Holder, now_s: float) -> _Wait:
        wait = self._waits.get(holder)
        if wait is None:
            wait = self._waits[holder] = _Wait(now_s, now_s + self._wait_s)
        return wait

    def _disappoint(self, tier: int) -> None:
        self._patience_s[tier] = max(self._patience_s[tier] / 2, min(_MIN_PATIENCE_S, self._wait_s))

    def _where(self, wait: _Wait, keys: Sequence[ChunkKey], have: int, now_s: float) -> list[_Run] | None:
        """Which tier has which part of what is missing. None: a remote one has not answered yet."""
        runs: list[_Run] = []
        at = have
        while at < len(keys):
            for tier, lane in enumerate(self._lanes):
                if lane.holds_is_local:
                    chunks = lane.leading(keys[at:])
                else:
                    answer = self._answer_of(wait, tier, lane, keys, at)
                    if answer is None and now_s >= wait.began_s + self._patience_s[tier]:
                        wait.answers[tier, at] = answer = 0  # it answers too late, if it does
                        self._disappoint(tier)
                    if answer is None and not self._answers[tier].are_worth_waiting_for():
                        answer = 0
                    if answer is None:
                        return runs or None  # what is known already need not wait for the rest
                    chunks = answer
                if chunks:
                    runs.append(_Run(tier, at, at + chunks))
                    at += chunks
                    break
            else:
                break
        return runs

    def _answer_of(self, wait: _Wait, tier: int, lane: Lane, keys: Sequence[ChunkKey], at: int) -> int | None:
        for (other, start), chunks in wait.answers.items():
            if other == tier and chunks is not None and start < at < start + chunks:
                return start + chunks - at
        place = (tier, at)
        if place not in wait.answers:
            wait.answers[place] = None

            sent_s = self._clock.now_s()

            def answered(leading: int) -> None:
                with self._host.lock:
                    self._answers[tier].came(leading, self._clock.now_s() - sent_s)
                if wait.answers[place] is None:
                    wait.answers[place] = leading

            if not lane.ask(keys[at:], answered):
                wait.answers[place] = 0
        return wait.answers[place]

    def _start(self, promotion: _Promotion, runs: Sequence[_Run]) -> bool:
        """Reserve and submit. False: nothing is on its way, so there is nothing to wait for."""
        chain = promotion.chain
        jobs: list[_Job] = []
        began_s = self._clock.now_s()
        with self._host.lock:
            skipped: set[int] = set()
            room = self._max_slots - len(self._arriving)
            for run in runs:
                for start in range(run.start, run.stop, self._batch_chunks):
                    job = _Job(run.tier, start, [], [], began_s)
                    for key in chain[start : min(start + self._batch_chunks, run.stop)]:
                        if room <= 0 or self._index.is_held(key):
                            break
                        slots = self._host.reserve([key], (), skipped)
                        if not slots:
                            break
                        job.keys.append(key)
                        job.slots.extend(slots)
                        room -= 1
                    if job.keys:
                        jobs.append(job)
                        self._arriving.update(job.keys)
                    if len(job.keys) < min(self._batch_chunks, run.stop - start):
                        break
                else:
                    continue
                break
            self.counts.requested += sum(len(job.keys) for job in jobs)
            self._host.publish_evicted("promotion", promotion.holder)
            if not jobs:
                return bool(self._arriving)  # others' are on their way; then there will be room
        short = self._host.pool.back([slot for job in jobs for slot in job.slots])
        submitted = False
        for job in jobs:
            refused = bool(short.intersection(job.slots)) or not self._submit(promotion, job)
            if refused:
                self._arrived(promotion, job, [])
            submitted = submitted or not refused
        return submitted

    def _submit(self, promotion: _Promotion, job: _Job) -> bool:
        pool = self._host.pool
        reads = [
            Read(key, bytearray(chunk_header.HEADER_BYTES), pool.pages(slot), pool.chunk_bytes, pool.sizes.of(key))
            for key, slot in zip(job.keys, job.slots, strict=True)
        ]
        return self._lanes[job.tier].load(reads, lambda arrivals: self._arrived(promotion, job, arrivals))

    def _arrived(self, promotion: _Promotion, job: _Job, arrivals: Sequence[Arrival]) -> None:
        """On the lane's thread. arrivals: none if the job was refused."""
        with self._host.lock:
            whole = 0
            while (
                whole < len(arrivals)
                and isinstance(arrivals[whole].outcome, Loaded)
                and job.start + whole < promotion.broken_at
            ):
                whole += 1
            keys, slots = job.keys[:whole], job.slots[:whole]
            self._arriving.difference_update(job.keys)
            wait = self._waits.get(promotion.holder)
            if whole < len(job.keys):
                promotion.broken_at = min(promotion.broken_at, job.start + whole)
                self._host.abort(job.keys[whole:], job.slots[whole:])
                self.counts.given_up += len(job.keys) - whole
                if wait is not None:
                    wait.over = True
            if whole:
                chain = promotion.chain[: job.start + whole]
                self._host.commit(keys, slots, chain, [arrival.checksum for arrival in arrivals[:whole]])
                self._host.touch(chain)
                self.counts.arrived += whole
                for key, slot in zip(keys, slots, strict=True):
                    self._source[slot] = key, self._lanes[job.tier].name
                if wait is not None:
                    if not wait.over:
                        self._patience_s[job.tier] = min(2 * self._patience_s[job.tier], self._wait_s)
                    here = [slot for key, slot in zip(keys, slots, strict=True) if self._index.key_at(slot) == key]
                    self._index.lease(here)
                    wait.slots += here
                self._spills.committed(keys, slots, chain, above=job.tier)
            if arrivals and self._host.events.on:
                self._host.events.publish(
                    events.Promoted(
                        promotion.holder,
                        self._lanes[job.tier].name,
                        keys,
                        len(job.keys) - whole,
                        self._host.pool.sizes.total(keys),
                        self._clock.now_s() - job.began_s,
                    )
                )
