"""A device without a device: streams and events whose work is done on host memory, in an order of the test's choosing.

Nothing that is enqueued has happened until the device goes on: then any stream's oldest work may be next, unless it
waits for an event. So an order that streams and events do not demand is met sooner or later, and a missing edge shows
as wrong bytes.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from kv_cuda.copy import driver, gpu
from kv_cuda.copy.rows import Compiled, Listing, RowKernel, Span


@dataclass(slots=True)
class FakeEvent:
    """The point in a stream at which so much of its work is done."""

    stream: "FakeStream"
    position: int

    def done(self) -> bool:
        self.stream.device.go_on(self.stream.device.chance.randrange(3))
        return self.is_reached

    def wait(self) -> None:
        while not self.is_reached:
            self.stream.device.go_on(1)

    synchronize = wait

    def hold_engine(self) -> None:
        self.stream.device.engine.follow(self)

    @property
    def is_reached(self) -> bool:
        return self.stream.done >= self.position


@dataclass(slots=True)
class FakeStream:
    """A `kv_cuda.copy.streams.Queue`. work: what it does, in order, or an event that it waits for. done: how much of it
    has been done."""

    device: "FakeDevice"
    handle: int
    work: list[Callable[[], None] | FakeEvent] = field(default_factory=list)
    done: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        previous, self.device.current = self.device.current, self
        yield
        self.device.current = previous

    def copy(self, to: torch.Tensor, origin: torch.Tensor) -> None:
        self.enqueue(lambda: to.copy_(origin))

    def current(self) -> int:
        return self.device.current.handle

    def make_event(self) -> tuple[FakeEvent, int]:
        self.device.events.append(FakeEvent(self, 0))
        return self.device.events[-1], len(self.device.events)

    def record(self) -> FakeEvent:
        return FakeEvent(self, len(self.work) - self.device.is_dropped("record"))

    def follow(self, event: Any) -> None:
        if isinstance(event, FakeEvent) and not self.device.is_dropped("follow"):
            self.work.append(FakeEvent(event.stream, event.position))  # it may be recorded again

    def follow_current(self) -> None:
        if not self.device.is_dropped("follow_current"):
            self.work.append(FakeEvent(self.device.current, len(self.device.current.work)))

    def enqueue(self, work: Callable[[], object]) -> None:
        self.device.count("work")
        self.work.append(lambda: (work(), None)[1])

    @property
    def can_go_on(self) -> bool:
        if self.done == len(self.work):
            return False
        next_work = self.work[self.done]
        return not isinstance(next_work, FakeEvent) or next_work.is_reached


class FakeDevice:
    """The streams of one device. engine: the one that the engine computes in.

    calls: how often each of its functions was called: `work` is copies and launches. status: what the driver answers to
        a launch. is_idle: set by a benchmark that discards work, whose events then count as reached.
    """

    def __init__(self, seed: int, *, drop: str = "") -> None:
        """drop: which edges between streams are left out, as a control: `follow`, `follow_current`, `record`,
        which leaves the last work out of an event, or `reuse`, which says of every event that it has been reached where
        lists are taken again."""
        self.chance = Random(seed)
        self.streams: list[FakeStream] = []
        self.engine = self.current = self.make_stream()
        self.events: list[FakeEvent] = []
        self.kernels: list[tuple[RowKernel, bool]] = []
        self.calls: dict[str, int] = {}
        self.is_idle = False
        self.status = 0
        self.drop = drop
        self.functions = [of(function) for of, function in self._functions()]

    def make_stream(self, _device: Any = None) -> FakeStream:
        self.streams.append(FakeStream(self, len(self.streams) + 1))
        return self.streams[-1]

    def go_on(self, steps: int) -> None:
        """Do some work, or all there is if there is less."""
        for _ in range(steps):
            ready = [stream for stream in self.streams if stream.can_go_on]
            if not ready:
                assert all(stream.done == len(stream.work) for stream in self.streams), "streams wait for each other"
                return
            stream = self.chance.choice(ready)
            work = stream.work[stream.done]
            if not isinstance(work, FakeEvent):
                work()
            stream.done += 1

    def finish(self) -> None:
        while any(stream.done < len(stream.work) for stream in self.streams):
            self.go_on(1)

    def discard(self) -> None:
        """Count all work as done without doing it."""
        for stream in self.streams:
            stream.done = len(stream.work)

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def is_dropped(self, name: str) -> bool:
        self.count(name)
        return self.drop == name

    def install(self, patch: pytest.MonkeyPatch, *, has_driver: bool = True) -> None:
        """Copiers that are made from now on use it, with kernels that move bytes one row after another. has_driver:
        C enqueues, by functions of ours in the place of CUDA's; else Python does."""
        patch.setattr(gpu, "make_queue", self.make_stream)
        patch.setattr(RowKernel, "compile", lambda kernel: self._compile(kernel))
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self.functions]
        patch.setattr(driver, "functions_and_context", lambda: (*addresses, 7) if has_driver else ())
        patch.setattr(RowKernel, "move", lambda kernel, *lists, **named: self._launch(kernel, *lists, **named))
        if self.drop == "reuse":
            patch.setattr(FakeEvent, "done", lambda event: True)

    def _compile(self, kernel: RowKernel) -> dict[bool, Compiled]:
        self.kernels += [(kernel, False), (kernel, True)]
        return {to_engine: Compiled(len(self.kernels) - 2 + to_engine, 128, 0) for to_engine in (False, True)}

    def _functions(self) -> Iterator[tuple[Any, Callable[..., int]]]:
        """Those of CUDA's driver, in the order of `Device` in csrc/plans.c. Each answers that it went well."""
        place, number = ctypes.c_uint64, ctypes.c_uint

        def record(event: int, stream: int) -> int:
            recorded = self.events[event - 1]
            recorded.stream = self.streams[stream - 1]
            is_edge = recorded.stream is self.engine
            recorded.position = len(recorded.stream.work) - (not is_edge and self.is_dropped("record"))
            return 0

        def wait(stream: int, event: int, _flags: int) -> int:
            waited = self.events[event - 1]
            if not self.is_dropped("follow_current"):
                self.streams[stream - 1].work.append(FakeEvent(waited.stream, waited.position))
            return 0

        def copy(to: int, origin: int, nbytes: int, stream: int) -> int:
            self.streams[stream - 1].enqueue(lambda: ctypes.memmove(to, origin, nbytes))
            return 0

        def launch(function: int, *sizes_and_stream: Any) -> int:
            *_, stream, values, _extra = sizes_and_stream
            if self.status:
                return self.status
            kernel, to_engine = self.kernels[function]
            numbers = [kind.from_address(values[at]).value for at, kind in enumerate(_ARGUMENTS)]
            _, slots, rows, base, tokens, *listed, first, count, step, plane_bytes = numbers
            assert slots == rows and plane_bytes == kernel.plane_bytes
            named = {"base": base, "span": (first, count, step), "to_engine": to_engine}
            lists = (ctypes.c_int64 * (1 << 40)).from_address(slots)
            listing = Listing(tokens, *listed)
            self.streams[stream - 1].enqueue(lambda: move_rows(kernel, lists, lists, **named, listing=listing))
            return 0

        yield ctypes.CFUNCTYPE(ctypes.c_int, place), lambda _context: 0
        yield ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p), lambda _context: 0
        yield ctypes.CFUNCTYPE(ctypes.c_int, place, place), record
        yield ctypes.CFUNCTYPE(ctypes.c_int, place, place, number), wait
        yield ctypes.CFUNCTYPE(ctypes.c_int, place, place, ctypes.c_size_t, place), copy
        values = ctypes.POINTER(place)
        yield ctypes.CFUNCTYPE(ctypes.c_int, place, *[number] * 7, place, values, ctypes.c_void_p), launch

    def _launch(self, kernel: RowKernel, slots: torch.Tensor, rows: torch.Tensor, **named: Any) -> None:
        del named["programs"]
        self.current.enqueue(lambda: move_rows(kernel, slots, rows, **named))


_ARGUMENTS: list[Any] = [*[ctypes.c_uint64] * 4, *[ctypes.c_int32] * 9, ctypes.c_int64]
"""Of the kernel, as csrc/plans.c passes them."""


def move_rows(
    kernel: RowKernel,
    slots: Any,
    rows: Any,
    *,
    base: int,
    span: Span,
    to_engine: bool,
    listing: Listing,
) -> None:
    """What the kernel does, by memmove: the lists are read when it runs."""
    first, count, step = span
    run = kernel.run_words * kernel.word_bytes
    for plane, token in product(range(first, first + count * step, step), range(listing.tokens)):
        cache, block_bytes, token_bytes, run_bytes = kernel.host_planes[plane].tolist()
        at = listing.first + token
        slot = int(slots[listing.slots_at + at // listing.per_slot]) * listing.per_slot + at % listing.per_slot
        row = int(rows[listing.rows_at + at // listing.per_row]) + at % listing.per_row * kernel.row_bytes
        block, in_block = divmod(slot, kernel.block_tokens)
        for number in range(kernel.row_words // kernel.run_words):
            ours = base + row + plane * kernel.plane_bytes + number * run
            theirs = cache + block * block_bytes + in_block * token_bytes + number * run_bytes
            to, origin = (theirs, ours) if to_engine else (ours, theirs)
            ctypes.memmove(to, origin, run)
