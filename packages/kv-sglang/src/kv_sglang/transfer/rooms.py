"""The state of one request on either side of a hand-over, and the threads that do the work.

SGLang frees a request's blocks as soon as it gives up the request, and they may be reused at once. So a room is closed
before that: from then on nothing that is read from the blocks is stored, and nothing is written to them.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kv_core.log import limited_logger

from kv_sglang.linker.lanes import Point
from kv_sglang.names import Names
from kv_sglang.transfer.exchange import Exchange

_log = limited_logger(__name__)

LANES: Final = 4
"""Threads that move pages: a request that waits for its pages delays a quarter of the others, not all."""


@dataclass(slots=True, eq=False)
class OutgoingRoom:
    """A request of the prefill engine.

    room: its number, which SGLang may give to another request once this one has ended.
    is_open: whether SGLang still has its blocks.
    lock: held while its metadata are read, or its outcome is recorded under its number.
    """

    room: int
    names: Names
    is_open: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        with self.lock:
            self.is_open = False


@dataclass(slots=True, eq=False)
class IncomingRoom:
    """A request of the decode engine.

    attempt: its own, while another request may have the same number (`messages`).
    first: the first page that it lacks.
    slots: the first slot of that page and of each one after it.
    aux_index: the place of its first token among SGLang's metadata.
    loaded: how many pages of the prompt have been loaded.
    ready: when nothing that was enqueued before writes to its blocks any more.
    lock: held while its blocks are written to.
    is_open: whether SGLang still has its blocks.
    given_by: the revision of the prefill engine's weights, once it is known.
    """

    names: Names
    first: int
    slots: list[int]
    aux_index: int
    loaded: int
    ready: Point
    attempt: bytes
    is_open: bool = True
    given_by: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Return once nothing is written: a copy in flight, of a few megabytes, is waited for."""
        with self.lock:
            self.is_open = False


Job = Callable[[Exchange], None]


class Lanes:
    """Threads, each with its own exchange. The jobs of one room run in order."""

    def __init__(self, make_exchange: Callable[[], Exchange]) -> None:
        self._queues: list[queue.SimpleQueue[Job]] = [queue.SimpleQueue() for _ in range(LANES)]
        for number, jobs in enumerate(self._queues):
            run = threading.Thread(
                target=_run, args=(jobs, make_exchange()), name=f"kv-hand-over-{number}", daemon=True
            )
            run.start()

    def add(self, room: int, job: Job) -> None:
        """job: raises only for a bug, and reports the request's outcome to SGLang itself."""
        self._queues[room % LANES].put(job)


def _run(jobs: "queue.SimpleQueue[Job]", exchange: Exchange) -> None:
    while True:
        job = jobs.get()
        try:
            job(exchange)
        except Exception:  # noqa: BLE001  # the thread serves other requests
            _log.exception("a hand-over ended because of a bug")
