"""The GPU copier: pinned host memory ↔ the engine's blocks, on streams of its own.

A call enqueues its work on the device and returns an event. Nothing waits for the whole device, and nothing is
allocated once the buffers exist. Loads and stores have two streams each, one for the kernel and one for the copy
engine, which take turns on a small ring buffer in device memory (docs/adr/0007 says why the CPU has none). Each is
ordered after what the engine has enqueued on its own stream before the call: the forward pass whose blocks are stored,
or the one that last used the blocks that are loaded into.

On CPU tensors the same code runs in Triton's interpreter, which is how it is tested without a GPU.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch
from kv_core.device import CopyEvent, LayerwiseCopier
from kv_core.errors import ConfigError, CopyFailed, InputError, KVError
from kv_core.format import ChunkFormat
from kv_core.transfer import HostExtent, Move, TransferPlan
from numpy.typing import NDArray

from kv_cuda.copy import driver
from kv_cuda.copy.copy_paths import CopyPath, CopyPaths, Direction
from kv_cuda.copy.cpu import check_dtype
from kv_cuda.copy.memory import AttachedPool, AttachesPools, buffers_for_copies, host_buffer, no_buffers
from kv_cuda.copy.plan import CopyTable, copy_shape, copy_table
from kv_cuda.copy.rows import Listing, RowKernel, Span, row_kernel
from kv_cuda.copy.streams import DoneEvent, GatheredLayers, LentEvent, make_queue
from kv_cuda.kernels import OTHER, installed_kernels
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


@dataclass(frozen=True, slots=True)
class _Group:
    """All copies of one chunk.

    extent: where the chunk is.
    copy_path: the path that its bytes take.
    programs: the largest number of the kernel's programs.
    first, end: its copies in the plan's table.
    start: the position of its first token in the lists of tokens.
    tokens: its number of tokens in these lists.
    """

    extent: HostExtent
    copy_path: CopyPath
    programs: int
    first: int
    end: int
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Checked:
    """A plan that was validated.

    direction: the direction of its copies.
    tokens: the number of tokens in all of them.
    table: the copies.
    chunks: the pinned bytes of each chunk.
    launches: the copies, chunk by chunk, as many chunks at a time as the lists of tokens hold.
    """

    direction: Direction
    tokens: int
    table: CopyTable
    chunks: Mapping[HostExtent, torch.Tensor]
    launches: list[list[_Group]]

    @property
    def pools(self) -> set[str]:
        """The names of its pools."""
        return {extent.pool for extent in self.chunks}


@dataclass(frozen=True, slots=True)
class _Listable:
    """What moves between a pool and blocks need to be listed; the same for every call.

    places: the pool's name and the size of its chunks. place: `Place` in csrc/plans.c. written: bytes of a bit for each
        block. programs: the largest number of the kernel's programs. device: `Device` in csrc/plans.c, if C enqueues.
    """

    pool: AttachedPool
    places: tuple[str, int]
    place: "array[int]"
    written: int
    programs: int
    device: "array[int]"


@dataclass(slots=True)  # not frozen, which takes three times as long to make
class _Listed:
    """Plans that C lists, all of which go directly, and in which nothing has to be looked at more closely.

    tokens: the number of tokens in all of them. requests: the number of plans.
    listable: their pool and blocks. per_slot: tokens of a block.
    moves: `Move` in csrc/plans.c, of each. tables, offsets: their blocks, and their chunks' places in the pool.
    """

    direction: Direction
    tokens: int
    requests: int
    listable: _Listable
    per_slot: int
    moves: "array[int]"
    tables: "array[int]"
    offsets: "array[int]"

    @property
    def pools(self) -> set[str]:
        return {self.listable.places[0]}

    def listings(self, at: int, per_row: int) -> Iterator[tuple[Listing, bool]]:
        """Of each move, in lists that begin there, and whether it is its plan's last."""
        numbers = iter(self.moves)
        for first, last, ends in zip(numbers, numbers, numbers, strict=True):
            begin = first - first % per_row
            blocks, chunks = -(-last // self.per_slot) - begin // self.per_slot, -(-(last - begin) // per_row)
            yield Listing(last - first, at, at + blocks, first - begin, self.per_slot, per_row), bool(ends)
            at += blocks + chunks


_NOTHING: Final = array("q")


class GpuCopier(AttachesPools, LayerwiseCopier):
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
        self._listables: dict[tuple[str, int, Direction], _Listable | None] = {}
        directions: tuple[Direction, ...] = ("load", "store")
        self._pipelines = {
            direction: _KernelPipeline(self._device, self._kernel, chunk_format.chunk_tokens)
            for direction in directions
        }
        # Triton compiles for the current device. A thread that has not chosen one would create a context on the first.
        with self._pipelines["load"].kernels.running():
            for to_engine, compiled in self._kernel.compile().items():
                if compiled is not None and (functions := driver.functions_and_context()):
                    pipeline = self._pipelines["load" if to_engine else "store"]
                    handles = pipeline.kernels.handle, pipeline.edge.handle
                    pipeline.driver.extend((*functions, *handles, *compiled, *self._kernel.for_driver))

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        super().prepare(extents)
        if all(copy_path != "staged" for _, copy_path in self._copy_paths.load):
            return
        try:
            with buffers_for_copies():
                self._pipelines["load"].make_ring()
        except CopyFailed as error:
            raise ConfigError(str(error)) from None

    def _attach(self, name: str, pool: AttachedPool) -> None:
        if pool.bytes.data_ptr() % self._kernel.aligned:
            raise InputError(f"pool {name!r} does not begin at a multiple of {self._kernel.aligned} bytes")
        self._listables.clear()
        super()._attach(name, pool)

    def detach(self, pool: str) -> None:
        self._listables.clear()
        super().detach(pool)

    def _wait(self) -> None:
        for pipeline in self._pipelines.values():
            pipeline.end().wait()

    def load(self, plan: TransferPlan) -> CopyEvent:
        (event,) = self._copy(plan, "load", [self._kernel.all_planes])
        return event

    def load_layers(self, plan: TransferPlan) -> list[CopyEvent]:
        """Like `load`, layer by layer: the events of the first layer, the second and so on, in order of completion."""
        return self._copy(plan, "load", [self._planes((layer,)) for layer in range(self._layout.layers)])

    def store(self, plan: TransferPlan) -> CopyEvent:
        (event,) = self._copy(plan, "store", [self._kernel.all_planes])
        return event

    def load_each(self, plans: Sequence[TransferPlan]) -> Iterable[CopyEvent | KVError]:
        return self._each(plans, "load") or super().load_each(plans)

    def store_each(self, plans: Sequence[TransferPlan]) -> Iterable[CopyEvent | KVError]:
        return self._each(plans, "store") or super().store_each(plans)

    def store_layers(self, plan: TransferPlan) -> GatheredLayers:
        """Each layer is gathered after everything that the engine has enqueued when `gather` is called."""
        checked: _Listed | _Checked | None = self._listed([plan], "store")
        if not isinstance(checked, _Listed) or self._submit(checked, []) is None:
            checked = self._checked(plan, "store")
        pools = {name: self._pools[name] for name in checked.pools}

        def gather(layers: Sequence[int]) -> CopyEvent:
            if any(self._pools.get(name) is not pool for name, pool in pools.items()):
                raise CopyFailed("the pool of the chunks was detached in the middle of a step")
            steps = [self._planes(layers)]
            events = self._submit(checked, steps) if isinstance(checked, _Listed) else self._move(checked, steps)
            assert events, "a plan that was valid before"
            return events[0]

        return GatheredLayers(self._layout.layers, gather)

    def _each(self, plans: Sequence[TransferPlan], direction: Direction) -> Sequence[CopyEvent]:
        """All of these as one submission, with an event for each; none, if they are to be tried one by one."""
        try:
            listed = self._listed(plans, direction)
            return (listed and self._submit(listed, [self._kernel.all_planes])) or []
        except KVError:
            return []  # when each is tried, it shows which it was

    def _copy(self, plan: TransferPlan, direction: Direction, steps: Sequence[Sequence[Span]]) -> list[CopyEvent]:
        """One event for each step: the planes that have been moved when it completes."""
        listed = self._listed([plan], direction)
        events = None if listed is None else self._submit(listed, steps)
        return self._move(self._checked(plan, direction), steps) if events is None else events

    def _planes(self, layers: Sequence[int]) -> list[Span]:
        """The planes of each of these layers: one of every part."""
        count = self._layout.layers
        return [(layer, self._kernel.plane_count // count, count) for layer in layers]

    def _checked(self, plan: TransferPlan, direction: Direction) -> _Checked:
        nbytes = {name: pool.bytes.numel() for name, pool in self._pools.items()}
        table = copy_table(plan, self._layout, self._format, nbytes, to_engine=direction == "load")
        for extent in table.extents:
            if extent.offset % self._kernel.aligned:
                raise InputError(f"an extent at {extent.offset} is not aligned to {self._kernel.aligned} bytes")
        # Pinned before anything is launched: a limit on locked memory must not leave half a plan behind.
        chunks = {extent: self._pools[extent.pool].chunk(extent) for extent in table.extents}
        return _Checked(direction, plan.tokens, table, chunks, list(self._launches(table, direction)))

    def _listed(self, plans: Sequence[TransferPlan], direction: Direction) -> _Listed | None:
        """Plans of moves between one pool and blocks, for C. None: there are others among them."""
        of_first = plans[0].parts
        if not all(plan.parts for plan in plans) or not isinstance(of_first[0], Move):  # events follow moves
            return None
        name, step, size = of_first[0].extents[0].pool, of_first[0].block_tokens, self._format.chunk_tokens
        case = name, step, direction
        if case not in self._listables:
            self._listables[case] = self._listable(name, step, direction)
        if (listable := self._listables[case]) is None:
            return None
        is_opaque, per_chunk, total, nbytes = self._format.kind == "blocks", size // step, 0, self._format.nbytes
        moves, tables, offsets = array("q"), array("i"), array("q")
        for plan in plans:
            for move in plan.parts:
                if not isinstance(move, Move) or move.block_tokens != step or plan.chunk_tokens != size:
                    return None
                first, last = move.first_token, move.last_token
                if is_opaque and (first % step or last % step):
                    return None
                chunk, end = first // size, -(-last // size)
                begin = chunk - move.first_chunk
                extents = move.extents[begin : end - move.first_chunk] if begin >= 0 else ()
                places = [extent.offset for extent in extents if extent.nbytes == nbytes and extent.pool == name]
                if not 0 < len(extents) == len(places) == end - chunk:
                    return None
                tables += move.table[chunk * per_chunk : -(-last // step)]
                offsets.fromlist(places)
                moves.extend((first, last, 0))
                total += last - first
            moves[-1] = 1
        is_repeated = direction == "store" and len(set(offsets)) < len(offsets)
        is_there = min(offsets) >= 0 and max(offsets) + nbytes <= listable.pool.bytes.numel()
        is_too_long = len(tables) + len(offsets) > 2 * self._pipelines[direction].list_tokens
        if is_repeated or not is_there or is_too_long:
            return None
        return _Listed(direction, total, len(plans), listable, step, moves, tables, offsets)

    def _listable(self, name: str, step: int, direction: Direction) -> _Listable | None:
        """None: moves between this pool and blocks of so many tokens cannot be listed."""
        pool, layout, size = self._pools.get(name), self._layout, self._format.chunk_tokens
        blocks, remainder = divmod(layout.blocks * layout.block_tokens, step)
        if pool is None or remainder or size % step or (self._format.kind == "blocks" and step != layout.block_tokens):
            return None
        path = self._copy_paths.choose(direction, self.run_bytes, may_stage=True, can_drive=self._can_drive)
        if installed_kernels() is None or (path != "direct" and not pool.is_on_device):
            return None
        aligned = math.lcm(self._kernel.aligned, self._format.itemsize)
        pool_place = pool.bytes.data_ptr(), pool.bytes.numel()
        place = array("q", (size, step, blocks, *pool_place, self._format.nbytes, aligned))
        programs = _PROGRAMS_ON_DEVICE if pool.is_on_device else _PROGRAMS_ON_BUS[direction]
        known = self._pipelines[direction].driver
        device = known + array("q", (programs,)) if known else _NOTHING
        written = (blocks + 7) // 8 if direction == "load" else 0
        return _Listable(pool, (name, self._format.nbytes), place, written, programs, device)

    def _submit(self, listed: _Listed, steps: Sequence[Sequence[Span]]) -> list[CopyEvent] | None:
        """One event for each step of each plan. None, and nothing has begun: something must be looked at more closely.
        Without steps, only whether that is so."""
        with self._range(f"kv {listed.direction}: {listed.tokens} tokens"):
            return self._list(listed, steps)

    def _list(self, listed: _Listed, steps: Sequence[Sequence[Span]]) -> list[CopyEvent] | None:
        kernels, listable, pipeline = installed_kernels(), listed.listable, self._pipelines[listed.direction]
        assert kernels is not None, "see _listable"
        # Before anything is launched: a limit on locked memory must not leave half a plan behind.
        listable.pool.prepare(listed.offsets, listable.places[1])
        count = len(listed.tables) + len(listed.offsets)
        at, host, on_device = pipeline.room(count)
        device, events = listable.device if steps else _NOTHING, list[LentEvent]()
        call, planes, written = array("q", (pipeline.kernels.current(), on_device)), array("q"), array("B")
        written.frombytes(bytes(listable.written))
        if device:
            events = pipeline.lend(listed.requests * len(steps))
            call.fromlist([event.handle for event in events])
            for spans in steps:
                for first, planes_count, step in spans:
                    planes.extend((first, planes_count, step, 0))
                planes[-1] = 1
        arguments: list[int] = []
        for numbers in (listable.place, listed.moves, listed.tables, listed.offsets, written, device, planes, call):
            if numbers is device:
                arguments += (host, 8 * count)
            address, length = numbers.buffer_info()
            arguments += (address, length * numbers.itemsize)
        try:
            answer = kernels.invoke("submit", arguments)
            if answer > 0:
                raise CopyFailed(f"the driver refuses: CUresult {answer}")
        except BaseException:
            pipeline.end().wait()  # the caller will release the memory that the rest is still copied to
            raise
        if answer == OTHER:
            return None
        if not steps:
            return []
        pipeline.has_filled(count, events)
        return list(events) if device else self._launch_listed(listed, steps, at, pipeline)

    def _launch_listed(
        self, listed: _Listed, steps: Sequence[Sequence[Span]], at: int, pipeline: "_KernelPipeline"
    ) -> list[CopyEvent]:
        """Where C does not: on devices without CUDA's driver."""
        listings, events = list(listed.listings(at, self._format.chunk_tokens)), list[CopyEvent]()
        with self._enqueuing(pipeline):
            pipeline.copy_list(at)
            with pipeline.kernels.running():
                for spans in steps:
                    for listing, ends in listings:
                        for span in spans:
                            programs, to_engine = listed.listable.programs, listed.direction == "load"
                            pipeline.launch(listing, 0, span, programs, to_engine=to_engine)
                        if ends:
                            events.append(pipeline.end())
        return events

    def _move(self, checked: _Checked, steps: Sequence[Sequence[Span]]) -> list[CopyEvent]:
        """One event for each step: the planes that have been moved when it completes."""
        pipeline, to_engine = self._pipelines[checked.direction], checked.direction == "load"
        events: list[CopyEvent] = []
        uploaded = -1
        lists: Listing | None = None
        with self._range(f"kv {checked.direction}: {checked.tokens} tokens"), self._enqueuing(pipeline):
            for spans in steps:
                for number, groups in enumerate(checked.launches):
                    if number != uploaded:  # most plans are one launch, whose lists serve every layer
                        uploaded, lists = number, self._upload(groups, checked, pipeline)
                    self._launch(groups, lists, checked, spans, pipeline, to_engine=to_engine)
                events.append(pipeline.end())
        return events

    @contextmanager
    def _enqueuing(self, pipeline: "_KernelPipeline") -> Iterator[None]:
        pipeline.begin()
        try:
            yield
        except BaseException as error:
            pipeline.end().wait()  # the caller will release the memory that the rest is still copied to
            if isinstance(error, torch.OutOfMemoryError):
                raise no_buffers(error) from None
            raise

    def _launches(self, table: CopyTable, direction: Direction) -> Iterator[list[_Group]]:
        """The copies chunk by chunk, as many chunks at a time as the lists of tokens hold."""
        block = self._layout.block_tokens
        in_blocks = (table.first_slot % block == 0) & (table.tokens % block == 0)
        bounds = table.starts.tolist()
        groups: list[_Group] = []
        start = 0
        for extent, first, end in zip(table.extents, bounds, bounds[1:], strict=False):
            tokens = int(table.tokens[first:end].sum())
            if start + tokens > self._pipelines[direction].list_tokens:
                yield groups
                groups, start = [], 0
            is_on_device = self._pools[extent.pool].is_on_device
            programs = _PROGRAMS_ON_DEVICE if is_on_device else _PROGRAMS_ON_BUS[direction]
            copy_path = self._copy_path(extent, tokens, direction, is_in_blocks=bool(in_blocks[first:end].all()))
            groups.append(_Group(extent, copy_path, programs, first, end, start, tokens))
            start += tokens
        if groups:
            yield groups

    def _copy_path(self, extent: HostExtent, tokens: int, direction: Direction, *, is_in_blocks: bool) -> CopyPath:
        if self._pools[extent.pool].is_on_device:
            return "direct"
        chunk = self._format.chunk_tokens
        # A load may copy more of a chunk than is needed; a store would overwrite the rest of it.
        may_stage = 2 * tokens > chunk if direction == "load" else tokens == chunk
        can_drive = self._can_drive and is_in_blocks
        return self._copy_paths.choose(direction, self.run_bytes, may_stage=may_stage, can_drive=can_drive)

    def _upload(self, groups: list[_Group], checked: _Checked, pipeline: "_KernelPipeline") -> Listing | None:
        """The lists of tokens on the device; None if they are not needed."""
        if all(group.copy_path == "driver" for group in groups):
            return None
        slots, rows = self._lists(groups, checked)
        at = pipeline.upload(np.concatenate((slots, rows)))
        return Listing(len(slots), at, at + len(slots))

    def _launch(
        self,
        groups: list[_Group],
        lists: Listing | None,
        checked: _Checked,
        spans: Sequence[Span],
        pipeline: "_KernelPipeline",
        *,
        to_engine: bool,
    ) -> None:
        """Chunks side by side that take the same path are one launch, except through the ring."""
        for (copy_path, programs), run in groupby(groups, lambda group: (group.copy_path, group.programs)):
            adjacent = list(run)
            if lists is None or copy_path == "driver":
                self._copy_by_driver(adjacent, checked, spans, pipeline, to_engine=to_engine)
            elif copy_path == "direct":
                tokens = lists.part(adjacent[0].start, adjacent[-1].start + adjacent[-1].tokens)
                with pipeline.kernels.running():
                    for span in spans:
                        pipeline.launch(tokens, 0, span, programs, to_engine=to_engine)
            else:
                for group in adjacent:
                    tokens = lists.part(group.start, group.start + group.tokens)
                    pipeline.staged(tokens, checked.chunks[group.extent], spans, to_engine=to_engine)

    def _lists(self, groups: Sequence[_Group], checked: _Checked) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each token's slot, and the place of its row in the chunk's first plane: an address, or an offset in bytes if
        the chunk goes through the ring.
        """
        table, row = checked.table, self._kernel.row_bytes
        copies = slice(groups[0].first, groups[-1].end)
        tokens = table.tokens[copies]
        within_copy = _indexes_within(tokens)
        slots = np.repeat(table.first_slot[copies], tokens) + within_copy
        first_rows = table.first_token[copies] * row + self._chunk_addresses(groups, checked)
        return slots, np.repeat(first_rows, tokens) + within_copy * row

    def _chunk_addresses(self, groups: Sequence[_Group], checked: _Checked) -> NDArray[np.int64]:
        """[copies]: the address of each copy's chunk; 0 for chunks that go through the ring."""
        addresses = [0 if group.copy_path == "staged" else checked.chunks[group.extent].data_ptr() for group in groups]
        return np.repeat(np.array(addresses, np.int64), [group.end - group.first for group in groups])

    def _copy_by_driver(
        self,
        groups: Sequence[_Group],
        checked: _Checked,
        spans: Sequence[Span],
        pipeline: "_KernelPipeline",
        *,
        to_engine: bool,
    ) -> None:
        """Block by block of every plane, by the driver's batched copies."""
        table, size, row = checked.table, self._layout.block_tokens, self._kernel.row_bytes
        copies = slice(groups[0].first, groups[-1].end)
        blocks = table.tokens[copies] // size
        within_copy = _indexes_within(blocks)
        block = np.repeat(table.first_slot[copies] // size, blocks) + within_copy
        first_rows = table.first_token[copies] * row + self._chunk_addresses(groups, checked)
        in_chunk = np.repeat(first_rows, blocks) + within_copy * (size * row)
        for first, count, step in spans:
            numbers = np.arange(first, first + count * step, step)[:, None]
            planes = self._kernel.host_planes[numbers[:, 0]]
            engine = (planes[:, :1] + block * planes[:, 1:2]).ravel()
            host = (numbers * self._kernel.plane_bytes + in_chunk).ravel()
            to, origin = (engine, host) if to_engine else (host, engine)
            with pipeline.kernels.running():
                driver.copy_runs(to, origin, size * row, self._device)


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
        self._addresses: list[tuple[int, int]] = []  # of each, here and on the device
        self._on_device: list[torch.Tensor] = []
        self._used: list[CopyEvent] = []
        self._list = self._filled = 0
        self._has_launched = False  # whether a kernel that reads the list was launched after the last event
        self._spare_events: list[tuple[CopyEvent, int]] = []
        (self.edge,) = self.lend(1)
        """For what the engine has enqueued, where C waits for that."""
        self.driver = array("q")
        """`Device` in csrc/plans.c without its last field; empty: there is none that C can ask."""
        self._copies_are_last = False  # True once a store has gone through the ring
        for _ in range(2):
            self._add_list()

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

    def lend(self, count: int) -> list[LentEvent]:
        """Events for C to record."""
        spare = self._spare_events
        return [LentEvent(*(spare.pop() if spare else self.kernels.make_event()), spare) for _ in range(count)]

    def room(self, count: int) -> tuple[int, int, int]:
        """Where in the list so many 64-bit numbers go that nothing reads yet: position, and address here and there."""
        if self._filled + count > 2 * self.list_tokens:
            if self._has_launched:
                self._used[self._list] = self.kernels.record()
            self._list, self._filled = self._unused_list(), 0
        host, on_device = self._addresses[self._list]
        return self._filled, host + 8 * self._filled, on_device + 8 * self._filled

    def has_filled(self, count: int, events: Sequence[CopyEvent] = ()) -> None:
        """So many numbers have come. events: after the last of them the list is no longer read."""
        self._filled += count
        if events:
            self._used[self._list], self._has_launched = events[-1], False

    def copy_list(self, at: int) -> None:
        """Have on the device what is in the list from there on, until the next launch has read it."""
        host_list, device_list = self._lists[self._list], self._on_device[self._list]
        if device_list is not host_list:
            self.kernels.copy(device_list[at : self._filled], host_list[at : self._filled])

    def upload(self, numbers: NDArray[np.int64]) -> int:
        """Have these numbers on the device until the next launch has read them. Returns where in the list."""
        at, _, _ = self.room(len(numbers))
        self._lists[self._list].numpy()[at : at + len(numbers)] = numbers
        self.has_filled(len(numbers))
        self.copy_list(at)
        return at

    def _unused_list(self) -> int:
        """Another list that nothing reads any more. Allocates one rather than wait and stall a step of the engine's."""
        for number, event in enumerate(self._used):
            if number != self._list and event.done():
                return number
        with buffers_for_copies():
            self._add_list()
        self.kernels.follow_current()  # the memory's previous user may still access it
        return len(self._lists) - 1

    def _add_list(self) -> None:
        host_list = host_buffer(2 * self.list_tokens, dtype=torch.int64, device=self._device)
        device_list = torch.empty_like(host_list, device=self._device) if self.kernels.handle else host_list
        self._lists.append(host_list)
        self._addresses.append((host_list.data_ptr(), device_list.data_ptr()))
        self._on_device.append(device_list)
        self._used.append(DoneEvent())

    def staged(self, tokens: Listing, chunk: torch.Tensor, spans: Sequence[Span], *, to_engine: bool) -> None:
        """By way of the ring, some planes at a time that lie side by side in the chunk."""
        ring, plane_bytes = self.make_ring(), self._kernel.plane_bytes
        for first, count in self._pieces(spans):
            turn = self._turn = (self._turn + 1) % _RING_SLOTS
            slot = ring[turn][: count * plane_bytes]
            piece = chunk[first * plane_bytes : (first + count) * plane_bytes]
            # The kernel counts planes from the chunk's first, which would lie that far before the slot.
            base = slot.data_ptr() - first * plane_bytes
            if to_engine:
                self._copies.follow(self._free[turn])
                self._copies.copy(slot, piece)
                self.kernels.follow(self._copies.record())
                with self.kernels.running():
                    self.launch(tokens, base, (first, count, 1), _PROGRAMS_ON_DEVICE, to_engine=True)
                self._free[turn] = self.kernels.record()
            else:
                self.kernels.follow(self._free[turn])
                with self.kernels.running():
                    self.launch(tokens, base, (first, count, 1), _PROGRAMS_ON_DEVICE, to_engine=False)
                self._copies.follow(self.kernels.record())
                self._copies.copy(piece, slot)
                self._free[turn] = self._copies.record()
                self._copies_are_last = True

    def _pieces(self, spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
        """The first plane and the number of planes of each piece."""
        for start, planes, step in spans:
            at_once = self._planes_per_slot if step == 1 else 1
            for number in range(0, planes, at_once):
                yield start + number * step, min(at_once, planes - number)

    def launch(self, tokens: Listing, base: int, span: Span, programs: int, *, to_engine: bool) -> None:
        """While the kernels' queue is running. base: 0 for chunks that the kernel reads or writes where they are; see
        `RowKernel.move`."""
        numbers = self._on_device[self._list]
        self._kernel.move(
            numbers, numbers, base=base, span=span, to_engine=to_engine, programs=programs, listing=tokens
        )
        self._has_launched = True

    def make_ring(self) -> torch.Tensor:
        """Its memory is allocated on first use."""
        if self._ring is None:
            nbytes = -(-self._planes_per_slot * self._kernel.plane_bytes // 256) * 256
            self._ring = torch.empty((_RING_SLOTS, nbytes), dtype=torch.uint8, device=self._device)
            # This memory's previous user may still be working on it, in its own queue. To have followed that queue when
            # the copy began does not suffice: a ring may be made ahead of the first copy.
            self.kernels.follow_current()
            self._free = [self.kernels.record()] * _RING_SLOTS
        return self._ring
