"""The tiers below the host pool against what their medium does without them.

    python benchmarks/tiers.py [--json] [--path DIRECTORY] [--layouts]

Chunks come from and go to the pages of a host pool, in batches and by two threads, as a lane moves them: the store rows
include making each chunk's header and checksum, the load rows checking them. The limits are the same bytes moved by
plain calls in the same minute, the two in turn: for a disk, O_DIRECT into one preallocated file with the same block
size and threads, and one fdatasync for every batch of writes (a store makes up to three). The tier is full, so that
every store evicts.

`--layouts` compares three ways to lay chunks out on a disk instead, which is why the disk tier is built as it is.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from unittest import mock

from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded, Stored
from kv_core.testing import key_chain
from kv_tiers import codec
from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.pool import PAGE_NBYTES, HostPool
from kv_tiers.tier import Read, Tier, TierContext, Write
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for
from kv_tiers.tiers.disk_files import File

from benchmarks._report import Row, median_s, paired_medians_s, parser, report

MIB = 1 << 20
BATCH_CHUNKS = {4: 8, 32: 4}
"""Chunks a call, by their MiB."""
THREADS = 2
FULL_CHUNKS = 100_000
FINGERPRINT = "benchmark"
FORMAT = codec.format_id(FINGERPRINT)


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--path", default=tempfile.gettempdir(), help="where to measure disks; needs 4 GiB for a while")
    made.add_argument("--layouts", action="store_true", help="compare layouts of a disk instead")
    arguments = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-tiers-", dir=arguments.path) as path:
        rows = [*pool_rows(), *disk_rows(Path(path))]
    return report(rows, arguments.json)


def pool_rows() -> list[Row]:
    """A slot of the host pool taken and given back."""
    with_slots = HostPool.anonymous("benchmark", 4 * MIB, 256)

    def alternate() -> None:
        for _ in range(1000):
            slot = with_slots.allocate()
            assert slot is not None
            with_slots.free(slot)

    value = median_s(alternate) / 1000
    with_slots.close()
    return [Row("pool allocate + free", value * 1e6, "µs", 2.0, value * 1e6 / 2.0, 1.0, True)]


def disk_rows(path: Path) -> list[Row]:
    rows = [row for chunk_mib in BATCH_CHUNKS for row in _disk_rates(path / f"rates-{chunk_mib}", chunk_mib)]
    return [*rows, *_disk_bookkeeping(path / "bookkeeping")]


class Traffic:
    """Batches of chunks between a tier and the pages of a pool."""

    def __init__(self, context: TierContext, batch_chunks: int) -> None:
        self.context = context
        self.batch_chunks = batch_chunks
        self._pool = HostPool.anonymous("benchmark", context.chunk_nbytes, THREADS * batch_chunks)
        self.pages = [
            self._pool.view[at * context.slot_bytes : (at + 1) * context.slot_bytes] for at in range(self._pool.slots)
        ]
        for number, pages in enumerate(self.pages):
            pages[:] = os.urandom(PAGE_NBYTES) * (len(pages) // PAGE_NBYTES)
            pages[:8] = number.to_bytes(8, "little")
        self._chains = (key_chain(batch_chunks, branch=f"benchmark {number}") for number in itertools.count())
        self.recent: list[list[ChunkKey]] = []

    def store(self, tier: Tier, thread: int, keys: list[ChunkKey]) -> None:
        nbytes = self.context.chunk_nbytes
        writes = []
        for key, parent, pages in zip(keys, [None, *keys], self._pages_of(thread), strict=False):
            writes.append(Write(key, parent, codec.pack_header(key, parent, pages[:nbytes], FORMAT), pages, nbytes))
        assert tier.store(writes) == [Stored()] * len(writes)

    def load(self, tier: Tier, thread: int, keys: list[ChunkKey]) -> None:
        nbytes = self.context.chunk_nbytes
        pages_of = self._pages_of(thread)
        reads = [Read(key, bytearray(256), pages, nbytes) for key, pages in zip(keys, pages_of, strict=True)]
        assert tier.load(reads) == [Loaded(nbytes)] * len(reads)
        for read in reads:
            assert codec.check(read.header, read.chunk, key=read.key, format_id=FORMAT) is None

    def fresh(self) -> list[ChunkKey]:
        return next(self._chains)

    def _pages_of(self, thread: int) -> list[memoryview]:
        return self.pages[thread * self.batch_chunks : (thread + 1) * self.batch_chunks]

    def close(self) -> None:
        for pages in self.pages:
            pages.release()
        self._pool.close()


class PlainFile:
    """What a disk does: O_DIRECT into one preallocated file."""

    def __init__(self, path: Path, slot_bytes: int, slots: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, slots * slot_bytes)
        self._slot_bytes = slot_bytes
        self._slots = slots

    def write(self, pages: list[memoryview], slot: int) -> None:
        for at, page in enumerate(pages):
            assert os.pwritev(self._fd, [page], (slot + at) % self._slots * self._slot_bytes) == len(page)
        os.fdatasync(self._fd)

    def read(self, pages: list[memoryview], slot: int) -> None:
        for at, page in enumerate(pages):
            assert os.preadv(self._fd, [page], (slot + at) % self._slots * self._slot_bytes) == len(page)

    def close(self) -> None:
        os.close(self._fd)


def _disk_rates(path: Path, chunk_mib: int) -> list[Row]:
    context = TierContext(chunk_mib * MIB, chunk_mib * MIB, FINGERPRINT)
    batch = BATCH_CHUNKS[chunk_mib]
    per_round = 2 * THREADS * batch
    slots = 2 * per_round
    path.mkdir()
    traffic = Traffic(context, batch)
    plain = PlainFile(path / "plain", context.slot_bytes, slots)
    config = DiskConfig(path=str(path / "tier"), capacity_bytes=bytes_for(context, slots))
    tier = DiskTier(config, context, LruPolicy())
    cursor = itertools.count()
    with ThreadPoolExecutor(THREADS) as threads:

        def both(work: Callable[[int], None]) -> None:
            list(threads.map(work, range(THREADS)))

        def store(thread: int) -> None:
            for _ in range(2):
                keys = traffic.fresh()
                traffic.store(tier, thread, keys)
                kept[thread].append(keys)

        def load(thread: int) -> None:
            for keys in kept[thread][-2:]:
                traffic.load(tier, thread, keys)

        def write_plain(thread: int) -> None:
            for _ in range(2):
                plain.write(traffic._pages_of(thread), next(cursor) * batch)

        def read_plain(thread: int) -> None:
            for _ in range(2):
                plain.read(traffic._pages_of(thread), next(cursor) * batch)

        kept: list[list[list[ChunkKey]]] = [[] for _ in range(THREADS)]
        for _ in range(2):  # every slot of both written once: the first time costs more
            both(store), both(write_plain)
        nbytes = per_round * context.chunk_nbytes
        store_s, write_s = paired_medians_s(lambda: both(store), lambda: both(write_plain))
        load_s, read_s = paired_medians_s(lambda: both(load), lambda: both(read_plain))
    tier.close(), plain.close(), traffic.close()
    return [
        _rate(f"disk store, {batch} chunks of {chunk_mib} MiB a call", nbytes, store_s, write_s),
        _rate(f"disk cold load, {batch} chunks of {chunk_mib} MiB a call", nbytes, load_s, read_s),
    ]


def _rate(name: str, nbytes: int, ours_s: float, limit_s: float) -> Row:
    return Row(name, nbytes / ours_s / 1e9, "GB/s", nbytes / limit_s / 1e9, limit_s / ours_s, 0.9, False)


def _disk_bookkeeping(path: Path) -> list[Row]:
    """Of a tier full of tiny chunks. A put without its bytes: the calls that read and write files do nothing."""
    context = TierContext(PAGE_NBYTES, PAGE_NBYTES, FINGERPRINT)
    config = DiskConfig(path=str(path), capacity_bytes=bytes_for(context, FULL_CHUNKS), durability="process")
    traffic = Traffic(context, 1)
    pages = traffic.pages[0]

    def writes(chunks: int, branch: str) -> list[Write]:
        keys = key_chain(chunks, branch=branch)
        return [
            Write(key, parent, codec.pack_header(key, parent, pages, FORMAT), pages, PAGE_NBYTES)
            for key, parent in zip(keys, [None, *keys], strict=False)
        ]

    tier = DiskTier(config, context, LruPolicy())
    for number in range(FULL_CHUNKS // 50):
        tier.store(writes(50, f"fill {number}"))
    rows = []
    for chunks in (1, 8):
        batches = [writes(chunks, f"put {chunks} {number}") for number in range(2000)]
        with mock.patch.object(File, "write", lambda *_: None):
            start = time.perf_counter()
            for batch in batches:
                tier.store(batch)
            value = (time.perf_counter() - start) / (chunks * len(batches)) * 1e6
        name = f"disk put into a full tier of {FULL_CHUNKS}, without bytes, {chunks} a call"
        rows.append(Row(name, value, "µs", 20.0, value / 20.0, 1.0, True))
    tier.close()
    traffic.close()
    return rows + _disk_recovery(config, context)


def _disk_recovery(config: DiskConfig, context: TierContext) -> list[Row]:
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        tier = DiskTier(config, context, LruPolicy())
        samples.append(time.perf_counter() - start)
        found = tier.usage().chunks or 0
        tier.close()
    value = median(samples) / found * FULL_CHUNKS
    return [Row("disk index ready after a restart, 100 000 chunks", value, "s", 1.0, value, 1.0, True)]


if __name__ == "__main__":
    sys.exit(main())
