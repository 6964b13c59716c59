"""What `kv doctor` says of this machine, and of machines that are not at hand."""

import errno
import os
from pathlib import Path

import pytest
from kv_core.tools.doctor import DoctorOptions
from kv_tiers import doctor

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /dev/shm rw,nosuid,nodev shared:2 - tmpfs tmpfs rw
41 22 0:44 / /mnt/far rw,relatime shared:3 - nfs4 server:/export rw
42 22 0:45 / /mnt/two\\040words rw,relatime - xfs /dev/sdb rw
43 22 0:46 / /mnt/far/near rw,relatime - ext4 /dev/sdc rw
"""


def test_every_finding_of_this_machine_that_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    found = list(doctor.check(DoctorOptions(str(tmp_path), measure=True)))
    assert {"shared memory", "NUMA", f"directory {tmp_path}", "kv-tiers"} <= {finding.what for finding in found}
    assert all(finding.advice for finding in found if finding.state != "ok")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/user", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/mnt/far/x", "nfs4"),
        ("/mnt/farther", "ext4"),
        ("/mnt/far/near/x", "ext4"),
        ("/mnt/two words", "xfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert doctor.file_system_of(Path(path), mounts) == kind
    assert doctor.file_system_of(Path(path), tmp_path / "none") == "unknown"


def test_a_networks_file_system_is_for_another_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "file_system_of", lambda path, mounts: "nfs4")
    (finding,) = doctor._directory(tmp_path)
    assert finding.state == "note"
    assert "shared_fs tier" in finding.advice


def test_a_directory_that_is_not_there_is_wrong(tmp_path: Path) -> None:
    (finding,) = doctor._directory(tmp_path / "none")
    assert (finding.state, finding.found) == ("wrong", "No such file or directory")


def test_what_a_disk_tier_needs_is_tried_and_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode, dir_fd=dir_fd)

    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    (finding,) = doctor._directory(tmp_path)
    assert (finding.state, "direct I/O" in finding.found) == ("ok", True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse_direct)
        (finding,) = doctor._directory(tmp_path)
        assert (finding.state, "no O_DIRECT" in finding.found) == ("note", True)
    with monkeypatch.context() as patched:
        patched.setattr("kv_tiers.tiers.disk_files.fallocate", refuse)
        (finding,) = doctor._directory(tmp_path)
        assert (finding.state, "no fallocate" in finding.found) == ("note", True)
    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", refuse)
        (finding,) = doctor._directory(tmp_path)
        assert (finding.state, "has no file locks" in finding.found) == ("wrong", True)
    assert list(tmp_path.iterdir()) == []


def test_several_nodes_of_memory_are_worth_a_note(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    assert [finding.state for finding in doctor._numa(tmp_path)] == ["ok"]
    (tmp_path / "node1").mkdir()
    (finding,) = doctor._numa(tmp_path)
    assert (finding.state, finding.found) == ("note", "2 nodes")
