"""The rows of

    python benchmarks/copy.py --device cuda [--path DIRECTORY] [--json]

on a GPU: each path against one plain copy of the same bytes between pinned memory and the device, by layout, length of
run and chunk size; the kernel alone inside the device against a device copy; both paths between files and blocks
against plain reads and writes of the same bytes by the host; the checksum on the device against a device copy; and how
much a matrix product that runs all the time is slowed down by each path.
"""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from kv_core.transfer import HostExtent, plan_transfer
from kv_cuda.copy import driver
from kv_cuda.copy.copy_paths import CopyPath, CopyPaths
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.copy.plan import copy_shape
from kv_cuda.copy.rows import row_kernel
from kv_cuda.copy.xxh3 import ChunkSums
from kv_cuda.files.cufile import find_cufile
from kv_cuda.tune.measure import MeasuredCopy, Sizes, measure_copy_paths, measure_files, measure_layout, pool_to_measure

from benchmarks._report import Row

BUS_TARGET = 0.95
DEVICE_TARGET = 0.85
FILE_TARGET = 0.9
SUMS_TARGET = 0.5
MATRIX = 8192
PRODUCTS = 40
LOADS = 20


def cuda_rows(device: torch.device, directory: Path) -> Iterator[Row]:
    copy_paths: list[CopyPath] = ["direct", "staged", *(["driver"] if driver.is_available(device) else [])]
    for heads in (1, 8):  # chunks of 4 and of 32 MiB
        sizes = Sizes(heads=heads)
        for one in measure_copy_paths(device, sizes):
            yield _bus_row(one)
        for order in ("nhd", "hnd"):
            for one in measure_layout(
                device, sizes, sizes.layout(16, order), [copy_path for copy_path in copy_paths if copy_path != "driver"]
            ):
                yield _bus_row(one)
    yield from _device_rows(device)
    yield _sums_row(device)
    for file in measure_files(device, directory, find_cufile(device, directory)):
        name = f"{file.direction} files {file.copy_path}, {file.chunk_bytes >> 20} MiB, in {file.directory}"
        ratio = file.gbps / file.limit_gbps
        yield Row(name, file.gbps, "GB/s", file.limit_gbps, ratio, FILE_TARGET, at_most=False)
    for copy_path in copy_paths:
        yield _slowdown(device, copy_path)


def _bus_row(one: MeasuredCopy) -> Row:
    name = f"{one.direction} {one.copy_path}, {one.layout}, {one.chunk_bytes >> 20} MiB"
    ratio = one.gbps / one.limit_gbps
    return Row(name, one.gbps, "GB/s", one.limit_gbps, ratio, BUS_TARGET, at_most=False)


def _device_rows(device: torch.device) -> Iterator[Row]:
    """The kernel between a ring in the device's memory and the blocks, with as many programs as it likes."""
    sizes = Sizes()
    layout = sizes.layout(16)
    described = layout.canonical_format(sizes.chunk_tokens)
    cache = torch.ones((layout.layers, layout.blocks, layout.page_elements), dtype=torch.bfloat16, device=device)
    kernel = row_kernel(layout, copy_shape(layout, layout.layers, described), list(cache), described.layer_bytes)
    ring = torch.ones(described.nbytes, dtype=torch.uint8, device=device)
    beside = torch.ones_like(ring)
    slots = torch.randperm(layout.blocks, device=device)[: sizes.chunk_tokens // 16].repeat_interleave(16) * 16
    slots = slots + torch.arange(sizes.chunk_tokens, device=device) % 16
    rows = torch.arange(sizes.chunk_tokens, device=device) * kernel.row_bytes

    def move(to_engine: bool) -> Callable[[], None]:
        span = (0, kernel.plane_count, 1)
        return lambda: kernel.move(slots, rows, base=ring.data_ptr(), span=span, to_engine=to_engine, programs=1 << 16)

    limit_s = _on_device_s(lambda: beside.copy_(ring))
    for name, to_engine in (("scatter", True), ("gather", False)):
        ours_s = _on_device_s(move(to_engine))
        # Each byte is read once and written once.
        ours, limit = (2 * described.nbytes / seconds / 1e9 for seconds in (ours_s, limit_s))
        yield Row(f"{name} inside the device, 32 MiB", ours, "GB/s", limit, ours / limit, DEVICE_TARGET, at_most=False)


def _sums_row(device: torch.device) -> Row:
    """The checksums of eight chunks of 32 MiB, which are read once, and a sixteenth of them written and read again."""
    chunks = torch.ones((8, 32 << 20), dtype=torch.uint8, device=device)
    beside = torch.ones_like(chunks)
    sums = ChunkSums(device, chunks.shape[1], len(chunks))
    ours_s, limit_s = _on_device_s(lambda: sums.of(chunks)), _on_device_s(lambda: beside.copy_(chunks))
    ours, limit = chunks.numel() / ours_s / 1e9, 2 * chunks.numel() / limit_s / 1e9
    return Row("checksums, 8 × 32 MiB", ours, "GB/s", limit, ours / limit, SUMS_TARGET, at_most=False)


def _on_device_s(run: Callable[[], object]) -> float:
    times = []
    for number in range(22):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _slowdown(device: torch.device, copy_path: CopyPath) -> Row:
    """Seconds of matrix products with chunks being loaded all the while, against the same products alone."""
    sizes = Sizes()
    layout = sizes.layout(16)
    described = layout.canonical_format(sizes.chunk_tokens)
    cache = torch.ones((layout.layers, layout.blocks, layout.page_elements), dtype=torch.bfloat16, device=device)
    pool = pool_to_measure(sizes.chunks * described.nbytes)
    only = ((0, copy_path),)
    copier = GpuCopier(layout, list(cache), described, copy_paths=CopyPaths(load=only, store=only))
    copier.attach("pool", pool.numpy().data)
    table = torch.randperm(layout.blocks)[: sizes.chunks * sizes.chunk_tokens // 16].tolist()
    plan = plan_transfer(
        [HostExtent("pool", number * described.nbytes, described.nbytes) for number in range(sizes.chunks)],
        table,
        chunk_tokens=sizes.chunk_tokens,
        block_tokens=16,
        first_token=0,
        last_token=sizes.chunks * sizes.chunk_tokens,
    )
    left = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=device)
    product, beside_stream = torch.empty_like(left), torch.cuda.Stream(device)

    def products(loads: int) -> float:
        """Seconds on the device from the first product to the last. The loads are enqueued while it computes."""
        torch.cuda.synchronize(device)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(PRODUCTS):
            torch.matmul(left, left, out=product)
        ended.record()
        # A load follows the current stream, and these are not to wait for the products.
        with torch.cuda.stream(beside_stream):
            events = [copier.load(plan) for _ in range(loads)]
        ended.synchronize()
        for event in events:
            event.wait()
        return begun.elapsed_time(ended) / 1e3

    alone, beside = [], []
    for number in range(7):
        for kept, loads in ((alone, 0), (beside, LOADS)):
            seconds = products(loads)
            if number >= 2:
                kept.append(seconds)
    ours, limit = statistics.median(beside), statistics.median(alone)
    copier.detach("pool")
    return Row(
        f"{PRODUCTS} products of {MATRIX}² beside {LOADS} {copy_path} loads",
        ours * 1e3,
        "ms",
        limit * 1e3,
        ours / limit,
        1.1,
        True,
    )
