"""Measures the throughput of each path on this device, against the bus in the same run."""

import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from kv_core.transfer import HostExtent, TransferPlan, plan_transfer

from kv_cuda.copy.copy_paths import CopyPath, CopyPaths, Direction, fastest
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.copy.ops import driver
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
    shuffled = torch.randperm(layout.blocks, generator=torch.Generator().manual_seed(7))
    table = shuffled[: sizes.chunks * sizes.chunk_tokens // layout.block_tokens].tolist()
    return plan_transfer(
        [HostExtent("pool", number * chunk_bytes, chunk_bytes) for number in range(sizes.chunks)],
        table,
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
