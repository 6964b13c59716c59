"""What a request says of tiers, at a server in another process: as in process, and known to the client by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_server import RemoteCache, ServerProcess, launch
from kv_testing.cache_servers import SLOT_BYTES, fill, join_server, kill_server, read, report_of
from kv_testing.wait import until

KEYS = key_chain(4)


@contextmanager
def served(home: Path, *names: str) -> Iterator[ServerProcess]:
    """A server whose pool has room for one prompt, over tiers with these names."""
    tiers = [{"type": "dram", "name": name, "capacity_bytes": 64 * SLOT_BYTES} for name in names]
    server = launch({"host": {"capacity_bytes": 4 * SLOT_BYTES}, "tiers": tiers}, socket=home / "s")
    try:
        yield server
    finally:
        server.stop()


def stored(home: Path) -> list[int]:
    (cache,) = report_of(home / "s").caches
    return [tier.usage.chunks or 0 for tier in cache.tiers]


def store(cache: RemoteCache, tiers: tuple[str, ...] | None, branch: str = "") -> None:
    lease = cache.begin_store(key_chain(4, branch=branch) if branch else KEYS, "w", tiers=tiers)
    fill(cache, lease)
    cache.commit(lease)


def found(cache: RemoteCache, tiers: tuple[str, ...] | None) -> int:
    plans = []

    def is_final() -> bool:
        plans.append(cache.lookup(KEYS, "r", wait_for_promotion=True, tiers=tiers))
        return plans[-1].ended is not Ended.PENDING

    until(is_final)
    cache.end("r")
    return plans[-1].chunks


def test_a_server_reads_and_writes_the_tiers_of_a_request_alone(tmp_path: Path) -> None:
    with served(tmp_path, "near", "far"):
        cache = join_server(tmp_path)
        assert cache.tiers == ("host", "near", "far")
        store(cache, ("far",))
        until(lambda: stored(tmp_path) == [0, 4])
        store(cache, ("near",), "crowd")
        until(lambda: stored(tmp_path) == [4, 4])
        assert found(cache, ()) == found(cache, ("host", "near")) == 0
        assert found(cache, ("far", "unknown")) == 4
        assert read(cache, KEYS)
        assert stored(tmp_path) == [4, 4]
        cache.close()


def test_the_names_are_those_of_the_server_that_came_after_a_crash(tmp_path: Path) -> None:
    with served(tmp_path, "near") as server:
        cache = join_server(tmp_path)
        assert cache.tiers == ("host", "near")
        kill_server(server)
    assert cache.tiers == ("host", "near")
    with served(tmp_path, "other", "far"):
        until(lambda: cache.lookup(KEYS, "r").ended is Ended.ABSENT)
        assert cache.tiers == ("host", "other", "far")
        cache.close()
