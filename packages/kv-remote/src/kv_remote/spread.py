"""Spreads work over threads that keep no process from ending.

The interpreter waits for an executor's threads when it ends, and a call to a file system that does not answer may never
return. These threads are daemons, and exist only as long as there is work.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from kv_tiers.threads import start_thread

T = TypeVar("T")
R = TypeVar("R")


def spread(work: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """The results for these items, by at most this many threads, or fewer if the system has no more for us. The calling
    thread is one of them. If `work` raises, so does this, and nothing more is begun."""
    todo = deque(enumerate(items))
    done: dict[int, R] = {}
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            try:
                number, item = todo.popleft()
            except IndexError:
                return
            try:
                done[number] = work(item)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the caller gets it
                errors.append(error)

    helpers: list[threading.Thread] = []
    for _ in range(min(threads, len(items)) - 1):
        helper = threading.Thread(target=run, name="kv-helper", daemon=True)
        if start_thread(helper):
            break
        helpers.append(helper)
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [done[number] for number in range(len(items))]
