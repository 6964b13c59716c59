"""Whether copies have stopped, which decides when the slots and blocks that they use may be released.

The rule: a slot is released, and a block is reported to the engine, only after every copy that reads or writes it has
stopped. Otherwise a copy in flight overwrites the slot's next chunk, or the KV of the block's next request. A copy has
stopped when its event says so: `done` is True, `wait` has returned, or either has raised `CopyFailed`. Any other
exception means that the query itself failed, as CUDA's does while a graph is captured, and says nothing about the copy.
The copy then counts as failed and still in flight, and the event is queried again. If no query ever succeeds, its slots
stay leased until this process ends.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from kv_core.device import CopyEvent
from kv_core.errors import CopyFailed, KVError
from kv_core.log import limited_logger
from kv_core.transfer import TransferPlan

_log = limited_logger(__name__)
_ASK_AGAIN_S: Final = 0.05


class Copies:
    """Copies that succeed or fail together, such as those of one load."""

    def __init__(self, events: Iterable[CopyEvent] = ()) -> None:
        self._in_flight = list(events)
        self.failure: Exception | None = None
        """The first reason why the bytes are not, or may not be, where they should be."""

    def add(self, events: Iterable[CopyEvent]) -> None:
        self._in_flight += events

    @property
    def are_in_flight(self) -> bool:
        """Whether any had not stopped at the last call of `have_stopped`."""
        return bool(self._in_flight)

    def fail(self, why: Exception) -> None:
        """Count them as failed. Those in flight still have to stop."""
        self.failure = self.failure or why

    def have_stopped(self, *, wait: bool = False) -> bool:
        """Whether none is in flight any more. wait: wait for each first; False then means that a wait failed."""
        self._in_flight = [event for event in self._in_flight if not self._has_stopped(event, wait=wait)]
        return not self._in_flight

    def hold_engine(self) -> None:
        """Have all that the engine enqueues from now on run after them; see `CopyEvent.hold_engine`."""
        for event in self._in_flight:
            try:
                event.hold_engine()
            except Exception as error:  # noqa: BLE001  # of any family: the engine does not wait for these bytes
                self.fail(error)

    def _has_stopped(self, event: CopyEvent, *, wait: bool) -> bool:
        try:
            if wait:
                event.wait()
            return wait or event.done()
        except CopyFailed as error:
            self.fail(error)
            return True
        except Exception as error:  # noqa: BLE001  # of any family: see above
            _log.error("it is unknown whether a copy has ended; its memory stays reserved until it is known: %r", error)
            self.fail(error)
            return False


Start: TypeAlias = Callable[[Sequence[TransferPlan]], Iterable[CopyEvent | KVError]]
"""`LayerwiseCopier.load_each` or `store_each`."""


def start_each(groups: Sequence[tuple[Start, Sequence[tuple[Copies, TransferPlan]]]]) -> None:
    """Group by group, start a copy for each of these that has not failed; what is refused fails alone. If there is a
    bug, which is raised, all fail that have not begun."""
    for number, (start, planned) in enumerate(groups):
        remaining = deque(each for each in planned if each[0].failure is None)
        try:
            for copy in start([plan for _, plan in remaining]) if remaining else ():
                copies, _ = remaining.popleft()
                if isinstance(copy, KVError):
                    copies.fail(copy)
                else:
                    copies.add([copy])
        except BaseException as error:
            why = error if isinstance(error, Exception) else CopyFailed(repr(error))
            for copies, _ in (*remaining, *(each for _, later in groups[number + 1 :] for each in later)):
                copies.fail(why)
            raise


def await_copies(events: Iterable[CopyEvent]) -> None:
    """Return once every copy has stopped, so that its slots may be released (`kv_connect.halves.copies`), however long
    that takes.

    Raises:
        CopyFailed: bytes are not where they should be.
    """
    copies = Copies(events)
    while not copies.have_stopped(wait=True):
        time.sleep(_ASK_AGAIN_S)
    if copies.failure is not None:
        raise CopyFailed(str(copies.failure)) from copies.failure
