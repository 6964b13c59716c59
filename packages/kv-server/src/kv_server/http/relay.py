"""Calls from HTTP's event loop into the running server, without delaying it.

What only the serving thread may touch is submitted to that thread. Caches may be called from any thread; they are
called on a few threads of our own, because clearing a large cache takes a while.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from kv_core.errors import InputError, MisuseError, TierDown
from kv_core.log import limited_logger
from kv_tiers.cache.host import ClosedError
from kv_tiers.cache.local import LocalCache
from kv_tiers.threads import join_all, start_thread
from msgspec import UNSET, Meta, UnsetType

from kv_server.http import timeline
from kv_server.http.operation import Problem
from kv_server.http.timeline import Timeline
from kv_server.report import Report
from kv_server.server import CacheServer, on_thread
from kv_server.wire import Format

T = TypeVar("T")
JobKind = Literal["warm-up", "prefetch", "export", "import"]

_log = limited_logger(__name__)

MAX_RUNNING: Final = 4
_REMEMBERED: Final = 256


class PrefixJob(msgspec.Struct, frozen=True):
    """A job that is running or has ended.

    id: its number.
    what: the kind of work.
    name: of the pin, of the file, or of a hint's action.
    state: whether it is running, done or failed.
    chunks: of the prefix, when it is done: pinned, exported, or held after an import.
    reason: why it failed, or why it stopped early.
    """

    id: int
    what: JobKind
    name: str
    state: Literal["running", "done", "failed"] = "running"
    chunks: int = 0
    reason: str = ""


Outcome = tuple[int, str]
"""The chunks of a job, and why there are no more."""


class PrefixJobs:
    """Work that takes longer than a request may, one thread each, with a number to query its state.

    Safe to call from any thread. Threads that are running after `end` end with the process, wherever they are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[int, PrefixJob] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._last_id = 0

    def start(self, what: JobKind, name: str, work: Callable[[], Outcome]) -> PrefixJob:
        """Raises `Problem`: too many are running already, or the system has no more threads for us."""
        with self._lock:
            if sum(job.state == "running" for job in self._jobs.values()) >= MAX_RUNNING:
                raise Problem(429, f"{MAX_RUNNING} jobs are running; ask again when one is done", {"retry-after": "5"})
            self._last_id += 1
            job = self._jobs[self._last_id] = PrefixJob(self._last_id, what, name)
            for id_ in list(self._jobs)[: max(0, len(self._jobs) - _REMEMBERED)]:
                if self._jobs[id_].state != "running":
                    del self._jobs[id_]
        thread = threading.Thread(target=self._run, args=(job, work), name=f"kv-{what}", daemon=True)
        if why := start_thread(thread):
            with self._lock:
                del self._jobs[job.id]
            raise Problem(503, f"no job can be started now: {why}", {"retry-after": "5"})
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        return job

    def end(self, timeout_s: float) -> None:
        """Wait until all have ended. Those whose caches are closed end with the next chunk, and an export then removes
        its unfinished file.
        """
        with self._lock:
            threads = list(self._threads)
        join_all(threads, timeout_s)

    def find(self, id_: int) -> PrefixJob:
        """Raises `Problem`: there is none with this number (any more)."""
        with self._lock:
            job = self._jobs.get(id_)
            if job is None:
                raise Problem(404, f"there is no job {id_}; GET /prefixes lists those that are remembered")
            return job

    def all(self) -> list[PrefixJob]:
        """Oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def _run(self, job: PrefixJob, work: Callable[[], Outcome]) -> None:
        chunks, reason, state = 0, "", "failed"
        try:
            chunks, reason = work()
            state = "done"
        except (InputError, MisuseError, OSError) as error:  # the cache may be closed meanwhile
            reason = str(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, the job's state reports it
            _log.exception("%s of %s failed because of a bug", job.what, job.name)
            reason = f"a bug: {error}"
        with self._lock:
            self._jobs[job.id] = msgspec.structs.replace(job, state=state, chunks=chunks, reason=reason)


ANSWER_S: Final = 2.0
"""Seconds that the serving thread may take to answer; it takes far less than a millisecond. Engines wait no longer than
`server.answer_s`, 1 s unless set, so a server that is later than this is not ready, as probes and load balancers
should know."""
_FRESH_S: Final = 0.1
"""Seconds for which one report serves all requests."""
_THREADS: Final = 4
_JOBS_S: Final = 5.0
"""How long jobs may take to end once their caches are closed: what an export has written may have to reach its disk."""


class Relay:
    """For HTTP's loop only."""

    def __init__(self, server: CacheServer) -> None:
        self.server = server
        self.jobs = PrefixJobs()
        self.timeline = Timeline()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-http")
        self._archive: Future[Any] | None = None  # the last call to its file system
        self._report: Future[Report] | None = None
        self._asked_s = 0.0

    async def report(self) -> Report:
        """Raises `Problem`: the server is stopping, or does not answer."""
        now_s = time.monotonic()
        # One that is still to come is as fresh as any: a thread that hangs is not given more to do.
        if self._report is None or (self._report.done() and now_s - self._asked_s > _FRESH_S):
            self._asked_s = now_s
            self._report = self.server.submit(self.server.report)
        try:
            return await _in_time(self._report, ANSWER_S)
        except TimeoutError:
            raise _timeout_problem() from None

    async def keep_timeline(self) -> None:
        """Add to the timeline until this is cancelled."""
        while True:
            await asyncio.sleep(timeline.SAMPLE_S)
            try:
                report = await self.report()
            except Problem:  # the server does not answer now
                continue
            except Exception:  # noqa: BLE001  # whatever it is, the next report may come
                _log.exception("a report for the history hit a bug")
                continue
            self.timeline.add(report, self.server.bus.wall_s(self.server.bus.now_s()))

    async def on_server(self, work: Callable[[CacheServer], T]) -> T:
        """The result of `work` on the server, on the serving thread: it must be quick. Raises `Problem`: as for
        `report`; then it was not done, and will not be."""
        future = self.server.submit(lambda: work(self.server))
        try:
            return await _in_time(future, ANSWER_S)
        except TimeoutError:
            if future.cancel():
                raise _timeout_problem() from None
            return await _in_time(future, None)  # it has begun, just now
        finally:
            future.cancel()  # if nobody waits for it any more
            self._asked_s = 0.0  # the report may be from before

    async def caches(self) -> dict[Format, LocalCache]:
        """Raises `Problem`: as for `report`."""
        return await self.on_server(lambda server: server.caches)

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` on another thread. Raises `Problem`: the cache has been closed."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except MisuseError as error:
            if self.server.is_stopping:
                raise Problem(503, f"the server is stopping: {error}") from None
            if isinstance(error, ClosedError):  # it had no client, and made room for another format
                again = {"retry-after": "1"}
                raise Problem(503, "a cache without clients was closed meanwhile; ask again", again) from None
            raise

    async def on_archive(self, work: Callable[[], T]) -> T:
        """The result of `work` on the archive's file system, one after the other on threads that nothing waits for: it
        may hang. Raises `Problem`: it has not answered in time."""
        until_s = time.monotonic() + ANSWER_S
        try:
            while self._archive is not None and not self._archive.done():
                if (left_s := until_s - time.monotonic()) <= 0:
                    raise TimeoutError
                await asyncio.wait([asyncio.wrap_future(self._archive)], timeout=left_s)
            self._archive = found = on_thread("kv-archive", work)
            return await _in_time(found, max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            why = f"the file system of http.archive_directory has not answered within {ANSWER_S:g} s"
            raise Problem(503, why, {"retry-after": "5"}) from None

    def close(self) -> None:
        """After the server has closed its caches."""
        self._threads.shutdown(wait=False)
        self.jobs.end(_JOBS_S)


async def _in_time(future: "Future[T]", limit_s: float | None) -> T:
    """Raises `TimeoutError`: it is not done yet. Raises `Problem`: the server is stopping."""
    try:
        # A client that disconnects must not cancel the answer for others that are waiting for it.
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), limit_s)
    except TierDown as why:
        raise Problem(503, f"{why}; ask its successor") from None


def _timeout_problem() -> Problem:
    text = f"the serving thread has not answered within {ANSWER_S:g} s; look at its log"
    return Problem(503, text, {"retry-after": "1"})


class FormatSelector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A format, as /status shows it. A field that is left out matches any.

    chunk_bytes: of the largest chunk.
    """

    fingerprint: Annotated[str, Meta(max_length=4096)] | UnsetType = UNSET
    chunk_bytes: Annotated[int, Meta(gt=0, lt=1 << 40)] | UnsetType = UNSET

    @property
    def matches_any(self) -> bool:
        """No field is given."""
        return self.fingerprint is UNSET and self.chunk_bytes is UNSET

    def matches(self, one: Format) -> bool:
        group_bytes, fingerprint = one
        return self.fingerprint in (UNSET, fingerprint) and self.chunk_bytes in (UNSET, max(group_bytes))


async def select_caches(relay: Relay, selector: FormatSelector) -> dict[Format, LocalCache]:
    """All caches that match. Matching none is a problem only if a field was given. Raises `Problem`: there is no such
    format, or the server does not answer."""
    caches = await relay.caches()
    found = {one: cache for one, cache in caches.items() if selector.matches(one)}
    if not found and not selector.matches_any:
        raise Problem(404, f"no cache of this format; there are {_listed(caches)}")
    return found


async def check_opened(relay: Relay, selector: FormatSelector) -> None:
    """Raises `Problem`: a cache that matches is being opened, and what its tiers hold cannot be reached yet."""
    opening = sum(selector.matches(one) for one in await relay.on_server(lambda server: list(server.formats.opening)))
    if opening:
        raise Problem(503, f"{opening} caches are being opened; ask again soon", {"retry-after": "1"})


async def select_cache(relay: Relay, selector: FormatSelector) -> tuple[Format, LocalCache]:
    """Raises `Problem`: no cache matches, or several do."""
    found = await select_caches(relay, selector)
    if not found:
        raise Problem(404, "there is no cache yet; a client that registers its format makes one")
    if len(found) > 1:
        raise Problem(409, f"several caches match; give the fingerprint and chunk_bytes of one: {_listed(found)}")
    return next(iter(found.items()))


def _listed(caches: dict[Format, LocalCache]) -> str:
    shown = [f"{fingerprint} with chunks of {max(group_bytes)} bytes" for group_bytes, fingerprint in caches]
    return "; ".join(shown) or "none yet"
