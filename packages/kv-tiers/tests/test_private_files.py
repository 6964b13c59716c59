"""One rule for every secret and every directory of ours, kept by all who read or make one."""

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kv_core.errors import ConfigError
from kv_remote.objects import make_objects_tier
from kv_remote.redis import make_redis_tier
from kv_remote.shared_fs import make_shared_fs_tier
from kv_server.address import ListeningSocket
from kv_server.http.start import read_token
from kv_tiers import HostPool
from kv_tiers.build import build_lane
from kv_tiers.pool import host_pool
from kv_tiers.pool.private_files import own_directory, read_secret
from kv_tiers.settings import Settings
from kv_tiers.tenants import read_tenants
from kv_tiers.tier import TierContext
from kv_tiers.tiers.disk_directory import DiskDirectory
from kv_tiers.tiers.space import Geometry

CONTEXT = TierContext(4096, 4096, "private files")
SECRET = "0123456789abcdef0123456789abcdef"
STRANGER = 12345
"""A user who is neither we nor root."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")

Reader = Callable[[Path], object]
READERS: dict[str, Reader] = {
    "secret_file": lambda path: Settings(algorithm="blake2b", secret_file=str(path)).scheme(),
    "salt_file": lambda path: read_tenants([{"name": "a", "salt_file": str(path)}], capacity_bytes=1 << 20),
    "token_file": read_token,
    "password_file": lambda path: make_redis_tier({"url": "redis://h", "password_file": str(path)}, CONTEXT).close(),
    "tls_key_file": lambda path: make_redis_tier(
        {"url": "rediss://h", "tls_cert_file": "/not/there", "tls_key_file": str(path)}, CONTEXT
    ).close(),
    "secret_access_key_file": lambda path: make_objects_tier(
        {"bucket": "b", "access_key_id": "me", "secret_access_key_file": str(path)}, CONTEXT
    ).close(),
    "key_file": lambda path: make_shared_fs_tier(
        {"directory": str(path.parent), "key_file": str(path)}, CONTEXT
    ).close(),
}
everywhere = pytest.mark.parametrize("name", READERS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def refused(name: str, path: Path) -> str:
    """What is said. It must say where the path was written, and which file it is."""
    with pytest.raises(ConfigError) as refusal:
        READERS[name](path)
    said = str(refusal.value)
    assert name in said and str(path) in said
    assert SECRET not in said
    return said


@everywhere
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o601])
def test_a_secret_that_others_have_any_right_to_is_refused(name: str, path: Path, mode: int) -> None:
    path.chmod(mode)
    said = refused(name, path)
    assert f"chmod 600 {path}" in said
    assert "defaultMode: 0400" in said


@everywhere
def test_a_fifo_holds_nobody_up(name: str, path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(refused(name, path)), daemon=True)
    reader.start()
    reader.join(30)
    assert said


@everywhere
def test_what_is_no_file_is_no_secret(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()
    path.mkdir(mode=0o700)
    assert "is not a file" in refused(name, path)
    path.rmdir()
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(path.parent)  # the system allows no long path
        bound.bind("secret")
        refused(name, path)


@everywhere
def test_a_file_that_is_not_there_is_said_so(name: str, tmp_path: Path) -> None:
    assert "No such file" in refused(name, tmp_path / "not" / "there")


@everywhere
def test_a_file_that_cannot_be_a_secret_is_not_read_whole(name: str, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)
    assert "bytes" in refused(name, path)


@as_root
@everywhere
def test_a_file_of_another_user_is_refused(name: str, path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)
    assert f"user {STRANGER}" in refused(name, path)


@as_root
def test_a_link_that_another_user_made_is_refused(path: Path) -> None:
    """It could send us to a secret of ours that is meant for somebody else."""
    link = path.with_name("link")
    link.symlink_to(path)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"link of user {STRANGER}"):
        read_secret(link, "token_file")


def test_a_secret_as_kubernetes_mounts_it_is_read(tmp_path: Path) -> None:
    """name → ..data/name, ..data → a directory that changes when the secret does; with defaultMode: 0400."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "secret").write_text(SECRET)
    (tmp_path / "..2026" / "secret").chmod(0o400)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "secret").symlink_to("..data/secret")
    assert read_secret(tmp_path / "secret", "token_file") == SECRET.encode()
    (tmp_path / "..2026" / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="defaultMode: 0400"):
        read_secret(tmp_path / "secret", "token_file")
    (tmp_path / "..2026" / "secret").chmod(0o440)  # defaultMode: 0400 with fsGroup
    with pytest.raises(ConfigError, match="with fsGroup"):
        read_secret(tmp_path / "secret", "token_file")


def test_newlines_at_the_end_do_not_count_and_spaces_do(path: Path) -> None:
    for text, said in ((b"a b \n", b"a b "), (b"x\r\n", b"x"), (b"x\n\n", b"x\n"), (b"x", b"x")):
        path.write_bytes(text)
        assert read_secret(path, "salt_file") == said
    path.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(path, "salt_file")


# Directories and files of our own.


def _pool(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "_parent", lambda: directory.parent)
    directory.rename(directory.parent / f"kv-tiers-{os.geteuid()}")
    HostPool.named("p", 4096, 1).close()


MAKERS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "socket": lambda directory, _: ListeningSocket(directory / "s").close(),
    "pool": _pool,
    "disk": lambda directory, _: DiskDirectory(
        str(directory.parent), directory.name, slots=1, geometry=Geometry.of(8192), direct="never"
    ).close(),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707, 0o702])
def test_a_directory_of_ours_that_others_reach_into_is_refused(
    name: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("0" * 32)
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="0700"):
        MAKERS[name](directory, monkeypatch)


@as_root
@pytest.mark.parametrize("name", MAKERS)
def test_a_directory_of_another_user_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / ("0" * 32)
    directory.mkdir(mode=0o700)
    os.chown(directory, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match="0700"):
        MAKERS[name](directory, monkeypatch)


def test_a_directory_is_made_for_us_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        own_directory(tmp_path / "above" / "made", "write another one", parents=True)
    finally:
        os.umask(before)
    for made in (tmp_path / "above", tmp_path / "above" / "made"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_trace_is_written_into_no_pipe_and_no_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace", 0o600)
    script = (
        "from kv_observe.trace_file import _TraceFile; from pathlib import Path\n"
        f"try: _TraceFile(Path({str(tmp_path / 'trace')!r}), 1000)\n"
        "except OSError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True)
    assert "trace" in done.stdout


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As Lustre mounted without -o flock."""

    def refuse(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    tmp_path.chmod(0o700)
    disk = {"type": "disk", "directory": str(tmp_path / "disk"), "capacity_bytes": "64MiB"}
    places: list[Callable[[], object]] = [
        lambda: build_lane(disk, TierContext(4096, 4096, "f"), where="t"),
        lambda: ListeningSocket(tmp_path / "kv.sock"),
        lambda: HostPool.named(f"unlockable-{os.getpid()}", 4096, 4),
    ]
    for place in places:
        with pytest.raises(ConfigError, match=r"cannot be locked.*file locks.*Lustre: -o flock"):
            place()
    HostPool.unlink(f"unlockable-{os.getpid()}")
