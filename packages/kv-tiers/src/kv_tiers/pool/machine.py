"""How much memory is available: the machine's, or less if a control group limits it."""

from collections.abc import Iterator
from pathlib import Path

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The smallest limit that applies to this process; None where none can be read."""
    limits = list(_cgroup_limits(root))
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=None)


def _cgroup_limits(root: Path) -> Iterator[int]:
    """The limits of every control group from ours up, in either version of control groups."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(top):
                break
            text = _read(directory / name).strip()
            if text.isdigit():  # "max" means none
                yield int(text)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def spelled(nbytes: int) -> str:
    """4294967296 as "4 GiB", for people."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
