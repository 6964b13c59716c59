"""`kv doctor` on memory and file systems."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from kv_core.errors import ConfigError
from kv_core.tools.doctor import DoctorOptions, Finding, version_of

from kv_tiers.pool.machine import memory_limit_bytes, spelled
from kv_tiers.tiers.disk_directory import try_place

_NETWORKED = ("nfs", "nfs4", "lustre", "cifs", "smb3", "fuse", "ceph", "9p", "glusterfs", "beegfs")


def check(options: DoctorOptions) -> Iterator[Finding]:
    """For the entry-point group `kv_core.doctor`."""
    yield from _memory()
    yield from _numa(Path("/sys/devices/system/node"))
    yield from _directory(Path(options.path))
    yield Finding("ok", "kv-tiers", f"{version_of('kv-tiers')} on Python {sys.version.split()[0]}")


def _memory() -> Iterator[Finding]:
    limit = memory_limit_bytes()
    if limit is not None:
        yield Finding("ok", "memory", f"{spelled(limit)} for this process and all others that share this limit")
    shared = Path("/dev/shm")  # noqa: S108  # where named pools are
    if not shared.is_dir():
        yield Finding("note", "shared memory", "there is no /dev/shm", "leave host.name out: a named pool needs it")
        return
    state = os.statvfs(shared)
    size = state.f_frsize * state.f_blocks
    if limit is not None and size < limit // 4:
        advice = "a named pool must fit: mount it larger; in a container, --shm-size"
        yield Finding("note", "shared memory", f"{spelled(size)} in {shared}", advice)
    else:
        yield Finding("ok", "shared memory", f"{spelled(size)} in {shared}")


def _numa(nodes: Path) -> Iterator[Finding]:
    node_names = sorted(path.name for path in nodes.glob("node[0-9]*"))
    if len(node_names) > 1:
        advice = "run each engine on the cores and memory of its GPU's node: numactl --cpunodebind=N --membind=N"
        yield Finding("note", "NUMA", f"{len(node_names)} nodes", advice)
    else:
        yield Finding("ok", "NUMA", "one node")


def _directory(path: Path) -> Iterator[Finding]:
    what = f"directory {path}"
    kind = file_system_of(path.resolve(), Path("/proc/self/mountinfo"))
    advice = "name a directory that you may write to: --path DIR"
    try:
        state = os.statvfs(path)
        tried = try_place(path)
    except OSError as error:
        yield Finding("wrong", what, error.strerror or str(error), advice)
        return
    except ConfigError as error:
        yield Finding("wrong", what, str(error), advice)
        return
    description = f"{kind}, {spelled(state.f_frsize * state.f_bavail)} free"
    remarks = tried.remarks()
    if kind.partition(".")[0] in _NETWORKED:
        advice = "use a shared_fs tier here, and a disk tier on a local disk"
        yield Finding("note", what, "; ".join([description + ", a network file system", *remarks]), advice)
    elif remarks:
        advice = "a disk tier works here all the same; ext4 and xfs have everything"
        yield Finding("note", what, "; ".join([description, *remarks]), advice)
    else:
        yield Finding("ok", what, description + ", direct I/O")


def file_system_of(path: Path, mounts: Path) -> str:
    """The kind of file system of this absolute path, as in mountinfo (proc(5)); "unknown" if it is not listed."""
    longest_mount, kind = "", "unknown"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        mounted_at = mount.split()[4].replace("\\040", " ")
        if path.is_relative_to(mounted_at) and len(mounted_at) >= len(longest_mount):
            longest_mount, kind = mounted_at, file_system.split()[0]
    return kind
