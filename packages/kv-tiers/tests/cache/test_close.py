"""A cache whose tiers failed closes like any other: nothing keeps the pool, and a named one is free at once."""

import errno
import gc
import os
import shutil
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NoReturn

import pytest
from kv_core.keys import ChunkKey
from kv_core.outcome import StoreOutcome
from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_testing.media import slabs_of, unreadable_device
from kv_testing.servers import free_port
from kv_testing.threads import threads_left
from kv_testing.wait import until
from kv_tiers import HostPool, LocalCache, chunk_header
from kv_tiers.build import build_local_cache
from kv_tiers.config import ColdConfig, HostConfig
from kv_tiers.lanes.lane import Lane
from kv_tiers.testing.tier_contract import content
from kv_tiers.tier import Write
from kv_tiers.tier_state import Health
from kv_tiers.tiers.disk import DiskTier
from kv_tiers.tiers.dram import DramTier

CHUNK_BYTES = 5000
SLOTS = 8

Fault = Literal["directory removed", "parent removed", "EIO"]


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    HostPool.unlink(name)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """What only the garbage collector would free is kept: a cache must not depend on when that comes by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def opened(name: str, *tiers: Mapping[str, object]) -> LocalCache:
    return build_local_cache(
        HostConfig(capacity_bytes=SLOTS * 8192, name=name),
        group_bytes=(CHUNK_BYTES,),
        fingerprint="close",
        tiers=tiers,
        cold=ColdConfig(drain_s=0.2),
    )


def disk_at(path: Path) -> dict[str, object]:
    path.parent.mkdir(exist_ok=True)
    return {"type": "disk", "directory": str(path), "capacity_bytes": 16 * 16384}


def store(cache: LocalCache, keys: list[ChunkKey]) -> None:
    lease = cache.begin_store(keys, "w")
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
    cache.commit(lease)


def disk_of(cache: LocalCache) -> DiskTier:
    tier = cache.lower.lanes[0].tier
    assert isinstance(tier, DiskTier)
    return tier


def has_failed(cache: LocalCache) -> bool:
    return cache.lower.states()[0].lane.downs > 0


def fetch(cache: LocalCache, keys: list[ChunkKey]) -> None:
    until(lambda: cache.lookup(keys, "r", wait_for_promotion=True).ended is not Ended.PENDING)


def break_medium(fault: Fault, cache: LocalCache, directory: Path) -> ExitStack:
    stack = ExitStack()
    if fault == "EIO":
        stack.enter_context(unreadable_device(slabs_of(disk_of(cache))))
    else:
        shutil.rmtree(directory if fault == "directory removed" else directory.parent)
    return stack


def assert_free(name: str, keys: Collection[ChunkKey]) -> None:
    """This process opens the named pool, and finds these in it."""
    again = HostPool.named(name, CHUNK_BYTES, SLOTS, fingerprint="close")
    assert again.directory is not None
    assert {record.key for record in again.directory.records()} == set(keys)
    again.close()


def test_what_was_cleared_while_a_tier_stored_is_gone_for_the_next_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing is waited for: a removal waits for stores that are under way."""
    directory, keys = tmp_path / "tier", key_chain(3)
    cache = opened(name, disk_at(directory))
    store(cache, keys)
    until(lambda: cache.lower.states()[0].usage.chunks == 3)
    begun, may_end, real = threading.Event(), threading.Event(), DiskTier.store

    def slow(tier: DiskTier, writes: Sequence[Write]) -> list[StoreOutcome]:
        begun.set()
        assert may_end.wait(30)
        return real(tier, writes)

    monkeypatch.setattr(DiskTier, "store", slow)
    store(cache, key_chain(2, branch="more"))
    assert begun.wait(30)
    cache.clear()
    threading.Timer(0.5, may_end.set).start()  # when the 0.2 s to drain are over
    cache.close()
    again = opened(name, disk_at(directory))
    assert again.lower.states()[0].usage.chunks == 0
    again.close()


@pytest.mark.parametrize("fault", ["directory removed", "parent removed", "EIO"])
def test_after_a_store_below_failed_the_pool_is_unmapped_and_free(name: str, tmp_path: Path, fault: Fault) -> None:
    directory = tmp_path / "mount" / "tier"
    cache = opened(name, disk_at(directory))
    before, after = key_chain(2, branch="before"), key_chain(3, branch="after")
    store(cache, before)
    until(lambda: cache.lower.states()[0].usage.chunks == 2)
    with break_medium(fault, cache, directory):
        store(cache, after)
        until(lambda: has_failed(cache))
        cache.close()
    assert_free(name, [*before, *after])


def test_after_a_load_from_below_failed_the_pool_is_unmapped_and_free(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    cache = opened(name, disk_at(directory))
    keys, others = key_chain(3), key_chain(SLOTS, branch="others")
    store(cache, keys)
    until(lambda: cache.lower.states()[0].usage.chunks == 3)
    store(cache, others)
    with break_medium("EIO", cache, directory):
        fetch(cache, keys)
        cache.close()
    again = HostPool.named(name, CHUNK_BYTES, SLOTS, fingerprint="close")
    again.close()


def test_what_waits_behind_a_tier_that_fails_is_let_go(name: str, tmp_path: Path) -> None:
    """What is in the lane's queue has the pool's memory too."""
    directory = tmp_path / "tier"
    cache = opened(name, disk_at(directory))
    store(cache, key_chain(1, branch="before"))
    until(lambda: cache.lower.states()[0].usage.chunks == 1)
    chunks = [key_chain(1, branch=str(branch)) for branch in range(6)]
    with break_medium("EIO", cache, directory):
        for keys in chunks:
            store(cache, keys)
        until(lambda: has_failed(cache))
        cache.close()
    assert_free(name, [*key_chain(1, branch="before"), *(key for keys in chunks for key in keys)])


@pytest.mark.parametrize("kind", ["shared_fs", "redis", "s3"])
def test_a_tier_that_was_never_there_keeps_nothing(name: str, tmp_path: Path, kind: str) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    options: dict[str, dict[str, object]] = {
        "shared_fs": {"directory": str(tmp_path / "not mounted")},
        "redis": {"url": f"redis://{nobody}"},
        "s3": {"bucket": "b", "endpoint": f"http://{nobody}", "anonymous": True, "retries": 0},
    }
    cache = opened(name, {"type": kind, **options[kind]})
    keys = key_chain(3)
    store(cache, keys)
    until(lambda: has_failed(cache))
    fetch(cache, [*keys, *key_chain(2, branch="more")])
    cache.close()
    assert_free(name, keys)


class HelpfulTier(DramTier):
    """A third party's, whose errors are parts of cycles: a helper that raises its argument is in its traceback."""

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        try:
            raise OSError(errno.EIO, "Input/output error")
        except OSError as error:
            return self._raised(error)

    def _raised(self, error: OSError) -> NoReturn:
        raise error


def test_a_third_partys_error_that_is_part_of_a_cycle_keeps_nothing(name: str) -> None:
    tier = HelpfulTier(HostPool.anonymous("below", CHUNK_BYTES, 4), LruPolicy())
    lane = Lane(tier, chunk_header.format_id("close"))
    pool = HostPool.named(name, CHUNK_BYTES, SLOTS, fingerprint="close")
    cache = LocalCache(pool, lanes=[(lane, "through")], cold=ColdConfig(drain_s=0.2))
    keys = key_chain(3)
    store(cache, keys)
    until(lambda: has_failed(cache))
    cache.close()
    assert_free(name, keys)


def test_a_tier_that_cannot_be_closed_keeps_neither_the_pool_nor_its_directory(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    cache = opened(name, disk_at(directory))
    keys = key_chain(3)
    store(cache, keys)
    until(lambda: cache.lower.states()[0].usage.chunks == 3)
    (slab,) = slabs_of(disk_of(cache))
    os.close(slab.fd)  # so that closing it is an error, as it is on NFS when the server has gone
    cache.close()
    assert_free(name, keys)
    again = opened(name, disk_at(directory))
    assert again.lower.states()[0].usage.chunks == 3
    again.close()


def test_a_tier_that_gets_no_thread_when_it_is_opened_again_stays_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a live upgrade that came to nothing. Promotions would wait for threads that are not there."""
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": 1 << 20}
    host = HostConfig(capacity_bytes=8 * 4096)
    cache = build_local_cache(host, group_bytes=[4096], fingerprint="f", tiers=[disk], cold=ColdConfig(drain_s=5.0))
    keys = key_chain(1)
    cache.commit(cache.begin_store(keys, "w"))
    assert cache.lower.pause(5.0)
    with threads_left(1):  # of two
        cache.lower.reopen()
    assert "stays closed" in caplog.text
    assert cache.lower.states()[0].health is Health.CLOSED
    cache.close()
