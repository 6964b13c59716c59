"""Runs the parts of a tier's call on a pool's threads, so that none of them outlives the call.

A call's memory is borrowed: a part that runs after the call has ended would write where other chunks are by then. An
executor starts its threads when they are needed. If the system has no more threads for this process, `submit` raises,
although the part stays queued and is run later by a thread that exists already.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

T = TypeVar("T")


def run_all(threads: Executor, parts: Sequence[Callable[[], T]]) -> list[T]:
    """The results of these, run concurrently. All of them have ended when this returns or raises."""
    futures = [begin(threads, part) for part in parts]
    wait(futures)
    error = next(filter(None, [future.exception() for future in futures]), None)
    if error is not None:
        futures.clear()  # a reference cycle would retain the borrowed memory until it is collected
        try:
            raise error
        finally:
            del error
    return [future.result() for future in futures]


def begin(threads: Executor, work: Callable[[], T]) -> "Future[T]":
    """Run `work` on one of these threads, or if there can be no more threads, here, before this returns. Wait for the
    future in any case: nothing else shows that the work has ended."""
    part: Future[T] = Future()
    todo = [(part, work)]
    try:
        threads.submit(_run, todo)
    except RuntimeError:
        _run(todo)
    return part


def _run(todo: "list[tuple[Future[T], Callable[[], T]]]") -> None:
    """Run what is in the list, unless another thread has taken it."""
    try:
        part, work = todo.pop()
    except IndexError:
        return
    try:
        part.set_result(work())
    except BaseException as error:  # noqa: BLE001  # of any kind: the caller that waits for the future gets it
        part.set_exception(error)
        # The error refers to this frame, and through it to the executor's, which has only the empty list: a reference
        # back to the error would be a cycle, and keep the borrowed memory in use until it is collected.
        del part, work
