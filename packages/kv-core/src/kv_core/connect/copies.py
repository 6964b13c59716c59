"""Whether copies have stopped, which decides when anything that they use may be given back.

The rule: a slot is released, and a block is reported to the engine, only after every copy that reads or writes it has
stopped. Otherwise the slot's next chunk, or the block's next request, is overwritten by a copy of somebody else. A copy
has stopped when its event says so: `done` is True, `wait` has returned, or either has raised `CopyFailed`. Any other
exception is a fault of the asking, such as a device that does not answer while it records a graph, and says nothing
about the copy. The copy then counts as failed and as in flight, and is asked again. If it never answers, what it uses
stays leased for as long as this process lives.
"""

from collections.abc import Iterable

from kv_core.connect.device import CopyEvent
from kv_core.errors import CopyFailed
from kv_core.log import limited_logger

_log = limited_logger(__name__)


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
        """Whether one had not stopped when `have_stopped` last asked."""
        return bool(self._in_flight)

    def fail(self, why: Exception) -> None:
        """Count them as failed. Those in flight still have to stop."""
        self.failure = self.failure or why

    def have_stopped(self, *, wait: bool = False) -> bool:
        """Whether none is in flight any more. wait: first wait for each; False then means that one does not answer."""
        self._in_flight = [event for event in self._in_flight if not self._has_stopped(event, wait=wait)]
        return not self._in_flight

    def hold_engine(self) -> None:
        """Have all that the engine enqueues from now on run after them; see `CopyEvent.hold_engine`."""
        for event in self._in_flight:
            try:
                event.hold_engine()
            except Exception as error:  # noqa: BLE001  # whatever it is: the engine does not wait for these bytes
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
            _log.error("a copy does not say whether it has ended, and what it uses is kept until it does: %r", error)
            self.fail(error)
            return False
