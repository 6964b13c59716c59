"""The disk tier keeps the promises of every tier that is bounded and outlives its process, and what it says itself."""

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
from kv_core.outcome import Absent, Damaged, Loaded
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_testing.disk_box import CHUNK_AT, CONTEXT, DiskBox, flip, load, store, writes_of
from kv_testing.media import slabs_of, unreadable_device
from kv_testing.wait import joined
from kv_tiers import chunk_header
from kv_tiers.testing.tier_contract import BoundedTierContract, PersistentTierContract
from kv_tiers.tier import Tier, TierContext
from kv_tiers.tiers import disk_directory
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for, make_disk_tier, slots_for


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
        for file, offset, nbytes in self.tier._chunks.segments(entry, self.tier._index.extent(entry).units, 1 << 20):
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


@pytest.fixture
def box(tmp_path: Path) -> Iterator[DiskBox]:
    made = DiskBox(tmp_path / "tier")
    yield made
    made.stop()


# What is damaged is a miss.


def test_a_bit_that_flips_anywhere_in_a_chunk_is_a_miss(box: DiskBox) -> None:
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


def test_a_bit_that_flips_anywhere_in_a_record_is_a_miss_after_the_restart(box: DiskBox) -> None:
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


def test_a_bit_that_flips_anywhere_in_the_index_header_is_a_start_from_nothing_or_a_refusal(box: DiskBox) -> None:
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
def test_a_chunk_cut_short_is_damaged_and_forgotten(box: DiskBox, direct: str) -> None:
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


def test_whatever_is_missing_of_the_files_is_a_miss_after_the_restart(box: DiskBox) -> None:
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


def test_a_missing_slab_is_a_miss(box: DiskBox) -> None:
    """The peer raised KeyError into the engine."""
    keys = key_chain(2)
    store(box.start(), keys)
    box.stop()
    (box.inside / "slab-0000").unlink()
    tier = box.start()
    assert [load(tier, key) for key in keys] == [Absent(), Absent()]
    store(tier, keys)


def test_two_records_of_a_chunk_are_one_chunk(box: DiskBox) -> None:
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


def test_after_a_restart_tails_leave_before_heads_and_old_prompts_before_new(box: DiskBox) -> None:
    old, new = key_chain(8), key_chain(8, branch="new")
    tier = box.start()
    store(tier, new[:4])
    store(tier, old)
    store(tier, new[4:], parent=new[3])
    tier = box.start()
    store(tier, key_chain(5, branch="newest"))
    assert tier.holds(old) == [True] * 3 + [False] * 5
    assert tier.holds(new) == [True] * 8


def test_a_smaller_capacity_forgets_for_good_and_says_so(box: DiskBox, caplog: pytest.LogCaptureFixture) -> None:
    """What was discarded while it was out of sight must not come back."""
    keys = key_chain(16)
    store(box.start(16), keys)
    assert "smaller capacity" not in caplog.text
    tier = box.start(4)
    assert "has a smaller capacity than at the last start" in caplog.text
    assert (tier.usage().chunks or 0) <= 4
    kept = tier.holds(keys)
    tier = box.start(16)
    assert tier.holds(keys) == kept
    store(tier, keys)
    assert all(tier.holds(keys))


def test_a_capacity_that_was_raised_takes_no_more_files_than_may_be_open(
    box: DiskBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slabs of a directory stay as small as its first capacity made them, and each is an open file."""
    limits, raised = (100, 300), []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, to: raised.append(to))
    monkeypatch.setattr(disk_directory, "_SLAB_BYTES", 1)
    keys = key_chain(4)
    store(box.start(4), keys)
    with pytest.raises(ConfigError, match=r"needs 100: .*this process may have 300.*ulimit -n \d+.* a new directory"):
        box.start(100)
    assert all(box.start(4).holds(keys)) and not raised
    limits = (100, 1000)
    tier = box.start(100)
    ((soft, hard),) = raised
    assert (350 < soft < 700, hard) == (True, 1000)
    store(tier, key_chain(90, branch="more"))
    assert all(tier.holds(keys))


def test_an_index_of_another_version_is_an_empty_tier_and_a_line_in_the_log(
    box: DiskBox, caplog: pytest.LogCaptureFixture
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


@pytest.mark.parametrize("lose", [Path.unlink, lambda index: os.truncate(index, 0)])
def test_an_index_that_was_lost_while_the_tier_ran_is_an_empty_tier_and_a_line_in_the_log(
    box: DiskBox, caplog: pytest.LogCaptureFixture, lose: Callable[[Path], None]
) -> None:
    """What the slabs hold is not taken over: some of it may have been discarded, and would be back."""
    tier = box.start()
    store(tier, key_chain(2))
    tier.discard(key_chain(1))
    lose(box.inside / "index")
    store(tier, key_chain(2, branch="later"))
    assert not caplog.text
    tier = box.start()
    assert f"starts empty: {box.inside / 'index'} was removed or cut short" in caplog.text
    assert tier.holds([*key_chain(2), *key_chain(2, branch="later")]) == [False] * 4
    store(tier, key_chain(2))
    assert box.start().holds(key_chain(2)) == [True, True]
    assert caplog.text.count("starts empty") == 1


def test_what_others_take_is_told(box: DiskBox, caplog: pytest.LogCaptureFixture) -> None:
    store(box.start(), key_chain(1))
    other = TierContext(CONTEXT.chunk_bytes, CONTEXT.slot_bytes, "another format")
    config = DiskConfig(directory=str(box.path), capacity_bytes=bytes_for(other, 4))
    DiskTier(config, other, LruPolicy()).close()
    assert "chunks of other formats take" in caplog.text


def test_a_pipe_in_the_place_of_anothers_index_holds_up_no_start(box: DiskBox) -> None:
    """In a directory that users share, any of them can put it there."""
    other = box.path / ("0" * 32)
    other.mkdir(parents=True)
    os.mkfifo(other / "index")
    starting = threading.Thread(target=box.start, daemon=True)
    starting.start()
    joined(starting, within_s=10)


# Whose directory it is.


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_users_who_share_the_directory_above_do_not_hinder_each_other() -> None:
    """Each has directories of its own in there, closed to the others."""
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o1777)  # as /tmp is
        store(DiskBox(Path(shared)).start(), key_chain(1))
        other = TierContext(CONTEXT.chunk_bytes, CONTEXT.slot_bytes, "another format")
        config = DiskConfig(directory=shared, capacity_bytes=bytes_for(other, 4))
        os.seteuid(12345)
        try:
            DiskTier(config, other, LruPolicy()).close()
        finally:
            os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_directory_behind_a_closed_one_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(0o700)
    options = {"directory": str(tmp_path / "closed" / "above" / "kv"), "capacity_bytes": "1GiB"}
    os.seteuid(12345)
    try:
        with pytest.raises(ConfigError, match="cannot be reached: Permission denied"):
            make_disk_tier.check(options)
    finally:
        os.seteuid(0)


def test_a_directory_has_one_owner(box: DiskBox) -> None:
    box.start()
    with pytest.raises(ConfigError, match=f"{box.inside} is in use .* choose another directory"):
        DiskBox(box.path).start()
    script = (
        "from kv_tiers.tiers.disk import *; from kv_eviction.simple import LruPolicy; "
        f"config = DiskConfig(directory={str(box.path)!r}, capacity_bytes=1 << 20); "
        "DiskTier(config, TierContext(5000, 8192, 'disk'), LruPolicy())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "is in use by another disk tier" in done.stderr
    box.stop()
    box.start()


def test_files_are_the_users_alone(box: DiskBox) -> None:
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


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


def _socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, 0o600 | stat.S_IFSOCK)


@pytest.mark.parametrize("name", ["lock", "index", "slab-0000", "trial"])
@pytest.mark.parametrize("spoil", [_link, _link_twice, _pipe, _directory, _socket, lambda path: path.chmod(0o644)])
def test_files_that_cannot_be_trusted_are_refused(box: DiskBox, name: str, spoil: Callable[[Path], None]) -> None:
    store(box.start(), key_chain(1))
    box.stop()
    (box.inside / name).touch(0o600)
    spoil(box.inside / name)
    with pytest.raises(ConfigError, match=f"{box.inside / name} .*; remove it or choose another directory"):
        box.start()


@pytest.mark.parametrize("in_the_way", [_pipe, _directory, _socket])
def test_what_lies_where_a_running_tier_makes_a_file_is_named_and_can_be_removed(
    box: DiskBox, in_the_way: Callable[[Path], None]
) -> None:
    tier = box.start()
    slab = box.inside / "slab-0000"
    slab.touch()
    in_the_way(slab)
    with pytest.raises(TierDown, match=f"{slab} is not a plain file .*; remove it"):
        tier.store(writes_of(key_chain(2)))
    slab.rmdir() if slab.is_dir() else slab.unlink()
    tier.probe()
    store(tier, key_chain(2))
    assert box.start().holds(key_chain(2)) == [True, True]


def test_a_directory_that_others_reach_into_or_that_is_a_link_is_refused(box: DiskBox) -> None:
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
def test_somebody_elses_index_is_refused_and_left_alone(box: DiskBox, foreign: bytes) -> None:
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
            DiskBox(path).start()
    with pytest.raises(ConfigError, match="several different ones"):
        DiskBox(tmp_path).start(directory=[str(tmp_path), str(tmp_path) + "/"])
    for nowhere in ([], "", [str(tmp_path), ""]):
        with pytest.raises(ConfigError, match="several different ones"):
            DiskBox(tmp_path).start(directory=nowhere)


def test_a_missing_device_among_several_is_refused_and_the_others_are_free_again(box: DiskBox) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        box.start(directory=[str(box.path), str(box.path / "a" / "b" / "c")])
    box.start()


def test_settings_that_make_no_sense_are_refused(box: DiskBox) -> None:
    with pytest.raises(ConfigError, match=f"write at least {bytes_for(CONTEXT, 1)}"):
        box.start(capacity_bytes=bytes_for(CONTEXT, 1) - 1)
    for wait_s in (-1, 5.5, 10):
        with pytest.raises(ConfigError, match=r"`wait_s` is .*; write 0 to 5, because"):
            box.start(wait_s=wait_s)
    assert slots_for(DiskConfig(directory="x", capacity_bytes=bytes_for(CONTEXT, 7)), CONTEXT) == 7


def test_a_big_capacity_costs_nothing_until_it_is_used(box: DiskBox) -> None:
    box.start(1_000_000)
    assert sum(file.stat().st_blocks for file in box.inside.iterdir()) * 512 < 100_000
