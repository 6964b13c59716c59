"""A named pool outlives its process, however that ends, and never serves what it cannot vouch for."""

import logging
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.log import LIMIT
from kv_core.service import LoadFailed, ReadLease
from kv_core.testing import key_chain
from kv_testing.service_contract import assert_adds_up
from kv_testing.wait import line
from kv_tiers import HostPool, LocalCache
from kv_tiers.pool import directory, host_pool
from kv_tiers.pool.directory import HEADER_BYTES, RECORD_BYTES, nbytes_for
from kv_tiers.testing.tier_contract import content

CHUNK_BYTES = 6000
SLOTS = 8


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    HostPool.unlink(name)


def opened(
    name: str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    group_bytes: tuple[int, ...] = (),
    slots: int = SLOTS,
    fingerprint: str = "f",
) -> LocalCache:
    return LocalCache(HostPool.named(name, chunk_bytes, slots, group_bytes=group_bytes, fingerprint=fingerprint))


def store(cache: LocalCache, keys: list[ChunkKey]) -> None:
    lease = cache.begin_store(keys, "w")
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
    cache.commit(lease)


def verified(cache: LocalCache, keys: list[ChunkKey]) -> list[ChunkKey]:
    """Those of the keys that are served, each with its right bytes."""
    served = []
    for key in keys:
        lease = cache.load([key], "r")
        if isinstance(lease, LoadFailed):
            continue
        assert isinstance(lease, ReadLease)
        (extent,) = lease.extents
        assert bytes(cache.pool.view[extent.offset : extent.offset + extent.nbytes]) == content(key, extent.nbytes)
        assert cache.release(lease)
        served.append(key)
    assert_adds_up(cache.counts())
    return served


def filled(name: str, keys: list[ChunkKey]) -> Path:
    cache = opened(name)
    store(cache, keys)
    cache.close()
    return host_pool.pool_path(name)


def test_the_next_process_finds_what_was_committed_and_nothing_else(name: str) -> None:
    keys = key_chain(6)
    cache = opened(name)
    store(cache, keys[:4])
    unfinished = cache.begin_store(keys, "w")
    cache.forget(keys[3:4])
    cache.close()
    again = opened(name)
    assert again.lookup(keys, "r").chunks == 3
    assert again.counts().chunks_adopted == 3
    again.end("r")
    assert verified(again, keys) == keys[:3]
    assert unfinished.keys == tuple(keys[4:])
    store(again, keys)
    assert again.lookup(keys, "r").chunks == 6
    again.close()


def test_what_was_evicted_or_cleared_does_not_come_back(name: str) -> None:
    first, second = key_chain(SLOTS, branch="first"), key_chain(5, branch="second")
    cache = opened(name)
    store(cache, first)
    store(cache, second)
    cache.close()
    again = opened(name)
    assert verified(again, [*first, *second]) == [*first[:3], *second]
    again.clear()
    again.close()
    third = opened(name)
    assert third.counts().slots_used == 0
    third.close()


def test_after_a_restart_tails_still_leave_before_their_heads(name: str) -> None:
    keys, old = key_chain(5), key_chain(3, branch="old")
    cache = opened(name)
    store(cache, keys[:1])
    store(cache, old)
    for chunks in range(2, 6):
        store(cache, keys[:chunks])
    cache.close()
    again = opened(name)
    store(again, key_chain(4, branch="new"))
    assert again.lookup(keys, "r").chunks == 4
    assert again.lookup(old, "r").chunks == 0
    again.close()


def test_a_pool_of_another_release_starts_empty_and_says_so(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = key_chain(6)
    with monkeypatch.context() as newer:
        newer.setattr(directory, "VERSION", directory.VERSION + 1)
        filled(name, keys)
    cache = opened(name)
    assert "starts empty" in caplog.text and "another release" in caplog.text
    assert cache.lookup(keys, "r").chunks == 0
    cache.close()


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "g"},
        {"slots": SLOTS + 1},
        {"slots": 2},
        {"chunk_bytes": 6001},
        {"chunk_bytes": 100},
        {"group_bytes": (CHUNK_BYTES, 100)},
    ],
)
def test_a_pool_made_for_something_else_starts_empty_and_says_so(
    name: str, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    keys = key_chain(6)
    filled(name, keys)
    with caplog.at_level(logging.WARNING):
        cache = opened(name, **other)
    assert "starts empty" in caplog.text
    assert cache.counts().chunks_resident == 0
    keys = keys[: cache.pool.slots]
    store(cache, keys)
    assert verified(cache, keys) == keys
    cache.close()
    caplog.clear()
    again = opened(name, **other)
    assert verified(again, keys) == keys
    assert not caplog.records
    again.close()


def test_a_flipped_bit_anywhere_in_a_chunk_is_a_miss(name: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = key_chain(6)
    path = filled(name, keys)
    chance = random.Random(3)
    for _ in range(20):
        victim = chance.randrange(6)
        at = nbytes_for(SLOTS) + victim * 8192 + chance.randrange(CHUNK_BYTES)
        flip(path, at, chance.randrange(8))
        LIMIT.reset()  # each is a fault of its own here, and must be named
        cache = opened(name)
        plan = cache.lookup(keys, "r")
        assert plan.chunks == victim
        counts = cache.counts()
        assert (counts.chunks_adopted, counts.chunks_damaged, counts.chunks_resident) == (6, 1, 5)
        assert keys[victim].hex() in caplog.text and "checksum" in caplog.text
        cache.end("r")
        assert verified(cache, keys) == [key for key in keys if key != keys[victim]]
        store(cache, keys)
        cache.close()


def test_a_damaged_chunk_that_was_pinned_or_held_unread_leaves_its_slot(name: str) -> None:
    """An operator may pin, and an engine hand over, what an earlier process left, before anything has read it."""
    keys = key_chain(6)
    flip(filled(name, keys), nbytes_for(SLOTS) + 2 * 8192, 0)
    cache = opened(name)
    assert cache.admin.pin(keys[:4], "p") == 4
    cache.commit(cache.begin_store(keys[:3], "w", hold_s=60.0))
    assert cache.lookup(keys, "r").chunks == 2
    assert (cache.admin.pins(), cache.holds.chunks, cache.counts().slots_used) == ({"p": 3}, 2, 5)
    cache.close()


def test_a_flipped_bit_anywhere_in_a_record_is_at_most_a_miss(name: str) -> None:
    keys = key_chain(6)
    path = filled(name, keys)
    chance = random.Random(5)
    for _ in range(60):
        victim = chance.randrange(6)
        flip(path, HEADER_BYTES + victim * RECORD_BYTES + chance.randrange(RECORD_BYTES), chance.randrange(8))
        cache = opened(name)
        assert verified(cache, keys) == [key for key in keys if key != keys[victim]]
        store(cache, keys)
        cache.close()


def test_a_record_in_another_slots_place_is_not_believed(name: str) -> None:
    keys = key_chain(6)
    path = filled(name, keys)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        record = file.read(RECORD_BYTES)
        file.seek(HEADER_BYTES + 7 * RECORD_BYTES)
        file.write(record)
    cache = opened(name)
    assert cache.counts().chunks_adopted == 6
    assert verified(cache, keys) == keys
    cache.close()


def test_a_flipped_bit_in_the_header_empties_the_pool(name: str) -> None:
    keys = key_chain(6)
    chance = random.Random(7)
    for _ in range(20):
        path = filled(name, keys)
        flip(path, chance.randrange(80), chance.randrange(8))
        cache = opened(name)
        assert cache.counts().chunks_adopted == 0
        cache.close()


def test_a_truncated_file_serves_only_what_is_whole(name: str) -> None:
    keys = key_chain(6)
    path = filled(name, keys)
    whole = path.read_bytes()
    chance = random.Random(9)
    for nbytes in [0, 1, 60, HEADER_BYTES, nbytes_for(SLOTS), *(chance.randrange(len(whole)) for _ in range(20))]:
        path.write_bytes(whole[:nbytes])
        cache = opened(name)
        chunks = max(0, min(6, (nbytes - nbytes_for(SLOTS) + 8192 - CHUNK_BYTES) // 8192))
        assert verified(cache, keys) == keys[:chunks]
        cache.close()


def test_garbage_is_an_empty_pool(name: str) -> None:
    keys = key_chain(6)
    path = filled(name, keys)
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
    cache = opened(name)
    assert cache.counts().slots_used == 0
    store(cache, keys)
    assert verified(cache, keys) == keys
    cache.close()


@contextmanager
def memory_for(calls: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So many allocations find memory, and those after them none."""
    real, left = os.posix_fallocate, [calls]

    def allocate(file: int, start: int, nbytes: int) -> None:
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        real(file, start, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", allocate)
        yield


def test_a_store_that_finds_no_memory_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may fill shared memory after the pool was opened."""
    cache = opened(name)
    keys = key_chain(6)
    with memory_for(2, monkeypatch):
        lease = cache.begin_store(keys, "w")
    assert lease.keys == tuple(keys[:2])
    assert "no memory left for 4 of 6" in lease.refused
    counts = cache.counts()
    assert (counts.chunks_reserved, counts.slots_used, counts.chunks_refused) == (2, 2, 4)
    cache.release(lease)
    store(cache, keys)
    assert verified(cache, keys) == keys
    cache.close()


def test_a_pool_that_finds_no_memory_for_its_directory_can_be_opened_later(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of another format is emptied first, and somebody else may take the memory."""
    filled(name, key_chain(6))
    with memory_for(1, monkeypatch), pytest.raises(ConfigError, match="cannot be mapped: No space left") as refused:
        opened(name, fingerprint="other")
    cache = opened(name, fingerprint="other")  # while the traceback of the first attempt is alive
    assert refused.tb and cache.counts().chunks_adopted == 0
    cache.close()


WRITER = """
import sys
from kv_core.log import LIMIT
from kv_core.testing import key_chain
from kv_tiers import HostPool, LocalCache
from kv_tiers.testing.tier_contract import content

name, chunk_bytes, slots, seed = sys.argv[1], *map(int, sys.argv[2:])
cache = LocalCache(HostPool.named(name, chunk_bytes, slots, fingerprint="f"))
chains = [key_chain(5, branch=str(branch)) for branch in range(6)]
print("ready", flush=True)
turn = seed
while True:
    turn += 1
    keys = chains[turn * 7 % 6]
    lease = cache.begin_store(keys, "w")
    for key, extent in zip(lease.keys, lease.extents):
        data = content(key, extent.nbytes)
        for part in range(0, extent.nbytes, 1500):  # bytes arrive in pieces, as from a device
            cache.pool.view[extent.offset + part : extent.offset + part + 1500] = data[part : part + 1500]
    if turn % 5:
        cache.commit(lease)
    else:
        cache.release(lease)
    if turn % 11 == 0:
        cache.forget(chains[turn % 6][3:])
"""


@pytest.mark.slow
@pytest.mark.timeout(400)  # it starts 24 processes
def test_killed_at_any_moment_it_serves_whole_chunks_only(name: str) -> None:
    """kill -9 while storing, evicting and forgetting; what the next process adopts must verify, all of it."""
    every_key = [key for branch in range(6) for key in key_chain(5, branch=str(branch))]
    chance = random.Random(11)
    adopted = 0
    for turn in range(24):
        command = [sys.executable, "-c", WRITER, name, str(CHUNK_BYTES), str(SLOTS), str(turn)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert line(writer.stdout) == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(chance.random() * 0.05)
            writer.send_signal(signal.SIGKILL)
        cache = opened(name)
        before = cache.counts()
        assert before.slots_used == before.chunks_resident == before.chunks_adopted
        assert len(verified(cache, every_key)) == before.chunks_adopted
        assert cache.counts().chunks_damaged == 0
        adopted += before.chunks_adopted
        cache.close()
    assert adopted > 24  # else nothing was put to the test


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
