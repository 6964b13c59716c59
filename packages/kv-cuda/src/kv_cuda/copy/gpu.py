"""The GPU copier: pinned host memory ↔ the engine's blocks, on streams of its own.

A call enqueues its work on the device and returns an event. Nothing waits for the whole device, and nothing is
allocated once the buffers exist. Loads and stores have two streams each, one for the kernel and one for the copy
engine, which take turns on a small ring buffer in device memory (docs/adr/0004 says why the CPU has none). Each is
ordered after what the engine has enqueued on its own stream before the call: the forward pass whose blocks are stored,
or the one that last used the blocks that are loaded into.

On CPU tensors the same code runs in Triton's interpreter, which is how it is tested without a GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kv_core.errors import ConfigError, CopyFailed, InputError
from kv_core.extent import HostExtent
from kv_core.format import ChunkFormat
from kv_core.transfer import Copy, TransferPlan

from kv_cuda.copy.copy_paths import CopyPath, CopyPaths, Direction
from kv_cuda.copy.cpu import check_dtype
from kv_cuda.copy.memory import Pool, buffers_for_copies, device_pool, host_buffer, host_pool
from kv_cuda.copy.nvtx import nvtx_ranges
from kv_cuda.copy.ops import driver
from kv_cuda.copy.ops.rows import RowKernel, Span, row_kernel
from kv_cuda.copy.plan import copy_shape, validate_and_split
from kv_cuda.copy.streams import DoneEvent, Event, make_queue
from kv_cuda.layout import PagedLayout

_RING_SLOTS = 4
_RING_SLOT_BYTES = 4 << 20
_LIST_TOKENS = 1 << 16
_PROGRAMS_ON_BUS = 16
"""Multiprocessors for a kernel that reads or writes host memory. Fewer already saturate the bus."""
_PROGRAMS_ON_DEVICE = 32
"""The same between ring and blocks, which takes a few microseconds per piece."""


@dataclass(frozen=True, slots=True)
class _Group:
    """All copies of one chunk.

    copies: its copies in the plan.
    copy_path: the path that its bytes take.
    start: its first token in the lists of tokens.
    tokens: its number of tokens there.
    """

    copies: tuple[Copy, ...]
    copy_path: CopyPath
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Checked:
    """A plan that was validated.

    direction: of its copies.
    tokens: in all of them.
    chunks: the bytes of each, pinned.
    launches: the copies, chunk by chunk, as many chunks at a time as the lists of tokens hold.
    """

    direction: Direction
    tokens: int
    chunks: Mapping[HostExtent, torch.Tensor]
    launches: list[list[_Group]]


@dataclass(frozen=True, slots=True)
class _LayersOfGpu:
    """A `kv_core.connect.device.LayerwiseStore`."""

    layers: int
    gather: Callable[[Sequence[int]], Event]


class GpuCopier:
    """A `kv_core.connect.device.DeviceCopier` for one group of layers. For one thread at a time."""

    def __init__(
        self,
        layout: PagedLayout,
        tensors: Sequence[torch.Tensor],
        chunk_format: ChunkFormat,
        *,
        copy_paths: CopyPaths | None = None,
        largest_chunk_bytes: int = 0,
    ) -> None:
        """tensors: in the layout's order, on one device; the copier keeps them, and so the engine's cache, alive.
        largest_chunk_bytes: of all groups whose chunks share a pool with these; 0: there are no larger ones.

        Raises:
            InputError: layout and tensors disagree, the format is not one of this layout's, or the layout's rows
                are not runs of bytes (`CpuCopier` takes those).
        """
        shape = copy_shape(layout, len(tensors), chunk_format)
        check_dtype(layout)
        self._layout, self._format = layout, chunk_format
        self._largest_chunk_bytes = max(largest_chunk_bytes, chunk_format.nbytes)
        self._tensors = list(tensors)
        self._device = tensors[0].device
        self._range = nvtx_ranges(self._device)
        self._copy_paths = CopyPaths() if copy_paths is None else copy_paths
        self._kernel = row_kernel(layout, shape, self._tensors, chunk_format.layer_bytes)
        # Bytes contiguous on both sides; 0 where not even a whole row is.
        part = shape.parts[0]
        row = shape.heads * shape.head_dim
        is_dense = part.token == row or layout.block_tokens == 1
        is_whole_row = self._kernel.run_words == self._kernel.row_words
        self.run_bytes = row * shape.itemsize * (layout.block_tokens if is_dense else 1) if is_whole_row else 0
        self._can_drive = is_dense and is_whole_row and driver.is_available(self._device)
        self._all = [(0, self._kernel.plane_count)]
        self._pools: dict[str, Pool] = {}
        directions: tuple[Direction, ...] = ("load", "store")
        self._pipelines = {
            one: _CopyPipeline(self._device, self._kernel, chunk_format.chunk_tokens) for one in directions
        }
        # Triton compiles for the current device. A thread that has not chosen one would create a context on the first.
        with self._pipelines["load"].kernels.running():
            self._kernel.compile()

    def attach(self, pool: str, view: memoryview) -> None:
        """Register a pool. Its memory is pinned piece by piece as it is used.

        Raises:
            InputError: the view is read-only or empty, or does not begin at a word.
        """
        self._know(pool, host_pool(pool, view, self._device, self._largest_chunk_bytes))

    def attach_tensor(self, pool: str, memory: torch.Tensor) -> None:
        """Register a pool that is memory of the device itself, uint8 in one axis. The copier keeps it alive.

        Raises:
            InputError: it is not such memory, or does not begin at a word.
        """
        self._know(pool, device_pool(pool, memory, self._device))

    def _know(self, name: str, pool: Pool) -> None:
        if pool.bytes.data_ptr() % self._kernel.aligned:
            raise InputError(f"pool {name!r} does not begin at a multiple of {self._kernel.aligned} bytes")
        self._pools[name] = pool

    def detach(self, pool: str) -> None:
        """Release a pool, so that it can be closed. Waits for the copies that use it."""
        if pool in self._pools:
            for pipeline in self._pipelines.values():
                pipeline.end().wait()
            self._pools.pop(pool).release()

    @property
    def is_queued(self) -> bool:
        return self._device.type == "cuda"

    @property
    def stores_behind(self) -> bool:
        return self.is_queued

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        for extent in extents:
            self._pools[extent.pool].chunk(extent)
        try:
            with buffers_for_copies():
                self._pipelines["load"].prepare()
        except CopyFailed as error:
            raise ConfigError(str(error)) from None

    def load(self, plan: TransferPlan) -> Event:
        (event,) = self._move(self._checked(plan, "load"), [self._all])
        return event

    def load_layers(self, plan: TransferPlan) -> list[Event]:
        """Like `load`, layer by layer: the events of the first layer, the second and so on, in order of completion."""
        return self._move(self._checked(plan, "load"), [self._planes((layer,)) for layer in range(self._layout.layers)])

    def store(self, plan: TransferPlan) -> Event:
        (event,) = self._move(self._checked(plan, "store"), [self._all])
        return event

    def store_layers(self, plan: TransferPlan) -> "_LayersOfGpu":
        """Each layer is gathered after everything that the engine has enqueued when `gather` is called."""
        checked = self._checked(plan, "store")
        pools = {extent.pool: self._pools[extent.pool] for extent in checked.chunks}

        def gather(layers: Sequence[int]) -> Event:
            if any(self._pools.get(name) is not pool for name, pool in pools.items()):
                raise CopyFailed("the pool of the chunks was detached in the middle of a step")
            (event,) = self._move(checked, [self._planes(layers)])
            return event

        return _LayersOfGpu(self._layout.layers, gather)

    def _planes(self, layers: Sequence[int]) -> list[Span]:
        """The planes of these layers, part by part."""
        firsts = range(0, self._kernel.plane_count, self._layout.layers)
        return [(first + layer, 1) for first in firsts for layer in layers]

    def _checked(self, plan: TransferPlan, direction: Direction) -> _Checked:
        nbytes = {name: pool.bytes.numel() for name, pool in self._pools.items()}
        validate_and_split(plan, self._layout, self._format, nbytes, to_engine=direction == "load")
        self._refuse_misaligned(plan)
        # Pinned before anything is launched: a limit on locked memory must not leave half a plan behind.
        chunks = {copy.extent: self._pools[copy.extent.pool].chunk(copy.extent) for copy in plan.copies}
        return _Checked(direction, plan.tokens, chunks, list(self._launches(plan, direction)))

    def _move(self, checked: _Checked, steps: Sequence[Sequence[Span]]) -> list[Event]:
        """One event for each step; a step is the planes that have been moved when it completes."""
        with self._range(f"kv {checked.direction}: {checked.tokens} tokens"), buffers_for_copies():
            return self._enqueue(checked, steps)

    def _enqueue(self, checked: _Checked, steps: Sequence[Sequence[Span]]) -> list[Event]:
        pipeline, to_engine = self._pipelines[checked.direction], checked.direction == "load"
        pipeline.begin()
        events: list[Event] = []
        uploaded, lists = -1, None
        try:
            for spans in steps:
                for number, groups in enumerate(checked.launches):
                    if number != uploaded:  # most plans are one launch, whose lists serve every layer
                        uploaded, lists = number, self._upload(groups, pipeline)
                    self._launch(groups, lists, checked.chunks, spans, pipeline, to_engine=to_engine)
                events.append(pipeline.end())
        except BaseException:
            pipeline.end().wait()  # the caller will release the memory that the rest is still copied to
            raise
        return events

    def _refuse_misaligned(self, plan: TransferPlan) -> None:
        for copy in plan.copies:
            if copy.extent.offset % self._kernel.aligned:
                raise InputError(f"an extent at {copy.extent.offset} is not aligned to {self._kernel.aligned} bytes")

    def _launches(self, plan: TransferPlan, direction: Direction) -> Iterator[list[_Group]]:
        """The copies chunk by chunk, as many chunks at a time as the lists of tokens hold."""
        groups: list[_Group] = []
        start = 0
        for copies in plan.by_chunk().values():
            tokens = sum(copy.tokens for copy in copies)
            if start + tokens > self._pipelines[direction].list_tokens:
                yield groups
                groups, start = [], 0
            groups.append(_Group(tuple(copies), self._copy_path(copies, tokens, direction), start, tokens))
            start += tokens
        if groups:
            yield groups

    def _copy_path(self, copies: Sequence[Copy], tokens: int, direction: Direction) -> CopyPath:
        if self._pools[copies[0].extent.pool].is_on_device:
            return "direct"
        chunk, block = self._format.chunk_tokens, self._layout.block_tokens
        # A load may copy more of a chunk than is needed; a store would overwrite the rest of it.
        may_stage = 2 * tokens > chunk if direction == "load" else tokens == chunk
        can_drive = self._can_drive and not any(copy.first_slot % block or copy.tokens % block for copy in copies)
        return self._copy_paths.choose(direction, self.run_bytes, may_stage=may_stage, can_drive=can_drive)

    def _upload(self, groups: list[_Group], pipeline: "_CopyPipeline") -> torch.Tensor | None:
        """The lists of tokens on the device; None if they are not needed."""
        if all(group.copy_path == "driver" for group in groups):
            return None
        return pipeline.upload(*self._lists(groups))

    def _launch(
        self,
        groups: list[_Group],
        lists: torch.Tensor | None,
        chunks: Mapping[HostExtent, torch.Tensor],
        spans: Sequence[Span],
        pipeline: "_CopyPipeline",
        *,
        to_engine: bool,
    ) -> None:
        for group in groups:
            extent = group.copies[0].extent
            chunk, programs = chunks[extent], _PROGRAMS_ON_BUS
            if self._pools[extent.pool].is_on_device:
                programs = _PROGRAMS_ON_DEVICE
            for span in spans:
                if lists is None or group.copy_path == "driver":
                    self._drive(group, chunk.data_ptr(), span, pipeline, to_engine=to_engine)
                    continue
                tokens = lists[:, group.start : group.start + group.tokens]
                if group.copy_path == "direct":
                    pipeline.direct(tokens, chunk, span, programs, to_engine=to_engine)
                else:
                    pipeline.staged(tokens, chunk, span, to_engine=to_engine)

    def _lists(self, groups: Sequence[_Group]) -> tuple[np.ndarray, np.ndarray]:
        """Each token's slot, and the offset in bytes of its row in a plane of its chunk."""
        copies = [copy for group in groups for copy in group.copies]
        tokens = np.array([copy.tokens for copy in copies])
        behind = np.arange(tokens.sum()) - np.repeat(np.cumsum(tokens) - tokens, tokens)  # offsets in each copy
        slots = np.repeat([copy.first_slot for copy in copies], tokens) + behind
        rows = (np.repeat([copy.first_token for copy in copies], tokens) + behind) * self._kernel.row_bytes
        return slots, rows

    def _drive(self, group: _Group, chunk: int, span: Span, pipeline: "_CopyPipeline", *, to_engine: bool) -> None:
        """Block by block of every plane, by the driver's batched copies."""
        size, row = self._layout.block_tokens, self._kernel.row_bytes
        first, count = span
        planes = self._kernel.host_planes[first : first + count]
        blocks = np.concatenate(
            [np.arange(copy.first_slot, copy.first_slot + copy.tokens, size) for copy in group.copies]
        )
        tokens = np.concatenate(
            [np.arange(copy.first_token, copy.first_token + copy.tokens, size) for copy in group.copies]
        )
        in_engine = planes[:, :1] + blocks // size * planes[:, 1:2]
        in_chunk = chunk + (first + np.arange(count))[:, None] * self._kernel.plane_bytes + tokens * row
        to, origin = (in_engine, in_chunk) if to_engine else (in_chunk, in_engine)
        with pipeline.kernels.running():
            driver.copy_runs(to.ravel(), origin.ravel(), np.full(to.size, size * row), self._device)


class _CopyPipeline:
    """One direction's queues, ring and lists of tokens."""

    def __init__(self, device: torch.device, kernel: RowKernel, chunk_tokens: int) -> None:
        self._device, self._kernel = device, kernel
        self.kernels, self._copies = make_queue(device), make_queue(device)
        self._planes_a_slot = max(1, min(kernel.plane_count, _RING_SLOT_BYTES // kernel.plane_bytes))
        self._ring: torch.Tensor | None = None
        self._free: list[Event] = [DoneEvent()] * _RING_SLOTS
        self._turn = 0
        self.list_tokens = max(_LIST_TOKENS, chunk_tokens)
        self._lists: list[torch.Tensor] = []
        self._on_device: list[torch.Tensor] = []
        self._used: list[Event] = []
        self._list = self._filled = 0
        for _ in range(2):
            self._add_list()

    def prepare(self) -> None:
        """Allocate the ring's memory, which otherwise happens on first use."""
        self._make_ring()

    def begin(self) -> None:
        """Order everything launched from now on after what the engine has launched."""
        self.kernels.follow_current()

    def end(self) -> Event:
        self._copies.follow(self.kernels.record())
        return self._copies.record()

    def upload(self, slots: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """[2, tokens] on the device, valid until the next launch has read them."""
        if self._filled + len(slots) > self.list_tokens:
            self._list, self._filled = self._unused_list(), 0
        first, end = self._filled, self._filled + len(slots)
        self._filled = -(-end // 2) * 2  # a list at an odd position would need another kernel, see `compile`
        given, there = (lists[self._list][:, first:end] for lists in (self._lists, self._on_device))
        given[0] = torch.from_numpy(slots)
        given[1] = torch.from_numpy(rows)
        if self._on_device[self._list] is not self._lists[self._list]:
            with self.kernels.running():
                for line in range(2):
                    there[line].copy_(given[line], non_blocking=True)
            self._used[self._list] = self.kernels.record()
        return there

    def _unused_list(self) -> int:
        """Another list that nothing reads any more. Allocates one rather than wait and stall a step of the engine's."""
        for number, used in enumerate(self._used):
            if number != self._list and used.done():
                return number
        self._add_list()
        self.kernels.follow_current()  # the memory's previous user may still access it
        return len(self._lists) - 1

    def _add_list(self) -> None:
        is_cuda = self._device.type == "cuda"
        given = host_buffer(2, self.list_tokens, dtype=torch.int64, device=self._device)
        there = torch.empty_like(given, device=self._device) if is_cuda else given
        self._lists.append(given)
        self._on_device.append(there)
        self._used.append(DoneEvent())

    def direct(self, tokens: torch.Tensor, chunk: torch.Tensor, span: Span, programs: int, *, to_engine: bool) -> None:
        """The kernel reads or writes the chunk where it is."""
        self._launch(tokens, chunk.data_ptr(), span, programs, to_engine=to_engine)

    def staged(self, tokens: torch.Tensor, chunk: torch.Tensor, span: Span, *, to_engine: bool) -> None:
        """By way of the ring, some planes at a time."""
        ring, plane_bytes = self._make_ring(), self._kernel.plane_bytes
        end = span[0] + span[1]
        for first in range(span[0], end, self._planes_a_slot):
            count = min(self._planes_a_slot, end - first)
            turn = self._turn = (self._turn + 1) % _RING_SLOTS
            slot = ring[turn][: count * plane_bytes]
            piece = chunk[first * plane_bytes : (first + count) * plane_bytes]
            # The kernel counts planes from the chunk's first, which would lie that far before the slot.
            base = slot.data_ptr() - first * plane_bytes
            if to_engine:
                self._copies.follow(self._free[turn])
                with self._copies.running():
                    slot.copy_(piece, non_blocking=True)
                self.kernels.follow(self._copies.record())
                self._launch(tokens, base, (first, count), _PROGRAMS_ON_DEVICE, to_engine=True)
                self._free[turn] = self.kernels.record()
            else:
                self.kernels.follow(self._free[turn])
                self._launch(tokens, base, (first, count), _PROGRAMS_ON_DEVICE, to_engine=False)
                self._copies.follow(self.kernels.record())
                with self._copies.running():
                    piece.copy_(slot, non_blocking=True)
                self._free[turn] = self._copies.record()

    def _launch(self, tokens: torch.Tensor, base: int, span: Span, programs: int, *, to_engine: bool) -> None:
        with self.kernels.running():
            self._kernel.move(tokens[0], tokens[1], base=base, span=span, to_engine=to_engine, programs=programs)
        self._used[self._list] = self.kernels.record()

    def _make_ring(self) -> torch.Tensor:
        if self._ring is None:
            nbytes = -(-self._planes_a_slot * self._kernel.plane_bytes // 256) * 256
            self._ring = torch.empty((_RING_SLOTS, nbytes), dtype=torch.uint8, device=self._device)
            # This memory's previous user may still be working on it, in its own queue. What was followed when the copy
            # began does not suffice: a ring may be made ahead of the first one (`prepare`).
            self.kernels.follow_current()
            self._free = [self.kernels.record()] * _RING_SLOTS
        return self._ring
