"""The GPU copier: pinned host memory ↔ the engine's blocks, on streams of its own.

A call enqueues its work on the device and returns an event. Nothing waits for the whole device, and nothing is
allocated once the buffers exist. Loads and stores have two streams each, one for the kernel and one for the copy
engine, which take turns on a small ring buffer in device memory (docs/adr/0007 says why the CPU has none). Each is
ordered after what the engine has enqueued on its own stream before the call: the forward pass whose blocks are stored,
or the one that last used the blocks that are loaded into.

On CPU tensors the same code runs in Triton's interpreter, which is how it is tested without a GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter

import numpy as np
import torch
from kv_core.device import CopyEvent
from kv_core.errors import ConfigError, CopyFailed, InputError
from kv_core.extent import HostExtent
from kv_core.format import ChunkFormat
from kv_core.transfer import TransferPlan
from numpy.typing import NDArray

from kv_cuda.copy.attached import AttachesPools
from kv_cuda.copy.copy_paths import CopyPath, CopyPaths, Direction
from kv_cuda.copy.cpu import check_dtype
from kv_cuda.copy.memory import AttachedPool, buffers_for_copies, host_buffer
from kv_cuda.copy.ops import driver
from kv_cuda.copy.ops.rows import RowKernel, Span, row_kernel
from kv_cuda.copy.plan import copy_shape
from kv_cuda.copy.streams import DoneEvent, make_queue
from kv_cuda.copy.table import CopyTable, copy_table
from kv_cuda.kernels import installed_kernels
from kv_cuda.layout import PagedLayout

_RING_SLOTS = 4
_RING_SLOT_BYTES = 8 << 20
"""Copied in 150 µs, about as long as it takes to enqueue a piece of such size."""
_LIST_TOKENS = 1 << 16
_PROGRAMS_ON_BUS: Mapping[Direction, int] = {"load": 8, "store": 4}
"""Multiprocessors for a kernel that reads or writes host memory: as many as it takes to saturate the bus (of an H100,
with runs of 32 KiB), so that all others compute."""
_PROGRAMS_ON_DEVICE = 32
"""The same for a kernel between ring and blocks, which takes a few microseconds per piece."""


@dataclass(slots=True)
class _Group:
    """Neighbouring chunks of a plan that take the same path.

    path: the path that their bytes take, and the largest number of the kernel's programs.
    first: the number of the first one in the plan's table.
    starts: where the tokens of each begin in the lists of tokens, and where the last one's end.
    """

    path: tuple[CopyPath, int]
    first: int
    starts: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class _Checked:
    """A plan that was validated.

    direction: the direction of its copies.
    tokens: the number of tokens in all of them.
    table: the copies.
    addresses: [chunks], where each chunk's pinned bytes are.
    launches: the chunks in groups, as many at a time as the lists of tokens hold.
    """

    direction: Direction
    tokens: int
    table: CopyTable
    addresses: NDArray[np.int64]
    launches: list[list[_Group]]


@dataclass(frozen=True, slots=True)
class _LayersOfGpu:
    """A `kv_core.device.LayerwiseStore`."""

    layers: int
    gather: Callable[[Sequence[int]], CopyEvent]


class GpuCopier(AttachesPools):
    """A `kv_core.device.DeviceCopier` for one group of layers. For one thread at a time."""

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
        largest_chunk_bytes: size of the largest chunk of all groups that share a pool with this; 0: none is larger.

        Raises:
            InputError: layout and tensors disagree, the format is not one of this layout's, or the layout's rows
                are not runs of bytes (`CpuCopier` takes those).
        """
        shape = copy_shape(layout, len(tensors), chunk_format)
        check_dtype(layout)
        super().__init__(tensors[0].device, max(largest_chunk_bytes, chunk_format.nbytes))
        self._layout, self._format = layout, chunk_format
        self._tensors = list(tensors)
        # For profilers: projected onto the device, a range covers the kernels and copies that this thread enqueues.
        self._range: Callable[[str], AbstractContextManager[object]] = (
            torch.cuda.nvtx.range if self._device.type == "cuda" else nullcontext
        )
        self._copy_paths = CopyPaths() if copy_paths is None else copy_paths
        self._kernel = row_kernel(layout, shape, self._tensors, chunk_format.layer_bytes)
        # Bytes contiguous on both sides; 0 where not even a whole row is.
        part = shape.parts[0]
        row = shape.heads * shape.head_dim
        is_dense = part.token == row or layout.block_tokens == 1
        is_whole_row = self._kernel.run_words == self._kernel.row_words
        self.run_bytes = row * shape.itemsize * (layout.block_tokens if is_dense else 1) if is_whole_row else 0
        self._can_drive = is_dense and is_whole_row and driver.is_available(self._device)
        self._all_planes: list[Span] = [(0, self._kernel.plane_count, 1)]
        directions: tuple[Direction, ...] = ("load", "store")
        self._pipelines = {
            direction: _KernelPipeline(self._device, self._kernel, chunk_format.chunk_tokens)
            for direction in directions
        }
        # Triton compiles for the current device. A thread that has not chosen one would create a context on the first.
        with self._pipelines["load"].kernels.running():
            self._kernel.compile()

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        super().prepare(extents)
        if all(copy_path != "staged" for _, copy_path in self._copy_paths.load):
            return
        try:
            with buffers_for_copies():
                self._pipelines["load"].prepare()
        except CopyFailed as error:
            raise ConfigError(str(error)) from None

    def _attach(self, name: str, pool: AttachedPool) -> None:
        if pool.bytes.data_ptr() % self._kernel.aligned:
            raise InputError(f"pool {name!r} does not begin at a multiple of {self._kernel.aligned} bytes")
        super()._attach(name, pool)

    def _wait(self) -> None:
        for pipeline in self._pipelines.values():
            pipeline.end().wait()

    def load(self, plan: TransferPlan) -> CopyEvent:
        (event,) = self._move(self._checked(plan, "load"), [self._all_planes])
        return event

    def load_layers(self, plan: TransferPlan) -> list[CopyEvent]:
        """Like `load`, layer by layer: the events of the first layer, the second and so on, in order of completion."""
        return self._move(self._checked(plan, "load"), [self._planes((layer,)) for layer in range(self._layout.layers)])

    def store(self, plan: TransferPlan) -> CopyEvent:
        (event,) = self._move(self._checked(plan, "store"), [self._all_planes])
        return event

    def store_layers(self, plan: TransferPlan) -> "_LayersOfGpu":
        """Each layer is gathered after everything that the engine has enqueued when `gather` is called."""
        checked = self._checked(plan, "store")
        pools = {extent.pool: self._pools[extent.pool] for extent in checked.table.extents}

        def gather(layers: Sequence[int]) -> CopyEvent:
            if any(self._pools.get(name) is not pool for name, pool in pools.items()):
                raise CopyFailed("the pool of the chunks was detached in the middle of a step")
            (event,) = self._move(checked, [self._planes(layers)])
            return event

        return _LayersOfGpu(self._layout.layers, gather)

    def _planes(self, layers: Sequence[int]) -> list[Span]:
        """The planes of each of these layers: one of every part."""
        count = self._layout.layers
        return [(layer, self._kernel.plane_count // count, count) for layer in layers]

    def _checked(self, plan: TransferPlan, direction: Direction) -> _Checked:
        nbytes = {name: pool.bytes.numel() for name, pool in self._pools.items()}
        table = copy_table(plan, self._layout, self._format, nbytes, to_engine=direction == "load")
        for offset in table.offsets[table.offsets % self._kernel.aligned != 0]:
            raise InputError(f"an extent at {offset} is not aligned to {self._kernel.aligned} bytes")
        # Pinned before anything is launched: a limit on locked memory must not leave half a plan behind.
        addresses, first = [table.offsets[:0]], 0
        for name, extents in groupby(table.extents, attrgetter("pool")):
            end = first + len(list(extents))
            addresses.append(self._pools[name].addresses(table.offsets[first:end], self._format.nbytes))
            first = end
        return _Checked(direction, plan.tokens, table, np.concatenate(addresses), self._launches(table, direction))

    def _move(self, checked: _Checked, steps: Sequence[Sequence[Span]]) -> list[CopyEvent]:
        """One event for each step; a step is the planes that have been moved when it completes."""
        with self._range(f"kv {checked.direction}: {checked.tokens} tokens"), buffers_for_copies():
            return self._enqueue(checked, steps)

    def _enqueue(self, checked: _Checked, steps: Sequence[Sequence[Span]]) -> list[CopyEvent]:
        pipeline, to_engine = self._pipelines[checked.direction], checked.direction == "load"
        pipeline.begin()
        events: list[CopyEvent] = []
        uploaded, lists = -1, None
        try:
            for spans in steps:
                for number, groups in enumerate(checked.launches):
                    if number != uploaded:  # most plans are one launch, whose lists serve every layer
                        uploaded, lists = number, self._upload(groups, checked, pipeline)
                    self._launch(groups, lists, checked, spans, pipeline, to_engine=to_engine)
                events.append(pipeline.end())
        except BaseException:
            pipeline.end().wait()  # the caller will release the memory that the rest is still copied to
            raise
        return events

    def _launches(self, table: CopyTable, direction: Direction) -> list[list[_Group]]:
        """The chunks in groups, as many at a time as the lists of tokens hold."""
        block, begins = self._layout.block_tokens, table.starts[:-1]
        in_blocks = (table.first_slot % block == 0) & (table.tokens % block == 0)
        counts = np.add.reduceat(table.tokens, begins).tolist() if len(begins) else []
        are_blocks = np.logical_and.reduceat(in_blocks, begins).tolist() if len(begins) else []
        kinds = list(zip(map(attrgetter("pool"), table.extents), counts, are_blocks, strict=True))
        path_of = {kind: self._path(*kind, direction) for kind in set(kinds)}
        launches: list[list[_Group]] = []
        listed = most = self._pipelines[direction].list_tokens
        for number, kind in enumerate(kinds):
            if listed + kind[1] > most:
                launches.append([])
                listed = 0
            groups, path = launches[-1], path_of[kind]
            if not groups or groups[-1].path != path:
                groups.append(_Group(path, number, [listed]))
            listed += kind[1]
            groups[-1].starts.append(listed)
        return launches

    def _path(self, pool: str, tokens: int, is_in_blocks: bool, direction: Direction) -> tuple[CopyPath, int]:
        """The path of a chunk in this pool of which so many tokens are copied, and the number of programs for it."""
        if self._pools[pool].is_on_device:
            return "direct", _PROGRAMS_ON_DEVICE
        chunk = self._format.chunk_tokens
        # A load may copy more of a chunk than is needed; a store would overwrite the rest of it.
        may_stage = 2 * tokens > chunk if direction == "load" else tokens == chunk
        can_drive = self._can_drive and is_in_blocks
        copy_path = self._copy_paths.choose(direction, self.run_bytes, may_stage=may_stage, can_drive=can_drive)
        return copy_path, _PROGRAMS_ON_BUS[direction]

    def _upload(self, groups: list[_Group], checked: _Checked, pipeline: "_KernelPipeline") -> torch.Tensor | None:
        """On the device, each token's slot, and the place of its row in the chunk's first plane: an address, or an
        offset in bytes if the chunk goes through the ring. None if no group needs these lists."""
        if all(group.path[0] == "driver" for group in groups):
            return None
        copies, places = _copies_of(groups[0].first, groups[-1].end, checked.table), checked.addresses
        if any(group.path[0] == "staged" for group in groups):
            places = places.copy()
            for group in groups:
                if group.path[0] == "staged":
                    places[group.first : group.end] = 0
        row, kernels = self._kernel.row_bytes, installed_kernels()

        def write(slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
            if kernels is not None:
                kernels.call("list_tokens", row, copies, places, slots, rows)
                return
            chunk, first_token, first_slot, tokens = copies.T
            within_copy = _indexes_within(tokens)
            slots[:] = np.repeat(first_slot, tokens) + within_copy
            rows[:] = np.repeat(first_token * row + places[chunk], tokens) + within_copy * row

        return pipeline.upload(groups[-1].starts[-1], write)

    def _launch(
        self,
        groups: list[_Group],
        lists: torch.Tensor | None,
        checked: _Checked,
        spans: Sequence[Span],
        pipeline: "_KernelPipeline",
        *,
        to_engine: bool,
    ) -> None:
        """A group is one launch for each span, except through the ring."""
        for group in groups:
            copy_path, programs = group.path
            if lists is None or copy_path == "driver":
                self._copy_by_driver(group, checked, spans, pipeline, to_engine=to_engine)
            elif copy_path == "direct":
                for span in spans:
                    tokens = lists[:, group.starts[0] : group.starts[-1]]
                    pipeline.direct(tokens, span, programs, to_engine=to_engine)
            else:
                for chunk, (start, end) in enumerate(pairwise(group.starts), group.first):
                    extent = checked.table.extents[chunk]
                    chunk_bytes = self._pools[extent.pool].chunk(extent)
                    pipeline.staged(lists[:, start:end], chunk_bytes, spans, to_engine=to_engine)

    def _copy_by_driver(
        self,
        group: _Group,
        checked: _Checked,
        spans: Sequence[Span],
        pipeline: "_KernelPipeline",
        *,
        to_engine: bool,
    ) -> None:
        """Block by block of every plane, by the driver's batched copies."""
        size, row = self._layout.block_tokens, self._kernel.row_bytes
        chunk, first_token, first_slot, tokens = _copies_of(group.first, group.end, checked.table).T
        blocks = tokens // size
        within_copy = _indexes_within(blocks)
        block = np.repeat(first_slot // size, blocks) + within_copy
        in_chunk = np.repeat(first_token * row + checked.addresses[chunk], blocks) + within_copy * (size * row)
        for first, count, step in spans:
            numbers = np.arange(first, first + count * step, step)[:, None]
            planes = self._kernel.host_planes[numbers[:, 0]]
            engine = (planes[:, :1] + block * planes[:, 1:2]).ravel()
            host = (numbers * self._kernel.plane_bytes + in_chunk).ravel()
            to, origin = (engine, host) if to_engine else (host, engine)
            with pipeline.kernels.running():
                driver.copy_runs(to, origin, size * row, self._device)


def _copies_of(first: int, end: int, table: CopyTable) -> NDArray[np.int64]:
    """Those of chunks `first` to `end`, the last one excluded."""
    return table.copies[table.starts[first] : table.starts[end]]


def _indexes_within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 … count - 1 for each of these counts, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


class _KernelPipeline:
    """One direction's queues, ring and lists of tokens."""

    def __init__(self, device: torch.device, kernel: RowKernel, chunk_tokens: int) -> None:
        self._device, self._kernel = device, kernel
        self.kernels, self._copies = make_queue(device), make_queue(device)
        self._planes_per_slot = max(1, min(kernel.plane_count, _RING_SLOT_BYTES // kernel.plane_bytes))
        self._ring: torch.Tensor | None = None
        self._free: list[CopyEvent] = [DoneEvent()] * _RING_SLOTS
        self._turn = 0
        self.list_tokens = -(-max(_LIST_TOKENS, chunk_tokens) // 2) * 2
        self._lists: list[torch.Tensor] = []
        self._on_device: list[torch.Tensor] = []
        self._used: list[CopyEvent] = []
        self._list = self._filled = 0
        self._has_launched = False  # whether a kernel that reads the list was launched after the last event
        self._copies_are_last = False  # True once a store has gone through the ring
        for _ in range(2):
            self._add_list()

    def prepare(self) -> None:
        """Allocate the ring's memory, which otherwise happens on first use."""
        self._make_ring()

    def begin(self) -> None:
        """Order everything launched from now on after what the engine has launched."""
        self.kernels.follow_current()

    def end(self) -> CopyEvent:
        """The point when everything that was launched is complete. Few calls: each costs as much as a small copy."""
        last = self._used[self._list] = self.kernels.record()
        self._has_launched = False
        if self._copies_are_last:
            self._copies.follow(last)
            return self._copies.record()
        return last

    def upload(self, tokens: int, write: Callable[[NDArray[np.int64], NDArray[np.int64]], None]) -> torch.Tensor:
        """[2, tokens] on the device, as `write` writes them; valid until the next launch has read them."""
        # An even number of positions each: a list at an odd one would need another kernel, see `RowKernel.compile`.
        length = -(-tokens // 2) * 2
        if self._filled + length > self.list_tokens:
            if self._has_launched:
                self._used[self._list] = self.kernels.record()
            self._list, self._filled = self._unused_list(), 0
        begin = 2 * self._filled
        self._filled += length
        host_list, device_list = (
            lists[self._list][begin : begin + 2 * length] for lists in (self._lists, self._on_device)
        )
        slots, rows = host_list.numpy().reshape(2, length)
        write(slots[:tokens], rows[:tokens])
        if self._on_device[self._list] is not self._lists[self._list]:
            with self.kernels.running():
                device_list.copy_(host_list, non_blocking=True)
        return device_list.view(2, length)[:, :tokens]

    def _unused_list(self) -> int:
        """Another list that nothing reads any more. Allocates one rather than wait and stall a step of the engine's."""
        for number, event in enumerate(self._used):
            if number != self._list and event.done():
                return number
        self._add_list()
        self.kernels.follow_current()  # the memory's previous user may still access it
        return len(self._lists) - 1

    def _add_list(self) -> None:
        is_cuda = self._device.type == "cuda"
        host_list = host_buffer(2 * self.list_tokens, dtype=torch.int64, device=self._device)
        device_list = torch.empty_like(host_list, device=self._device) if is_cuda else host_list
        self._lists.append(host_list)
        self._on_device.append(device_list)
        self._used.append(DoneEvent())

    def direct(self, tokens: torch.Tensor, span: Span, programs: int, *, to_engine: bool) -> None:
        """The kernel reads or writes the chunks where they are."""
        self._launch(tokens, 0, span, programs, to_engine=to_engine)

    def staged(self, tokens: torch.Tensor, chunk: torch.Tensor, spans: Sequence[Span], *, to_engine: bool) -> None:
        """By way of the ring, some planes at a time that lie side by side in the chunk."""
        ring, plane_bytes = self._make_ring(), self._kernel.plane_bytes
        for first, count in self._pieces(spans):
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
                self._launch(tokens, base, (first, count, 1), _PROGRAMS_ON_DEVICE, to_engine=True)
                self._free[turn] = self.kernels.record()
            else:
                self.kernels.follow(self._free[turn])
                self._launch(tokens, base, (first, count, 1), _PROGRAMS_ON_DEVICE, to_engine=False)
                self._copies.follow(self.kernels.record())
                with self._copies.running():
                    piece.copy_(slot, non_blocking=True)
                self._free[turn] = self._copies.record()
                self._copies_are_last = True

    def _pieces(self, spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
        """The first plane and the number of planes of each piece."""
        for start, planes, step in spans:
            at_once = self._planes_per_slot if step == 1 else 1
            for number in range(0, planes, at_once):
                yield start + number * step, min(at_once, planes - number)

    def _launch(self, tokens: torch.Tensor, base: int, span: Span, programs: int, *, to_engine: bool) -> None:
        with self.kernels.running():
            self._kernel.move(tokens[0], tokens[1], base=base, span=span, to_engine=to_engine, programs=programs)
        self._has_launched = True

    def _make_ring(self) -> torch.Tensor:
        if self._ring is None:
            nbytes = -(-self._planes_per_slot * self._kernel.plane_bytes // 256) * 256
            self._ring = torch.empty((_RING_SLOTS, nbytes), dtype=torch.uint8, device=self._device)
            # This memory's previous user may still be working on it, in its own queue. To have followed that queue when
            # the copy began does not suffice: a ring may be made ahead of the first copy (`prepare`).
            self.kernels.follow_current()
            self._free = [self.kernels.record()] * _RING_SLOTS
        return self._ring
