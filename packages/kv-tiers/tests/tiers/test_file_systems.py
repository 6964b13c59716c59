"""Tiers on file systems that offer less than ext4: real ones, mounted here, and calls that the kernel refuses."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_core.errors import ConfigError, TierDown
from kv_core.outcome import Loaded, LoadOutcome, Stored
from kv_core.testing import key_chain
from kv_remote.shared_fs import SharedFsConfig, SharedFsTier
from kv_testing.disk_box import CONTEXT, DiskBox, load, store, writes_of
from kv_tiers.testing.tier_contract import TierContract
from kv_tiers.tier import Tier, TierContext
from kv_tiers.tiers.disk import DiskTier, make_disk_tier
from kv_tiers.tiers.disk_chunks import bytes_for
from kv_tiers.tiers.disk_files import File

FILE_SYSTEMS = ["ext2", "ext3", "tmpfs", "overlay", "exfat-fuse", "bindfs"]
FAT_OPTIONS = f"uid={os.geteuid()},dmask=077,fmask=177"


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=120)


@pytest.fixture(params=FILE_SYSTEMS)
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory with a file system of this kind."""
    kind, at, image = request.param, tmp_path / "mount", tmp_path / "image"
    at.mkdir()
    loop = ""
    try:
        if kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", at)
        elif kind == "overlay":
            for name in ("lower", "upper", "work"):
                (tmp_path / name).mkdir()
            options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
            run("mount", "-t", "overlay", "-o", options, "overlay", at)
        elif kind == "bindfs":
            (tmp_path / "behind").mkdir()
            run("bindfs", tmp_path / "behind", at)
        else:
            with image.open("wb") as file:
                file.truncate(64 << 20)
            run("mkfs.exfat" if kind == "exfat-fuse" else f"mkfs.{kind}", image)
            if kind == "exfat-fuse":
                command = ["losetup", "-f", "--show", str(image)]
                made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                loop = made.stdout.strip()
                run("mount.exfat-fuse", "-o", FAT_OPTIONS, loop, at)
            else:
                run("mount", "-o", "loop", image, at)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{kind} cannot be mounted here: {error}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], timeout=120, check=False)
        if loop:
            subprocess.run(["losetup", "-d", loop], timeout=120, check=False)


@pytest.mark.parametrize("direct", ["auto", "never"])
def test_a_disk_tier_stores_and_finds_again_on_every_file_system(
    mount: Path, direct: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where fallocate is emulated by the C library, direct I/O refuses its writes: it stored nothing, for ever, while
    the log said "direct I/O" and every probe succeeded."""
    box, keys = DiskBox(mount / "tier"), key_chain(16)
    try:
        tier = box.start(16, direct=direct)
        store(tier, keys)
        assert [load(tier, key) for key in keys] == [Loaded(CONTEXT.chunk_bytes)] * 16
        store(tier, key_chain(16, branch="evicts"))
        tier.probe()
        tier = box.start(16, direct=direct)
        assert [load(tier, key) for key in key_chain(16, branch="evicts")] == [Loaded(CONTEXT.chunk_bytes)] * 16
        assert caplog.text.count("has no fallocate") in (0, 2)  # once a start
    finally:
        box.stop()


def test_a_file_system_without_fallocate_that_fills_up_leaves_the_tier_with_what_it_has(tmp_path: Path) -> None:
    at, image = tmp_path / "mount", tmp_path / "image"
    at.mkdir()
    with image.open("wb") as file:
        file.truncate(1 << 20)
    try:
        run("mkfs.ext2", image)
        run("mount", "-o", "loop", image, at)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"ext2 cannot be mounted here: {error}")
    box = DiskBox(at / "tier")
    try:
        tier = box.start(400)
        for number in range(40):
            assert all(isinstance(one, Stored) for one in tier.store(writes_of(key_chain(4, branch=str(number)))))
        assert 10 < (tier.usage().chunks or 0) < 90
        assert "No space left" in tier.usage().full
        assert [load(tier, key) for key in key_chain(4, branch="39")] == [Loaded(CONTEXT.chunk_bytes)] * 4
        tier = box.start(400)
        assert tier.holds(key_chain(4, branch="39")) == [True] * 4
    finally:
        box.stop()
        subprocess.run(["umount", "--lazy", str(at)], timeout=120, check=False)


def test_a_shared_tier_stores_and_finds_on_every_file_system(mount: Path) -> None:
    directory, keys = mount / "shared", key_chain(4)
    directory.mkdir(mode=0o700)
    tier = SharedFsTier(SharedFsConfig(directory=str(directory)), CONTEXT)
    assert tier.store(writes_of(keys)) == [Stored()] * 4
    assert tier.holds(keys) == [True] * 4
    tier.probe()
    assert [path for path in directory.iterdir() if path.name.startswith(".")] == []


# Calls that a kernel or a FUSE server refuses. In a process of its own, which strace makes the kernel do.

CALLS = [
    ("fallocate", "EOPNOTSUPP", "auto", "has no fallocate"),
    ("fallocate", "ENOSYS", "never", "has no fallocate"),
    ("fdatasync,fsync", "EINVAL", "auto", "has no fsync ("),
    ("fadvise64", "ENOSYS", "never", ""),
    ("statfs,fstatfs", "ENOSYS", "auto", ""),
]


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace on this machine's PATH")
@pytest.mark.parametrize(("calls", "error", "direct", "said"), CALLS)
def test_calls_that_are_refused_are_done_without(
    tmp_path: Path, calls: str, error: str, direct: str, said: str
) -> None:
    result = traced(tmp_path, f"{calls}:error={error}", direct)
    assert result["disk"] == result["found"] == ["Loaded"] * 6
    assert result["shared"] == ["Loaded"] * 6
    disk_lines = [line for line in result["log"] if said and said in line and "tier/" in line]
    assert len(disk_lines) == (2 if said else 0), result["log"]  # once a start


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace on this machine's PATH")
@pytest.mark.parametrize(("call", "when"), [("preadv", 2), ("preadv", 7), ("pwritev", 1), ("pwritev", 4)])
def test_direct_io_that_is_refused_at_any_time_is_left(tmp_path: Path, call: str, when: int) -> None:
    """Also where the start's trial found nothing wrong. Calls through the page cache succeed: only one is refused."""
    result = traced(tmp_path, f"{call}:error=EINVAL:when={when}", "auto")
    assert result["disk"] == result["found"] == ["Loaded"] * 6
    assert sum("has no O_DIRECT" in line for line in result["log"]) <= 1


def traced(tmp_path: Path, injection: str, direct: str) -> dict[str, list[str]]:
    quick = ["--seccomp-bpf", "-e", f"trace={injection.partition(':')[0]}"]
    command = ["strace", "-f", "-qq", "-o", "/dev/null", *quick, "-e", f"inject={injection}", sys.executable, __file__]
    done = subprocess.run([*command, str(tmp_path), direct], capture_output=True, text=True, timeout=120, check=False)
    if "Operation not permitted" in done.stderr and "strace" in done.stderr:
        pytest.skip("processes may not be traced here")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def store_and_load(root: Path, direct: str) -> dict[str, list[str]]:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kv_tiers").addHandler(handler)
    keys, box = key_chain(6), DiskBox(root / "tier")

    def names(outcomes: list[LoadOutcome]) -> list[str]:
        return [type(outcome).__name__ for outcome in outcomes]

    tier = box.start(direct=direct)
    store(tier, keys)
    loaded = names([load(tier, key) for key in keys])
    tier.probe()
    tier = box.start(direct=direct)
    found = names([load(tier, key) for key in keys])
    box.stop()
    (root / "shared").mkdir(mode=0o700)
    shared = SharedFsTier(SharedFsConfig(directory=str(root / "shared")), CONTEXT)
    contract = TierContract()
    contract.context, contract.tier = CONTEXT, shared
    assert shared.store(writes_of(keys)) == [Stored()] * 6
    shared.probe()
    return {"disk": loaded, "found": found, "shared": names(contract.load(keys)), "log": lines}


def test_a_file_system_without_locks_is_refused_in_words_that_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre without -o flock said "lock cannot be used: Function not implemented"."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ConfigError, match="-o flock"):
        DiskBox(tmp_path / "tier").start()


def test_direct_io_that_was_asked_for_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = DiskBox(tmp_path / "tier")
    tier, real = box.start(direct="always"), os.pwritev

    def refuse_direct(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse_direct)
    for call in (lambda: tier.store(writes_of(key_chain(1))), tier.probe):
        with pytest.raises(TierDown, match="Invalid argument"):
            call()
    with pytest.raises(ConfigError, match="no direct I/O"):
        box.start(direct="always")
    store(box.start(direct="auto"), key_chain(1))
    box.stop()


def test_a_probe_does_what_stores_do(tmp_path: Path) -> None:
    """A probe that wrote one page of the index succeeded where no store did."""
    box = DiskBox(tmp_path / "tier")
    tier = box.start()
    for call in ("allocate", "write", "sync", "read"):
        real = getattr(File, call)

        def fail(self: File, *arguments: object, real: Any = real) -> object:
            if self.path.name not in ("index", "lock"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(self, *arguments)

        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(File, call, fail)
            with pytest.raises(TierDown, match="Input/output"):
                tier.probe()
        tier.probe()
    store(tier, key_chain(1))
    box.stop()


class TestDiskThroughTheContractWithoutFallocate(TierContract):
    """The whole contract, where room is made by writing zeros."""

    def setup_method(self) -> None:
        self.patch = pytest.MonkeyPatch()

        def refuse(descriptor: int, start: int, nbytes: int) -> None:
            raise OSError(95, "Operation not supported")

        self.patch.setattr("kv_tiers.tiers.disk_files.fallocate", refuse)
        self.root = Path(tempfile.mkdtemp(prefix="kv"))
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        self.patch.undo()
        shutil.rmtree(self.root, ignore_errors=True)

    def make(self, context: TierContext, chunks: int) -> Tier:
        shutil.rmtree(self.root, ignore_errors=True)
        tier = make_disk_tier({"directory": str(self.root), "capacity_bytes": bytes_for(context, chunks)}, context)
        assert isinstance(tier, DiskTier)
        return tier


if __name__ == "__main__":
    print(json.dumps(store_and_load(Path(sys.argv[1]), sys.argv[2])))
