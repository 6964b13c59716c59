"""Runs the parts of a tier's call on a pool's threads, so that none of them outlives the call.

A call's memory is borrowed: a part that runs after the call has ended would write where other chunks are by then. An
executor starts its threads when they are needed. If the system has no more threads for this process, `submit` raises,
although the part stays queued and is run later by a thread that exists already.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")


def begin(threads: Executor, work: Callable[[], T]) -> "Future[T]":
    """Run `work` on one of these threads, or if there can be no more threads, here, before this returns. Wait for the
    future in any case: nothing else shows that the work has ended."""
    part: Future[T] = Future()
    try:
        threads.submit(_run, part, work)
    except RuntimeError:
        if part.cancel():  # from now on nobody else begins it
            part = Future()
            _run(part, work)
    return part


def _run(part: "Future[T]", work: Callable[[], T]) -> None:
    if not part.set_running_or_notify_cancel():
        return
    try:
        part.set_result(work())
    except BaseException as error:  # noqa: BLE001  # whatever it is, whoever waits for the future gets it
        part.set_exception(error)
        del part  # the error refers to this frame: a reference cycle would keep the borrowed memory in use
