"""Promotions by coverage: the longest boundary that the pool and the tiers can serve together, and nothing else."""

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage, longest_hit
from kv_core.keys import ChunkKey
from kv_core.service import Ended
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.shapes import CHUNK_TOKENS, keys_for, shapes
from kv_testing.tower import FINGERPRINT, Tower
from kv_tiers import chunk_header
from kv_tiers.cache.hits import fitting, needed_count
from kv_tiers.config import ColdConfig
from kv_tiers.tier import Write

GROUP_BYTES = (CHUNK_BYTES, 10, CHUNK_BYTES, 33)
WINDOW = Coverage("window", 5)
HYBRID = ChunkShape(CHUNK_TOKENS, (ALL, WINDOW, STATE))


def tower_of(
    keys: list[ChunkKey], pool: Iterable[int], below: list[set[int]], *, remote: list[bool], batch: int = 2
) -> Tower:
    """Of these places the pool has some and each tier some, with bytes of each group's size."""
    tower = Tower(
        *["through"] * len(below),
        slots=len(keys) + 1,
        below=len(keys),
        remote=remote,
        cold=ColdConfig(batch_bytes=batch * 4096, prefetch_share=1.0, drain_s=0.0),
        group_bytes=GROUP_BYTES,
    )  # type: ignore[arg-type]
    tower.store(keys)
    tower.run()
    for tier, places in zip(tower.tiers, below, strict=True):
        assert tier.holds(keys) == [True] * len(keys)
        tier.discard([key for place, key in enumerate(keys) if place not in places])
    in_pool = set(pool)
    with tower.cache._host.lock:
        tower.cache._host.forget([key for place, key in enumerate(keys) if place not in in_pool])
    return tower


@given(shapes(), st.integers(1, 8), st.integers(1, 4), st.tuples(st.booleans(), st.booleans()), st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_waited_for_is_the_longest_boundary_and_what_it_needs(
    shape: ChunkShape, chunks: int, batch: int, far: tuple[bool, bool], data: st.DataObject
) -> None:
    keys = keys_for(shape, chunks)
    sets = st.lists(st.sampled_from([True, True, False]), min_size=len(keys), max_size=len(keys)).map(
        lambda held: {place for place, is_held in enumerate(held) if is_held}
    )
    pool, hot, cold = data.draw(sets), data.draw(sets), data.draw(sets)
    tower = tower_of(keys, pool, [hot, cold], remote=list(far), batch=batch)
    anywhere = pool | hot | cold
    best = longest_hit([place in anywhere for place in range(len(keys))], shape)
    plan = tower.fetch(keys, shape=shape)
    assert plan.chunks == best
    needed = set(shape.needed_places(best))
    before = longest_hit([place in pool for place in range(len(keys))], shape)
    assert tower.cache.lower.promotions.counts.requested == (len(needed - pool) if best > before else 0)
    for chunk, tier in enumerate(plan.tiers):
        of_chunk = [place for place in needed if place // shape.keys_per_chunk == chunk]
        # What was in the pool by itself, and what a longer boundary needed but a shorter one did not, is the pool's.
        slowest = max((0 if place in pool else 1 if place in hot else 2 for place in of_chunk), default=0)
        assert tier == ("host", "tier0", "tier1")[slowest]
    if needed:
        tower.read([keys[place] for place in shape.needed_places(best)])
    tower.close()


def test_of_a_window_and_a_state_only_the_last_come_up() -> None:
    keys = keys_for(HYBRID, 6)
    tower = tower_of(keys, (), [set(range(len(keys)))], remote=[False])
    plan = tower.fetch(keys, shape=HYBRID)
    assert (plan.chunks, plan.ended) == (6, Ended.ALL_HELD)
    resident = set(tower.cache.admin.resident_keys())
    assert resident == {*keys[0::3], keys[5 * 3 + 1], keys[5 * 3 + 2]}
    tower.close()


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(
    ("broken", "hit"),
    [
        ([5 * 3 + 2], 5),  # the state at the end: the one before it is there
        ([5 * 3 + 1], 5),  # the window's last chunk
        ([4 * 3 + 1], 6),  # a chunk behind every window that is asked for
        ([3 * 3], 3),  # full attention: what is behind it is worthless
        ([5 * 3 + 2, 4 * 3 + 2], 4),
    ],
)
def test_what_does_not_come_ends_its_boundaries_and_the_next_shorter_one_wins(
    far: bool, broken: list[int], hit: int
) -> None:
    keys = keys_for(HYBRID, 6)
    tower = tower_of(keys, (), [set(range(len(keys)))], remote=[far])
    tower.tiers[0].broken = {keys[place] for place in broken}
    plan = tower.fetch(keys, shape=HYBRID)
    assert plan.chunks == hit
    tower.read([keys[place] for place in HYBRID.needed_places(hit)])
    tower.close()


def test_what_a_tier_does_not_bring_is_asked_of_the_next_one() -> None:
    keys = keys_for(HYBRID, 4)
    tower = tower_of(keys, (), [set(range(len(keys)))] * 2, remote=[False, True])
    tower.tiers[0].broken = {keys[3 * 3], keys[3 * 3 + 2]}
    assert tower.fetch(keys, shape=HYBRID).chunks == 4
    tower.close()


def test_a_payload_of_another_size_than_its_groups_is_a_miss() -> None:
    """As after the format changed under one fingerprint: it is damage, and the next boundary is served."""
    keys = keys_for(HYBRID, 3)
    tower = tower_of(keys, (), [set(range(len(keys)))], remote=[False])
    state = keys[2 * 3 + 2]
    tower.tiers[0].discard([state])
    pages = memoryview(bytearray(4096))
    header = chunk_header.pack_header(state, None, pages[:50], chunk_header.format_id(FINGERPRINT))
    tower.tiers[0].store([Write(state, None, header, pages, 50)])
    assert tower.fetch(keys, shape=HYBRID).chunks == 2
    assert tower.cache.lower.states()[0].lane.damaged == 1
    tower.close()


def test_a_boundary_larger_than_the_pool_is_not_waited_for() -> None:
    keys = keys_for(HYBRID, 6)
    tower = tower_of(keys, (), [set(range(len(keys)))], remote=[False])
    small = Tower("through", slots=5, group_bytes=GROUP_BYTES)
    small.tiers[0]._tier, tower.tiers[0]._tier = tower.tiers[0]._tier, small.tiers[0]._tier
    assert small.fetch(keys, shape=HYBRID).chunks == 3  # three chunks of full attention, one of the window, a state
    tower.close()
    small.close()


@given(shapes(), st.integers(0, 40), st.integers(0, 60))
def test_what_fits_is_the_longest_boundary_that_does(shape: ChunkShape, chunks: int, room: int) -> None:
    assert fitting(shape, chunks, room) == next(n for n in range(chunks, -1, -1) if needed_count(shape, n) <= room)


@pytest.mark.parametrize("shape", [ChunkShape(CHUNK_TOKENS), HYBRID])
def test_the_boundary_that_fits_a_small_share_is_found_at_once(
    shape: ChunkShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request asks at each of the engine's steps, and its prompt may be far longer than its share has room for."""
    counted: list[int] = []
    needed = ChunkShape.needed

    def counting(self: ChunkShape, chunks: int) -> Iterator[range]:
        counted.append(chunks)
        return needed(self, chunks)

    tower = Tower()
    tower.tiers[0].fault = "lie"
    monkeypatch.setattr(ChunkShape, "needed", counting)
    assert tower.ask(keys_for(shape, 250), shape=shape).ended is Ended.PENDING
    assert len(counted) < 30  # not 242
    tower.close()
