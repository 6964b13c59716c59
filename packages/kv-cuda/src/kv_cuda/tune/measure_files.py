"""Measures each path from a directory's files to this device, against plain copies and the host alone."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from kv_core.errors import ConfigError
from kv_core.hashing import checksum_of
from kv_core.outcome import Loaded
from kv_core.transfer import FileExtent

from kv_cuda.choose import make_copier
from kv_cuda.copy.copy_paths import Direction, FileCopyPath, FileCopyPaths
from kv_cuda.files.cufile import NoCuFile
from kv_cuda.files.direct import DirectCopier
from kv_cuda.files.host_files import PAGE_BYTES, Files, HostFiles, aligned_zeros
from kv_cuda.tune.measure import Sizes, paired_s

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
    shuffled = torch.randperm(layout.blocks, generator=torch.Generator().manual_seed(7))
    table = shuffled[: sizes.chunks * sizes.chunk_tokens // layout.block_tokens].tolist()
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
