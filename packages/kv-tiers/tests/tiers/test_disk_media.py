"""A disk tier on media that are full, fail, vanish or are slow, and with threads that meet."""

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from kv_core.clock import HandClock
from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded, LoadOutcome, ReadFailed, Refused, Stored
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_testing.disk_box import CHUNK_AT, CONTEXT, DiskBox, load, store, writes_of
from kv_testing.wait import joined
from kv_tiers import chunk_header
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import Read, TierContext
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for
from kv_tiers.tiers.disk_files import File


@pytest.fixture
def box(tmp_path: Path) -> Iterator[DiskBox]:
    made = DiskBox(tmp_path / "tier")
    yield made
    made.stop()


# Media that are large, or smaller than they were said to be.


def test_a_large_medium_costs_memory_for_what_it_holds(tmp_path: Path) -> None:
    """Sixteen million slots, for each of which it took 200 bytes before there was a chunk in any."""
    box = DiskBox(tmp_path / "tier")
    tracemalloc.start()
    try:
        tier = box.start(16_000_000)
        store(tier, key_chain(3))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        assert all(tier.holds(key_chain(3)))
    finally:
        tracemalloc.stop()
        box.stop()


@pytest.mark.parametrize(("spare_bytes", "warnings"), [(1 << 30, 1), (-(1 << 30), 0)])
def test_a_tier_that_will_fill_its_file_system_says_so_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spare_bytes: int, warnings: int
) -> None:
    space, context = os.statvfs(tmp_path), TierContext(16 << 20, 16 << 20, "large")
    capacity = space.f_bavail * space.f_frsize + spare_bytes
    config = DiskConfig(directory=str(tmp_path / "tier"), capacity_bytes=capacity)
    DiskTier(config, context, LruPolicy()).close()
    assert [record.levelname for record in caplog.records].count("WARNING") == warnings
    assert ("the tier will fill it up" in caplog.text) == bool(warnings)


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
    tier = DiskBox(root / "tier").start()
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
    box = DiskBox(mount / "tier")
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_start_where_no_file_can_be_made_finds_what_is_there(
    box: DiskBox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """A file system without a free inode, or a user who has all the files that he may have."""
    keys = key_chain(3)
    store(box.start(), keys)
    box.stop()
    real = os.open

    def open_what_is_there(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "trial":
            raise OSError(number, os.strerror(number))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_what_is_there)
    tier = box.start()
    assert tier.holds(keys) == [True] * 3
    assert [type(load(tier, key)) for key in keys] == [Loaded] * 3
    assert os.strerror(number) in caplog.text


def failing(number: int, method: str, name: str) -> Callable[..., object]:
    """The method, which fails for files with this beginning of a name."""
    real = getattr(File, method)

    def fail(self: File, *arguments: object) -> object:
        if self.path.name.startswith(name):
            raise OSError(number, os.strerror(number))
        return real(self, *arguments)

    return fail


def test_a_chunk_that_cannot_be_read_is_a_miss_and_its_neighbours_are_not(
    box: DiskBox, monkeypatch: pytest.MonkeyPatch
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
    box: DiskBox, monkeypatch: pytest.MonkeyPatch, method: str, name: str, number: int
) -> None:
    tier = box.start(64)
    before, after = key_chain(3), key_chain(3, branch="after")
    if method != "allocate":
        store(tier, before)
    with monkeypatch.context() as broken:
        broken.setattr(File, method, failing(number, method, name))
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


def test_an_unacknowledged_chunk_does_not_come_back(box: DiskBox, monkeypatch: pytest.MonkeyPatch) -> None:
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
        broken.setattr(File, "sync", failing(errno.EIO, "sync", "index"))
        with pytest.raises(TierDown):
            tier.store(writes_of(keys))
    assert len(offsets) == 2
    tier.probe()
    assert box.start().holds(keys) == [False, False]


def test_a_failed_sync_is_not_forgotten_by_the_next(box: DiskBox, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_store_is_answered_by_a_sync_after_the_one_that_lost_its_writes(
    box: DiskBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another store's sync fails and drops what this one has written; the next sync has nothing to do, and succeeds."""
    tier = box.start()
    real = File.sync
    probed: list[bool] = []

    def sync(self: File) -> None:
        if self.path.name == "index" and not probed:
            probed.append(True)
            self.in_doubt = True
            with pytest.raises(TierDown, match="are being stored"):
                tier.probe()
        real(self)

    monkeypatch.setattr(File, "sync", sync)
    keys = key_chain(2)
    with pytest.raises(TierDown):
        tier.store(writes_of(keys))
    assert probed and tier.holds(keys) == [False] * 2
    tier.probe()
    store(tier, keys)


def test_a_directory_that_vanished_is_noticed_and_made_again(box: DiskBox) -> None:
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


def test_a_medium_that_is_mounted_again_is_used_again_and_what_is_below_it_never(tmp_path: Path) -> None:
    """It may have another device number then: a disk that was unplugged has, and so has a network's file system."""
    mount = tmp_path / "mount"
    mount.mkdir()

    def is_mounted() -> bool:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
        return subprocess.run(command, capture_output=True, timeout=120).returncode == 0

    if not is_mounted():
        pytest.skip("file systems cannot be mounted here")
    box = DiskBox(mount / "tier")
    kept = os.open(mount, os.O_RDONLY)  # else the number might be given to the next one
    try:
        tier = box.start()
        store(tier, key_chain(3))
        subprocess.run(["umount", "--lazy", str(mount)], check=True, timeout=120)  # the tier has files open there
        for _ in range(2):
            with pytest.raises(TierDown, match="mount those again"):
                tier.probe()
            assert not any(mount.iterdir())
        assert is_mounted()
        assert os.stat(mount).st_dev != os.fstat(kept).st_dev
        tier.probe()
        store(tier, key_chain(3, branch="after"))
    finally:
        os.close(kept)
        box.stop()
        subprocess.run(["umount", "--lazy", str(mount)], timeout=120)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
def test_a_directory_that_cannot_be_looked_at_has_not_vanished(
    box: DiskBox, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """All of its chunks were discarded, and with a load in flight their records too."""
    tier = box.start()
    keys = key_chain(3)
    store(tier, keys)
    in_flight = tier._index.begin_load(keys[:1])

    def lstat(_: str) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, "lstat", lstat)
        for call in (lambda: tier.store(writes_of(key_chain(1, branch="more"))), tier.probe):
            with pytest.raises(TierDown, match=os.strerror(number)):
                call()
    tier._index.end_load(in_flight)
    tier.probe()
    assert tier.holds(keys) == [True] * 3
    assert box.start().holds(keys) == [True] * 3


def test_a_probe_after_the_end_opens_nothing(tmp_path: Path) -> None:
    """The lane's thread probes a tier that is down, and may do so while it is closed."""
    first, second = DiskBox(tmp_path / "tier"), DiskBox(tmp_path / "tier")
    tier = first.start()
    store(tier, key_chain(1))
    first.stop()
    with pytest.raises(TierDown, match="closed"):
        tier.probe()
    assert second.start().holds(key_chain(1)) == [True]
    second.stop()


def test_a_full_disk_that_was_replaced_is_not_said_to_be_full(box: DiskBox, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = box.start(24)  # so large that each store makes room for the next
    with monkeypatch.context() as full:
        full.setattr(File, "allocate", failing(errno.ENOSPC, "allocate", "slab"))
        assert [type(outcome) for outcome in tier.store(writes_of(key_chain(1)))] == [Refused]
    assert "No space left" in tier.usage().full
    shutil.rmtree(box.path)
    tier.probe()
    assert not tier.usage().full


def test_a_directory_that_was_replaced_by_another_is_taken_over(box: DiskBox) -> None:
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


def test_reading_holds_nobody_up(box: DiskBox, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_store_waits_for_readers_to_make_room(box: DiskBox, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = box.start(2, wait_s=5)
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

    def wait(releases: int, timeout_s: float, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> bool:
        waiting.set()
        return wait_for_room(releases, timeout_s, keys, parent)

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


def test_a_store_does_not_wait_for_ever(box: DiskBox, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_room_that_others_always_take_ends_the_wait_too(box: DiskBox, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    config = DiskConfig(directory=str(box.path), capacity_bytes=bytes_for(CONTEXT, 2), wait_s=1.0)
    tier = box.tier = DiskTier(config, CONTEXT, LruPolicy(), clock=clock)

    def released(*of: object) -> bool:
        clock.advance(0.3)
        return True

    monkeypatch.setattr(tier._index, "wait_for_room", released)
    outcomes = tier.store(writes_of(key_chain(3)))
    assert [type(outcome) for outcome in outcomes] == [Stored, Stored, Refused]
    assert clock.now_s() == pytest.approx(1.2)


def test_what_the_system_does_in_part_is_finished(box: DiskBox, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = box.start()
    keys = key_chain(2)
    pwritev, preadv = os.pwritev, os.preadv

    def part(buffers: list[memoryview]) -> list[memoryview]:
        return [memoryview(buffers[0])[:4096]]

    monkeypatch.setattr(os, "pwritev", lambda file, buffers, offset: pwritev(file, part(buffers), offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, part(buffers), offset))
    store(tier, keys)
    assert [load(tier, key) for key in keys] == [Loaded(CONTEXT.chunk_bytes)] * 2


def test_a_discard_during_the_store_holds_after_a_restart(box: DiskBox, monkeypatch: pytest.MonkeyPatch) -> None:
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
