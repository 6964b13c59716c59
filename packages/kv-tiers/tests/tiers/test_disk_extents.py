"""Bytes of the disk tier that others read: where they lie stays theirs while they do."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_core.errors import MisuseError, TierDown
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded, LoadOutcome, Stored
from kv_core.testing import key_chain
from kv_core.transfer import FileExtent
from kv_eviction.simple import LruPolicy
from kv_tiers import chunk_header
from kv_tiers.testing.tier_contract import aligned_pages, content
from kv_tiers.tier import Read, SupportsFileExtents, TierContext, Write
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for
from kv_tiers.tiers.disk_files import File

CONTEXT = TierContext(5000, 8192, "lent")
FORMAT = chunk_header.format_id("lent")
SLOTS = 6
NBYTES = CONTEXT.chunk_bytes
KEYS = key_chain(4)


class Box:
    """A tier over two directories, made anew as a restart would."""

    def __init__(self, root: Path) -> None:
        self.paths = [str(root / "a"), str(root / "b")]
        self.tier = self.open()

    def open(self) -> DiskTier:
        config = DiskConfig(directory=self.paths, capacity_bytes=bytes_for(CONTEXT, SLOTS, 2), wait_s=0)
        return DiskTier(config, CONTEXT, LruPolicy())

    def restart(self) -> DiskTier:
        """Whatever was going on is forgotten, as when the process is killed."""
        self.tier.close()
        self.tier = self.open()
        return self.tier


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.tier.close()


@pytest.fixture
def tier(box: Box) -> DiskTier:
    return box.tier


def store(tier: DiskTier, keys: list[ChunkKey], parent: ChunkKey | None = None) -> list[object]:
    writes = []
    for above, key in zip([parent, *keys], keys, strict=False):
        pages = aligned_pages(CONTEXT.slot_bytes)
        pages[:NBYTES] = content(key, NBYTES)
        writes.append(Write(key, above, chunk_header.pack_header(key, above, pages[:NBYTES], FORMAT), pages, NBYTES))
    return list(tier.store(writes))


def load(tier: DiskTier, key: ChunkKey) -> LoadOutcome:
    """As the lane does: loaded is what the checksum says is whole."""
    read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(CONTEXT.slot_bytes), NBYTES)
    (outcome,) = tier.load([read])
    if isinstance(outcome, Loaded):
        return chunk_header.check(read.header, read.room, key=key, format_id=FORMAT) or outcome
    return outcome


def bytes_at(extent: FileExtent | None) -> bytes:
    assert extent is not None
    with Path(extent.path).open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.nbytes)


def put(extent: FileExtent | None, data: bytes) -> None:
    assert extent is not None
    with Path(extent.path).open("r+b") as file:
        file.seek(extent.offset)
        file.write(data)


def test_a_lease_says_where_the_bytes_are_and_how_to_know_them(tier: DiskTier) -> None:
    assert isinstance(tier, SupportsFileExtents)
    store(tier, KEYS[:3])
    lease = tier.lease_extents(KEYS)
    for key, extent in zip(KEYS[:3], lease.extents, strict=False):
        assert extent is not None
        assert extent.offset % 4096 == 0
        assert extent.nbytes == NBYTES
        assert bytes_at(extent) == content(key, NBYTES)
        assert extent.checksum == checksum_of(memoryview(content(key, NBYTES)))
    assert lease.extents[3] is None
    assert len({extent.path for extent in lease.extents if extent}) == 2
    tier.end_lease(lease)
    with pytest.raises(MisuseError, match="is not open"):
        tier.end_lease(lease)


def test_a_slot_is_nobody_elses_while_it_is_read(tier: DiskTier) -> None:
    """A full tier makes room for others everywhere but there."""
    store(tier, KEYS[:2])
    lease = tier.lease_extents(KEYS[:2])
    for branch in range(4):
        store(tier, key_chain(6, branch=str(branch)))
        assert [bytes_at(extent) for extent in lease.extents] == [content(key, NBYTES) for key in KEYS[:2]]
    assert tier.holds(KEYS[:2]) == [True, True]
    tier.end_lease(lease)
    assert store(tier, key_chain(6, branch="after")) == [Stored()] * 6
    assert tier.holds(KEYS[:2]) == [False, False]


def test_what_is_discarded_while_it_is_read_stays_until_it_is_read(tier: DiskTier, box: Box) -> None:
    store(tier, KEYS[:1])
    lease = tier.lease_extents(KEYS[:1])
    tier.discard(KEYS[:1])
    store(tier, key_chain(6, branch="other"))
    assert bytes_at(lease.extents[0]) == content(KEYS[0], NBYTES)
    assert tier.lease_extents(KEYS[:1]).extents == (None,)
    tier.end_lease(lease)
    assert store(tier, key_chain(6, branch="after")) == [Stored()] * 6
    assert box.restart().holds(KEYS[:1]) == [False]


@pytest.mark.parametrize("how", ["clear", "clear_tenant"])
def test_what_is_cleared_and_stored_anew_while_it_is_read_is_elsewhere(tier: DiskTier, box: Box, how: str) -> None:
    store(tier, KEYS)
    lease = tier.lease_extents(KEYS)
    if how == "clear":
        tier.clear()
    else:
        tier.clear_tenant(KEYS[0].tenant)
    assert store(tier, KEYS[:2]) == [Stored()] * 2
    again = tier.lease_extents(KEYS[:2])
    assert not set(again.extents) & set(lease.extents)
    assert [bytes_at(extent) for extent in lease.extents] == [content(key, NBYTES) for key in KEYS]
    tier.end_lease(lease)
    tier.end_lease(again)
    assert box.restart().holds(KEYS) == [True, True, False, False]


def test_what_a_reader_could_not_read_is_passed_over_and_something_must_be_readable(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    store(tier, KEYS[:2])
    tier.end_lease(tier.lease_extents(KEYS[:2]), KEYS[:1])
    assert tier.holds(KEYS[:2]) == [False, True]
    assert tier.lease_extents(KEYS[:1]).extents == (None,)
    with monkeypatch.context() as patched:
        patched.setattr(File, "read", broken)
        with pytest.raises(TierDown, match="Input/output error"):
            tier.probe()
    tier.probe()


def test_a_flipped_bit_is_no_longer_what_the_lease_says(tier: DiskTier) -> None:
    store(tier, KEYS[:1])
    lease = tier.lease_extents(KEYS[:1])
    (extent,) = lease.extents
    spoiled = bytearray(bytes_at(extent))
    spoiled[1234] ^= 4
    put(extent, bytes(spoiled))
    assert extent is not None
    assert checksum_of(memoryview(bytes_at(extent))) != extent.checksum


@pytest.mark.parametrize("at", [0, 8, 16, 24, 80, 300, 511])
def test_a_record_that_is_damaged_vouches_for_nothing(tier: DiskTier, box: Box, at: int) -> None:
    store(tier, KEYS[:1])
    for path in box.paths:
        with (Path(path) / CONTEXT.namespace / "index").open("r+b") as index:
            index.seek(4096 + at)
            (byte,) = index.read(1) or b"\0"  # one directory has no record yet
            index.seek(4096 + at)
            index.write(bytes([byte ^ 1]))
    lease = tier.lease_extents(KEYS[:1])
    assert lease.extents == (None,)
    tier.end_lease(lease)
    assert load(tier, KEYS[0]) == Loaded(NBYTES)  # its slot has a header of its own


def test_an_index_that_cannot_be_read_is_a_tier_that_is_down_and_leaves_no_lease(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tier, KEYS[:2])

    def read(self: File, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(File, "read", read)
        with pytest.raises(TierDown, match="Input/output error"):
            tier.lease_extents(KEYS[:2])
    assert store(tier, key_chain(6, branch="other")) == [Stored()] * 6


def test_a_directory_is_not_begun_anew_while_bytes_of_it_are_carried(tier: DiskTier, box: Box) -> None:
    store(tier, KEYS[:1])
    lease = tier.lease_extents(KEYS[:1])
    for path in box.paths:
        shutil.rmtree(path)
    with pytest.raises(TierDown, match="still in use"):
        tier.probe()
    tier.end_lease(lease)
    tier.probe()
    assert os.path.isdir(box.paths[0])


def test_what_a_directory_that_is_still_there_had_does_not_come_back_over_what_replaced_it(
    tier: DiskTier, box: Box
) -> None:
    """Its records were left when the tier could not begin anew, although their room was given to others."""
    store(tier, KEYS)
    lease = tier.lease_extents(KEYS[:1])
    shutil.rmtree(box.paths[1])
    with pytest.raises(TierDown, match="still in use"):
        tier.probe()
    others = key_chain(SLOTS, branch="others")
    for key in others:
        with contextlib.suppress(TierDown):  # its place is in the directory that has gone
            store(tier, [key])
    assert any(tier.holds(others))
    tier.discard(others)
    tier.end_lease(lease)
    assert box.restart().holds(KEYS) == [False] * 4
