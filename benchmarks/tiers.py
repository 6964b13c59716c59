"""The tiers below the host pool against what their medium does without them.

    python benchmarks/tiers.py [--json] [--path DIRECTORY] [--layouts]

Chunks come from and go to the pages of a host pool in batches, by one thread that waits for each. The limits are the
same bytes moved by plain calls in the same minute, the two in turn: for a disk, O_DIRECT into one preallocated file
with the same block size, and one fdatasync for every batch of writes (a store makes two). The tier is full, so that
every store evicts. The rows `with checksums` add what a lane does around the tier, making each chunk's header or
checking it, and an xxh3_128 of the same bytes to the limit. The rows `encrypted` compare a lane's whole work around a
disk with `encryption_key_file` and without.

`--layouts` compares three ways to lay chunks out on a disk instead, which is why the disk tier is built as it is
(docs/adr/0013).
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Protocol
from unittest import mock

from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded, Stored, StoreOutcome
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_tiers import chunk_header
from kv_tiers.build import build_lane
from kv_tiers.encryption import KEY_BYTES
from kv_tiers.lanes.jobs import Arrival, Outgoing
from kv_tiers.pool.host_pool import PAGE_BYTES, HostPool
from kv_tiers.tier import Read, Tier, TierContext, Write
from kv_tiers.tiers.disk import DiskConfig, DiskTier
from kv_tiers.tiers.disk_chunks import bytes_for
from kv_tiers.tiers.disk_files import File

from benchmarks._remote import redis_rows
from benchmarks._report import Row, median_s, paired_medians_s, parser, report

MIB = 1 << 20
BATCH_CHUNKS = {4: 8, 32: 4}
"""Chunks a call, by their MiB."""
FULL_CHUNKS = 100_000
CALLS = 16
"""Calls at a time, where threads share the work, each of 32 MiB, as a cache makes them (`ColdConfig.batch_bytes`)."""
LAYOUT_CHUNKS = 128
LAYOUT_MIB = 4
FINGERPRINT = "benchmark"
FORMAT = chunk_header.format_id(FINGERPRINT)


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--path", default=tempfile.gettempdir(), help="where to measure disks; needs 6 GiB for a while")
    made.add_argument("--layouts", action="store_true", help="compare layouts of a disk instead")
    arguments = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-tiers-", dir=arguments.path) as path:
        directory = Path(path)
        rows = layout_rows(directory) if arguments.layouts else [*pool_rows(), *disk_rows(directory), *redis_rows()]
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
    encrypted = [
        row for chunk_mib in BATCH_CHUNKS for row in _encrypted_rates(path / f"encrypted-{chunk_mib}", chunk_mib)
    ]
    return [*rows, *encrypted, *_disk_bookkeeping(path / "bookkeeping")]


class Traffic:
    """Batches of chunks between a tier and the pages of a pool."""

    def __init__(self, chunk_bytes: int, batch_chunks: int) -> None:
        self.context = TierContext(chunk_bytes, chunk_bytes, FINGERPRINT)
        self.nbytes = chunk_bytes * batch_chunks
        self._batch_chunks = batch_chunks
        self._pool = HostPool.anonymous("benchmark", chunk_bytes, batch_chunks)
        self.pages = [self._pool.view[at * chunk_bytes : (at + 1) * chunk_bytes] for at in range(batch_chunks)]
        for pages in self.pages:
            pages[:] = os.urandom(PAGE_BYTES) * (chunk_bytes // PAGE_BYTES)
        # The checksum is over the same bytes each time, so a header made before is right for the rows without it.
        self._checksums = [checksum_of(page) for page in self.pages]
        self._numbers = itertools.count()
        self.stored: list[list[ChunkKey]] = []

    def prepare(self) -> list[Write]:
        """A batch under new keys, its headers without a pass over the bytes."""
        keys = key_chain(self._batch_chunks, branch=f"benchmark {next(self._numbers)}")
        writes = []
        for key, parent, pages, checksum in zip(keys, [None, *keys], self.pages, self._checksums, strict=False):
            header = chunk_header.pack_header(key, parent, pages, FORMAT, checksum)
            writes.append(Write(key, parent, header, pages, len(pages)))
        return writes

    def store(self, tier: Tier, writes: list[Write]) -> None:
        assert tier.store(writes) == [Stored()] * len(writes)
        self.stored.append([write.key for write in writes])

    def make_headers(self, writes: list[Write]) -> None:
        for write in writes:
            chunk_header.pack_header(write.key, write.parent, write.payload, FORMAT)

    def load(self, tier: Tier, keys: list[ChunkKey]) -> list[Read]:
        reads = [
            Read(key, bytearray(chunk_header.HEADER_BYTES), pages, len(pages))
            for key, pages in zip(keys, self.pages, strict=True)
        ]
        assert tier.load(reads) == [Loaded(len(pages)) for pages in self.pages]
        return reads

    def check(self, reads: list[Read]) -> None:
        for read in reads:
            assert chunk_header.check(read.header, read.room, key=read.key, format_id=FORMAT) is None

    def digest(self) -> None:
        for pages in self.pages:
            checksum_of(pages)

    def close(self) -> None:
        for pages in self.pages:
            pages.release()
        self._pool.close()


class PlainFile:
    """What a disk does: O_DIRECT into one preallocated file."""

    def __init__(self, path: Path, slot_bytes: int, slots: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, slots * slot_bytes)
        self._slot_bytes, self._slots = slot_bytes, slots
        self._next_write = self._next_read = 0

    def write(self, pages: list[memoryview]) -> None:
        for page in pages:
            at = self._next_write % self._slots * self._slot_bytes
            self._next_write += 1
            assert os.pwritev(self._fd, [page], at) == len(page)
        os.fdatasync(self._fd)

    def read(self, pages: list[memoryview]) -> None:
        for page in pages:
            at = self._next_read % self._slots * self._slot_bytes
            self._next_read += 1
            assert os.preadv(self._fd, [page], at) == len(page)

    def close(self) -> None:
        os.close(self._fd)


def _disk_rates(path: Path, chunk_mib: int) -> list[Row]:
    batch = BATCH_CHUNKS[chunk_mib]
    traffic = Traffic(chunk_mib * MIB, batch)
    slots = 24 * batch  # so many that the tier keeps a batch's worth ready
    path.mkdir()
    plain = PlainFile(path / "plain", chunk_mib * MIB, slots)
    config = DiskConfig(directory=str(path / "tier"), capacity_bytes=bytes_for(traffic.context, slots))
    tier = DiskTier(config, traffic.context, LruPolicy())
    for _ in range(slots // batch + 1):  # the first write to a slot costs more
        traffic.store(tier, traffic.prepare())
        plain.write(traffic.pages)
    prepared = [traffic.prepare() for _ in range(50)]

    def plain_store_with_checksums() -> None:
        traffic.digest()
        plain.write(traffic.pages)

    def store_with_checksums() -> None:
        writes = prepared.pop()
        traffic.make_headers(writes)
        traffic.store(tier, writes)

    def plain_load_with_checksums() -> None:
        plain.read(traffic.pages)
        traffic.digest()

    store = paired_medians_s(lambda: traffic.store(tier, prepared.pop()), lambda: plain.write(traffic.pages))
    checked_store = paired_medians_s(store_with_checksums, plain_store_with_checksums)
    loads = itertools.cycle(traffic.stored[-4:])  # past the page cache, so each of them is cold
    load = paired_medians_s(lambda: traffic.load(tier, next(loads)), lambda: plain.read(traffic.pages))
    checked_load = paired_medians_s(lambda: traffic.check(traffic.load(tier, next(loads))), plain_load_with_checksums)
    tier.close(), plain.close()
    shutil.rmtree(path)
    prepared.clear()
    nbytes = traffic.nbytes
    traffic.close()
    what = f"{batch} chunks of {chunk_mib} MiB a call"
    return [
        _rate(f"disk store, {what}", nbytes, store),
        _rate(f"disk store, {what}, with checksums", nbytes, checked_store),
        _rate(f"disk cold load, {what}", nbytes, load),
        _rate(f"disk cold load, {what}, with checksums", nbytes, checked_load),
    ]


def _encrypted_rates(path: Path, chunk_mib: int) -> list[Row]:
    """Through lanes as an engine has them."""
    batch = 32 // chunk_mib
    traffic = Traffic(chunk_mib * MIB, batch)
    key_file = path / "key"
    path.mkdir()
    key_file.write_bytes(os.urandom(KEY_BYTES))
    key_file.chmod(0o600)
    stored: list[list[list[ChunkKey]]] = [[], []]
    lanes = []
    for name, key in (("encrypted", {"encryption_key_file": str(key_file)}), ("plain", {})):
        capacity = bytes_for(traffic.context, 3 * CALLS * batch)
        disk = {"type": "disk", "directory": str(path / name), "capacity_bytes": capacity, **key}
        lanes.append(build_lane(disk, traffic.context, where=name)[0])

    def store(side: int) -> None:
        answers: Queue[list[StoreOutcome]] = Queue()
        for _ in range(CALLS):
            keys = [write.key for write in traffic.prepare()]
            stored[side].append(keys)
            chunks = [
                Outgoing(key, parent, pages, len(pages))
                for key, parent, pages in zip(keys, [None, *keys], traffic.pages, strict=False)
            ]
            assert lanes[side].store(chunks, answers.put)
        for _ in range(CALLS):
            assert answers.get(timeout=60) == [Stored()] * batch

    def load(side: int) -> None:
        answers: Queue[list[Arrival]] = Queue()
        for number in range(CALLS):
            keys, pages = next(loads[side]), pools[number]
            reads = [
                Read(key, bytearray(chunk_header.HEADER_BYTES), page, len(page))
                for key, page in zip(keys, pages, strict=True)
            ]
            assert lanes[side].load(reads, answers.put)
        for _ in range(CALLS):
            assert all(isinstance(arrival.outcome, Loaded) for arrival in answers.get(timeout=60))

    for _ in range(3 + 1):  # the first write to a slot costs more
        store(0), store(1)
    store_s = paired_medians_s(lambda: store(0), lambda: store(1))
    others = [Traffic(chunk_mib * MIB, batch) for _ in range(CALLS)]
    pools = [other.pages for other in others]
    loads = [itertools.cycle(keys[-2 * CALLS :]) for keys in stored]  # past the page cache, so each of them is cold
    load_s = paired_medians_s(lambda: load(0), lambda: load(1))
    for lane in lanes:
        lane.close()
    shutil.rmtree(path)
    nbytes = CALLS * traffic.nbytes
    for each in (traffic, *others):
        each.close()
    what = f"{CALLS} calls of {batch} chunks of {chunk_mib} MiB, encrypted"
    return [_rate(f"disk store, {what}", nbytes, store_s, 0.95), _rate(f"disk cold load, {what}", nbytes, load_s, 0.95)]


def _rate(name: str, nbytes: int, seconds: tuple[float, float], target: float = 0.9) -> Row:
    ours_s, limit_s = seconds
    return Row(name, nbytes / ours_s / 1e9, "GB/s", nbytes / limit_s / 1e9, limit_s / ours_s, target, False)


def _disk_bookkeeping(path: Path) -> list[Row]:
    """Of a tier full of tiny chunks. A put is one chunk's share of a store of eight, all of it but for the two system
    calls that write: which victim, which slot, the record, what is durable."""
    traffic = Traffic(PAGE_BYTES, 1)
    context, pages = traffic.context, traffic.pages[0]
    config = DiskConfig(directory=str(path), capacity_bytes=bytes_for(context, FULL_CHUNKS), durability="process")

    def writes(chunks: int, branch: str) -> list[Write]:
        keys = key_chain(chunks, branch=branch)
        return [
            Write(key, parent, chunk_header.pack_header(key, parent, pages, FORMAT), pages, PAGE_BYTES)
            for key, parent in zip(keys, [None, *keys], strict=False)
        ]

    tier = DiskTier(config, context, LruPolicy())
    for number in range(FULL_CHUNKS // 50):
        tier.store(writes(50, f"fill {number}"))
    batches = [writes(8, f"put {number}") for number in range(2000)]
    with mock.patch.object(File, "write", _nothing):
        put_s = median_s(lambda: [tier.store(batches.pop()) for _ in range(50)], repeats=39, warm_up=1)
    value = put_s / (8 * 50) * 1e6
    row = Row(
        f"disk put into {FULL_CHUNKS} chunks, a full tier, without bytes", value, "µs", 20.0, value / 20, 1.0, True
    )
    tier.close()
    batches.clear()
    traffic.close()
    return [row, *_disk_recovery(config, context)]


def _nothing(*_: object) -> None:
    """In the place of a write; cheaper than a mock, which remembers its calls."""


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


# Layouts.


class Layout(Protocol):
    """One way to keep LAYOUT_CHUNKS chunks of LAYOUT_MIB on a disk, durable after every batch."""

    def write(self, batch: int, pages: list[memoryview]) -> None: ...

    def read(self, chunk: int, page: memoryview) -> None: ...


class FileAChunk:
    """New chunks are new files; the oldest are removed. A chunk is seen under its name when it is whole."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._path = path
        self._directory = os.open(path, os.O_RDONLY)

    def write(self, batch: int, pages: list[memoryview]) -> None:
        for at, page in enumerate(pages):
            number = batch * len(pages) + at
            (self._path / str(number - LAYOUT_CHUNKS)).unlink(missing_ok=True)
            file = os.open(self._path / "new", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(file, 0, len(page))
            os.pwrite(file, page, 0)
            os.fdatasync(file)
            os.close(file)
            os.rename(self._path / "new", self._path / str(number))
        os.fsync(self._directory)

    def read(self, chunk: int, page: memoryview) -> None:
        file = os.open(self._path / str(chunk), os.O_RDONLY | os.O_DIRECT)
        os.preadv(file, [page], 0)
        os.close(file)


class AppendLog:
    """Chunks go to the end of the newest segment; the oldest segment is removed whole, with no survivors to copy."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._path = path
        self._segments: dict[int, int] = {}

    def write(self, batch: int, pages: list[memoryview]) -> None:
        for at, page in enumerate(pages):
            segment, place = divmod(batch * len(pages) + at, LAYOUT_CHUNKS // 4)
            if segment not in self._segments:
                self._segments[segment] = os.open(
                    self._path / str(segment), os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600
                )
                if (old := segment - 5) in self._segments:
                    os.close(self._segments.pop(old))
                    (self._path / str(old)).unlink()
            os.pwrite(self._segments[segment], page, place * len(page))
        os.fdatasync(self._segments[segment])

    def read(self, chunk: int, page: memoryview) -> None:
        segment, place = divmod(chunk, LAYOUT_CHUNKS // 4)
        os.preadv(self._segments[segment], [page], place * len(page))


class Slots:
    """New chunks take the places of the oldest in one preallocated file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, LAYOUT_CHUNKS * LAYOUT_MIB * MIB)

    def write(self, batch: int, pages: list[memoryview]) -> None:
        for at, page in enumerate(pages):
            os.pwrite(self._file, page, (batch * len(pages) + at) % LAYOUT_CHUNKS * len(page))
        os.fdatasync(self._file)

    def read(self, chunk: int, page: memoryview) -> None:
        os.preadv(self._file, [page], chunk % LAYOUT_CHUNKS * len(page))


def layout_rows(path: Path) -> list[Row]:
    """Every layout takes its turn in each round. `limit` is the slots' figure: the others must not beat it."""
    traffic = Traffic(LAYOUT_MIB * MIB, 8)
    slots: Layout = Slots(path / "slots")
    others: dict[str, Layout] = {"a file a chunk": FileAChunk(path / "files"), "append log": AppendLog(path / "log")}
    layouts = {"slots": slots, **others}
    store_s: dict[str, list[float]] = {name: [] for name in layouts}
    load_s: dict[str, list[float]] = {name: [] for name in layouts}
    full = LAYOUT_CHUNKS // 8
    for batch in range(4 * full):
        for name, layout in layouts.items():
            start = time.perf_counter()
            layout.write(batch, traffic.pages)
            wrote = time.perf_counter()
            for at, page in enumerate(traffic.pages):
                layout.read(max(0, batch - full // 2) * 8 + at, page)
            if batch >= 2 * full:  # all of them have replaced what they hold once
                store_s[name].append(wrote - start)
                load_s[name].append(time.perf_counter() - wrote)
    nbytes = traffic.nbytes
    rows = []
    for name in others:
        for what, seconds in (("store", store_s), ("load", load_s)):
            value, limit = nbytes / median(seconds[name]) / 1e9, nbytes / median(seconds["slots"]) / 1e9
            rows.append(Row(f"{name}, {what} of 4 MiB, against slots", value, "GB/s", limit, value / limit, 1.05, True))
    headers_s = median_s(lambda: [slots.read(at, traffic.pages[0][:PAGE_BYTES]) for at in range(64)]) / 64
    traffic.close()
    value = headers_s * FULL_CHUNKS
    rows.append(Row("restart from 100 000 headers in their slots, against 1 s", value, "s", 1.0, value, 1.0, False))
    return rows


if __name__ == "__main__":
    sys.exit(main())
