"""A lane: the bounded queue and the few threads in front of one tier. Nothing else calls a tier.

Submitting never waits: a lane that is full or closed, or whose tier is down or stuck, refuses, which costs a miss and
nothing more. `kv_tiers.lanes.jobs` has the order of jobs, and which chunks are hidden meanwhile.

Chunks get headers and are encoded on the way out; on the way back they are verified and decoded (`Payloads`). A wrong
one is discarded at once, so that the next lookup is a miss and not the same fault again. Events report what happens.

An idle lane checks whether the remainder of some payload is wanted (`when_idle`), and interrupts reading it as soon as
there is other work. A lane that is never idle reads a step of it now and then (`RemainderTurns`).

A tier that raises is down: nothing is sent to it until a probe succeeds; probes become rarer, up to a limit. A job that
does not return within `stuck_s` (see `Running`) has the same effect until it does; its memory stays in use, as its
thread may still write there.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Final, TypeVar

from kv_core.clock import Clock
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger, on_one_line, traceback_of
from kv_core.outcome import Loaded, StoreOutcome

from kv_tiers.clock import MonotonicClock
from kv_tiers.codec import PREFIX_DIVISORS, Codec
from kv_tiers.encryption import Cipher
from kv_tiers.events import events
from kv_tiers.events.bus import UNWATCHED
from kv_tiers.lanes.jobs import (
    Arrival,
    Ask,
    ClearTenant,
    ClearTier,
    Discard,
    Job,
    Jobs,
    LoadChunks,
    LoadRemainder,
    Outgoing,
    Probe,
    Removal,
    Store,
)
from kv_tiers.lanes.moving import FindCodec, Moving, Payloads, chunk_bytes, no_codec, refuse
from kv_tiers.lanes.speed import LoadSpeed
from kv_tiers.threads import OutOfThreadsError, join_all, must_start
from kv_tiers.tier import (
    ClearsTenants,
    Read,
    RemembersRemoved,
    RemovalRefusedError,
    ShowsProgress,
    Tier,
    TierUsage,
)
from kv_tiers.tier_state import SERVING, Health, HealthTracker, LaneCounts, release_frames

_log = limited_logger(__name__)

# When a lane reads the remainder of a payload: while there is nothing else to do, and otherwise a tenth of the time.
#
# No request waits for a remainder (`LoadRemainder`), so other jobs come first. But a lane that is never idle, because
# one prompt follows another, would leave its approximations as they are for good. So once `LEAST_S` have passed, and
# nine times as long as the last step took, one step comes before the queued jobs.

LEAST_S: Final = 0.1
_TIMES: Final = 9
"""If the lane is not idle, the wait for the next step is this many times as long as the last step took."""


class RemainderTurn:
    """Chosen in place of a job: `Lane.when_idle` is to be called for a remainder."""


class RemainderTurns:
    """The remainder turns of one lane, under its lock. Times are by its clock."""

    def __init__(self) -> None:
        self._are_wanted = self._is_asking = self._is_reading = False
        self._due_s = 0.0
        self._step_began_s: float | None = None

    def wanted(self, now_s: float) -> None:
        """There may be remainders to read."""
        if not (self._are_wanted or self._is_asking or self._is_reading):
            self._due_s = max(self._due_s, now_s + LEAST_S)
        self._are_wanted = True

    def may_ask(self, now_s: float, is_idle: bool) -> bool:
        """Whether to call `when_idle` now."""
        return self._are_wanted and not self._is_asking and not self._is_reading and (is_idle or now_s >= self._due_s)

    def asks(self) -> None:
        self._is_asking, self._are_wanted = True, False

    def answered(self, *, was_there: bool) -> None:
        """`when_idle` has returned. was_there: whether it returned a remainder, so that there may be more."""
        self._is_asking, self._are_wanted = False, self._are_wanted or was_there

    def begins(self) -> None:
        self._is_reading, self._step_began_s = True, None

    def may_step(self, now_s: float, is_idle: bool) -> bool:
        """Whether to read a step of the remainder now."""
        is_due = now_s >= self._due_s
        if is_due:
            self._due_s = math.inf  # until this remainder has ended
        if is_due or is_idle:
            self._step_began_s = now_s
        return is_due or is_idle

    def ended(self, now_s: float) -> None:
        self._is_reading = False
        if self._step_began_s is not None:
            self._due_s = now_s + max(LEAST_S, _TIMES * (now_s - self._step_began_s))


# The calls to a tier that are in progress, and which of them show by their duration whether it answers.
#
# Removing the chunks of a tenant takes time in proportion to their number: minutes for a million files. As long as a
# thread is left for other calls, these show whether the tier answers. So do bytes that move, if the tier reports them:
# loading some chunks over a slow line takes longer than a call may take without moving a byte.


class Running:
    """The calls of one lane, under its lock. Times are by its clock."""

    def __init__(self, threads: int, tier: Tier, clock: Clock) -> None:
        """threads, tier, clock: those of the lane."""
        self._threads = threads
        self._clock = clock
        self._progressed_s = -inf
        if isinstance(tier, ShowsProgress):
            tier.on_progress = self._progressed
        self._others: dict[int, float] = {}  # job → when it began
        self._removals: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._others) + len(self._removals)

    def began(self, job: Job | Probe, now_s: float) -> None:
        (self._removals if isinstance(job, Removal) else self._others)[id(job)] = now_s

    def ended(self, job: Job | Probe) -> None:
        del (self._removals if isinstance(job, Removal) else self._others)[id(job)]

    def since_s(self) -> list[float]:
        """For each call that should return soon, when it began or, if later, when bytes last moved."""
        is_full = len(self._removals) >= self._threads
        began = [*self._others.values(), *(self._removals.values() if is_full else ())]
        return [max(began_s, self._progressed_s) for began_s in began]

    def _progressed(self) -> None:
        """Bytes have moved. Called on a thread of the tier, without the lock."""
        self._progressed_s = self._clock.now_s()


# The threads of a lane, and their calls of functions that the lane was given: a bug in one must not end a thread.
#
# Otherwise nothing would call the tier, while its lane still took jobs: chunks would count as arriving for good.


R = TypeVar("R")


class Workers:
    """The threads of one lane, all of which run `work` until it returns."""

    def __init__(self, tier: str, count: int, work: Callable[[], None]) -> None:
        """tier: the tier's name. count: the number of threads; 0: the caller does the work."""
        self._tier, self._count, self._work = tier, count, work
        self._started: list[threading.Thread] = []

    def start(self) -> None:
        """Raises `OutOfThreadsError`: the system has no more threads for us. Some may have been started: `join`
        them."""
        for number in range(self._count):
            thread = threading.Thread(target=self._work, name=f"kv-{self._tier}-{number}", daemon=True)
            must_start(thread)
            self._started.append(thread)

    def join(self, timeout_s: float) -> bool:
        """Wait until all threads have ended. False: one has not."""
        join_all(self._started, timeout_s)
        return not any(thread.is_alive() for thread in self._started)

    def call(self, function: Callable[..., R], *args: object) -> R | None:
        """Call a function that was given to the lane; its result. None: it raised, which is logged; without threads,
        the caller gets the exception."""
        try:
            return function(*args)
        except Exception as error:
            if not self._count:
                raise
            # As text, and without its frames: they would keep the memory of the chunks in use.
            _log.error("tier %s: a function that its lane calls raised, a bug:\n%s", self._tier, traceback_of(error))
            release_frames(error)
            return None


class Lane:
    """The lane of one tier. Safe to call from any thread. It owns the tier and closes it."""

    def __init__(
        self,
        tier: Tier,
        format_id: bytes,
        *,
        make: Callable[[], Tier] | None = None,
        codec: Codec | None = None,
        find_codec: FindCodec = no_codec,
        approximate: bool = False,
        drops_parts: bool = False,
        cipher: Cipher | None = None,
        only_hides: bool = False,
        threads: int = 2,
        max_load_chunks: int = 1024,
        max_store_chunks: int = 256,
        backoff_s: float = 0.1,
        max_backoff_s: float = 1.0,
        stuck_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        """make: makes the same tier again, for `reopen`.
        codec, find_codec: as for `Payloads`.
        approximate: whether only first parts may be read of chunks that have parts; the tier must be a `ReadsPrefixes`.
        drops_parts, cipher: as for `Payloads`.
        only_hides: others fill this tier: discarded or cleared chunks stay there, but are no longer found by us.
        threads: 0 starts none; `step` then does one job at a time, for tests and tools that need a fixed order.
        clock: times the back-off, and calls that hang. Drains and closes use the system's clock."""
        self.tier = tier
        self._make = make
        self.name = tier.name
        self.holds_is_local = tier.holds_is_local
        self.events = UNWATCHED
        """Where the tier's health and damage are published; set by the cache above."""
        self.when_idle: Callable[[], LoadRemainder | None] = lambda: None
        """Called without a lock, on a thread of the lane, after `has_remainders` and while it returns one."""
        self.when_done: Callable[[], object] = lambda: None
        """Called in the same way after every job: stores that were refused before may now be taken."""
        self._turns = RemainderTurns()
        self._noticed = Health.UP
        payloads = Payloads(format_id, codec, find_codec, drops_parts=drops_parts, cipher=cipher)
        self.divisors: Sequence[int] = (1, *PREFIX_DIVISORS) if approximate else (1,)
        """How much of a chunk may be read: one of this many equal parts of its size; 1, the first, is all."""
        self._least_divisor = self.divisors[-1]
        # A store may take the medium's time to make things durable, and a load should not wait for that.
        self._jobs = Jobs(
            max_load_chunks=max_load_chunks,
            max_store_chunks=max_store_chunks,
            max_stores=max(1, threads - 1),
            only_hides=tier.name if only_hides else None,
        )
        self._only_hides = only_hides
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._tracker = HealthTracker(
            backoff_s=backoff_s, max_backoff_s=max_backoff_s, stuck_s=stuck_s, clock=self._clock
        )
        self._changed = threading.Condition()
        self._threads = threads
        self._running = Running(threads, tier, self._clock)
        self._counts = LaneCounts()
        self._speed = LoadSpeed()
        jobs, speed, counts, changed = self._jobs, self._speed, self._counts, self._changed
        self._moving = Moving(tier, payloads, self._clock, jobs=jobs, speed=speed, counts=counts, changed=changed)
        self._moving.decodes = codec is not None or approximate
        self._workers = Workers(tier.name, threads, self._work)
        try:
            self._workers.start()
        except RuntimeError:  # the system has no more threads for us
            self.close()
            raise

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of these chunks a load would find. Only for a tier that answers from memory."""
        with self._changed:
            if self._health() not in SERVING or self._jobs.is_clearing:
                return [False] * len(keys)
            hidden = set(filter(self._jobs.is_hidden, keys))
        return [held and key not in hidden for key, held in zip(keys, self._holds(keys), strict=True)]

    def ask(self, keys: Sequence[ChunkKey], done: Callable[[list[bool]], None]) -> bool:
        """Like `holds`, for any tier, in one round trip: `done` is called on another thread. False: refused."""
        return self._submit(Ask(list(keys), done))

    def load(
        self,
        reads: Sequence[Read],
        done: Callable[[list[Arrival]], None],
        *,
        divisor: int | None = None,
        keeps: bool = False,
    ) -> bool:
        """Load chunks. The memory of `reads` is in use until `done` is called, on another thread. False: refused.

        divisor: of `divisors`; None: the smallest part of each. keeps: as in `LoadChunks`.
        """
        return self._submit(LoadChunks(list(reads), done, self._divisor(divisor), keeps))

    def has_remainders(self) -> None:
        """There may now be something to read when the lane is idle (`when_idle`)."""
        with self._changed:
            self._turns.wanted(self._clock.now_s())
            self._changed.notify()

    def store(self, chunks: Sequence[Outgoing], done: Callable[[list[StoreOutcome]], None]) -> bool:
        """Store chunks of one prompt, in its order. Their memory is in use until `done` is called. False: refused."""
        return self._submit(Store(list(chunks), done))

    def load_s(self, nbytes: int, divisor: int | None = None, last_bytes: int | None = None) -> float | None:
        """The expected time to load chunks of these sizes, if requested now, with decoding; None while unknown.

        divisor: as for `load`. last_bytes: as for `LoadSpeed.seconds`.
        """
        with self._changed:
            return self._speed.seconds(nbytes, self._clock.now_s(), self._divisor(divisor), last_bytes)

    def load_cost(self, *, trust: bool = False) -> tuple[float, float] | None:
        """Seconds per load and per byte, with nothing queued before; None: not known yet. trust: few loads suffice."""
        with self._changed:
            return self._speed.coefficients(self._least_divisor, trust=trust)

    def batch_bytes(self, wanted: int) -> int:
        """How many bytes of chunks one load should have: `wanted` if they need no decoding. With several smaller loads,
        one is decoded while the next is read."""
        return self._moving.batch_bytes(wanted)

    def is_idle(self) -> bool:
        """No load, store or query is queued, and nothing but a remainder is running."""
        with self._changed:
            return not self._jobs.queued and not self._is_busy()

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        """From now on these chunks are not found here. The tier discards them as soon as it can. Never refused."""
        with self._changed:
            self._jobs.discard(keys)
            self._changed.notify()

    def clear(self) -> None:
        """Hide everything that is here now or being stored here."""
        if self._only_hides:
            _log.warning(
                "tier %s is written by others (write: never), so clearing does not change it; this process no longer "
                "reads it, but a new one will: clear it where it is written",
                self.name,
            )
        with self._changed:
            self._jobs.clear()
            self._changed.notify()

    def clear_tenant(self, tenant: bytes) -> None:
        """Like `clear`, for keys with this tag. A tier that cannot tell tenants apart is cleared as a whole."""
        with self._changed:
            if self._only_hides or isinstance(self.tier, ClearsTenants):
                self._jobs.clear_tenant(tenant)
            else:
                self._jobs.clear()
            self._changed.notify()

    def hangs(self) -> bool:
        """Whether a call to the tier has not returned for so long that the tier is bypassed."""
        with self._changed:
            return self._tracker.hangs(self._running.since_s())

    def room_for_stores(self) -> int:
        """How many more chunks `store` would take now."""
        with self._changed:
            return self._jobs.room_for_stores if self._health() in SERVING else 0

    def was_read(self, arrivals: Sequence[Arrival], nbytes: int, seconds: float) -> None:
        """Others have read these chunks in the tier's own files: treat their outcomes as those of a load."""
        failures = self._faults(arrivals)
        loaded = sum(isinstance(arrival.outcome, Loaded) for arrival in arrivals)
        with self._changed:
            now_s = self._clock.now_s()
            self._speed.began(-1, nbytes, now_s - seconds)
            self._speed.ended(-1, now_s, loaded=loaded == len(arrivals), stored_bytes=nbytes)
            self._counts.loaded += loaded
            self._counts.seconds_loading += seconds
            if loaded and not failures:
                self._tracker.loaded()
        if failures:
            self._go_down("; ".join(failures))()

    def health(self) -> tuple[Health, str]:
        """The tier's health, and why; empty for a tier that is up, whatever it was before."""
        with self._changed:
            health = self._health()
            return health, "" if health is Health.UP else self._tracker.why(health)

    def counts(self) -> LaneCounts:
        """A snapshot."""
        with self._changed:
            return replace(self._counts, queued=self._jobs.queued)

    def usage(self) -> TierUsage:
        with self._changed:
            is_open = not self._tracker.is_closed
        return self.tier.usage() if is_open else TierUsage()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running. False: something still is when the time is up."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._is_busy() or self._jobs.has_any(self._clock.now_s()):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or self._health() not in SERVING:
                    return not self._is_busy() and not self._jobs.has_submitted()
                self._changed.wait(min(remaining_s, 0.05))
        return True

    def remove_all(self, timeout_s: float) -> None:
        """Refuse queued jobs, and wait until what is to be removed is: nothing hides it from the next process."""
        with self._changed:
            waiting = self._jobs.take_submitted()
        for job in waiting:
            self._refuse(job, "the cache was closed")
        if self._threads:
            self.drain(timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Refuse queued jobs, wait for running ones, close the tier. False: a call still runs, and uses its memory."""
        with self._changed:
            self._tracker.is_closed = True
            waiting = self._jobs.take_submitted()
            self._changed.notify_all()
        for job in waiting:
            self._refuse(job, "the cache was closed")
        has_ended = self._workers.join(max(timeout_s, 0.5))  # even an idle thread takes a moment to end
        with self._changed:
            self._jobs.log_unremoved(self.name)
        if not has_ended:
            _log.warning("tier %s does not return from a call; it is not waited for", self.name)
            return False
        try:
            self.tier.close()
        except Exception as error:  # noqa: BLE001  # it is closed either way, and its memory no longer in use
            _log.warning("tier %s: closing it failed: %s: %s", self.name, type(error).__name__, error)
        return True

    def reopen(self) -> None:
        """After `close`: make the tier again and go on with it. Raises `ConfigError`: it cannot be made, and stays
        closed."""
        assert self._make is not None
        before = self.tier
        self.tier = self._moving.tier = self._make()
        self.tier.name = self.name
        if isinstance(before, RemembersRemoved) and isinstance(self.tier, RemembersRemoved):
            self.tier.remove(before.removed())
        with self._changed:
            self._running = Running(self._threads, self.tier, self._clock)
            self._tracker.is_closed = False
        self._workers = Workers(self.name, self._threads, self._work)
        try:
            self._workers.start()
        except OutOfThreadsError as error:
            self.close()
            raise ConfigError(str(error)) from None

    def removals(self) -> tuple[bool, list[bytes], list[ChunkKey]]:
        """What the tier has still to remove: everything, the chunks of these tenants, and these."""
        with self._changed:
            return self._jobs.removals()

    def step(self) -> bool:
        """Do one job in this thread. False: there is none to do now."""
        while True:
            with self._changed:
                if (job := self._choose()) is None:
                    return False
                self._begin(job)
            if self._run(job):
                return True  # else it was a remainder's turn and there was no remainder; something else may be waiting

    # Under `_changed`.

    def _health(self) -> Health:
        now = self._tracker.now(self._running.since_s())
        if now is not self._noticed:  # a call that hangs is noticed at the next query, as nothing else happens then
            if self.events.on:
                why = self._tracker.why(now)
                self.events.publish(events.TierHealth(self.name, self._noticed.name, now.name, why))
            self._noticed = now
        return now

    def _submit(self, job: LoadChunks | Ask | Store) -> bool:
        with self._changed:
            if self._health() not in SERVING or not self._jobs.submit(job):
                return False
            if isinstance(job, LoadChunks):
                self._speed.began(id(job), sum(map(chunk_bytes, job.reads)), self._clock.now_s(), job.divisor)
            self._changed.notify()
            return True

    def _is_busy(self) -> bool:
        """Whether something other than a remainder is running."""
        return len(self._running) > (self._jobs.remainder is not None)

    def _choose(self) -> Job | Probe | RemainderTurn | None:
        """The job to begin now, or None."""
        if self._may_read_remainder(self._turns.may_ask):
            return RemainderTurn()
        if self._tracker.is_closed:
            return None
        if self._tracker.retry_at_s is not None:
            return Probe() if self._tracker.may_probe() else None
        return self._jobs.next(self._clock.now_s())

    def _may_read_remainder(self, may: Callable[[float, bool], bool]) -> bool:
        now_s, is_down = self._clock.now_s(), self._tracker.is_closed or self._tracker.retry_at_s is not None
        return not is_down and may(now_s, not self._is_busy() and not self._jobs.has_any(now_s))

    def _begin(self, job: Job | Probe | RemainderTurn) -> None:
        if isinstance(job, RemainderTurn):
            self._turns.asks()
            return
        self._running.began(job, self._clock.now_s())
        if isinstance(job, Probe):
            self._tracker.is_probing = True
        else:
            self._jobs.begin(job)

    def _end(self, job: Job | Probe) -> None:
        self._running.ended(job)
        if isinstance(job, LoadRemainder):
            self._turns.ended(self._clock.now_s())
        if isinstance(job, Probe):
            self._tracker.is_probing = False
        else:
            self._jobs.end(job)
        self._changed.notify_all()

    # Without `_changed`.

    def _work(self) -> None:
        while True:
            with self._changed:
                while (job := self._choose()) is None:
                    if self._tracker.is_closed:
                        return
                    due_in_s = self._jobs.removals_due_in_s(self._clock.now_s())
                    self._changed.wait(due_in_s if self._tracker.retry_at_s is None else self._tracker.probe_due_in_s())
                self._begin(job)
            self._run(job)
            del job  # or its memory stays in use while this thread waits for the next

    def _take_remainder(self) -> LoadRemainder | None:
        """Begin the remainder that `when_idle` returns; None: it returned none, or there is other work by now."""
        remainder = self._workers.call(self.when_idle)
        with self._changed:
            self._turns.answered(was_there=remainder is not None)
            if remainder is not None and self._may_read_remainder(self._turns.may_ask):
                self._turns.begins()
                self._begin(remainder)
                return remainder
        if remainder is not None:
            self._workers.call(remainder.done, None)
        return None

    def _run(self, chosen: Job | Probe | RemainderTurn) -> bool:
        """Do a job and answer it. False: there was nothing to do."""
        if (job := self._take_remainder() if isinstance(chosen, RemainderTurn) else chosen) is None:
            return False
        try:
            answer = self._do(job)
        except BaseException as error:  # noqa: BLE001  # a bug in a tier costs only its chunks, a Rust panic too
            answer = self._failed(job, error)
        if isinstance(
            job, LoadRemainder
        ):  # before the remainder ends: `when_idle` may be called then, and needs the outcome
            answer()
        with self._changed:
            self._end(job)
        if not isinstance(job, LoadRemainder):
            answer()
        self._workers.call(self.when_done)
        return True

    def _do(self, job: Job | Probe) -> Callable[[], object]:
        began = self._clock.now_s()
        match job:
            case LoadChunks():
                arrivals = self._moving.load(job)
                failures = self._faults(arrivals)
                with self._changed:
                    now_s = self._clock.now_s()
                    self._counts.seconds_loading += now_s - began
                    self._moving.learn(job, arrivals, now_s)
                    if not failures and any(isinstance(arrival.outcome, Loaded) for arrival in arrivals):
                        self._tracker.loaded()
                return self._then(lambda: self._workers.call(job.done, arrivals), failures)
            case Ask():
                with self._changed:
                    keys = [key for key in job.keys if not self._jobs.is_hidden(key)]
                held = dict(zip(keys, self.tier.holds(keys) if keys else (), strict=True))
                return lambda: self._workers.call(job.done, [held.get(key, False) for key in job.keys])
            case Store():
                outcomes = self._moving.store(job)
                with self._changed:
                    self._counts.seconds_storing += self._clock.now_s() - began
                self._update_full()
                return lambda: self._workers.call(job.done, outcomes)
            case LoadRemainder():
                arrival = self._moving.remainder(job, lambda: not self._may_read_remainder(self._turns.may_step))
                failures = [] if arrival is None else self._faults([arrival])
                return self._then(lambda: self._workers.call(job.done, arrival), failures)
            case ClearTier():
                self.tier.clear()
            case Discard():
                self.tier.discard(job.keys)
                with self._changed:
                    self._counts.discarded += len(job.keys)
            case ClearTenant():
                assert isinstance(self.tier, ClearsTenants)
                self.tier.clear_tenant(job.tenant)
            case Probe():
                self.tier.probe()
                with self._changed:
                    self._tracker.probed()
                    self._health()
                self._update_full()
                if not self.events.is_logged:
                    _log.warning("tier %s is back", self.name)  # as visible as the line that it was down
        return lambda: None

    def _then(self, answer: Callable[[], object], failures: Sequence[str]) -> Callable[[], None]:
        """The answer, followed by the consequences of failures: why chunks could not be read, if any could not."""
        refuse = self._go_down("; ".join(failures)) if failures else lambda: None

        def answer_and_refuse() -> None:
            answer()
            refuse()

        return answer_and_refuse

    def _faults(self, arrivals: Sequence[Arrival]) -> list[str]:
        """Discard damaged chunks. Returns why others could not be read."""
        damaged, failures = self._moving.faults(arrivals)
        for key, reason in damaged.items():
            level = logging.DEBUG if self.events.is_logged else logging.WARNING
            _log.log(level, "tier %s: chunk %s: %s; it is discarded", self.name, key.hex(), reason)
        if damaged:
            if self.events.on:
                reasons = "; ".join(sorted(set(damaged.values())))
                self.events.publish(events.DamageFound(self.name, list(damaged), reasons))
            self.discard(damaged)
        return failures

    def _divisor(self, divisor: int | None) -> int:
        """A divisor of what this lane may read: the smallest part if `None` or a smaller one is requested."""
        return self._least_divisor if divisor is None else min(divisor, self._least_divisor)

    def _update_full(self) -> None:
        full = self.tier.usage().full
        with self._changed:
            if full and not self._tracker.full and not self.events.is_logged:
                _log.warning("tier %s takes no more chunks: %s", self.name, full)
            self._tracker.full = full
            self._health()

    def _go_down(self, why: str, failed_job: Job | None = None) -> Callable[[], None]:
        """Send the tier nothing for a while. Returns a function to call without the lock: it refuses the waiting jobs.

        failed_job: the job that the tier did not do.
        """
        with self._changed:
            is_first = self._tracker.failed(why)
            self._counts.downs += is_first
            self._health()
            if failed_job is not None:
                self._jobs.requeue(failed_job)
            waiting = self._jobs.take_submitted()
            self._changed.notify_all()  # a thread must probe it, and the call may have failed on a caller's thread
        if is_first and not self.events.is_logged:
            _log.warning("tier %s is down: %s", self.name, why)

        def refuse() -> None:
            for refused in waiting if failed_job is None else (failed_job, *waiting):
                self._refuse(refused, f"tier {self.name} is down: {why}")

        return refuse

    def _failed(self, job: Job | Probe, error: BaseException) -> Callable[[], None]:
        why, tier = str(error), self.name
        if isinstance(error, RemovalRefusedError) and not isinstance(
            job, Probe | LoadChunks | Ask | Store | LoadRemainder
        ):
            with self._changed:
                hidden = self._jobs.refused_removal(job, self._clock.now_s())
            _log.warning("tier %s does not permit removals: %s; hidden instead until it does: %s", tier, why, hidden)
            return lambda: None
        if not isinstance(error, TierDown):
            # As text: a traceback retained by a log handler would keep the memory of the call in use.
            _log.error("tier %s raised a non-TierDown error, a bug in it:\n%s", tier, traceback_of(error))
            why = on_one_line(f"{type(error).__name__}: {error}")
        release_frames(error)
        return self._go_down(why, None if isinstance(job, Probe) else job)

    def _refuse(self, job: Job, why: str) -> None:
        with self._changed:
            if isinstance(job, LoadChunks):
                self._speed.ended(id(job), self._clock.now_s(), loaded=False)
            elif isinstance(job, Store):
                self._counts.refused += len(job.chunks)
        self._workers.call(refuse, job, why)

    def _holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        try:
            return self.tier.holds(keys) if keys else []
        except Exception as error:  # noqa: BLE001  # as in `_run`
            self._failed(Probe(), error)()
        return [False] * len(keys)
