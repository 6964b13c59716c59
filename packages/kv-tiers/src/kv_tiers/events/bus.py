"""The event bus: one bounded queue and one thread between a cache and its subscribers. The cache waits for neither.

Publishing appends to a deque: no lock, no system call, no exception. Without subscribers it is not called at all,
because the publisher checks `Source.on` before it creates an event. The thread delivers several times a second, so
events arrive shortly after they happened. While there are none it sleeps, and the first that is published wakes it:
a system call that waits for nobody. The queue holds at most `max_queued` events; the rest is dropped and counted, to
bound memory.

Every subscriber gets every event, in the order of publishing, on that one thread. A subscriber that raises does not
affect the others: its first failure is logged, all are counted, and it gets the next event as usual.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final
from weakref import WeakSet

import msgspec
from kv_core.clock import Clock
from kv_core.log import limited_logger

from kv_tiers.events.changes import ChangeLog, Changes
from kv_tiers.events.events import Event
from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.threads import must_start

_log = limited_logger(__name__)

MAX_QUEUED: Final = 1 << 14
INTERVAL_S: Final = 0.05


class Source:
    """One cache's end of a bus. Publish only if `on` is true, so that events without a subscriber are never created."""

    def __init__(self, bus: "EventBus", name: str, group_bytes: Sequence[int], chunk_tokens: int = 0) -> None:
        self.name = name
        """Distinguishes this cache from others on the same bus."""
        self.sizes = PayloadSizes(group_bytes)
        """The sizes of its chunks."""
        self.chunk_tokens = chunk_tokens
        """Tokens of one chunk; 0 until an engine has reported it."""
        self.on = False
        """Events are wanted, by a subscriber or a reader of `changes_since`."""
        self.on_requests = False
        """A subscriber wants the events of every request: lookups, loads and ends of holders."""
        self.is_logged = False
        """A subscriber logs what an operator should know, so that the cache does not."""
        self._is_subscribed = False
        self.log: ChangeLog | None = None
        """What `changes_since` reads; None: nobody has asked for it."""
        self._bus, self._queue, self._max_queued = bus, bus._queue, bus._max_queued
        self._append, self._now_s, self._dropped = bus._queue.append, bus.now_s, bus._drop

    def publish(self, event: Event) -> None:
        """Queue an event for the subscribers. From any thread, under any lock."""
        if self.log is not None:
            self.log.note(event)
            if not self._is_subscribed:
                return
        if len(self._queue) < self._max_queued:
            self._append((self, self._now_s(), event))
            if self._bus._sleeps:
                self._bus._rouse()
        else:
            self._dropped()

    def changes_since(self, upto: int) -> Changes:
        """The keys that entered and left the pool since `upto`. The first call starts the record.

        upto: as in the last answer; 0 at first.
        """
        if self.log is None:
            self.log = ChangeLog()
            self.on = True
        return self.log.since(upto)


class Occurred(msgspec.Struct, frozen=True):
    """An event with its context.

    source: the cache that published it.
    at_s: when, on the bus's monotonic clock (`EventBus.wall_s` converts it).
    event: what happened.
    """

    source: Source
    at_s: float
    event: Event


class Subscriber(ABC):
    """Receives events. Called on the bus's thread only, until `close`."""

    wants_requests = True
    """False: it does not need `LookedUp`, `LoadBegun`, `LoadEnded` and `HolderEnded`, and may not receive them. These
    are the majority of events, and keep every prompt's keys alive until they are delivered."""
    writes_log = False
    """It logs what an operator should know: a tier that fails or recovers, and damage."""

    @abstractmethod
    def take(self, occurred: Occurred) -> None:
        """Receive an event."""

    def flush(self) -> None:
        """The queue is empty: write out what has been collected. Called often."""
        return

    def close(self) -> None:
        """There will be no more events."""
        return


class _Marker(threading.Event):
    """In the queue: set when everything before it has been delivered."""


class EventBus:
    """Owns its subscribers and closes them. Safe to use from any thread."""

    def __init__(
        self, *, max_queued: int = MAX_QUEUED, interval_s: float = INTERVAL_S, clock: Clock | None = None
    ) -> None:
        self._queue: deque[tuple[Source, float, Event] | _Marker] = deque()
        self._max_queued = max_queued
        self._interval_s = interval_s
        self.now_s: Callable[[], float] = time.monotonic if clock is None else clock.now_s
        self._lock = threading.Lock()  # guards everything below; publishing takes it only to count dropped events
        self._sources: WeakSet[Source] = WeakSet()  # a server opens and closes many caches
        self._subscribers: tuple[Subscriber, ...] = ()
        self._failed_before: set[int] = set()
        self.events_dropped = 0
        """Events that found the queue full."""
        self.failures = 0
        """How often a subscriber raised."""
        self._thread: threading.Thread | None = None
        self._asleep = threading.Lock()  # held, except to wake the thread: setting a `threading.Event` may have to wait
        self._asleep.acquire()
        self._hurry = threading.Event()  # set: a caller waits for the delivery
        self._sleeps = False
        self._closed = False

    def source(self, name: str = "", group_bytes: Sequence[int] = (1,), chunk_tokens: int = 0) -> Source:
        source = Source(self, name, group_bytes, chunk_tokens)
        with self._lock:
            self._sources.add(source)
            self._switch(source)
        return source

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on deliver every event to it. After `close` it receives none. Raises `OutOfThreadsError`: the system
        has no thread to deliver events on."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._deliver, name="kv-events", daemon=True)
                must_start(thread)
                self._thread = thread
            self._subscribers += (subscriber,)
            for source in self._sources:
                self._switch(source)

    def wall_s(self, at_s: float) -> float:
        """A time of this bus's clock in seconds since 1970, by the machine's clock as it is set now."""
        return time.time() - self.now_s() + at_s

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything published before has been delivered. False: it takes longer than `timeout_s`."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return True
        marker = _Marker()
        self._queue.append(marker)
        self._hurry.set()
        self._rouse()
        return marker.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Deliver what is queued, then close the subscribers. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for source in self._sources:
                self._switch(source)
            thread = self._thread
        self._hurry.set()
        self._rouse()
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning("a subscriber of the cache's events hangs; it is not waited for")
                return
        for subscriber in self._subscribers:
            self._call(subscriber, subscriber.close)

    def _switch(self, source: Source) -> None:
        """Switch the source on if there are subscribers, else off."""
        source._is_subscribed = bool(self._subscribers) and not self._closed
        source.on = source._is_subscribed or source.log is not None
        source.on_requests = source._is_subscribed and any(
            subscriber.wants_requests for subscriber in self._subscribers
        )
        source.is_logged = source._is_subscribed and any(subscriber.writes_log for subscriber in self._subscribers)

    def _drop(self) -> None:
        with self._lock:
            self.events_dropped += 1

    def _deliver(self) -> None:
        queue = self._queue
        while True:
            self._sleep()
            self._hurry.wait(self._interval_s)  # for what comes soon after the first
            self._hurry.clear()
            is_last = self._closed
            subscribers = self._subscribers
            for _ in range(len(queue)):
                item = queue.popleft()
                if isinstance(item, _Marker):
                    self._flush_all(subscribers)
                    item.set()
                    continue
                occurred = Occurred(*item)
                for subscriber in subscribers:
                    self._call(subscriber, subscriber.take, occurred)
            self._flush_all(subscribers)
            if is_last and not queue:
                return

    def _sleep(self) -> None:
        """Return once there is something in the queue, or the bus is closed."""
        self._asleep.acquire(blocking=False)  # it may have been woken since
        self._sleeps = True
        # In this order: what is published from now on wakes it, and what came before is in the queue.
        if not self._queue and not self._closed:
            self._asleep.acquire()
        self._sleeps = False

    def _rouse(self) -> None:
        with suppress(RuntimeError):  # another thread has woken it
            self._asleep.release()

    def _flush_all(self, subscribers: tuple[Subscriber, ...]) -> None:
        for subscriber in subscribers:
            self._call(subscriber, subscriber.flush)

    def _call(self, subscriber: Subscriber, call: Callable[..., None], *arguments: Occurred) -> None:
        try:
            call(*arguments)
        except Exception:  # noqa: BLE001  # one subscriber's bug affects neither the others nor the cache
            self._count_failure(subscriber)

    def _count_failure(self, subscriber: Subscriber) -> None:
        self.failures += 1
        if id(subscriber) not in self._failed_before:
            self._failed_before.add(id(subscriber))
            _log.exception(
                "%s failed on an event; from now on its failures are only counted", type(subscriber).__name__
            )


UNWATCHED: Final = EventBus().source()
"""The source of a cache without a bus."""
