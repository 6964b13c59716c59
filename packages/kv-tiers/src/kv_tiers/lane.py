"""A lane: the bounded queue and the few threads in front of one tier. Nobody else calls a tier.

Submitting never waits: a lane that is full, resting, stuck, frozen or closed refuses, and what was refused costs a miss
and nothing more. What goes first, and what is hidden meanwhile, is a table of its own (`kv_tiers.lane_jobs`).

Here chunks get their headers on the way out and are checked against them on the way back. A wrong one is discarded at
once, so the next question is a miss and not the same fault again.

What becomes of the tier and of its chunks is told as events. Only where no log of these is kept does the lane log it.

A tier that raises is rested: nothing is sent to it until a probe succeeds, at first soon and then ever more seldom. A
job that does not come back within `stuck_s` has the same effect until it does; its memory stays lent, because nobody
can take it back from a thread that may still write there.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kv_core.clock import Clock
from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import Absent, Damaged, Loaded, Refused, Stored, StoreOutcome

from kv_tiers import codec
from kv_tiers.clock import MonotonicClock
from kv_tiers.lane_jobs import Arrival, Ask, Clear, ClearTenant, Discard, Job, Jobs, Load, Outgoing, Store, Submitted
from kv_tiers.observe import events
from kv_tiers.observe.bus import UNWATCHED
from kv_tiers.tier import ClearsTenants, Read, Tier, TierUsage, Write

_log = limited_logger(__name__)


class Health(Enum):
    UP = "it answers"
    RESTING = "it failed, and is probed now and then"
    STUCK = "a call to it has not come back"
    FROZEN = "somebody asked that it be left alone"
    CLOSED = "it is closed"


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """A snapshot. `queued` is a present value; the rest only grow. Chunks, but for `downs` and `seconds_…`."""

    queued: int
    loaded: int
    absent: int
    damaged: int
    stored: int
    refused: int
    discarded: int
    downs: int
    seconds_loading: float
    seconds_storing: float


class _Probe:
    """Whether a tier that failed is back."""


@dataclass(slots=True)
class _Totals:
    loaded: int = 0
    absent: int = 0
    damaged: int = 0
    stored: int = 0
    refused: int = 0
    discarded: int = 0
    downs: int = 0
    seconds_loading: float = 0.0
    seconds_storing: float = 0.0


class Lane:
    """One tier's. Safe to call from any thread. It owns the tier and closes it."""

    def __init__(
        self,
        tier: Tier,
        format_id: bytes,
        *,
        threads: int = 2,
        max_load_chunks: int = 1024,
        max_store_chunks: int = 256,
        rest_s: float = 0.1,
        max_rest_s: float = 1.0,
        stuck_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        """threads: 0 starts none; `step` then does one job at a time, for tests and tools that want an order.
        clock: what a tier's rest and a call that hangs are measured by. Drains and closes wait for threads, and so by
        the machine's."""
        self.tier = tier
        self.name = tier.name
        self.answers_from_memory = tier.answers_from_memory
        self.events = UNWATCHED
        """Where its health and damage are told; whoever puts the lane below a cache sets it."""
        self._noticed = Health.UP
        self._format_id = format_id
        # A store may take the medium's time to make things durable, and a load should not wait for that.
        self._jobs = Jobs(
            max_load_chunks=max_load_chunks, max_store_chunks=max_store_chunks, most_stores=max(1, threads - 1)
        )
        self._rest_s, self._max_rest_s, self._stuck_s = rest_s, max_rest_s, stuck_s
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._changed = threading.Condition()
        self._running: dict[int, float] = {}  # job → when it began
        self._frozen = self._closed = False
        self._rests_until: float | None = None
        self._rests_next = rest_s
        self._probing = False
        self._why_down = ""
        self._totals = _Totals()
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-{tier.name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def leading(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading `keys` the tier holds. Only for one that answers from memory."""
        with self._changed:
            if self._health() is not Health.UP or self._jobs.is_clearing:
                return 0
            keys = keys[: self._jobs.first_hidden(keys)]
        return _leading(self._holds(keys))

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of these a load would find. Only for a tier that answers from memory."""
        with self._changed:
            if self._health() is not Health.UP or self._jobs.is_clearing:
                return [False] * len(keys)
            hidden = set(filter(self._jobs.is_hidden, keys))
        return [held and key not in hidden for key, held in zip(keys, self._holds(keys), strict=True)]

    def ask(self, keys: Sequence[ChunkKey], done: Callable[[int], None]) -> bool:
        """Have the tier asked, in one round trip: `done` gets how many leading `keys` it holds, on another thread."""
        return self._submit(Ask(list(keys), done))

    def load(self, reads: Sequence[Read], done: Callable[[list[Arrival]], None]) -> bool:
        """Bring chunks. The memory of `reads` is lent until `done` is called, on another thread. False: refused."""
        return self._submit(Load(list(reads), done))

    def store(self, chunks: Sequence[Outgoing], done: Callable[[list[StoreOutcome]], None]) -> bool:
        """Keep chunks of one prompt, in its order. Their memory is lent until `done` is called. False: refused."""
        return self._submit(Store(list(chunks), done))

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        """Nobody finds these here from now, whatever the tier is doing; it is told when it can be. Never refused."""
        with self._changed:
            self._jobs.discard(keys)
            self._changed.notify()

    def clear(self) -> None:
        """Nobody finds anything here from now that is here now, or on its way here."""
        with self._changed:
            self._jobs.clear()
            self._changed.notify()

    def clear_tenant(self, tenant: bytes) -> None:
        """As `clear`, for what has this tag. A tier that cannot tell tenants apart is cleared whole."""
        with self._changed:
            if isinstance(self.tier, ClearsTenants):
                self._jobs.clear_tenant(tenant)
            else:
                self._jobs.clear()
            self._changed.notify()

    def room_for_stores(self) -> int:
        """How many more chunks `store` would take now."""
        with self._changed:
            return self._jobs.room_for_stores if self._health() is Health.UP else 0

    def freeze(self, frozen: bool) -> None:
        """Leave the tier alone, or go on with it. What is queued waits; what is submitted meanwhile is refused."""
        with self._changed:
            self._frozen = frozen
            self._health()
            self._changed.notify_all()

    def health(self) -> tuple[Health, str]:
        """How the tier is doing, and why."""
        with self._changed:
            return self._health(), self._why_down

    def counts(self) -> LaneCounts:
        with self._changed:
            totals = self._totals
            return LaneCounts(
                queued=self._jobs.queued,
                loaded=totals.loaded,
                absent=totals.absent,
                damaged=totals.damaged,
                stored=totals.stored,
                refused=totals.refused,
                discarded=totals.discarded,
                downs=totals.downs,
                seconds_loading=totals.seconds_loading,
                seconds_storing=totals.seconds_storing,
            )

    def usage(self) -> TierUsage:
        return self.tier.usage()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running. False: there still was when the time was over."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._jobs.has_any() or self._running:
                left = until - time.monotonic()
                if left <= 0 or self._health() is not Health.UP:
                    return not self._running and not self._jobs.has_submitted()
                self._changed.wait(min(left, 0.05))
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        """Refuse what is queued, wait for what is running, close the tier. False: a call to it never came back, so it
        stays open and the memory it was lent stays lent."""
        with self._changed:
            self._closed = True
            waiting = self._jobs.take_submitted()
            self._changed.notify_all()
        for job in waiting:
            self._refuse(job, "the cache was closed")
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("tier %s does not come back from a call; it is left as it is", self.name)
            return False
        try:
            self.tier.close()
        except Exception as error:  # noqa: BLE001  # it is over either way, and its memory is lent no longer
            _log.warning("tier %s: closing it failed: %s: %s", self.name, type(error).__name__, error)
        return True

    def step(self) -> bool:
        """Do one job in this thread. False: there is none to be done now."""
        with self._changed:
            job = self._next()
            if job is None:
                return False
            self._begin(job)
        self._run(job)
        return True

    # Under `_changed`.

    def _health(self) -> Health:
        now = self._health_now()
        if now is not self._noticed:  # a call that hangs is noticed by whoever asks next, as nothing else happens then
            if self.events.on:
                self.events.publish(events.TierHealth(self.name, self._noticed.name, now.name, self._why(now)))
            self._noticed = now
        return now

    def _why(self, health: Health) -> str:
        return self._why_down if health is Health.RESTING else health.value

    def _health_now(self) -> Health:
        if self._closed:
            return Health.CLOSED
        if self._frozen:
            return Health.FROZEN
        if self._rests_until is not None:
            return Health.RESTING
        if self._running and self._clock.now_s() - min(self._running.values()) > self._stuck_s:
            return Health.STUCK
        return Health.UP

    def _submit(self, job: Submitted) -> bool:
        with self._changed:
            if self._health() is not Health.UP or not self._jobs.submit(job):
                return False
            self._changed.notify()
            return True

    def _next(self) -> Job | _Probe | None:
        if self._frozen or self._closed:
            return None
        if self._rests_until is not None:
            if self._probing or self._clock.now_s() < self._rests_until:
                return None
            return _Probe()
        return self._jobs.next()

    def _begin(self, job: Job | _Probe) -> None:
        self._running[id(job)] = self._clock.now_s()
        if isinstance(job, _Probe):
            self._probing = True
        else:
            self._jobs.begin(job)

    def _end(self, job: Job | _Probe) -> None:
        del self._running[id(job)]
        if isinstance(job, _Probe):
            self._probing = False
        else:
            self._jobs.end(job)
        self._changed.notify_all()

    # Without it.

    def _work(self) -> None:
        while True:
            with self._changed:
                while (job := self._next()) is None:
                    if self._closed:
                        return
                    rests = self._rests_until is not None and not self._probing and not self._frozen
                    self._changed.wait(max(0.0, (self._rests_until or 0.0) - self._clock.now_s()) if rests else None)
                self._begin(job)
            self._run(job)
            del job  # or its memory stays lent while this thread waits for the next

    def _run(self, job: Job | _Probe) -> None:
        answer: Callable[[], None]
        try:
            answer = self._do(job)
        except TierDown as down:
            answer = self._down(job, str(down))
            _release_frames(down)
        except Exception as error:  # noqa: BLE001  # a tier may be a third party's, and its bugs cost its chunks only
            self._log_bug()
            answer = self._down(job, f"{type(error).__name__}: {error}")
            _release_frames(error)
        with self._changed:
            self._end(job)
        answer()

    def _do(self, job: Job | _Probe) -> Callable[[], None]:
        began = self._clock.now_s()
        match job:
            case Load():
                arrivals = self._load(job.reads)
                with self._changed:
                    self._totals.seconds_loading += self._clock.now_s() - began
                return lambda: job.done(arrivals)
            case Ask():
                with self._changed:
                    keys = job.keys[: self._jobs.first_hidden(job.keys)]
                leading = _leading(self.tier.holds(keys)) if keys else 0
                return lambda: job.done(leading)
            case Store():
                outcomes = self._store(job)
                with self._changed:
                    self._totals.seconds_storing += self._clock.now_s() - began
                return lambda: job.done(outcomes)
            case Clear():
                self.tier.clear()
            case Discard():
                self.tier.discard(job.keys)
                with self._changed:
                    self._totals.discarded += len(job.keys)
            case ClearTenant():
                assert isinstance(self.tier, ClearsTenants)
                self.tier.clear_tenant(job.tenant)
            case _Probe():
                self.tier.probe()
                with self._changed:
                    self._rests_until, self._rests_next = None, self._rest_s
                    self._health()
                if not self.events.is_logged:
                    _log.info("tier %s is back", self.name)
        return _nothing

    def _load(self, reads: list[Read]) -> list[Arrival]:
        arrivals = []
        wrong = []
        for read, told in zip(reads, self.tier.load(reads), strict=True):
            outcome, checksum = told, b""
            if isinstance(told, Loaded):
                damage = codec.check(read.header, read.chunk, key=read.key, format_id=self._format_id)
                if damage is not None:
                    outcome = damage
                else:
                    checksum = codec.checksum_in(read.header)
            if isinstance(outcome, Damaged):
                level = logging.DEBUG if self.events.is_logged else logging.WARNING
                _log.log(level, "tier %s: chunk %s: %s; it is discarded", self.name, read.key.hex(), outcome.reason)
                wrong.append(read.key)
            arrivals.append(Arrival(read.key, outcome, checksum))
        with self._changed:
            self._totals.loaded += sum(isinstance(arrival.outcome, Loaded) for arrival in arrivals)
            self._totals.absent += sum(isinstance(arrival.outcome, Absent) for arrival in arrivals)
            self._totals.damaged += len(wrong)
        if wrong:
            if self.events.on:
                reasons = {arrival.outcome.reason for arrival in arrivals if isinstance(arrival.outcome, Damaged)}
                self.events.publish(events.Damaged(self.name, wrong, "; ".join(sorted(reasons))))
            self.discard(wrong)
        return arrivals

    def _store(self, job: Store) -> list[StoreOutcome]:
        with self._changed:
            chunks = [chunk for chunk in job.chunks if chunk.key not in job.dropped]
        writes = [
            Write(
                chunk.key,
                chunk.parent,
                codec.pack_header(chunk.key, chunk.parent, chunk.pages[: chunk.nbytes], self._format_id),
                chunk.pages,
                chunk.nbytes,
            )
            for chunk in chunks
        ]
        told = dict(zip([write.key for write in writes], self.tier.store(writes), strict=True))
        outcomes = [told.get(chunk.key, Refused("it was discarded meanwhile")) for chunk in job.chunks]
        stored = sum(isinstance(outcome, Stored) for outcome in outcomes)
        with self._changed:
            self._totals.stored += stored
            self._totals.refused += len(outcomes) - stored
        return outcomes

    def _down(self, job: Job | _Probe, why: str) -> Callable[[], None]:
        with self._changed:
            first = self._rests_until is None
            self._rests_until = self._clock.now_s() + self._rests_next
            self._rests_next = min(2 * self._rests_next, self._max_rest_s)
            self._why_down = why
            self._totals.downs += first
            self._health()
            if not isinstance(job, _Probe):
                self._jobs.say_again(job)
            waiting = self._jobs.take_submitted()
        if first and not self.events.is_logged:
            _log.warning("tier %s is down and rests: %s", self.name, why)

        def answer() -> None:
            for refused in (job, *waiting):
                self._refuse(refused, f"tier {self.name} is down: {why}")

        return answer

    def _refuse(self, job: Job | _Probe, why: str) -> None:
        match job:
            case Load():
                job.done([Arrival(read.key, Absent()) for read in job.reads])
            case Ask():
                job.done(0)
            case Store():
                with self._changed:
                    self._totals.refused += len(job.chunks)
                job.done([Refused(why)] * len(job.chunks))
            case _:
                pass

    def _log_bug(self) -> None:
        # As text: a traceback kept by a log handler would keep the memory that the call was lent.
        _log.error("tier %s raised what is no TierDown, a bug in it:\n%s", self.name, traceback.format_exc())

    def _holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if not keys:
            return []
        try:
            return self.tier.holds(keys)
        except TierDown as down:
            self._down(_Probe(), str(down))()
        except Exception as error:  # noqa: BLE001  # as in `_run`
            self._log_bug()
            self._down(_Probe(), f"{type(error).__name__}: {error}")()
        return [False] * len(keys)


def _leading(held: Sequence[bool]) -> int:
    return next((n for n, here in enumerate(held) if not here), len(held))


def _release_frames(error: BaseException) -> None:
    """Clear the local variables of the calls that the error came through, and of the errors behind it.

    They hold the memory that the tier was lent. An error that is part of a cycle (a frame in its own traceback holds
    it, which a helper that raises its argument is enough for) would keep that memory lent until the garbage collector
    comes by, and a pool cannot be unmapped while it is.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        pending += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions


def _nothing() -> None:
    return
