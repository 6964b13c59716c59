"""What peers may read of a cache: right bytes from wherever they are, or nothing, and nothing stays leased."""

import errno
import mmap
import os
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NoReturn

import pytest
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_server.peers import side as peer_reads
from kv_server.peers.side import PeerReads, PeerSide, peer_side
from kv_testing.faults import FAULTS, Fault
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.tower import FINGERPRINT, Tower
from kv_testing.wait import joined
from kv_tiers import HostPool, LocalCache, chunk_header
from kv_tiers.testing.tier_contract import content

KEYS = key_chain(3)
FORM = chunk_header.format_id(FINGERPRINT)


@pytest.fixture
def tower() -> Iterator[Tower]:
    """A pool of four slots, a tier that answers from memory, and a remote one below it; `KEYS` are in both tiers."""
    made = Tower("through", "through", remote=[False, True], slots=4, threads=2, extensions=[PeerSide()])
    made.store(KEYS)
    made.cache.lower.drain(10.0)
    yield made
    made.close()


def crowded(tower: Tower) -> PeerReads:
    """Of the cache, whose pool `KEYS` have left."""
    tower.store(key_chain(4, branch="crowd"))
    tower.cache.lower.drain(10.0)
    return peer_side(tower.cache).reads(FINGERPRINT)


def is_right(reads: PeerReads, key: ChunkKey, timeout_s: float = 10.0) -> bool | None:
    """Whether the bytes are those of this chunk; None: there are none."""
    with reads.read(key, timeout_s) as stored:
        if stored is None:
            return None
        header = stored.header(checksum_of(stored.payload))
        damage = chunk_header.check(header, stored.payload, key=key, format_id=FORM)
        return damage is None and stored.payload == content(key, CHUNK_BYTES)


def no_memory(*_: object) -> NoReturn:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_a_chunk_comes_from_the_pool_and_from_a_tier_that_answers_from_memory(tower: Tower) -> None:
    reads = peer_side(tower.cache).reads(FINGERPRINT)
    assert [is_right(reads, key) for key in KEYS] == [True] * 3
    assert "load" not in tower.tiers[0].calls
    crowded(tower)
    assert reads.holds([*KEYS, *key_chain(1, branch="nobody's")]) == [True] * 3 + [False]
    assert [is_right(reads, key) for key in KEYS] == [True] * 3
    assert tower.tiers[0].calls.count("load") == 3


def test_a_peer_does_not_get_what_an_earlier_process_left_damaged() -> None:
    """The checksum that is sent is of whatever is there, and would vouch for the wrong bytes."""
    name = f"peers-{uuid.uuid4().hex}"
    try:
        before = Tower(slots=4, pool=HostPool.named(name, CHUNK_BYTES, 4))
        before.store(KEYS)
        before.close()
        cache = LocalCache(HostPool.named(name, CHUNK_BYTES, 4), extensions=[PeerSide()])
        slot = cache._index.find(KEYS[1])
        assert slot is not None
        with cache.pool.chunk(slot, CHUNK_BYTES) as chunk:
            chunk[7] ^= 1
        reads = peer_side(cache).reads(FINGERPRINT)
        assert [is_right(reads, key) for key in KEYS] == [True, None, True]
        counts = cache.counts()
        assert (counts.chunks_damaged, counts.chunks_resident, counts.slots_used) == (1, 2, 2)
        cache.close()
    finally:
        HostPool.unlink(name)


def test_a_remote_tier_is_never_asked(tower: Tower) -> None:
    reads = crowded(tower)
    tower.lanes[0].discard(KEYS)
    del tower.tiers[1].calls[:]
    assert reads.holds(KEYS) == [False] * 3
    assert [is_right(reads, key) for key in KEYS] == [None] * 3
    assert not {"holds", "load"} & set(tower.tiers[1].calls)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault not in ("", "hang", "delay", "swap", "lie", "add_only")]
)
def test_what_a_tier_does_wrong_is_nothing_for_a_peer(tower: Tower, fault: Fault) -> None:
    reads = crowded(tower)
    tower.tiers[0].fault = fault
    assert is_right(reads, KEYS[0], timeout_s=0.5) is None


def test_memory_that_a_hanging_tier_still_has_is_lent_to_nobody_else(tower: Tower) -> None:
    """A tier may write at any time into what it has not given back."""
    reads = crowded(tower)
    tower.tiers[0].fault = "hang"
    assert is_right(reads, KEYS[0], timeout_s=0.05) is None
    tower.tiers[0].let_go()
    assert [is_right(reads, key) for key in KEYS * 4] == [True] * 12


def test_a_read_for_which_there_is_no_memory_leaves_the_others_theirs(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = crowded(tower)
    with monkeypatch.context() as short:
        short.setattr(mmap, "mmap", no_memory)
        for _ in range(8):  # more than may be staged
            with pytest.raises(OSError, match="Cannot allocate memory"):
                is_right(reads, KEYS[0], timeout_s=0.05)
    assert is_right(reads, KEYS[0]) is True


@pytest.mark.parametrize("why", ["slow peers", "a tier that hangs"])
def test_a_peer_learns_soon_that_a_chunk_cannot_be_had(tower: Tower, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Else it gives up before, and takes the whole host to be down. A slow peer may have memory for half a minute."""
    reads = crowded(tower)
    found: list[bool | None] = []
    waiting = threading.Thread(target=lambda: found.append(is_right(reads, KEYS[1], timeout_s=60.0)), daemon=True)
    with ExitStack() as slow:
        if why == "slow peers":
            for key in (*KEYS, KEYS[0]):
                assert slow.enter_context(reads.read(key, 60.0)) is not None
        else:
            tower.tiers[0].fault = "hang"
        monkeypatch.setattr(peer_reads, "LOWER_S", 0.1)
        waiting.start()
        joined(waiting, within_s=10.0)
        assert found == [None]
    tower.tiers[0].let_go()


def test_chunks_that_are_evicted_and_forgotten_while_peers_read_are_right_or_absent(tower: Tower) -> None:
    reads = peer_side(tower.cache).reads(FINGERPRINT)
    seen: list[bool | None] = []
    ended = threading.Event()

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not ended.is_set():
            seen.append(is_right(reads, rng.choice(KEYS)))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]  # more than may be staged
    for thread in threads:
        thread.start()
    for turn in range(60):
        tower.store(KEYS if turn % 3 else key_chain(4, branch=str(turn)))
        if turn % 10 == 9:
            tower.cache.forget(KEYS[turn % 3 :])
    ended.set()
    joined(*threads)
    tower.cache.lower.drain(10.0)
    assert False not in seen and True in seen
