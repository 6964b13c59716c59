"""The disk tier keeps the promises of every tier that is bounded and outlives its process, and what it says itself."""

import errno
import json
import logging
import os
import resource
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest
import xxhash
from kv_core.clock import HandClock
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, ReadFailed, Refused, Stored
from kv_core.testing import key_chain
from kv_tiers import chunk_header
from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.testing.contract import content
from kv_tiers.testing.media import slabs_of, unreadable_device
from kv_tiers.testing.tier_contract import BoundedTierContract, PersistentTierContract, aligned_pages
from kv_tiers.testing.wait import joined
from kv_tiers.tier import Read, Tier, TierContext, Write
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for, slots_for
from kv_tiers.tiers.disk_files import File


class DiskContract(BoundedTierContract, PersistentTierContract):
    direct = "auto"
    directories = 1

    def setup_method(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.made = 0
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        shutil.rmtree(self.root)

    def make(self, context: TierContext, chunks: int) -> Tier:
        self.made += 1
        return self.reopen(context, chunks)

    def reopen(self, context: TierContext, chunks: int) -> Tier:
        paths = [str(self.root / f"{self.made}-{at}") for at in range(self.directories)]
        settings = {
            "directory": paths,
            "capacity_bytes": bytes_for(context, chunks, self.directories),
            "direct": self.direct,
        }
        self.clock = HandClock()
        return DiskTier(msgspec.convert(settings, DiskConfig), context, LruPolicy(), clock=self.clock)

    def unreadable_medium(self) -> AbstractContextManager[object]:
        assert isinstance(self.tier, DiskTier)
        return unreadable_device(slabs_of(self.tier))

    def spoil(self, key: ChunkKey, at: int) -> None:
        assert isinstance(self.tier, DiskTier)
        (entry,) = self.tier._index.begin_load([key], touch=False)
        assert entry is not None
        left = CHUNK_AT + at
        for file, offset, nbytes in self.tier._chunks.segments(entry, self.tier._index.extent(entry), 1 << 20):
            if left < nbytes:
                flip(file.path, offset + left, at % 8)
                break
            left -= nbytes
        self.tier._index.end_load([entry])

    def wait_until_tried_again(self) -> None:
        self.clock.advance(60)


class TestDirect(DiskContract):
    pass


class TestBuffered(DiskContract):
    direct = "never"


class TestTwoDirectories(DiskContract):
    directories = 2


CONTEXT = TierContext(5000, 8192, "disk")
FORMAT = chunk_header.format_id("disk")
CHUNK_AT = 4096
"""Bytes of a slot before the chunk's own."""


class Box:
    """A tier in a directory, made anew as a restart would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tier: DiskTier | None = None

    @property
    def inside(self) -> Path:
        return self.path / CONTEXT.namespace

    def start(self, chunks: int = 16, **settings: object) -> DiskTier:
        self.stop()
        given = {"directory": str(self.path), "capacity_bytes": bytes_for(CONTEXT, chunks), **settings}
        self.tier = DiskTier(msgspec.convert(given, DiskConfig), CONTEXT, LruPolicy())
        return self.tier

    def stop(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path / "tier")
    yield made
    made.stop()


def writes_of(keys: list[ChunkKey], parent: ChunkKey | None = None) -> list[Write]:
    made = []
    for above, key in zip([parent, *keys], keys, strict=False):
        pages = aligned_pages(CONTEXT.slot_bytes)
        pages[: CONTEXT.chunk_bytes] = content(key, CONTEXT.chunk_bytes)
        chunk = pages[: CONTEXT.chunk_bytes]
        made.append(Write(key, above, chunk_header.pack_header(key, above, chunk, FORMAT), pages, len(chunk)))
    return made


def store(tier: DiskTier, keys: list[ChunkKey], parent: ChunkKey | None = None) -> None:
    assert tier.store(writes_of(keys, parent)) == [Stored()] * len(keys)


def load(tier: DiskTier, key: ChunkKey) -> LoadOutcome:
    """As the lane does: loaded is what the checksum says is whole."""
    read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(CONTEXT.slot_bytes), CONTEXT.chunk_bytes)
    (outcome,) = tier.load([read])
    if isinstance(outcome, Loaded):
        return chunk_header.check(read.header, read.room, key=key, format_id=FORMAT) or outcome
    return outcome


def flip(path: Path, at: int, bit: int) -> None:
    """Calling it again undoes it."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


# What is damaged is a miss.


def test_a_bit_that_flips_anywhere_in_a_chunk_is_a_miss(box: Box) -> None:
    tier = box.start()
    (key,) = key_chain(1)
    store(tier, [key])
    slab = box.inside / "slab-0000"
    chunk_positions = [*range(0, CONTEXT.chunk_bytes, 37), CONTEXT.chunk_bytes - 1]
    for at in [*range(chunk_header.HEADER_BYTES), *(CHUNK_AT + at for at in chunk_positions)]:
        flip(slab, at, at % 8)
        assert isinstance(load(tier, key), Damaged), at
        flip(slab, at, at % 8)
    assert load(tier, key) == Loaded(CONTEXT.chunk_bytes)


def test_a_bit_that_flips_anywhere_in_a_record_is_a_miss_after_the_restart(box: Box) -> None:
    keys = key_chain(2)
    store(box.start(), keys)
    box.stop()
    for at in range(512):
        flip(box.inside / "index", 4096 + at, at % 8)
        tier = box.start()
        assert tier.holds(keys) == [False, True], at
        box.stop()
        flip(box.inside / "index", 4096 + at, at % 8)
    assert load(box.start(), keys[0]) == Loaded(CONTEXT.chunk_bytes)


def test_a_bit_that_flips_anywhere_in_the_index_header_is_a_start_from_nothing_or_a_refusal(box: Box) -> None:
    keys = key_chain(1)
    for at in range(56):
        store(box.start(), keys)
        box.stop()
        flip(box.inside / "index", at, at % 8)
        if at < 8:  # the name of the format itself: it may be anybody's file
            with pytest.raises(ConfigError, match="not the index of a disk tier"):
                box.start()
            flip(box.inside / "index", at, at % 8)
        else:
            assert box.start().holds(keys) == [False]


@pytest.mark.parametrize("direct", ["auto", "never"])
def test_a_chunk_cut_short_is_damaged_and_forgotten(box: Box, direct: str) -> None:
    """The peer returned it as a hit."""
    slab = box.inside / "slab-0000"
    stride = CHUNK_AT + CONTEXT.slot_bytes
    for nbytes in [*range(0, stride, 811), 4096, 8192, stride - 1]:
        tier = box.start(direct=direct)
        keys = key_chain(2)
        store(tier, keys)
        tier.clear()
        store(tier, keys[:1])
        whole = slab.stat().st_size
        held = next(at for at in range(0, whole, stride) if slab.read_bytes()[at : at + 8] == b"kvchunk\n")
        os.truncate(slab, held + nbytes)
        assert isinstance(load(tier, keys[0]), Damaged)
        assert tier.holds(keys[:1]) == [False]
        store(tier, keys[:1])
        tier.clear()


def test_whatever_is_missing_of_the_files_is_a_miss_after_the_restart(box: Box) -> None:
    keys = key_chain(4)
    stride = CHUNK_AT + CONTEXT.slot_bytes
    for name, nbytes in [("slab-0000", at) for at in range(0, 4 * stride, stride // 3)] + [
        ("index", at) for at in [*range(4096, 4096 + 4 * 512, 100), 0, 10, 4095]
    ]:
        tier = box.start()
        tier.clear()
        store(tier, keys)
        box.stop()
        os.truncate(box.inside / name, nbytes)
        tier = box.start()
        for key in keys:
            assert isinstance(load(tier, key), Loaded | Absent)
        assert sum(tier.holds(keys)) == (nbytes // stride if name == "slab-0000" else max(0, nbytes - 4096) // 512)
        store(tier, keys)


def test_a_missing_slab_is_a_miss(box: Box) -> None:
    """The peer raised KeyError into the engine."""
    keys = key_chain(2)
    store(box.start(), keys)
    box.stop()
    (box.inside / "slab-0000").unlink()
    tier = box.start()
    assert [load(tier, key) for key in keys] == [Absent(), Absent()]
    store(tier, keys)


def test_two_records_of_a_chunk_are_one_chunk(box: Box) -> None:
    """A wipe in one directory may be lost while the newer record in another lasts."""
    paths = [str(box.path / "a"), str(box.path / "b")]
    box.path.mkdir()
    (key, other) = key_chain(2)
    for only in paths:
        store(box.start(directory=only), [key])
    tier = box.start(directory=paths, capacity_bytes=bytes_for(CONTEXT, 16, 2))
    assert tier.usage().chunks == 1
    assert load(tier, key) == Loaded(CONTEXT.chunk_bytes)
    tier.discard([key])
    store(tier, [other])
    assert box.start(directory=paths, capacity_bytes=bytes_for(CONTEXT, 16, 2)).holds([key, other]) == [False, True]


# Restarts.


def test_after_a_restart_tails_leave_before_heads_and_old_prompts_before_new(box: Box) -> None:
    old, new = key_chain(8), key_chain(8, branch="new")
    tier = box.start()
    store(tier, new[:4])
    store(tier, old)
    store(tier, new[4:], parent=new[3])
    tier = box.start()
    store(tier, key_chain(5, branch="newest"))
    assert tier.holds(old) == [True] * 3 + [False] * 5
    assert tier.holds(new) == [True] * 8


def test_a_smaller_capacity_forgets_for_good(box: Box) -> None:
    """What was discarded while it was out of sight must not come back."""
    keys = key_chain(16)
    store(box.start(16), keys)
    tier = box.start(4)
    assert (tier.usage().chunks or 0) <= 4
    kept = tier.holds(keys)
    tier = box.start(16)
    assert tier.holds(keys) == kept
    store(tier, keys)
    assert all(tier.holds(keys))


def test_an_index_of_another_version_is_an_empty_tier_and_a_line_in_the_log(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    keys = key_chain(2)
    store(box.start(), keys)
    box.stop()
    index = box.inside / "index"
    described = bytearray(index.read_bytes()[:48])
    described[8:12] = struct.pack("<I", 2)
    with index.open("r+b") as file:
        file.write(described + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(described))))
    tier = box.start()
    assert "starts empty" in caplog.text
    assert tier.holds(keys) == [False, False]
    store(tier, keys)
    assert box.start().holds(keys) == [True, True]


def test_what_others_take_is_told(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    store(box.start(), key_chain(1))
    other = TierContext(CONTEXT.chunk_bytes, CONTEXT.slot_bytes, "another format")
    config = DiskConfig(directory=str(box.path), capacity_bytes=bytes_for(other, 4))
    DiskTier(config, other, LruPolicy()).close()
    assert "chunks of other formats take" in caplog.text


# Whose directory it is.


def test_a_directory_has_one_owner(box: Box) -> None:
    box.start()
    with pytest.raises(ConfigError, match=f"{box.inside} is in use .* choose another directory"):
        Box(box.path).start()
    script = (
        "from kv_tiers.tiers.disk import *; from kv_tiers.eviction.lru import LruPolicy; "
        f"config = DiskConfig(directory={str(box.path)!r}, capacity_bytes=1 << 20); "
        "DiskTier(config, TierContext(5000, 8192, 'disk'), LruPolicy())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "is in use by another disk tier" in done.stderr
    box.stop()
    box.start()


def test_files_are_the_users_alone(box: Box) -> None:
    store(box.start(), key_chain(1))
    assert stat.S_IMODE(box.inside.stat().st_mode) == 0o700
    assert stat.S_IMODE(box.path.stat().st_mode) == 0o700
    files = list(box.inside.iterdir())
    assert {file.name for file in files} == {"lock", "index", "slab-0000"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


def _link_twice(path: Path) -> None:
    path.with_suffix(".second").hardlink_to(path)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("name", ["lock", "index", "slab-0000"])
@pytest.mark.parametrize("spoil", [_link, _link_twice, _pipe, lambda path: path.chmod(0o644)])
def test_files_that_cannot_be_trusted_are_refused(box: Box, name: str, spoil: Callable[[Path], None]) -> None:
    store(box.start(), key_chain(1))
    box.stop()
    spoil(box.inside / name)
    with pytest.raises(ConfigError, match=str(box.inside)):
        box.start()


def test_a_directory_that_others_reach_into_or_that_is_a_link_is_refused(box: Box) -> None:
    box.start()
    box.stop()
    box.inside.chmod(0o755)
    with pytest.raises(ConfigError, match="not a directory of this user closed to others"):
        box.start()
    box.inside.chmod(0o700)
    _link(box.inside)
    with pytest.raises(ConfigError, match="cannot be used"):
        box.start()


@pytest.mark.parametrize("foreign", [b"SQLite format 3\0", b"\1", b"\0" * 4095 + b"x", os.urandom(100_000)])
def test_somebody_elses_index_is_refused_and_left_alone(box: Box, foreign: bytes) -> None:
    box.start()
    box.stop()
    index = box.inside / "index"
    index.write_bytes(foreign)
    with pytest.raises(ConfigError, match="not the index of a disk tier; move it away"):
        box.start()
    assert index.read_bytes() == foreign


def test_directories_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    for path in (plain, plain / "below", tmp_path / "missing" / "below"):
        with pytest.raises(ConfigError, match=f"{path}.* cannot be used"):
            Box(path).start()
    with pytest.raises(ConfigError, match="several different ones"):
        Box(tmp_path).start(directory=[str(tmp_path), str(tmp_path) + "/"])
    with pytest.raises(ConfigError, match="several different ones"):
        Box(tmp_path).start(directory=[])


def test_a_missing_device_among_several_is_refused_and_the_others_are_free_again(box: Box) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        box.start(directory=[str(box.path), str(box.path / "a" / "b" / "c")])
    box.start()


def test_settings_that_make_no_sense_are_refused(box: Box) -> None:
    with pytest.raises(ConfigError, match=f"write at least {bytes_for(CONTEXT, 1)}"):
        box.start(capacity_bytes=bytes_for(CONTEXT, 1) - 1)
    with pytest.raises(ConfigError, match="wait_s"):
        box.start(wait_s=-1)
    assert slots_for(DiskConfig(directory="x", capacity_bytes=bytes_for(CONTEXT, 7)), CONTEXT) == 7


def test_a_big_capacity_costs_nothing_until_it_is_used(box: Box) -> None:
    box.start(1_000_000)
    assert sum(file.stat().st_blocks for file in box.inside.iterdir()) * 512 < 100_000


# Media that fail.


def test_a_full_disk_leaves_the_tier_with_what_it_has(tmp_path: Path) -> None:
    """The peer was stuck for ever. Really full: the process may not make files larger than a few slots."""
    script = Path(__file__)
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["used"] == 6
    assert said["first"] == [True] * 6 + [False] * 2  # the rest of a prompt never drives out its head
    assert said["later"] == [True] * 3
    assert said["log"].count("has no room for more") == 1
    assert said["grown"] == [True] * 8


def full_disk(root: Path) -> dict[str, object]:
    """In a process of its own, as the limit holds for all of it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kv_tiers").addHandler(handler)
    stride = CHUNK_AT + CONTEXT.slot_bytes
    tier = Box(root / "tier").start()
    # The index needs 12 KiB, the slab has room for six.
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * stride + 100, resource.RLIM_INFINITY))
    first, later = key_chain(8), key_chain(3, branch="later")
    stored = [isinstance(outcome, Stored) for outcome in tier.store(writes_of(first))]
    outcomes = tier.store(writes_of(later))
    held = tier.holds(later)
    used = tier.usage().chunks
    assert all(isinstance(load(tier, key), Loaded) for key in later)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tier.probe()  # there is room again
    tier.store(writes_of(first))
    return {
        "first": stored,
        "later": [isinstance(outcome, Stored) and is_held for outcome, is_held in zip(outcomes, held, strict=True)],
        "used": used,
        "log": "\n".join(lines),
        "grown": tier.holds(first),
    }


def test_a_small_file_system_that_fills_up(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True, timeout=120
    ).returncode:
        pytest.skip("file systems cannot be mounted here")
    box = Box(mount / "tier")
    try:
        tier = box.start(64)
        for number in range(8):
            outcomes = tier.store(writes_of(key_chain(4, branch=str(number))))
            assert all(isinstance(outcome, Stored) for outcome in outcomes)
        assert 10 < (tier.usage().chunks or 0) <= 21
        assert tier.holds(key_chain(4, branch="7")) == [True] * 4
        tier = box.start(64)
        assert tier.holds(key_chain(4, branch="7")) == [True] * 4
        for number in range(8):
            tier.store(writes_of(key_chain(4, branch=f"again {number}")))
        assert tier.holds(key_chain(4, branch="again 7")) == [True] * 4
    finally:
        box.stop()
        subprocess.run(["umount", str(mount)], check=True, timeout=120)


def failing(number: int, path_end: str = "") -> Callable[..., None]:
    def fail(self: File, *_: object) -> None:
        if self.path.name.startswith(path_end):
            raise OSError(number, os.strerror(number))

    return fail


def test_a_chunk_that_cannot_be_read_is_a_miss_and_its_neighbours_are_not(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = box.start()
    keys = key_chain(3)
    store(tier, keys)
    real, spoiled = File.read, CHUNK_AT + CONTEXT.slot_bytes

    def read(self: File, buffers: list[memoryview], offset: int) -> int:
        if self.path.name == "slab-0000" and offset <= spoiled < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, buffers, offset)

    monkeypatch.setattr(File, "read", read)
    pages = [aligned_pages(CONTEXT.slot_bytes) for _ in keys]
    outcomes = tier.load(
        [Read(key, bytearray(chunk_header.HEADER_BYTES), page, 5000) for key, page in zip(keys, pages, strict=True)]
    )
    assert [type(outcome) for outcome in outcomes] == [Loaded, ReadFailed, Loaded]
    assert tier.holds(keys) == [True, False, True]
    monkeypatch.undo()
    tier = box.start()
    assert tier.holds(keys) == [True] * 3  # nothing is known to be wrong with its bytes
    assert load(tier, keys[1]) == Loaded(5000)


@pytest.mark.parametrize("method", ["write", "sync", "allocate"])
@pytest.mark.parametrize("name", ["slab", "index"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENODEV])
def test_a_medium_that_takes_no_writes_is_down_and_comes_back(
    box: Box, monkeypatch: pytest.MonkeyPatch, method: str, name: str, number: int
) -> None:
    tier = box.start(64)
    before, after = key_chain(3), key_chain(3, branch="after")
    if method != "allocate":
        store(tier, before)
    with monkeypatch.context() as broken:
        broken.setattr(File, method, failing(number, name))
        for _ in range(3):
            with pytest.raises(TierDown, match=os.strerror(number)):
                tier.store(writes_of(after))
        if name == "index" and method != "allocate":
            with pytest.raises(TierDown):
                tier.probe()
        assert tier.holds(after) == [False] * 3
    tier.probe()
    store(tier, after)
    assert all(isinstance(load(tier, key), Loaded) for key in after)
    held = [method != "allocate"] * 3
    assert box.start(64).holds([*before, *after]) == [*held, True, True, True]


def test_an_unacknowledged_chunk_does_not_come_back(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record was written, and could not be wiped when the sync failed: `probe` does."""
    tier = box.start()
    keys = key_chain(2)
    real, offsets = File.write, list[int]()

    def write(self: File, buffers: list[memoryview], offset: int) -> None:
        if self.path.name == "index":
            offsets.append(offset)
        if len(offsets) > 1:
            raise OSError(errno.EIO, "Input/output error")
        real(self, buffers, offset)

    with monkeypatch.context() as broken:
        broken.setattr(File, "write", write)
        broken.setattr(File, "sync", failing(errno.EIO, "index"))
        with pytest.raises(TierDown):
            tier.store(writes_of(keys))
    assert len(offsets) == 2
    tier.probe()
    assert box.start().holds(keys) == [False, False]


def test_a_failed_sync_is_not_forgotten_by_the_next(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system calls the next one a success, though what it dropped is not on the medium."""
    tier = box.start()
    failures = [OSError(errno.EIO, "Input/output error")]
    real = os.fdatasync
    monkeypatch.setattr(
        os, "fdatasync", lambda file: real(file) if not failures else (_ for _ in ()).throw(failures.pop())
    )
    for _ in range(2):
        with pytest.raises(TierDown):
            tier.store(writes_of(key_chain(1)))
    tier.probe()
    store(tier, key_chain(1))


def test_a_directory_that_vanished_is_noticed_and_made_again(box: Box) -> None:
    tier = box.start()
    keys = key_chain(3)
    store(tier, keys)
    shutil.rmtree(box.path)
    with pytest.raises(TierDown, match="removed or replaced"):
        tier.store(writes_of(key_chain(2, branch="lost")))
    box.path.touch()  # in the way
    with pytest.raises(TierDown, match="cannot be used"):
        tier.probe()
    assert tier.holds(keys) == [False] * 3
    with pytest.raises(TierDown):
        tier.store(writes_of(keys))
    with pytest.raises(TierDown):
        tier.probe()
    box.path.unlink()
    tier.probe()
    store(tier, keys)
    assert box.start().holds(keys) == [True] * 3


def test_a_directory_that_was_replaced_by_another_is_taken_over(box: Box) -> None:
    keys = key_chain(3)
    store(box.start(), keys)
    box.stop()
    backup = box.path.with_name("backup")
    shutil.copytree(box.path, backup)
    tier = box.start()
    tier.clear()
    shutil.rmtree(box.path)
    backup.rename(box.path)
    tier.probe()
    assert [load(tier, key) for key in keys] == [Loaded(CONTEXT.chunk_bytes)] * 3


# Threads.


def test_reading_holds_nobody_up(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer returned from a cold read with its lock held, and all later work on the disk hung."""
    tier = box.start()
    keys = key_chain(3)
    store(tier, keys)
    real, reading, go_on = File.read, threading.Event(), threading.Event()

    def read(self: File, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(30)
        return real(self, buffers, offset)

    monkeypatch.setattr(File, "read", read)
    outcomes: list[LoadOutcome] = []
    reader = threading.Thread(target=lambda: outcomes.append(load(tier, keys[0])))
    reader.start()
    assert reading.wait(30)
    store(tier, key_chain(3, branch="meanwhile"))
    tier.discard([keys[0]])
    store(tier, key_chain(14, branch="more"))  # every other slot
    assert tier.holds(keys) == [False] * 3
    go_on.set()
    joined(reader)
    assert outcomes == [Loaded(CONTEXT.chunk_bytes)]


def test_a_store_waits_for_readers_to_make_room(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = box.start(2, wait_s=30)
    keys, later = key_chain(2), key_chain(1, branch="later")
    store(tier, keys)
    real, reading, go_on = File.read, threading.Semaphore(0), threading.Event()

    def read(self: File, buffers: list[memoryview], offset: int) -> int:
        reading.release()
        assert go_on.wait(30)
        return real(self, buffers, offset)

    monkeypatch.setattr(File, "read", read)
    waiting = threading.Event()
    wait_for_room = tier._index.wait_for_room

    def wait(releases: int, timeout_s: float) -> bool:
        waiting.set()
        return wait_for_room(releases, timeout_s)

    monkeypatch.setattr(tier._index, "wait_for_room", wait)
    readers = [threading.Thread(target=load, args=(tier, key)) for key in keys]
    for reader in readers:
        reader.start()
    assert reading.acquire(timeout=30) and reading.acquire(timeout=30)
    outcomes: list[object] = []
    writer = threading.Thread(target=lambda: outcomes.extend(tier.store(writes_of(later))))
    writer.start()
    assert waiting.wait(30)
    go_on.set()
    for thread in (writer, *readers):
        joined(thread)
    assert outcomes == [Stored()]


def test_a_store_does_not_wait_for_ever(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = box.start(1, wait_s=0.01)
    (key,), later = key_chain(1), key_chain(1, branch="later")
    store(tier, [key])
    real = File.read

    def read(self: File, buffers: list[memoryview], offset: int) -> int:
        (outcome,) = tier.store(writes_of(later))
        assert isinstance(outcome, Refused)
        assert "being read" in outcome.reason
        return real(self, buffers, offset)

    monkeypatch.setattr(File, "read", read)
    assert load(tier, key) == Loaded(CONTEXT.chunk_bytes)


def test_room_that_others_always_take_ends_the_wait_too(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    config = DiskConfig(directory=str(box.path), capacity_bytes=bytes_for(CONTEXT, 2), wait_s=1.0)
    tier = box.tier = DiskTier(config, CONTEXT, LruPolicy(), clock=clock)

    def released(releases: int, timeout_s: float) -> bool:
        clock.advance(0.3)
        return True

    monkeypatch.setattr(tier._index, "wait_for_room", released)
    outcomes = tier.store(writes_of(key_chain(3)))
    assert [type(outcome) for outcome in outcomes] == [Stored, Stored, Refused]
    assert clock.now_s() == pytest.approx(1.2)


def test_what_the_system_does_in_part_is_finished(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = box.start()
    keys = key_chain(2)
    pwritev, preadv = os.pwritev, os.preadv

    def part(buffers: list[memoryview]) -> list[memoryview]:
        return [memoryview(buffers[0])[:4096]]

    monkeypatch.setattr(os, "pwritev", lambda file, buffers, offset: pwritev(file, part(buffers), offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, part(buffers), offset))
    store(tier, keys)
    assert [load(tier, key) for key in keys] == [Loaded(CONTEXT.chunk_bytes)] * 2


def test_a_discard_during_the_store_holds_after_a_restart(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = box.start()
    keys = key_chain(2)
    real = File.sync

    def sync(self: File) -> None:
        real(self)
        if self.path.name == "index":
            monkeypatch.setattr(File, "sync", real)
            tier.discard(keys[1:])

    monkeypatch.setattr(File, "sync", sync)
    tier.store(writes_of(keys))
    assert tier.holds(keys) == [True, False]
    assert box.start().holds(keys) == [True, False]


if __name__ == "__main__":
    print(json.dumps(full_disk(Path(sys.argv[1]))))
