"""A lower tier's own eviction knows windows and states: what no hit can use leaves before what one can."""

from pathlib import Path

import pytest
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage
from kv_core.keys import ChunkKey
from kv_eviction.coverage import BoundedGroups
from kv_eviction.simple import LruPolicy
from kv_testing.shapes import CHUNK_TOKENS, keys_for
from kv_testing.wait import until
from kv_tiers import HostConfig, build_local_cache
from kv_tiers.cache.local import LocalCache
from kv_tiers.lanes.lane import Lane
from kv_tiers.tiers.index import ExtentIndex
from kv_tiers.tiers.space import Geometry

WINDOWED = ChunkShape(CHUNK_TOKENS, (ALL, Coverage("window", CHUNK_TOKENS + 1)))
PLAIN = ChunkShape(CHUNK_TOKENS)
LINEAR = ChunkShape(CHUNK_TOKENS, (ALL, STATE))


def index_of(slots: int, shape: ChunkShape) -> ExtentIndex:
    bounded = BoundedGroups()
    bounded.note(keys_for(shape, 1), shape)
    return ExtentIndex([slots], Geometry(4096, 1), LruPolicy(), bounded=bounded)


def put(index: ExtentIndex, keys: list[ChunkKey]) -> None:
    """As a lane stores them: each the parent of the next."""
    places, _, _ = index.reserve(keys, [100] * len(keys), None)
    index.commit([place for place in places if place is not None], [None, *keys[:-1]])


def use(index: ExtentIndex, keys: list[ChunkKey]) -> None:
    entries = index.begin_load(keys)
    assert None not in entries
    index.end_load(entries)


@pytest.mark.parametrize("shape", [WINDOWED, LINEAR], ids=["window", "state"])
def test_what_is_far_behind_every_boundary_leaves_first(shape: ChunkShape) -> None:
    """Of a prompt that comes back its whole prefix is used, and of a window or of states what is at its end."""
    index, mine = index_of(12, shape), keys_for(shape, 6)
    for group in range(2):
        put(index, mine[group::2])
    use(index, mine[0::2])
    use(index, mine[-1:])
    put(index, keys_for(PLAIN, 5, branch=1))
    assert index.holds(mine[0::2]) == [True] * 6
    assert index.holds(mine[1::2]) == [False] * 5 + [True]


def test_a_state_whose_prefix_has_left_is_the_next_to_leave() -> None:
    index = index_of(4, LINEAR)
    old, new = keys_for(LINEAR, 1, branch=1), keys_for(LINEAR, 1, branch=2)
    for key in (*old, *new):
        put(index, [key])
    use(index, new)
    use(index, old[1:])  # the state alone
    put(index, keys_for(PLAIN, 1, branch=3))
    assert index.holds([*old, *new]) == [False, True, True, True]
    put(index, keys_for(PLAIN, 1, branch=4))
    assert index.holds([*old, *new]) == [False, False, True, True]  # though it was used last


def test_a_window_makes_room_for_what_comes_after_it() -> None:
    """A prefix never does: a chunk is worthless without it."""
    index, keys = index_of(2, WINDOWED), keys_for(WINDOWED, 3)
    put(index, keys[1:5:2])
    places, _, _ = index.reserve(keys[5:], [100], keys[3])
    index.commit([place for place in places if place is not None], [keys[3]])
    assert index.holds(keys[1::2]) == [False, True, True]
    index = index_of(2, WINDOWED)
    put(index, keys[0:4:2])
    places, _, _ = index.reserve(keys[4:5], [100], keys[2])
    assert places == [None]


def on_disk(directory: Path, capacity: str) -> LocalCache:
    tier = {"type": "disk", "directory": str(directory), "capacity_bytes": capacity, "policy": "lru"}
    return build_local_cache(
        HostConfig(capacity_bytes=200_000), group_bytes=(4096, 4096), fingerprint="f", tiers=[tier]
    )


def test_a_disk_is_told_by_the_lookups_of_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wired from the settings to the tier's index."""
    cache = on_disk(tmp_path, "1MiB")
    keys = keys_for(LINEAR, 2)
    cache.lookup(keys, "r", shape=LINEAR)
    (lane,) = cache.lower.local_lanes()
    index: ExtentIndex = lane.tier._chunks.index  # type: ignore[attr-defined]
    assert index._bounded.has(keys[1])
    assert not index._bounded.has(keys[0])
    for group in range(2):
        cache.commit(cache.begin_store(keys[group::2], "w"))
    until(lambda: lane.holds(keys) == [True] * 4)
    assert len(index._shares.common.policy.bounded_slots) == 2
    cache.close()


@pytest.mark.parametrize("kind", ["disk", "dram"])
def test_usage_counts_each_group_by_itself_and_its_shards_once(kind: str, tmp_path: Path) -> None:
    """Whatever has been stored, discarded and evicted, and after a restart."""
    place = {"directory": str(tmp_path)} if kind == "disk" else {}
    tier = {"type": kind, "capacity_bytes": "256KiB", "write": "through", **place}
    shape = ChunkShape(CHUNK_TOKENS, (ALL, STATE), shards=2)
    keys = keys_for(shape, 3)

    def opened() -> tuple[LocalCache, Lane]:
        cache = build_local_cache(
            HostConfig(capacity_bytes=400_000), group_bytes=(4000, 4000), fingerprint="f", tiers=[tier]
        )
        (lane,) = cache.lower.local_lanes()
        return cache, lane

    def told() -> tuple[int, ...]:
        return cache.lower.states()[0].usage.by_group

    cache, lane = opened()
    assert told() == ()
    stored = [*(key for key in keys if key.group == 0), *keys[2:4]]
    cache.commit(cache.begin_store(stored, "w"))
    until(lambda: lane.holds(stored) == [True] * len(stored))
    assert told() == (3, 1)
    cache.forget([stored[0], *keys[2:4]])
    until(lambda: told() == (3, 0))  # of the first chunk there is still the other shard
    if kind == "disk":
        cache.close()
        cache, lane = opened()
        assert told() == (3,)
    cache.forget(stored[1:2])
    until(lambda: told()[0] == 2)
    others = keys_for(shape, 40, branch=1)
    for at in range(0, len(others), 4):
        cache.commit(cache.begin_store(others[at : at + 4], "w"))
    until(lambda: cache.lower.states()[0].spill.waiting == cache.lower.states()[0].spill.under_way == 0)
    held = [key for key in [*keys, *others] if lane.holds([key]) == [True]]
    assert 0 < len(held) < 100
    counts = [
        max(sum(key.group == group and key.shard == shard for key in held) for shard in (0, 1)) for group in (0, 1)
    ]
    assert list(told()) == counts
    cache.close()
