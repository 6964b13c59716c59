"""What an engine's processes cost, as Linux counts it: CPU seconds, threads, and how many of those do the work."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
BUSY_SHARE = 0.05
"""A thread that had so much of a core is busy."""


@dataclass(frozen=True, slots=True)
class Cost:
    """cpu_s: seconds of all cores. threads: that there are. busy: those that had a share of a core worth naming."""

    cpu_s: float
    threads: int
    busy: int


class Meter:
    """Reads the CPU time of a process and its descendants, from when it is made on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = _threads_of(pid)

    def read(self, wall_s: float) -> Cost:
        """Since the meter was made, which was `wall_s` seconds ago. Threads that have ended meanwhile are left out."""
        now = _threads_of(self._pid)
        used = [cpu_s - self._before.get(thread, 0.0) for thread, cpu_s in now.items()]
        return Cost(sum(used), len(now), sum(share > BUSY_SHARE * wall_s for share in used))


def _threads_of(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process and its descendants."""
    found: dict[int, float] = {}
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                found[int(task.name)] = (int(fields[11]) + int(fields[12])) * _TICK_S
                waiting += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found
