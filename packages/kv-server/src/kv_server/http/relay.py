"""Calls from HTTP's event loop into the running server, without delaying it.

What only the serving thread may touch is submitted to that thread. Caches may be called from any thread; they are
called on a few threads of our own, because clearing a large cache takes a while.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from kv_core.errors import MisuseError, TierDown
from kv_tiers.cache.host import ClosedError
from kv_tiers.cache.local import LocalCache

from kv_server.http.jobs import PrefixJobs
from kv_server.http.problem import Problem
from kv_server.report import Report
from kv_server.server import CacheServer
from kv_server.wire import Format

ANSWER_S: Final = 2.0
"""Seconds that the serving thread may take to answer; it takes far less than a millisecond. Engines wait no longer than
`server.answer_s`, 1 s unless set, so a server that is later than this is not ready, as probes and load balancers
should know."""
_FRESH_S: Final = 0.1
"""Seconds for which one report serves all requests."""
_THREADS: Final = 4
_JOBS_S: Final = 5.0
"""How long jobs may take to end once their caches are closed: what an export has written may have to reach its disk."""

T = TypeVar("T")


class Relay:
    """For HTTP's loop only."""

    def __init__(self, server: CacheServer) -> None:
        self._server = server
        self.bus = server.bus
        """The bus on which the caches publish events."""
        self.network_metrics = server.network_metrics
        self.jobs = PrefixJobs()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-http")
        self._report: Future[Report] | None = None
        self._asked_s = 0.0

    @property
    def is_stopping(self) -> bool:
        return self._server.is_stopping

    async def report(self) -> Report:
        """
        Raises:
            Problem: the server is stopping, or does not answer.
        """
        now_s = time.monotonic()
        # One that is still to come is as fresh as any: a thread that hangs is not given more to do.
        if self._report is None or (self._report.done() and now_s - self._asked_s > _FRESH_S):
            self._asked_s = now_s
            self._report = self._server.submit(self._server.report)
        try:
            return await _in_time(self._report, ANSWER_S)
        except TimeoutError:
            raise _timeout_problem() from None

    async def on_server(self, work: Callable[[CacheServer], T]) -> T:
        """The result of `work` on the server, on the serving thread: it must be quick.

        Raises:
            Problem: as for `report`; then it was not done, and will not be.
        """
        future = self._server.submit(lambda: work(self._server))
        try:
            return await _in_time(future, ANSWER_S)
        except TimeoutError:
            if future.cancel():
                raise _timeout_problem() from None
            return await _in_time(future, None)  # it has begun, just now
        finally:
            future.cancel()  # if nobody waits for it any more

    async def caches(self) -> dict[Format, LocalCache]:
        """
        Raises:
            Problem: as for `report`.
        """
        return await self.on_server(lambda server: server.caches)

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` on another thread.

        Raises:
            Problem: the cache has been closed.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except MisuseError as error:
            if self.is_stopping:
                raise Problem(503, f"the server is stopping: {error}") from None
            if isinstance(error, ClosedError):  # it had no client, and made room for another format
                again = {"retry-after": "1"}
                raise Problem(503, "a cache without clients was closed meanwhile; ask again", again) from None
            raise

    def close(self) -> None:
        """After the server has closed its caches."""
        self._threads.shutdown(wait=False)
        self.jobs.end(_JOBS_S)


async def _in_time(future: "Future[T]", limit_s: float | None) -> T:
    """
    Raises:
        TimeoutError: it is not done yet.
        Problem: the server is stopping.
    """
    try:
        # A client that disconnects must not cancel the answer for others that are waiting for it.
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), limit_s)
    except TierDown as why:
        raise Problem(503, f"{why}; ask its successor") from None


def _timeout_problem() -> Problem:
    text = f"the serving thread has not answered within {ANSWER_S:g} s; look at its log"
    return Problem(503, text, {"retry-after": "1"})
