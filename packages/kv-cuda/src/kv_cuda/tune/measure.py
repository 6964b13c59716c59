"""Measures the throughput of each path on this device, in the same run as its limit: the bus, or the files alone."""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from kv_core.errors import ConfigError
from kv_core.hashing import checksum_of
from kv_core.outcome import Loaded
from kv_core.transfer import FileExtent, HostExtent, TransferPlan, plan_transfer

from kv_cuda.choose import make_copier
from kv_cuda.copy import driver
from kv_cuda.copy.copy_paths import CopyPath, CopyPaths, Direction, FileCopyPath, FileCopyPaths, fastest
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.files.cufile import NoCuFile
from kv_cuda.files.direct import DirectCopier
from kv_cuda.files.host_files import PAGE_BYTES, Files, HostFiles, aligned_zeros
from kv_cuda.layout import PagedLayout, split_parts

_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class MeasuredCopy:
    """One copy path in one direction, as medians.

    layout: the layout's name.
    run_bytes: length of a contiguous run of bytes.
    gbps: GB/s.
    limit_gbps: GB/s of a plain copy of the same bytes, pinned memory ↔ device.
    """

    layout: str
    direction: Direction
    copy_path: CopyPath
    run_bytes: int
    chunk_bytes: int
    gbps: float
    limit_gbps: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: a cache in bfloat16 with 128 elements per head.

    chunks: chunks moved in one call.
    block_tokens: tokens in a block; each is measured.
    """

    layers: int = 32
    heads: int = 8
    chunk_tokens: int = 256
    chunks: int = 4
    block_tokens: tuple[int, ...] = (1, 4, 16, 64, 256)

    def layout(self, block_tokens: int, order: str = "apart") -> PagedLayout:
        """order: `apart` (a block's K, then its V), or vLLM's `nhd` and `hnd` (K and V side by side in each head)."""
        dim = 128
        row = self.heads * dim
        strides = {
            "apart": {"token": row, "head": dim, "value_offset": block_tokens * row},
            "nhd": {"token": 2 * row, "head": 2 * dim, "value_offset": dim},
            "hnd": {"token": 2 * dim, "head": 2 * block_tokens * dim, "value_offset": dim},
        }[order]
        return split_parts(
            f"{order}, {block_tokens}-token blocks",
            block=2 * block_tokens * row,
            dim=1,
            **strides,
            dtype="bfloat16",
            itemsize=2,
            layers=self.layers,
            blocks=2 * self.chunks * self.chunk_tokens // block_tokens,
            block_tokens=block_tokens,
            heads=self.heads,
            head_dim=dim,
        )

    def shuffled_blocks(self, layout: PagedLayout) -> list[int]:
        """A block table of all chunks."""
        shuffled: list[int] = torch.randperm(layout.blocks, generator=torch.Generator().manual_seed(7)).tolist()
        return shuffled[: self.chunks * self.chunk_tokens // layout.block_tokens]


def measure_copy_paths(device: torch.device, sizes: Sizes) -> Iterator[MeasuredCopy]:
    """Every path that the device has, by length of run, as each becomes known."""
    copy_paths: list[CopyPath] = ["direct", "staged"]
    if driver.is_available(device):
        copy_paths.append("driver")
    for block_tokens in sizes.block_tokens:
        yield from measure_layout(device, sizes, sizes.layout(block_tokens), copy_paths)


def measure_layout(
    device: torch.device, sizes: Sizes, layout: PagedLayout, copy_paths: Sequence[CopyPath]
) -> Iterator[MeasuredCopy]:
    """Both directions of each path through one layout, with random blocks."""
    chunk_format = layout.canonical_format(sizes.chunk_tokens)
    cache = torch.ones((layout.layers, layout.blocks, layout.page_elements), dtype=torch.bfloat16, device=device)
    pool = pool_to_measure(sizes.chunks * chunk_format.nbytes)
    device_memory = torch.ones(sizes.chunks * chunk_format.nbytes, dtype=torch.uint8, device=device)
    plan = _plan(layout, sizes, chunk_format.nbytes)
    total_bytes = sizes.chunks * chunk_format.nbytes
    # Chunk by chunk, because the driver copies within one registration only, and a copier registers slices.
    host_chunks, device_chunks = (
        [memory[offset : offset + chunk_format.nbytes] for offset in range(0, total_bytes, chunk_format.nbytes)]
        for memory in (pool, device_memory)
    )
    for copy_path in copy_paths:
        table = ((0, copy_path),)
        copier = GpuCopier(layout, list(cache), chunk_format, copy_paths=CopyPaths(load=table, store=table))
        copier.attach("pool", pool.numpy().data)
        moves: list[tuple[Direction, Callable[[TransferPlan], object], list[torch.Tensor], list[torch.Tensor]]] = [
            ("load", lambda plan, copier=copier: copier.load(plan).wait(), device_chunks, host_chunks),  # type: ignore[misc]
            ("store", lambda plan, copier=copier: copier.store(plan).wait(), host_chunks, device_chunks),  # type: ignore[misc]
        ]
        for direction, move, to, origin in moves:
            copier_s, limit_s = paired_s(
                lambda move=move: move(plan),  # type: ignore[misc]
                lambda to=to, origin=origin: _copy(to, origin),  # type: ignore[misc]
            )
            yield MeasuredCopy(
                layout.name,
                direction,
                copy_path,
                copier.run_bytes,
                chunk_format.nbytes,
                total_bytes / copier_s / 1e9,
                total_bytes / limit_s / 1e9,
            )
        copier.detach("pool")


def copy_paths_from(measured: Sequence[MeasuredCopy]) -> CopyPaths:
    """The table that follows from the measurements."""
    tables = {}
    for direction in ("load", "store"):
        rates: dict[int, dict[CopyPath, float]] = {}
        for measurement in measured:
            if measurement.direction == direction:
                rates.setdefault(measurement.run_bytes, {})[measurement.copy_path] = measurement.gbps
        tables[direction] = fastest(rates)
    return CopyPaths(**tables)


def _plan(layout: PagedLayout, sizes: Sizes, chunk_bytes: int) -> TransferPlan:
    return plan_transfer(
        [HostExtent("pool", number * chunk_bytes, chunk_bytes) for number in range(sizes.chunks)],
        sizes.shuffled_blocks(layout),
        chunk_tokens=sizes.chunk_tokens,
        block_tokens=layout.block_tokens,
        first_token=0,
        last_token=sizes.chunks * sizes.chunk_tokens,
    )


def pool_to_measure(nbytes: int) -> torch.Tensor:
    """Mapped memory like a pool's, which a copier pins. Its pages exist already, so that creating them is not
    measured."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)


def _copy(to: Sequence[torch.Tensor], origin: Sequence[torch.Tensor]) -> None:
    for target, source in zip(to, origin, strict=True):
        target.copy_(source, non_blocking=True)
    for device in (to[0].device, origin[0].device):
        if device.type == "cuda":  # its own stream: the current device may be another GPU
            torch.cuda.current_stream(device).synchronize()


def paired_s(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Medians of two calls timed alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(_ROUNDS + 2):
        for call, samples in zip((first, second), times, strict=True):
            start = time.perf_counter()
            call()
            if round_number >= 2:
                samples.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


CHUNKS = 16
"""Number of chunks of 32 MiB, so that each half of the ring is used several times."""


@dataclass(frozen=True, slots=True)
class MeasuredFile:
    """One copy path, as medians.

    gbps: GB/s.
    limit_gbps: GB/s of the same bytes from the files to host memory, bypassing the page cache where the file
        system can, without checksum or copy.
    """

    directory: str
    direction: Direction
    copy_path: FileCopyPath
    chunk_bytes: int
    gbps: float
    limit_gbps: float


def measure_files(
    device: torch.device, directory: Path, cufile: Files | NoCuFile, sizes: Sizes | None = None
) -> Iterator[MeasuredFile]:
    """Each path that exists, as it becomes known. Temporarily needs twice the chunks' bytes of disk space there.

    Raises:
        ConfigError: nothing can be written there.
    """
    sizes = replace(Sizes(), chunks=CHUNKS) if sizes is None else sizes
    try:
        with tempfile.TemporaryDirectory(prefix="kv-bench-", dir=directory) as temporary:
            copy_paths: list[tuple[FileCopyPath, Files | NoCuFile]] = [("staged", NoCuFile("not requested", ""))]
            if not isinstance(cufile, NoCuFile):
                copy_paths.append(("direct", cufile))
            for copy_path, files in copy_paths:
                yield from _measure(device, Path(temporary) / copy_path, copy_path, files, sizes)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be measured: {error.strerror or error}") from None


def file_copy_paths_from(measured: Sequence[MeasuredFile]) -> FileCopyPaths:
    """The faster path for each directory of which both were measured."""
    rates: dict[str, dict[FileCopyPath, float]] = {}
    for measurement in measured:
        rates.setdefault(measurement.directory, {})[measurement.copy_path] = measurement.gbps
    faster = {directory: max(gbps, key=gbps.__getitem__) for directory, gbps in rates.items() if len(gbps) == 2}
    return FileCopyPaths(faster)


def _measure(
    device: torch.device, path: Path, copy_path: FileCopyPath, files: Files | NoCuFile, sizes: Sizes
) -> Iterator[MeasuredFile]:
    """Load by one path."""
    directory = str(path.parent.parent.absolute())
    layout = sizes.layout(16) if 16 in sizes.block_tokens else sizes.layout(sizes.block_tokens[0])
    chunk_format = layout.canonical_format(sizes.chunk_tokens)
    cache = torch.ones((layout.layers, layout.blocks, layout.page_elements), dtype=torch.bfloat16, device=device)
    slot = PAGE_BYTES + -(-chunk_format.nbytes // PAGE_BYTES) * PAGE_BYTES
    chunk = os.urandom(chunk_format.nbytes)
    checksum = checksum_of(memoryview(chunk))
    extents = []
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, sizes.chunks * slot)
        for offset in range(PAGE_BYTES, sizes.chunks * slot, slot):
            os.pwrite(file.fileno(), chunk, offset)
            extents.append(FileExtent(str(path), offset, chunk_format.nbytes, checksum))
        os.fsync(file.fileno())
    table = sizes.shuffled_blocks(layout)
    copier = DirectCopier(make_copier(layout, list(cache), chunk_format), chunk_format, device, files)
    plain_file = _PlainFile(path, extents, slot - PAGE_BYTES)
    try:
        copier_s, plain_s = paired_s(lambda: _load(copier, extents, table, layout.block_tokens), plain_file.read)
        if (copy_path == "direct") != copier.has_direct_path:
            return  # the path failed, which is logged: another was measured in its place
        gbps, limit_gbps = (sizes.chunks * chunk_format.nbytes / seconds / 1e9 for seconds in (copier_s, plain_s))
        yield MeasuredFile(directory, "load", copy_path, chunk_format.nbytes, gbps, limit_gbps)
    finally:
        copier.close()
        plain_file.close()


def _load(copier: DirectCopier, files: Sequence[FileExtent], table: list[int], block_tokens: int) -> None:
    last_token = len(table) * block_tokens
    carried = copier.load(files, table, block_tokens=block_tokens, first_token=0, last_token=last_token)
    carried.event.wait()
    if not all(isinstance(outcome, Loaded) for outcome in carried.outcomes):
        raise OSError("a chunk could not be read")


class _PlainFile:
    """All of the chunks' bytes at once from the file to the host."""

    def __init__(self, path: Path, extents: Sequence[FileExtent], nbytes: int) -> None:
        self._files, self._extents = HostFiles(), extents
        self._file = self._files.open(str(path))
        self._memory = aligned_zeros(len(extents) * nbytes, torch.device("cpu")).view(len(extents), nbytes)

    def read(self) -> None:
        transfers = [
            self._file.read(row, extent.offset) for row, extent in zip(self._memory, self._extents, strict=True)
        ]
        for transfer in transfers:
            transfer.wait()

    def close(self) -> None:
        self._file.close()
        self._files.close()
