"""Gather and scatter between an engine's blocks and the host pool, against memmove of the same bytes.

    python benchmarks/copy.py [--json]
    python benchmarks/copy.py --device cuda [--path DIRECTORY] [--json]      # on a GPU: see benchmarks/_copy_cuda.py

Each row moves the blocks of four chunks of 32 MiB, one chunk at a time and in a random order of blocks, and is paired
with a memmove of 32 MiB for each chunk, between buffers as large that were touched before. memmove has one thread,
torch as many as it wants: run this on a machine with nothing else to do. The memmoves are not one call because past 192
MiB or so glibc writes around the cache, almost twice as fast, and the reference would hang on the number of chunks.

The last rows store one such chunk into memory of a pool that was never used, which the pool has populated ahead, and
have beside them the same store into memory that nobody populated.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import ctypes
import mmap
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kv_core.format import ChunkFormat, Kind
from kv_core.transfer import HostExtent, TransferPlan, plan_transfer
from kv_cuda import PagedLayout, make_copier, split_parts, tiled_keys_and_values, transposed_keys
from kv_server.remote_cache import MappedPool
from kv_testing.wait import until
from kv_tiers import HostPool

from benchmarks._report import Row, paired_medians_s, parser, report

CHUNK_TOKENS = 256
LAYERS = 32
DIM = 128
CHUNK_BYTES = 32 << 20
POOL_CHUNKS = 4


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--device", default="cpu", help="cpu, or cuda where there is a GPU")
    made.add_argument("--path", default=tempfile.gettempdir(), help="where to measure files on a GPU; needs a GiB")
    arguments = made.parse_args()
    if arguments.device != "cpu":
        from benchmarks._copy_cuda import cuda_rows

        return report(list(cuda_rows(torch.device(arguments.device), Path(arguments.path))), arguments.json)
    rows = [row for case in _cases() for row in _measure(*case)]
    rows += [_fresh(is_shared) for is_shared in (False, True)]
    return report(rows, arguments.json)


def _cases() -> list[tuple[str, PagedLayout, Kind, float]]:
    def sizes(tokens: int, dtype: str) -> dict[str, int | str]:
        itemsize = getattr(torch, dtype).itemsize
        # Twice a chunk's blocks and two spare, so that a random choice of them is scattered.
        return {
            "dtype": dtype,
            "itemsize": itemsize,
            "layers": LAYERS,
            "blocks": 2 * CHUNK_TOKENS // tokens + 2,
            "block_tokens": tokens,
            "heads": CHUNK_BYTES // (LAYERS * CHUNK_TOKENS * 2 * DIM * itemsize),
            "head_dim": DIM,
        }

    def strided(tokens: int, order: str) -> PagedLayout:
        given = sizes(tokens, "bfloat16")
        row = int(given["heads"]) * DIM
        strides = {
            "apart": {"token": row, "head": DIM, "value_offset": tokens * row},
            "nhd": {"token": 2 * row, "head": 2 * DIM, "value_offset": DIM},
            "hnd": {"token": 2 * DIM, "head": 2 * tokens * DIM, "value_offset": DIM},
        }[order]
        return split_parts(order, block=2 * tokens * row, dim=1, **strides, **given)

    def cpu(dtype: str) -> PagedLayout:
        given = sizes(128, dtype)
        return transposed_keys("cpu", block=2 * 128 * int(given["heads"]) * DIM, **given)

    def amx(dtype: str) -> PagedLayout:
        given = sizes(128, dtype)
        block = 2 * 128 * int(given["heads"]) * DIM
        return tiled_keys_and_values("amx", block=block, keys=(16, 2), values=(2, 16), **given)

    return [
        ("NHD, K and V apart, 16-token blocks, bfloat16", strided(16, "apart"), "canonical", 0.9),
        ("vLLM NHD, K‖V in a head, 16-token blocks, bfloat16", strided(16, "nhd"), "canonical", 0.5),
        ("vLLM HND, K‖V in a head, 16-token blocks, bfloat16", strided(16, "hnd"), "canonical", 0.5),
        ("vLLM CPU, K transposed, 128-token blocks, float32", cpu("float32"), "canonical", 0.5),
        ("vLLM CPU, K transposed, 128-token blocks, bfloat16", cpu("bfloat16"), "canonical", 0.5),
        ("vLLM CPU with AMX, 128-token blocks, bfloat16", amx("bfloat16"), "canonical", 0.4),
        ("opaque blocks, 16-token blocks, bfloat16", strided(16, "apart"), "blocks", 0.9),
        ("opaque blocks, 128-token blocks, bfloat16", cpu("bfloat16"), "blocks", 0.9),
        # On a CPU the arithmetic costs far more than the copy; what is gained is room. The targets say so.
        ("int8, vLLM CPU, 128-token blocks, float32", cpu("float32"), "int8", 0.1),
        ("int8, vLLM CPU, 128-token blocks, bfloat16", cpu("bfloat16"), "int8", 0.1),
        ("fp8, vLLM CPU, 128-token blocks, bfloat16", cpu("bfloat16"), "fp8", 0.02),
    ]


def _format(layout: PagedLayout, kind: Kind) -> ChunkFormat:
    match kind:
        case "canonical":
            return layout.canonical_format(CHUNK_TOKENS)
        case "blocks":
            return layout.blocks_format(CHUNK_TOKENS, "bench")
        case _:
            return layout.quantised_format(kind, CHUNK_TOKENS)


def _measure(name: str, layout: PagedLayout, kind: Kind, target: float) -> list[Row]:
    # Ones: memory that was only ever read as zero would be one shared page of the kernel's.
    cache = torch.ones(LAYERS, layout.blocks, layout.page_elements, dtype=getattr(torch, layout.dtype))
    chunk_format = _format(layout, kind)
    nbytes = chunk_format.nbytes
    copier = make_copier(layout, list(cache), chunk_format)
    # Quantised chunks are counted as what they stand for: the engine's bytes are what a request waits for.
    moved = POOL_CHUNKS * CHUNK_BYTES
    pool = bytearray(b"\x01") * (POOL_CHUNKS * nbytes)
    source, target_bytes = (bytearray(b"\x01") * moved for _ in range(2))
    copier.attach("pool", memoryview(pool))
    chosen = random.Random(7)
    plans = [
        plan_transfer(
            [HostExtent("pool", number * nbytes, nbytes)],
            chosen.sample(range(layout.blocks), CHUNK_TOKENS // layout.block_tokens),
            chunk_tokens=CHUNK_TOKENS,
            block_tokens=layout.block_tokens,
            first_token=0,
            last_token=CHUNK_TOKENS,
        )
        for number in range(POOL_CHUNKS)
    ]
    there = ctypes.addressof(ctypes.c_char.from_buffer(target_bytes))
    here = ctypes.addressof(ctypes.c_char.from_buffer(source))

    def memmove() -> None:
        for number in range(POOL_CHUNKS):
            ctypes.memmove(there + number * CHUNK_BYTES, here + number * CHUNK_BYTES, CHUNK_BYTES)

    def each(move: Callable[[TransferPlan], object]) -> Callable[[], None]:
        def run() -> None:
            for plan in plans:
                move(plan)

        return run

    rows = []
    for verb, move in (("gather", copier.store), ("scatter", copier.load)):
        ours_s, memmove_s = paired_medians_s(each(move), memmove)
        ours, limit = moved / ours_s / 1e9, moved / memmove_s / 1e9
        rows.append(Row(f"{verb}: {name}", ours, "GB/s", limit, ours / limit, target, at_most=False))
    return rows


def _fresh(is_shared: bool) -> Row:
    """A store of a chunk into the first slots of a pool: what the pool populated, against what is touched by the store.

    is_shared: a server's pool, as its client sees it.
    """
    _, layout, kind, _ = _cases()[0]
    cache = torch.ones(LAYERS, layout.blocks, layout.page_elements, dtype=getattr(torch, layout.dtype))
    chunk_format = _format(layout, kind)
    copier = make_copier(layout, list(cache), chunk_format)
    blocks = random.Random(7).sample(range(layout.blocks), CHUNK_TOKENS // layout.block_tokens)
    sizes = {"chunk_tokens": CHUNK_TOKENS, "block_tokens": layout.block_tokens}
    plan = plan_transfer([HostExtent("pool", 0, CHUNK_BYTES)], blocks, first_token=0, last_token=CHUNK_TOKENS, **sizes)

    def store_s(view: memoryview) -> float:
        copier.attach("pool", view)
        began = time.perf_counter()
        copier.store(plan)
        took_s = time.perf_counter() - began
        copier.detach("pool")
        return took_s

    def populated_s() -> float:
        make = HostPool.shared if is_shared else HostPool.anonymous
        pool = make("pool", CHUNK_BYTES, POOL_CHUNKS)
        mapped = MappedPool("pool", (CHUNK_BYTES,), POOL_CHUNKS, os.dup(pool.descriptor)) if is_shared else None
        until(lambda: all(thread.name != "kv-populate" for thread in threading.enumerate()))
        took_s = store_s(pool.view if mapped is None else mapped.view)
        del mapped
        pool.close()
        return took_s

    def touched_s() -> float:
        nbytes = POOL_CHUNKS * CHUNK_BYTES
        if is_shared:
            file = os.memfd_create("pool")
            os.ftruncate(file, nbytes)
            memory = mmap.mmap(file, nbytes)
            os.close(file)
        else:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        return store_s(memoryview(memory))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as an engine on a CPU leaves one for it
    ours, theirs = [], []
    for _ in range(9):
        ours.append(populated_s() * 1e3)
        theirs.append(touched_s() * 1e3)
    torch.set_num_threads(threads)
    value, limit = statistics.median(ours), statistics.median(theirs)
    where = "a server's pool" if is_shared else "a pool"
    name = f"one thread's store of 32 MiB into fresh memory of {where}"
    return Row(name, value, "ms", limit, value / limit, 0.9, at_most=True)


if __name__ == "__main__":
    sys.exit(main())
