"""The threads of a lane, and their calls of functions that the lane was given: a bug in one must not end a thread.

Otherwise nothing would call the tier, while its lane still took jobs: chunks would count as arriving for good.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from kv_core.log import limited_logger, traceback_of

from kv_tiers.lanes.health import release_frames
from kv_tiers.threads import join_all, must_start

_log = limited_logger(__name__)

R = TypeVar("R")


class Workers:
    """The threads of one lane, all of which run `work` until it returns."""

    def __init__(self, tier: str, count: int, work: Callable[[], None]) -> None:
        """tier: the tier's name. count: the number of threads; 0: the caller does the work."""
        self._tier, self._count, self._work = tier, count, work
        self._started: list[threading.Thread] = []

    def start(self) -> None:
        """
        Raises:
            OutOfThreadsError: the system has no more threads for us. Some may have been started: `join` them.
        """
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
