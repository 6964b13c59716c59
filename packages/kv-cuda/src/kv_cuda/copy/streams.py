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
    """Work that runs in order."""

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


@dataclass(frozen=True, slots=True)
class GatheredLayers:
    """A `kv_core.device.LayerwiseStore`. gather: as there."""

    layers: int
    gather: Callable[[Sequence[int]], CopyEvent]


class HostQueue:
    """On a CPU: everything is complete when a call returns."""

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
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)

    def follow_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))


def make_queue(device: torch.device) -> Queue:
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
