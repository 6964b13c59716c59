"""The host pool: slots that are never given twice, files that nobody else can have touched, sizes that can be had."""

import ctypes
import errno
import os
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_core.errors import ConfigError, MisuseError
from kv_core.testing import key_chain
from kv_core.transfer import HostExtent
from kv_tiers import HostPool
from kv_tiers.pool import host_pool
from kv_tiers.pool.machine import memory_limit_bytes, spelled
from kv_tiers.pool.populated import LEAST_AHEAD


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A pool's name, in a directory that only this test uses."""
    monkeypatch.setattr(host_pool, "_parent", lambda: tmp_path)
    return f"pool-{uuid.uuid4().hex}"


@given(st.lists(st.booleans(), max_size=60))
def test_no_slot_is_given_twice_and_none_is_lost(allocations: list[bool]) -> None:
    made = HostPool.anonymous("p", 10, 7)
    taken: list[int] = []
    for allocate in allocations:
        if allocate:
            slot = made.allocate()
            assert (slot is None) == (len(taken) == 7)
            assert slot not in taken
            if slot is not None:
                taken.append(slot)
        elif taken:
            made.free(taken.pop(len(taken) // 2))
        assert made.slots_used == len(taken)
    made.close()


def test_used_slots_come_again_before_new_ones() -> None:
    """Memory is taken from the machine only as it is needed."""
    made = HostPool.anonymous("p", 10, 100)
    for _ in range(50):
        first, second = made.allocate(), made.allocate()
        assert {first, second} == {0, 1}
        made.free(0)
        made.free(1)
    made.close()


def test_a_slot_freed_twice_is_a_bug() -> None:
    made = HostPool.anonymous("p", 10, 3)
    made.allocate()
    made.free(0)
    for slot in (0, 1):
        with pytest.raises(MisuseError, match="free already"):
            made.free(slot)
    made.close()


def test_slots_start_at_pages_and_chunks_keep_their_size() -> None:
    made = HostPool.anonymous("p", 5000, 3)
    assert made.slot_bytes == 8192
    keys = key_chain(1)
    assert made.places.extents(keys, [2]) == (HostExtent("p", 16384, 5000),)
    assert made.places.extents(keys, [2])[0] is made.places.extents(keys, [2])[0]
    assert len(made.view) == 3 * 8192
    assert ctypes.addressof(ctypes.c_char.from_buffer(made.view)) % 4096 == 0
    made.close()


def test_a_big_pool_takes_little_memory_until_it_is_used() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    made = HostPool.anonymous("p", 2**20, 1024)
    most = LEAST_AHEAD + 2**23
    assert resident_bytes() - before < most
    made.view[:10] = b"0123456789"
    assert resident_bytes() - before < most
    made.close()


def test_close_says_who_is_in_the_way_and_works_afterwards() -> None:
    made = HostPool.anonymous("p", 4096, 2)
    for lend in (lambda: made.view[:5], lambda: ctypes.c_char.from_buffer(made.view), lambda: memoryview(made.view)):
        lent = lend()
        with pytest.raises(BufferError, match="release it"):
            made.close()
        assert bytes(made.view[:1]) == b"\0"
        del lent
    made.close()
    made.close()


def test_more_than_the_machine_has_is_refused_with_what_to_write() -> None:
    limit = memory_limit_bytes()
    assert limit is not None
    for make in (HostPool.anonymous, HostPool.named):
        with pytest.raises(ConfigError, match="write a capacity of at most") as refusal:
            make("p", limit, 2)
        assert spelled(2 * limit) in str(refusal.value)
        assert spelled(limit) in str(refusal.value)


def test_a_pool_of_nothing_is_refused() -> None:
    for chunk_bytes, slots in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ConfigError, match="positive"):
            HostPool.anonymous("p", chunk_bytes, slots)


def test_a_file_is_the_users_alone(name: str) -> None:
    made = HostPool.named(name, 100, 3)
    path = host_pool.pool_path(name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    made.close()
    assert path.exists()
    HostPool.unlink(name)
    HostPool.unlink(name)
    assert not path.exists()


def test_a_file_has_one_owner_at_a_time(name: str) -> None:
    made = HostPool.named(name, 100, 3)
    with pytest.raises(ConfigError, match="open already"):
        HostPool.named(name, 100, 3)
    other = f"""if True:
        from pathlib import Path
        from kv_tiers import HostPool
        from kv_tiers.pool import host_pool
        host_pool._parent = lambda: Path({str(host_pool._parent())!r})
        HostPool.named({name!r}, 100, 3)
    """
    ended = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False, timeout=99)
    assert ended.returncode == 1
    assert "open already" in ended.stderr
    made.close()
    HostPool.named(name, 100, 3).close()


@pytest.mark.parametrize("spoil", ["symlink", "readable", "fifo", "directory", "hard link"])
def test_what_somebody_else_may_have_made_is_refused(name: str, tmp_path: Path, spoil: str) -> None:
    HostPool.named("first", 100, 3).close()
    path = host_pool.pool_path(name)
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    match spoil:
        case "symlink":
            path.symlink_to(target)
        case "readable":
            path.touch(mode=0o644)
            path.chmod(0o644)
        case "fifo":
            os.mkfifo(path, 0o600)
        case "directory":
            path.mkdir(0o600)
        case _:
            target.chmod(0o600)
            path.hardlink_to(target)
    with pytest.raises(ConfigError, match="remove it or choose another name"):
        HostPool.named(name, 100, 3)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("spoil", ["symlink", "open to others", "file"])
def test_a_directory_that_is_not_ours_alone_is_refused(name: str, tmp_path: Path, spoil: str) -> None:
    directory = host_pool.pool_path(name).parent
    match spoil:
        case "symlink":
            (tmp_path / "elsewhere").mkdir(0o700)
            directory.symlink_to(tmp_path / "elsewhere")
        case "open to others":
            directory.mkdir()
            directory.chmod(0o750)
        case _:
            directory.touch()
    with pytest.raises(ConfigError, match="closed to others"):
        HostPool.named(name, 100, 3)


def test_the_file_of_another_user_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    HostPool.named(name, 100, 3).close()
    path = host_pool.pool_path(name)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(host_pool, "pool_path", lambda name: path)
    with pytest.raises(ConfigError, match="of this user"):
        HostPool.named(name, 100, 3)


@pytest.mark.parametrize("wrong", ["", "a/b", "..", ".hidden", "a" * 65, "ä", "a\n", "a\0"])
def test_a_name_is_a_plain_word(wrong: str) -> None:
    for use in (HostPool.unlink, lambda wrong: HostPool.named(wrong, 100, 3)):
        with pytest.raises(ConfigError, match="pool's name"):
            use(wrong)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
def test_a_full_file_system_is_noticed_before_it_kills(
    number: int, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = HostPool.named(name, 100, 3)

    def full(file: int, start: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert made.back([0, 2]) == {0, 2}
    assert f"pool {name} has no memory for more chunks" in caplog.text
    assert made.back([0, 2]) == set()
    made.close()


def test_a_file_system_too_small_is_refused_with_what_to_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstatvfs

    class Small:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda file: Small() if real(file) else None)
    with pytest.raises(ConfigError, match=r"12\.?\d* KiB|16 KiB|24 KiB") as refusal:
        HostPool.named(name, 4096, 4)
    assert "4 KiB free" in str(refusal.value)


def test_the_smallest_limit_above_us_counts(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\n")
    assert memory_limit_bytes(tmp_path) == 1000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n4:cpu,memory:/old\n")
    second = tmp_path / "sys/fs/cgroup/outer"
    (second / "inner").mkdir(parents=True)
    (second / "inner/memory.max").write_text("max\n")
    (second / "memory.max").write_text("900000\n")
    assert memory_limit_bytes(tmp_path) == 900_000
    first = tmp_path / "sys/fs/cgroup/memory/old"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text("800000\n")
    assert memory_limit_bytes(tmp_path) == 800_000


def test_sizes_are_spelled_for_people() -> None:
    assert [spelled(nbytes) for nbytes in (0, 1023, 1536, 2**32, 2**52)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "4 GiB",
        "4096 TiB",
    ]


def test_a_smaller_pool_knows_what_lies_beyond_its_capacity_after_an_exchange() -> None:
    """As when better bytes of a chunk, read into a place beyond it, replace those in one below."""
    earlier = HostPool.shared("p", 4096, 4)
    pool = HostPool.shared("p", 4096, 2, mapped_slots=4, descriptor=os.dup(earlier.descriptor))
    pool.take(range(3))
    assert (pool.above, pool.unused) == ({2}, [3])
    pool.swap(0, 2)
    assert pool.above == {0}
    pool.free(2)
    pool.free(0)
    assert (pool.above, pool.unused, pool.allocate()) == (set(), [3, 2], 2)
    for each in (earlier, pool):
        each.close()
