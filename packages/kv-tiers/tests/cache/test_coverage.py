"""Lookups by coverage: the longest boundary at which every group has what it needs, and nothing else is leased."""

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.coverage import ALL, STATE, ChunkShape, longest_hit
from kv_core.keys import ChunkKey
from kv_core.service import Ended, LoadFailed, LookupPlan, ReadLease
from kv_eviction import LruPolicy
from kv_testing.shapes import CHUNK_TOKENS, keys_for, shapes
from kv_tiers import HostPool, LocalCache
from kv_tiers.cache.hits import needed_count


def filled(keys: list[ChunkKey], held: list[bool]) -> LocalCache:
    cache = LocalCache(HostPool.anonymous("coverage", 64, max(1, len(keys))), policy=LruPolicy())
    cache.commit(cache.begin_store([key for key, is_held in zip(keys, held, strict=True) if is_held], "w"))
    return cache


@given(shapes(), st.integers(1, 12), st.data())
@settings(max_examples=300, deadline=None)
def test_a_hit_is_the_longest_boundary_and_leases_what_it_needs(
    shape: ChunkShape, chunks: int, data: st.DataObject
) -> None:
    keys = keys_for(shape, chunks)
    mostly = st.sampled_from([True] * 7 + [False])
    held = data.draw(st.lists(mostly, min_size=len(keys), max_size=len(keys)))
    cache = filled(keys, held)
    plan = cache.lookup(keys, "r", shape=shape)
    assert plan.chunks == longest_hit(held, shape)
    assert plan == expected(held, shape, chunks)
    # What is leased stays while everything else must go, and what is not does not.
    needed = {keys[place] for place in shape.needed_places(plan.chunks)} if plan.chunks else set()
    cache.begin_store(keys_for(shape, chunks, branch=1), "other")
    assert set(cache.admin.resident_keys()) == needed
    ordered = [keys[place] for place in shape.needed_places(plan.chunks)]
    if ordered:
        assert isinstance(cache.load(ordered, "r"), ReadLease)
    cache.end("r")
    cache.end("other")
    cache.close()


def expected(held: list[bool], shape: ChunkShape, chunks: int) -> LookupPlan:
    """By the definitions, without any cleverness."""
    hit = longest_hit(held, shape)
    whole = ChunkShape(
        shape.chunk_tokens, tuple(group for group in shape.groups if group == ALL) or (ALL,), shape.shards
    )
    per = shape.keys_per_chunk
    are_whole = [shape.groups[at % per // shape.shards] == ALL for at in range(per)]
    of_whole = [is_held for at, is_held in enumerate(held) if are_whole[at % per]]
    prefix = longest_hit(of_whole, whole) if any(are_whole) else hit
    lacking = -1
    if prefix > hit:
        places = shape.needed(prefix)
        lacking = next(
            group
            for group, needed in enumerate(places)
            if not all(held[chunk * per + group * shape.shards + s] for chunk in needed for s in range(shape.shards))
        )
    if hit == chunks:
        ended = Ended.ALL_HELD
    elif lacking >= 0:
        ended = Ended.INCOMPLETE
    else:
        next_chunk = [held[prefix * per + at] for at in range(per) if are_whole[at]]
        is_partly_held = bool(next_chunk) and next_chunk[0]
        ended = Ended.INCOMPLETE if is_partly_held else Ended.ABSENT
    return LookupPlan("r", hit, ended, ("host",) * hit, prefix, lacking)


@given(shapes(), st.integers(0, 12))
def test_what_a_hit_needs_is_counted(shape: ChunkShape, chunks: int) -> None:
    assert len(shape.needed_places(chunks)) == needed_count(shape, chunks)


def test_a_missing_state_ends_a_hit_and_is_named() -> None:
    shape = ChunkShape(CHUNK_TOKENS, (ALL, STATE))
    keys = keys_for(shape, 5)
    cache = filled(keys, [at % 2 == 0 or at // 2 in (1, 2) for at in range(10)])
    plan = cache.lookup(keys, "r", shape=shape)
    assert (plan.chunks, plan.prefix_chunks, plan.lacking, plan.ended) == (3, 5, 1, Ended.INCOMPLETE)
    cache.close()


def test_a_model_of_states_alone_needs_one_key() -> None:
    """Pure Mamba: the state of the boundary is all there is to load."""
    shape = ChunkShape(CHUNK_TOKENS, (STATE,))
    keys = keys_for(shape, 6)
    cache = filled(keys, [at == 3 for at in range(6)])
    plan = cache.lookup(keys, "r", shape=shape)
    assert (plan.chunks, plan.prefix_chunks, plan.lacking, plan.ended) == (4, 4, -1, Ended.ABSENT)
    assert cache.lookup(keys[:4], "r", shape=shape).ended is Ended.ALL_HELD
    cache.close()


def test_groups_of_several_sizes_share_one_pool() -> None:
    """Extents are of the group's size in slots of the largest; a slot that changes its group changes its extent."""
    pool = HostPool.anonymous("sizes", 9000, 2, group_bytes=(9000, 100))
    assert pool.slot_bytes == 12288
    cache = LocalCache(pool, policy=LruPolicy())
    full, state = keys_for(ChunkShape(CHUNK_TOKENS, (ALL, STATE)), 1)
    for key, nbytes in ((full, 9000), (state, 100), (full, 9000)):
        lease = cache.begin_store([key], "w")
        assert [extent.nbytes for extent in lease.extents] == [nbytes]
        cache.commit(lease)
        read = cache.load([key], "r")
        assert not isinstance(read, LoadFailed)
        assert [extent.nbytes for extent in read.extents] == [nbytes]
        cache.release(read)
        cache.forget([key])
    cache.close()
