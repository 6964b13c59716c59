"""Jobs: work that takes longer than a request may, one thread each, with a number to query its state."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Literal

import msgspec
from kv_core.errors import InputError, MisuseError
from kv_core.log import limited_logger
from kv_tiers.threads import join_all, start_thread

from kv_server.http.problem import Problem

_log = limited_logger(__name__)

MAX_RUNNING: Final = 4
_REMEMBERED: Final = 256


class PrefixJob(msgspec.Struct):
    """A job that is running or has ended.

    id: its number.
    what: the kind of work.
    name: of the pin, or of the file.
    state: whether it is running, done or failed.
    chunks: of the prefix, when it is done: pinned, exported, or held after an import.
    reason: why it failed, or why it stopped early.
    """

    id: int
    what: Literal["warm-up", "export", "import"]
    name: str
    state: Literal["running", "done", "failed"] = "running"
    chunks: int = 0
    reason: str = ""


Outcome = tuple[int, str]
"""The chunks of a job, and why there are no more."""


class PrefixJobs:
    """Safe to call from any thread. Threads that are running after `end` end with the process, wherever they are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[int, PrefixJob] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._last_id = 0

    def start(self, what: Literal["warm-up", "export", "import"], name: str, work: Callable[[], Outcome]) -> PrefixJob:
        """
        Raises:
            Problem: too many are running already, or the system has no more threads for us.
        """
        with self._lock:
            if sum(job.state == "running" for job in self._jobs.values()) >= MAX_RUNNING:
                raise Problem(429, f"{MAX_RUNNING} jobs are running; ask again when one is done", {"retry-after": "5"})
            self._last_id += 1
            job = self._jobs[self._last_id] = PrefixJob(self._last_id, what, name)
            for id_ in list(self._jobs)[: max(0, len(self._jobs) - _REMEMBERED)]:
                if self._jobs[id_].state != "running":
                    del self._jobs[id_]
            answer = msgspec.structs.replace(job)
        thread = threading.Thread(target=self._run, args=(job, work), name=f"kv-{what}", daemon=True)
        if why := start_thread(thread):
            with self._lock:
                del self._jobs[job.id]
            raise Problem(503, f"no job can be started now: {why}", {"retry-after": "5"})
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        return answer

    def end(self, timeout_s: float) -> None:
        """Wait until all have ended. Those whose caches are closed end with the next chunk, and an export then removes
        its unfinished file.
        """
        with self._lock:
            threads = list(self._threads)
        join_all(threads, timeout_s)

    def find(self, id_: int) -> PrefixJob:
        """
        Raises:
            Problem: there is none with this number (any more).
        """
        with self._lock:
            job = self._jobs.get(id_)
            if job is None:
                raise Problem(404, f"there is no job {id_}; GET /prefixes lists those that are remembered")
            return msgspec.structs.replace(job)

    def all(self) -> list[PrefixJob]:
        """Oldest first."""
        with self._lock:
            return [msgspec.structs.replace(job) for job in self._jobs.values()]

    def _run(self, job: PrefixJob, work: Callable[[], Outcome]) -> None:
        chunks, reason, failed = 0, "", True
        try:
            chunks, reason = work()
            failed = False
        except (InputError, MisuseError, OSError) as error:  # the cache may be closed meanwhile
            reason = str(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, the job's state reports it
            _log.exception("%s of %s failed because of a bug", job.what, job.name)
            reason = f"a bug: {error}"
        with self._lock:
            job.chunks, job.reason, job.state = chunks, reason, "failed" if failed else "done"
