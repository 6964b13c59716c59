"""A lane: the bounded queue and the few threads in front of one tier. Nobody else calls a tier.

Submitting never waits: a lane that is full, resting, stuck, frozen or closed refuses, and what was refused costs a miss
and nothing more. Loads (and questions of presence) go before discards, and discards before stores: an engine waits for
the first, and whoever was told that a chunk is gone must not find it.

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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kv_core.clock import Clock
from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, Refused, Stored, StoreOutcome

from kv_tiers import codec
from kv_tiers.clock import MonotonicClock
from kv_tiers.observe import events
from kv_tiers.observe.bus import UNWATCHED
from kv_tiers.tier import ClearsTenants, Read, Tier, TierUsage, Write

_log = logging.getLogger(__name__)

MAX_DISCARDS = 100_000
"""More keys than this to be discarded by a tier that does not answer, and it is cleared instead when it does."""


class Health(Enum):
    UP = "it answers"
    RESTING = "it failed, and is probed now and then"
    STUCK = "a call to it has not come back"
    FROZEN = "somebody asked that it be left alone"
    CLOSED = "it is closed"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A chunk to store: `pages` are leased until the job is done, its bytes the first `nbytes`."""

    key: ChunkKey
    parent: ChunkKey | None
    pages: memoryview
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """What became of one chunk that was to be loaded. checksum: of its bytes, if it was."""

    key: ChunkKey
    outcome: LoadOutcome
    checksum: bytes = b""


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


@dataclass(slots=True)
class _Load:
    reads: list[Read]
    done: Callable[[list[Arrival]], None]


@dataclass(slots=True)
class _Ask:
    keys: list[ChunkKey]
    done: Callable[[int], None]


@dataclass(slots=True)
class _Store:
    chunks: list[Outgoing]
    done: Callable[[list[StoreOutcome]], None]
    dropped: set[ChunkKey] = field(default_factory=set)


@dataclass(slots=True)
class _Discard:
    keys: list[ChunkKey]
    everything: bool = False


@dataclass(slots=True)
class _ClearTenant:
    tenant: bytes


@dataclass(slots=True)
class _Probe:
    pass


_Job = _Load | _Ask | _Store | _Discard | _ClearTenant | _Probe


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
        self._most_stores = max(1, threads - 1)
        self._max_load_chunks, self._max_store_chunks = max_load_chunks, max_store_chunks
        self._rest_s, self._max_rest_s, self._stuck_s = rest_s, max_rest_s, stuck_s
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._changed = threading.Condition()
        self._loads: deque[_Load | _Ask] = deque()
        self._stores: deque[_Store] = deque()
        self._discards: dict[ChunkKey, None] = {}
        self._clear_next = False
        self._load_chunks = self._store_chunks = 0
        self._discarding: set[ChunkKey] = set()
        self._clearing = 0
        self._tenants_to_clear: dict[bytes, None] = {}
        self._clearing_tenants: set[bytes] = set()
        self._storing: dict[int, _Store] = {}
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
            if self._health() is not Health.UP or self._clearing or self._clear_next:
                return 0
            keys = keys[: self._first_hidden(keys)]
        return _leading(self._holds(keys))

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of these a load would find. Only for a tier that answers from memory."""
        with self._changed:
            if self._health() is not Health.UP or self._clearing or self._clear_next:
                return [False] * len(keys)
            hidden = {key for key in keys if key in self._discards or key in self._discarding}
        return [held and key not in hidden for key, held in zip(keys, self._holds(keys), strict=True)]

    def ask(self, keys: Sequence[ChunkKey], done: Callable[[int], None]) -> bool:
        """Have the tier asked, in one round trip: `done` gets how many leading `keys` it holds, on another thread."""
        return self._submit(_Ask(list(keys), done))

    def load(self, reads: Sequence[Read], done: Callable[[list[Arrival]], None]) -> bool:
        """Bring chunks. The memory of `reads` is lent until `done` is called, on another thread. False: refused."""
        return self._submit(_Load(list(reads), done))

    def store(self, chunks: Sequence[Outgoing], done: Callable[[list[StoreOutcome]], None]) -> bool:
        """Keep chunks of one prompt, in its order. Their memory is lent until `done` is called. False: refused."""
        return self._submit(_Store(list(chunks), done))

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        """Nobody finds these here from now, whatever the tier is doing; it is told when it can be. Never refused."""
        with self._changed:
            for key in keys:
                self._discards[key] = None
                for job in (*self._stores, *self._storing.values()):
                    job.dropped.add(key)
            if len(self._discards) > MAX_DISCARDS:
                self._drop_everything()
            self._changed.notify()

    def clear(self) -> None:
        """Nobody finds anything here from now that is here now, or on its way here."""
        with self._changed:
            self._drop_everything()
            self._changed.notify()

    def clear_tenant(self, tenant: bytes) -> None:
        """As `clear`, for what has this tag. A tier that cannot tell tenants apart is cleared whole."""
        with self._changed:
            if isinstance(self.tier, ClearsTenants):
                self._tenants_to_clear[tenant] = None
                for job in (*self._stores, *self._storing.values()):
                    job.dropped.update(chunk.key for chunk in job.chunks if chunk.key.tenant == tenant)
            else:
                self._drop_everything()
            self._changed.notify()

    def room_for_stores(self) -> int:
        """How many more chunks `store` would take now."""
        with self._changed:
            if self._health() is not Health.UP:
                return 0
            return max(0, self._max_store_chunks - self._store_chunks)

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
                queued=self._load_chunks + self._store_chunks,
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
            while (
                self._loads
                or self._stores
                or self._discards
                or self._clear_next
                or self._tenants_to_clear
                or self._running
            ):
                left = until - time.monotonic()
                if left <= 0 or self._health() is not Health.UP:
                    return not self._running and not self._loads and not self._stores
                self._changed.wait(min(left, 0.05))
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        """Refuse what is queued, wait for what is running, close the tier. False: a call to it never came back, so it
        stays open and the memory it was lent stays lent."""
        with self._changed:
            self._closed = True
            waiting: list[_Job] = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._load_chunks = self._store_chunks = 0
            self._changed.notify_all()
        for job in waiting:
            self._refuse(job, "the cache was closed")
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("tier %s does not come back from a call; it is left as it is", self.name)
            return False
        self.tier.close()
        return True

    def step(self) -> bool:
        """Do one job in this thread. False: there is none to be done now."""
        with self._changed:
            job = self._next()
            if job is None:
                return False
            number = self._begin(job)
        self._run(number, job)
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

    def _submit(self, job: _Load | _Ask | _Store) -> bool:
        with self._changed:
            if self._health() is not Health.UP or self._clearing or self._clear_next:
                return False
            if self._is_of_cleared(job):
                return False
            if isinstance(job, _Store):
                if self._store_chunks + len(job.chunks) > self._max_store_chunks:
                    return False
                self._store_chunks += len(job.chunks)
                self._stores.append(job)
            else:
                chunks = len(job.reads) if isinstance(job, _Load) else 1
                if self._load_chunks + chunks > self._max_load_chunks:
                    return False
                self._load_chunks += chunks
                self._loads.append(job)
            self._changed.notify()
            return True

    def _first_hidden(self, keys: Sequence[ChunkKey]) -> int:
        first = len(keys)
        if self._discards or self._discarding:
            hidden = (n for n, key in enumerate(keys) if key in self._discards or key in self._discarding)
            first = next(hidden, first)
        if self._tenants_to_clear or self._clearing_tenants:
            first = next((n for n, key in enumerate(keys[:first]) if self._is_being_cleared(key)), first)
        return first

    def _is_being_cleared(self, key: ChunkKey) -> bool:
        return key.tenant in self._tenants_to_clear or key.tenant in self._clearing_tenants

    def _is_of_cleared(self, job: _Load | _Ask | _Store) -> bool:
        """Whether it is about chunks of a tenant whose clearing has not ended."""
        if not self._tenants_to_clear and not self._clearing_tenants:
            return False
        if isinstance(job, _Ask):
            return any(map(self._is_being_cleared, job.keys))
        return any(self._is_being_cleared(one.key) for one in (job.reads if isinstance(job, _Load) else job.chunks))

    def _drop_everything(self) -> None:
        self._clear_next = True
        self._discards.clear()
        self._tenants_to_clear.clear()
        for job in (*self._stores, *self._storing.values()):
            job.dropped.update(chunk.key for chunk in job.chunks)

    def _next(self) -> _Job | None:
        if self._frozen or self._closed:
            return None
        if self._rests_until is not None:
            if self._probing or self._clock.now_s() < self._rests_until:
                return None
            return _Probe()
        if self._loads:
            return self._loads.popleft()
        if self._clear_next and not self._storing and not self._clearing:
            return _Discard([], everything=True)
        if self._tenants_to_clear and not self._clearing and not self._clear_next:
            storing = {chunk.key.tenant for job in self._storing.values() for chunk in job.chunks}
            for tenant in self._tenants_to_clear:
                if tenant not in storing and tenant not in self._clearing_tenants:
                    return _ClearTenant(tenant)
        if self._discards:
            busy = {chunk.key for job in self._storing.values() for chunk in job.chunks}
            keys = [key for key in self._discards if key not in busy]
            if keys:
                return _Discard(keys)
        if self._stores and not self._clearing and not self._clear_next and len(self._storing) < self._most_stores:
            first = self._stores[0]
            if not any(chunk.key in self._discarding for chunk in first.chunks):
                return self._stores.popleft()
        return None

    def _begin(self, job: _Job) -> int:
        number = id(job)
        self._running[number] = self._clock.now_s()
        match job:
            case _Store():
                self._storing[number] = job
            case _Discard(everything=True):
                self._clearing += 1
                self._clear_next = False
            case _Discard():
                for key in job.keys:
                    del self._discards[key]
                self._discarding.update(job.keys)
            case _ClearTenant():
                del self._tenants_to_clear[job.tenant]
                self._clearing_tenants.add(job.tenant)
            case _Probe():
                self._probing = True
            case _:
                pass
        return number

    def _end(self, number: int, job: _Job) -> None:
        del self._running[number]
        match job:
            case _Load():
                self._load_chunks -= len(job.reads)
            case _Ask():
                self._load_chunks -= 1
            case _Store():
                del self._storing[number]
                self._store_chunks -= len(job.chunks)
            case _Discard(everything=True):
                self._clearing -= 1
            case _Discard():
                self._discarding.difference_update(job.keys)
            case _ClearTenant():
                self._clearing_tenants.remove(job.tenant)
            case _Probe():
                self._probing = False
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
                number = self._begin(job)
            self._run(number, job)
            del job  # or its memory stays lent while this thread waits for the next

    def _run(self, number: int, job: _Job) -> None:
        answer: Callable[[], None]
        try:
            answer = self._do(job)
        except TierDown as down:
            answer = self._down(job, str(down))
        except Exception as error:  # noqa: BLE001  # a tier may be a third party's, and its bugs cost its chunks only
            self._log_bug()
            answer = self._down(job, f"{type(error).__name__}: {error}")
        with self._changed:
            self._end(number, job)
        answer()

    def _do(self, job: _Job) -> Callable[[], None]:
        began = self._clock.now_s()
        match job:
            case _Load():
                arrivals = self._load(job.reads)
                with self._changed:
                    self._totals.seconds_loading += self._clock.now_s() - began
                return lambda: job.done(arrivals)
            case _Ask():
                with self._changed:
                    keys = job.keys[: self._first_hidden(job.keys)]
                leading = _leading(self.tier.holds(keys)) if keys else 0
                return lambda: job.done(leading)
            case _Store():
                outcomes = self._store(job)
                with self._changed:
                    self._totals.seconds_storing += self._clock.now_s() - began
                return lambda: job.done(outcomes)
            case _Discard(everything=True):
                self.tier.clear()
            case _Discard():
                self.tier.discard(job.keys)
                with self._changed:
                    self._totals.discarded += len(job.keys)
            case _ClearTenant():
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

    def _store(self, job: _Store) -> list[StoreOutcome]:
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

    def _down(self, job: _Job, why: str) -> Callable[[], None]:
        with self._changed:
            first = self._rests_until is None
            self._rests_until = self._clock.now_s() + self._rests_next
            self._rests_next = min(2 * self._rests_next, self._max_rest_s)
            self._why_down = why
            self._totals.downs += first
            self._health()
            # A tier that is down forgets nothing by itself: it is told again when it is back.
            match job:
                case _Discard(everything=True):
                    self._clear_next = True
                case _Discard():
                    self._discards.update(dict.fromkeys(job.keys))
                case _ClearTenant():
                    self._tenants_to_clear[job.tenant] = None
                case _:
                    pass
            waiting: list[_Job] = [*self._loads, *self._stores]
            self._loads.clear()
            self._load_chunks -= sum(
                len(other.reads) if isinstance(other, _Load) else 1
                for other in waiting
                if not isinstance(other, _Store)
            )
            self._stores.clear()
            self._store_chunks -= sum(len(other.chunks) for other in waiting if isinstance(other, _Store))
        if first and not self.events.is_logged:
            _log.warning("tier %s is down and rests: %s", self.name, why)

        def answer() -> None:
            for refused in (job, *waiting):
                self._refuse(refused, f"tier {self.name} is down: {why}")

        return answer

    def _refuse(self, job: _Job, why: str) -> None:
        match job:
            case _Load():
                job.done([Arrival(read.key, Absent()) for read in job.reads])
            case _Ask():
                job.done(0)
            case _Store():
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


def _nothing() -> None:
    return
