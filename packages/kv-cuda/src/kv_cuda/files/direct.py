"""Chunks from a tier's files to the engine's blocks: the direct path, and the staged path as its fallback.

    direct   cuFile reads the bytes into a ring in the device's memory; their checksum is computed there
    staged   the system reads them into a ring in pinned host memory; the host computes the checksum

In both, one half of the ring is filled by the files while the other is scattered by the group's own copier, for which a
ring is a pool like any other. Bytes are scattered only after their checksum has been verified (docs/adr/0007).

The direct path is used if cuFile is available, unless it was measured to be slower (`kv bench copy --file`). Chunks
that it does not deliver completely go through the staged path; if that succeeds, this copier does not use the direct
path again and logs that once. Bytes that both paths read and found wrong are damaged; a failed read says nothing about
the bytes.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from kv_core.device import CopyEvent
from kv_core.errors import CopyFailed, InputError
from kv_core.format import ChunkFormat
from kv_core.hashing import checksum_of
from kv_core.log import limited_logger
from kv_core.outcome import Damaged, Loaded, LoadOutcome, ReadFailed
from kv_core.transfer import Copy, FileExtent, HostExtent, TransferPlan, plan_transfer

from kv_cuda.choose import BoundCopier, make_copier
from kv_cuda.copy.copy_paths import FileCopyPaths
from kv_cuda.copy.streams import DoneEvent, make_queue
from kv_cuda.files.cufile import NoCuFile, find_cufile
from kv_cuda.files.host_files import PAGE_BYTES, Files, HostFiles, OpenFile, Transfer, aligned_zeros
from kv_cuda.layout import PagedLayout

_log = limited_logger(__name__)

_HALF_BYTES: Final = 32 << 20
_MAX_CHUNKS_IN_HALF: Final = 16
_MAX_OPEN_FILES: Final = 128


def make_direct_copier(
    layout: PagedLayout, tensors: Sequence[torch.Tensor], chunk_format: ChunkFormat, directory: Path
) -> "DirectCopier":
    """A direct copier for files of this directory, with its own group copier, so that a thread may use it alongside the
    engine's.

    Raises:
        InputError: layout, tensors and format do not fit together.
    """
    device = tensors[0].device
    copier = make_copier(layout, tensors, chunk_format)
    copy_paths = FileCopyPaths.of_device(device)
    return DirectCopier(copier, chunk_format, device, find_cufile(device, directory), copy_paths=copy_paths)


@dataclass(frozen=True, slots=True)
class Carried:
    """The result of a load. The files may be released at once.

    outcomes: the outcome of each chunk; `Damaged` ones should be discarded, those whose read failed kept.
    event: complete when the blocks of the loaded chunks hold their bytes.
    """

    outcomes: list[LoadOutcome]
    event: CopyEvent


@dataclass(frozen=True, slots=True)
class _DirectChunk:
    """One chunk of a call.

    index: its index among the given extents.
    file: its place.
    copies: its copies; their extent is replaced by one in the ring.
    """

    index: int
    file: FileExtent
    copies: tuple[Copy, ...]


_Failures = dict[int, Damaged | ReadFailed]


class DirectCopier:
    """Copies from files to the blocks of one group of layers. Calls block as long as file I/O does: make them on a
    thread that may wait, one by one.

    Loads run after everything in the calling thread's current stream at the time of the call.
    """

    def __init__(
        self,
        copier: BoundCopier,
        chunk_format: ChunkFormat,
        device: torch.device,
        cufile: Files | NoCuFile,
        *,
        copy_paths: FileCopyPaths | None = None,
    ) -> None:
        """
        copier: the group's copier, for that format and device. No other thread may use it during a call.
        cufile: the result of `find_cufile`, or any `Files` for memory of the device.
        """
        self._copier, self._format = copier, chunk_format
        self._copy_paths = FileCopyPaths() if copy_paths is None else copy_paths
        self._staged = self._staged_ring()
        self._direct = self._direct_ring(cufile, device)

    @property
    def has_direct_path(self) -> bool:
        """Whether the direct path exists and has not failed where the staged path succeeded."""
        return self._direct is not None

    def load(
        self,
        files: Sequence[FileExtent],
        block_ids: Sequence[int],
        *,
        block_tokens: int,
        first_token: int,
        last_token: int,
    ) -> Carried:
        """Load the prompt's tokens `first_token … last_token` (excluding the last) into their slots.

        files: one for each chunk that these tokens belong to. A chunk is read whole even if only some of its tokens are
            wanted.
        block_ids, block_tokens: as for `plan_transfer`.

        Raises:
            InputError: files, blocks and tokens do not match. Some of them may have been copied.
            ConfigError: the system does not let this process lock memory for the staged path.
            CopyFailed: the device failed.
        """
        size, nbytes = self._format.chunk_tokens, self._format.nbytes
        numbers = range(
            first_token // size, -(-last_token // size) if last_token > first_token else first_token // size
        )
        if len(files) != len(numbers):
            raise InputError(f"{len(files)} files for tokens {first_token} to {last_token}, in {len(numbers)} chunks")
        chunks = []
        for index, (number, file) in enumerate(zip(numbers, files, strict=True)):
            if file.nbytes != nbytes:
                raise InputError(f"an extent of {file.nbytes} bytes for chunks of {nbytes}")
            plan = plan_transfer(
                [HostExtent("", 0, nbytes)],
                block_ids,
                chunk_tokens=size,
                block_tokens=block_tokens,
                first_token=max(first_token, number * size),
                last_token=min(last_token, (number + 1) * size),
                extents_from_chunk=number,
            )
            chunks.append(_DirectChunk(index, file, plan.copies))
        events: list[CopyEvent] = [DoneEvent()]
        failed = self._load_all(chunks, events)
        outcomes: list[LoadOutcome] = [failed.get(chunk.index, Loaded(chunk.file.nbytes)) for chunk in chunks]
        # All events are in one queue, so the last one completes last.
        return Carried(outcomes, events[-1])

    def close(self) -> None:
        """Wait for transfers in flight and release rings and files."""
        for ring in (self._staged, self._direct):
            if ring is not None:
                ring.close()
        self._direct = None

    def _staged_ring(self) -> "_Ring":
        nbytes = self._format.nbytes

        def sums(rows: torch.Tensor) -> list[bytes]:
            return [checksum_of(row[:nbytes].numpy().data) for row in rows]

        ring = _Ring("files, staged", HostFiles(), self._copier, self._format, device=torch.device("cpu"), sums=sums)
        self._copier.attach(ring.name, ring.memory.numpy().data)
        return ring

    def _direct_ring(self, cufile: Files | NoCuFile, device: torch.device) -> "_Ring | None":
        if isinstance(cufile, NoCuFile):
            _log.info("files are staged through host memory: %s", cufile.why)
            return None
        try:
            from kv_cuda.copy.xxh3 import ChunkSums

            sums = ChunkSums(device, self._format.nbytes, _half_chunks(self._format)).of
            ring = _Ring("files, direct", cufile, self._copier, self._format, device=device, sums=sums)
            ring.warm_up()
        except (ImportError, InputError, OSError, torch.OutOfMemoryError) as error:
            _log.warning("files are staged through host memory: %s", error)
            return None
        self._copier.attach_tensor(ring.name, ring.memory)
        _log.info("files are read straight into the GPU, by cuFile")
        return ring

    def _load_all(self, chunks: Sequence[_DirectChunk], events: list[CopyEvent]) -> _Failures:
        """Use the direct path where possible, the staged one for the rest and for failures. Returns why some failed.
        events: receives those of the scattered ones, in order."""
        failed_direct: _Failures = {}
        direct = self._direct
        remaining = list(chunks)
        if direct is not None:
            batch = [chunk for chunk in chunks if self._may_go_direct(chunk.file)]
            events += direct.load(batch, failed_direct)
            arrived = {chunk.index for chunk in batch} - failed_direct.keys()
            remaining = [chunk for chunk in chunks if chunk.index not in arrived]
        failed: _Failures = {}
        events += self._staged.load(remaining, failed)
        direct_faults = [failure.reason for index, failure in failed_direct.items() if index not in failed]
        if direct is not None and direct_faults:
            _log.warning(
                "files are staged through host memory from now on, as the direct path failed: %s", direct_faults[0]
            )
            self._direct = None
            direct.close()
        return failed

    def _may_go_direct(self, file: FileExtent) -> bool:
        return file.offset % PAGE_BYTES == 0 and self._copy_paths.takes_direct(file.path)


class _Ring:
    """Two halves of memory that files fill and the copier empties in turn."""

    def __init__(
        self,
        name: str,
        files: Files,
        copier: BoundCopier,
        chunk_format: ChunkFormat,
        *,
        device: torch.device,
        sums: Callable[[torch.Tensor], list[bytes]],
    ) -> None:
        """sums: the checksums of the chunks in these rows of the ring.

        Raises:
            OSError: the memory cannot be registered for file transfers.
        """
        self.name = name
        self._files, self._copier, self._format, self._sums = files, copier, chunk_format, sums
        self._half_chunks = _half_chunks(chunk_format)
        rows, row_bytes = 2 * self._half_chunks, _row_bytes(chunk_format)
        self.memory = aligned_zeros(rows * row_bytes, device)
        self._rows = self.memory.view(rows, row_bytes)
        # The memory's previous user may still access it, and file transfers do not follow the device's queues.
        queue = make_queue(device)
        queue.follow_current()
        queue.record().wait()
        files.register(self.memory)
        self._transfers: tuple[list[Transfer], list[Transfer]] = ([], [])
        self._free: list[CopyEvent] = [DoneEvent(), DoneEvent()]
        self._open: OrderedDict[tuple[str, int, int], OpenFile] = OrderedDict()

    def warm_up(self) -> None:
        """Compile the checksum's kernels now, which takes a second, rather than for the first chunk."""
        self._sums(self._rows[:1])

    def load(self, chunks: Sequence[_DirectChunk], failed: _Failures) -> list[CopyEvent]:
        """Load chunks; the events of the scattered ones, in order."""
        events = []
        halves = self._halves(chunks)
        with self._awaiting_transfers():
            for number, (half, batch) in enumerate(halves):
                self._free[half].wait()
                self._begin(half, batch)
                if number:
                    events += self._scatter(*halves[number - 1], failed)
            if halves:
                events += self._scatter(*halves[-1], failed)
        return events

    def close(self) -> None:
        self._copier.detach(self.name)  # waits for the copies
        for file in self._open.values():
            file.close()
        self._open.clear()
        with suppress(OSError):  # the memory is released anyway
            self._files.unregister(self.memory)
        self._files.close()

    def _halves(self, chunks: Sequence[_DirectChunk]) -> list[tuple[int, Sequence[_DirectChunk]]]:
        """As many chunks at a time as half the ring holds, with the half that they use."""
        step = self._half_chunks
        return [(start // step % 2, chunks[start : start + step]) for start in range(0, len(chunks), step)]

    @contextmanager
    def _awaiting_transfers(self) -> Iterator[None]:
        """No transfer outlives the call, however it ends: the files are released after it and may then be reused."""
        try:
            yield
        finally:
            for transfers in self._transfers:
                for transfer in transfers:
                    with suppress(Exception):  # whatever one raises, the next has to end too
                        transfer.wait()
                transfers.clear()

    def _begin(self, half: int, chunks: Sequence[_DirectChunk]) -> None:
        """Begin to read whole pages of every chunk into its row."""
        for row, chunk in enumerate(chunks, half * self._half_chunks):
            try:
                transfer = self._open_file(chunk.file.path).read(self._rows[row], chunk.file.offset)
            except OSError as error:
                transfer = _FailedTransfer(error)
            self._transfers[half].append(transfer)

    def _wait_for_chunks(
        self, half: int, chunks: Sequence[_DirectChunk], failed: _Failures
    ) -> list[tuple[int, _DirectChunk]]:
        """The chunks whose bytes were all moved, with their rows."""
        arrived = []
        for row, (chunk, transfer) in enumerate(
            zip(chunks, self._transfers[half], strict=True), half * self._half_chunks
        ):
            path, nbytes = chunk.file.path, chunk.file.nbytes
            try:
                moved = transfer.wait()
            except OSError as error:
                failed[chunk.index] = ReadFailed(f"{path}: {error.strerror or error}")
                continue
            if moved < nbytes:
                failed[chunk.index] = Damaged(f"{path}: {moved} of {nbytes} bytes were read")
            else:
                arrived.append((row, chunk))
        self._transfers[half].clear()
        return arrived

    def _scatter(self, half: int, chunks: Sequence[_DirectChunk], failed: _Failures) -> list[CopyEvent]:
        arrived = self._wait_for_chunks(half, chunks, failed)
        if not arrived:
            return []
        first = half * self._half_chunks
        checksums = self._sums(self._rows[first : first + len(chunks)])
        verified = []
        for row, chunk in arrived:
            if checksums[row - first] == chunk.file.checksum:
                verified.append((row, chunk))
            else:
                failed[chunk.index] = Damaged(
                    f"{chunk.file.path}: the checksum of the bytes at {chunk.file.offset} is wrong"
                )
        if not verified:
            return []
        self._free[half] = self._copier.load(self._plan(verified))
        return [self._free[half]]

    def _plan(self, rows: Sequence[tuple[int, _DirectChunk]]) -> TransferPlan:
        row_bytes, nbytes = self._rows.shape[1], self._format.nbytes
        copies = [
            replace(copy, extent=HostExtent(self.name, row * row_bytes, nbytes))
            for row, chunk in rows
            for copy in chunk.copies
        ]
        return TransferPlan(tuple(copies), self._format.chunk_tokens)

    def _open_file(self, path: str) -> OpenFile:
        """The open file: one for all its chunks, reopened when another file has replaced it."""
        status = os.stat(path)
        key = (path, status.st_dev, status.st_ino)
        file = self._open.pop(key, None) or self._files.open(path)
        self._open[key] = file
        if len(self._open) > _MAX_OPEN_FILES:  # more than a ring has chunks, so the oldest is not in use
            self._open.popitem(last=False)[1].close()
        return file


class _FailedTransfer:
    def __init__(self, error: OSError) -> None:
        self._error = error

    def wait(self) -> int:
        raise self._error


def _row_bytes(chunk_format: ChunkFormat) -> int:
    return -(-chunk_format.nbytes // PAGE_BYTES) * PAGE_BYTES


def _half_chunks(chunk_format: ChunkFormat) -> int:
    return max(1, min(_MAX_CHUNKS_IN_HALF, _HALF_BYTES // _row_bytes(chunk_format)))


@dataclass(slots=True)
class ThreadRead:
    """A read on the thread, as `kv_core.device.FileRead`."""

    outcomes: Sequence[LoadOutcome] = ()
    seconds: float = 0.0
    _ended: "Future[None]" = field(default_factory=Future)

    def done(self) -> bool:
        if self._ended.done():
            self.wait()
        return self._ended.done()

    def wait(self) -> None:
        if (error := self._ended.exception()) is not None:
            raise CopyFailed(f"reading files raised {type(error).__name__}: {error}") from error

    hold_engine = wait


class ThreadReader:
    """A direct copier on a thread, for an engine's worker, as `kv_core.device.FileReader`.

    The thread starts with the first read, makes one at a time and waits for its files, so that the engine does not. On
    a device its stream follows what the engine has enqueued when a read is requested: until then, others may use the
    blocks.
    """

    def __init__(
        self, layout: PagedLayout, tensors: Sequence[torch.Tensor], chunk_format: ChunkFormat, directory: Path
    ) -> None:
        """
        Raises:
            InputError: layout, tensors and format do not fit together.
            ConfigError: the system does not let this process lock memory for the staged path.
        """
        device = tensors[0].device
        self._copier = make_direct_copier(layout, tensors, chunk_format, directory)
        self._engines, self._own = make_queue(device), make_queue(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-direct")

    def read(
        self,
        files: Sequence[FileExtent],
        block_ids: Sequence[int],
        *,
        block_tokens: int,
        first_token: int,
        last_token: int,
    ) -> ThreadRead:
        read = ThreadRead()
        self._engines.follow_current()
        blocks_are_free = self._engines.record()

        def run() -> None:
            if read._ended.done():
                return  # the executor keeps what it had no thread for, and the blocks are others' by now
            began_s = time.monotonic()
            try:
                with self._own.running():
                    self._own.follow(blocks_are_free)
                    carried = self._copier.load(
                        files, block_ids, block_tokens=block_tokens, first_token=first_token, last_token=last_token
                    )
                    carried.event.wait()
                read.outcomes, read.seconds = carried.outcomes, time.monotonic() - began_s
                read._ended.set_result(None)
            except BaseException as error:  # noqa: BLE001  # of any family: the engine's thread reports it
                read._ended.set_exception(error)

        try:
            self._thread.submit(run)
        except RuntimeError as error:  # the system has no more threads for us
            read._ended.set_exception(error)
        return read

    def close(self) -> None:
        self._thread.shutdown()
        self._copier.close()
