"""Which of our files a hit from disk passes, and which a store to disk does: seen by a profiler, not listed by hand.

    python scripts/passed_files.py

A `LocalCache` with a disk tier in a temporary directory stores two chunks, loses them from its pool, and finds them on
the disk. Every Python function of ours that runs meanwhile, on any thread, names its file.
"""

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
CHUNK_BYTES = 4096
WAIT_S = 30.0


class Passed:
    """A profile function for all threads that collects files while it is on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_name != "<module>" and str(PACKAGES) in code.co_filename:
            self.files.add(code.co_filename.partition("/src/")[2])

    def collected(self) -> list[str]:
        """What was collected since it was on; it is off from now on."""
        self.is_on = False
        found, self.files = sorted(self.files), set()
        return found


def passed() -> dict[str, list[str]]:
    """The files that a store to disk and a hit from disk pass, as `kv_tiers/cache/local.py`."""
    seen = Passed()
    threading.setprofile(seen)  # before any thread of the cache starts
    sys.setprofile(seen)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return _of_a_cache(scratch, seen)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _of_a_cache(scratch: str, seen: Passed) -> dict[str, list[str]]:
    from kv_core import ChunkKey
    from kv_core.service import Ended
    from kv_tiers import HostConfig, build_local_cache

    def keys(prompt: int) -> list[ChunkKey]:
        return [ChunkKey(bytes([1]) + bytes(29) + bytes([prompt, number]) * 16) for number in range(2)]

    disk = {"type": "disk", "directory": f"{scratch}/kv", "capacity_bytes": "64MiB"}
    pool = HostConfig(capacity_bytes=2 * CHUNK_BYTES)
    cache = build_local_cache(pool, group_bytes=(CHUNK_BYTES,), fingerprint="traced", tiers=[disk])

    def store(prompt: int) -> None:
        cache.commit(cache.begin_store(keys(prompt), "writer"))
        cache.end("writer")
        cache.lower.drain(WAIT_S)

    def hit(prompt: int) -> None:
        asked = threading.Event()  # nobody sets it: only its time-out is used
        for _ in range(int(WAIT_S * 100)):
            plan = cache.lookup(keys(prompt), "reader", wait_for_promotion=True)
            if plan.ended is not Ended.PENDING:
                break
            asked.wait(0.01)
        assert plan.chunks == 2
        cache.release(cache.load(keys(prompt), "reader"))
        cache.end("reader")

    try:
        store(1)
        store(2)  # what happens but once has happened, and prompt 1 has left the pool
        hit(1)
        store(3)  # prompt 1 has left the pool again
        seen.is_on = True
        store(4)
        stored = seen.collected()
        seen.is_on = True
        hit(1)
        return {"a store to disk": stored, "a hit from disk": seen.collected()}
    finally:
        seen.is_on = False
        cache.close()


if __name__ == "__main__":
    for what, files in passed().items():
        print(f"{what}: {len(files)} files", *files, sep="\n  ")
