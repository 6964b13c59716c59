"""Streams and events of a device for the copiers, with stand-ins for CPUs, where a copy is complete on return.

All ordering of copies is here: what waits for what on the device, and how the host detects completion. No call
waits for the whole device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from kv_core.device import CopyEvent


class Queue(Protocol):
    """Work that runs in order.

    handle: the device's name for it; 0: there is none, and work is done at once.
    """

    handle: int

    def current(self) -> int:
        """The handle of the caller's current queue, the engine's."""

    def make_event(self) -> tuple[CopyEvent, int]:
        """An event that has not been recorded, and the device's name for it."""

    def running(self) -> AbstractContextManager[None]:
        """A context in which torch's and Triton's calls go to this queue."""

    def copy(self, to: torch.Tensor, origin: torch.Tensor) -> None:
        """Copy bytes in this queue."""

    def record(self) -> CopyEvent:
        """The point after everything now in the queue."""

    def follow(self, event: CopyEvent) -> None:
        """Make all work enqueued from now on wait on the device for that event."""

    def follow_current(self) -> None:
        """Likewise for everything now in the caller's current queue, the engine's."""


class DoneEvent:
    """A copy that has arrived already."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def hold_engine(self) -> None:
        return None


class LentEvent:
    """An event that C has recorded. Nobody has to make another when this is no longer needed."""

    __slots__ = ("_spare", "handle", "lent")

    def __init__(self, lent: CopyEvent, handle: int, spare: list[tuple[CopyEvent, int]]) -> None:
        """spare: where the event goes then."""
        self.lent, self.handle, self._spare = lent, handle, spare

    def __del__(self) -> None:
        self._spare.append((self.lent, self.handle))

    def done(self) -> bool:
        return self.lent.done()

    def wait(self) -> None:
        self.lent.wait()

    def hold_engine(self) -> None:
        self.lent.hold_engine()


@dataclass(frozen=True, slots=True)
class GatheredLayers:
    """A `kv_core.device.LayerwiseStore`. gather: as there."""

    layers: int
    gather: Callable[[Sequence[int]], CopyEvent]


class HostQueue:
    """On a CPU: everything is complete when a call returns."""

    handle = 0

    def current(self) -> int:
        return 0

    def make_event(self) -> tuple[CopyEvent, int]:
        return DoneEvent(), 0

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def copy(self, to: torch.Tensor, origin: torch.Tensor) -> None:
        to.copy_(origin)

    def record(self) -> CopyEvent:
        return DoneEvent()

    def follow(self, event: CopyEvent) -> None:
        return None

    def follow_current(self) -> None:
        return None


class CudaEvent:
    """An event of a stream. What CUDA raises is not `CopyFailed`: it may be about other work, or about the asking, as
    while a graph is recorded, so it does not say that the copy has stopped."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self.device = device

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def hold_engine(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CudaQueue:
    """A separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.handle: int = self._stream.cuda_stream
        # As Triton asks: `torch.cuda.current_stream` makes an object of it.
        self._current = torch._C._cuda_getCurrentRawStream

    def current(self) -> int:
        return int(self._current(self._device.index))

    def make_event(self) -> tuple[CopyEvent, int]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)  # torch makes it only now
        return CudaEvent(event, self._device), event.cuda_event

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, to: torch.Tensor, origin: torch.Tensor) -> None:
        with self.running():
            to.copy_(origin, non_blocking=True)

    def record(self) -> CopyEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaEvent(event, self._device)

    def follow(self, event: CopyEvent) -> None:
        while isinstance(event, LentEvent):
            event = event.lent
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)

    def follow_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))


def make_queue(device: torch.device) -> Queue:
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
