"""From the disk tier's files to an engine's blocks, by the path that leaves the host pool out."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kv_core.keys import ChunkKey
from kv_core.outcome import Damaged, Loaded, LoadOutcome, Stored
from kv_core.testing import key_chain
from kv_core.transfer import FileExtent, HostExtent, plan_transfer
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.files.cufile import NoCuFile
from kv_cuda.files.direct import DirectCopier
from kv_cuda.files.host_files import HostFiles
from kv_eviction.simple import LruPolicy
from kv_testing.layouts import TOKENS, small_caches
from kv_tiers import HostConfig, LocalCache, build_local_cache, chunk_header
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import FileLease, TierContext, Write
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for

CACHE = small_caches()["NHD, K‖V"]
CHUNK = 2 * TOKENS
FORMAT = CACHE.layout.canonical_format(CHUNK)
CONTEXT = TierContext(FORMAT.nbytes, -(-FORMAT.nbytes // 4096) * 4096, FORMAT.fingerprint)
FORM = chunk_header.format_id(FORMAT.fingerprint)
CPU = torch.device("cpu")
KEYS = key_chain(3)
TABLE = [5, 0, 3, 6, 1, 2]


@dataclass
class Bench:
    """A tier, an engine's blocks, and what carries bytes between them. path: by which."""

    root: Path
    copy_path: str

    def __post_init__(self) -> None:
        self.tier = self.open()
        self.blocks = CACHE.make()
        generator = torch.Generator().manual_seed(3)
        for layer in self.blocks:
            layer.copy_(torch.randn(layer.shape, generator=generator))
        self.computed = [layer.clone() for layer in self.blocks]
        # The test's "device" is the host, so its own files stand where cuFile would.
        files = HostFiles() if self.copy_path == "direct" else NoCuFile("this test is for the other path", "")
        self.copier = DirectCopier(GpuCopier(CACHE.layout, self.blocks, FORMAT), FORMAT, CPU, files)

    def open(self) -> DiskTier:
        config = DiskConfig(directory=str(self.root), capacity_bytes=bytes_for(CONTEXT, 4), wait_s=0)
        return DiskTier(config, CONTEXT, LruPolicy())

    def restart(self) -> None:
        self.tier.close()
        self.tier = self.open()

    def store(self, keys: list[ChunkKey]) -> list[object]:
        """As a spill stores them."""
        writes = []
        hands = GpuCopier(CACHE.layout, self.blocks, FORMAT)
        for number, (above, key) in enumerate(zip([None, *keys], keys, strict=False)):
            pages = aligned_pages(CONTEXT.slot_bytes)
            hands.attach("pool", pages)
            tokens = {"first_token": number * CHUNK, "last_token": (number + 1) * CHUNK, "extents_from_chunk": number}
            extents = [HostExtent("pool", 0, FORMAT.nbytes)]
            hands.store(plan_transfer(extents, TABLE, chunk_tokens=CHUNK, block_tokens=TOKENS, **tokens)).wait()
            hands.detach("pool")
            header = chunk_header.pack_header(key, above, pages[: FORMAT.nbytes], FORM)
            writes.append(Write(key, above, header, pages, FORMAT.nbytes))
        return list(self.tier.store(writes))

    def load(self, keys: list[ChunkKey]) -> list[LoadOutcome]:
        lease = self.tier.lease_extents(keys)
        carried = self.copier.load(
            found(lease), TABLE, block_tokens=TOKENS, first_token=0, last_token=len(keys) * CHUNK
        )
        damaged = [key for key, one in zip(keys, carried.outcomes, strict=True) if isinstance(one, Damaged)]
        if damaged:
            self.tier.discard(damaged)
        self.tier.end_lease(lease)
        carried.event.wait()
        return carried.outcomes

    def forget_blocks(self) -> None:
        for layer in self.blocks:
            layer.zero_()

    def is_back(self, blocks: list[int]) -> bool:
        return all(torch.equal(now[blocks], then[blocks]) for now, then in zip(self.blocks, self.computed, strict=True))

    def close(self) -> None:
        self.copier.close()
        self.tier.close()


def found(lease: FileLease) -> list[FileExtent]:
    return [extent for extent in lease.extents if extent is not None]


@pytest.fixture(params=["direct", "staged"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "kv", request.param)
    yield made
    made.close()


def test_blocks_come_back_after_a_restart(bench: Bench) -> None:
    assert bench.store(KEYS) == [Stored()] * 3
    bench.restart()
    bench.forget_blocks()
    assert bench.load(KEYS) == [Loaded(FORMAT.nbytes)] * 3
    assert bench.is_back(TABLE)
    assert bench.copier.has_direct_path == (bench.copy_path == "direct")


def test_damage_on_the_disk_is_a_miss_from_then_on(bench: Bench) -> None:
    bench.store(KEYS)
    (path,) = (bench.root / CONTEXT.namespace).glob("slab-*")
    lease = bench.tier.lease_extents(KEYS[1:2])
    (extent,) = lease.extents
    bench.tier.end_lease(lease)
    assert extent is not None
    data = bytearray(path.read_bytes())
    data[extent.offset + 100] ^= 64
    path.write_bytes(data)
    bench.forget_blocks()
    assert [type(one) for one in bench.load(KEYS)] == [Loaded, Damaged, Loaded]
    assert bench.is_back([5, 0, 1, 2])
    assert not any(layer[block].any() for layer in bench.blocks for block in (3, 6))
    assert bench.tier.holds(KEYS) == [True, False, True]
    assert bench.tier.lease_extents(KEYS[1:2]).extents == (None,)


def test_a_tier_that_makes_room_meanwhile_takes_nothing_from_a_reader(bench: Bench) -> None:
    bench.store(KEYS)
    lease = bench.tier.lease_extents(KEYS)
    others = key_chain(3, branch="other")
    assert bench.store(others).count(Stored()) == 1, "the fourth slot is all there is"
    bench.forget_blocks()
    carried = bench.copier.load(found(lease), TABLE, block_tokens=TOKENS, first_token=0, last_token=3 * CHUNK)
    carried.event.wait()
    assert bench.is_back(TABLE)
    bench.tier.end_lease(lease)
    assert bench.store(others[1:]) == [Stored()] * 2
    assert bench.tier.holds(KEYS).count(True) < 3


# Beside a cache that uses the same disk.


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[LocalCache]:
    disk = {"type": "disk", "directory": str(tmp_path / "cached"), "capacity_bytes": bytes_for(CONTEXT, 16)}
    made = build_local_cache(
        HostConfig(capacity_bytes=4 * CONTEXT.slot_bytes),
        group_bytes=(FORMAT.nbytes,),
        fingerprint=FORMAT.fingerprint,
        tiers=[disk],
    )
    yield made
    made.close()


def crowd_out(cache: LocalCache, branch: str) -> None:
    lease = cache.begin_store(key_chain(4, branch=branch), "other")
    assert not lease.refused
    cache.commit(lease)
    cache.lower.drain(10)


def test_what_a_cache_spilled_is_loaded_into_blocks_past_its_pool(bench: Bench, cache: LocalCache) -> None:
    hands = GpuCopier(CACHE.layout, bench.blocks, FORMAT)
    hands.attach(cache.pool.name, cache.pool.view)
    lease = cache.begin_store(KEYS, "worker")
    plan = plan_transfer(
        lease.extents, TABLE, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=0, last_token=3 * CHUNK
    )
    hands.store(plan).wait()
    cache.commit(lease)
    hands.detach(cache.pool.name)
    cache.lower.drain(10)
    crowd_out(cache, "crowd")
    assert cache.lookup(KEYS, "engine").chunks == 0
    bench.forget_blocks()
    disk = cache.lower.lanes[0].tier
    assert isinstance(disk, DiskTier)
    lent = disk.lease_extents(KEYS)
    carried = bench.copier.load(found(lent), TABLE, block_tokens=TOKENS, first_token=0, last_token=3 * CHUNK)
    disk.end_lease(lent)
    carried.event.wait()
    assert carried.outcomes == [Loaded(FORMAT.nbytes)] * 3
    assert bench.is_back(TABLE)
