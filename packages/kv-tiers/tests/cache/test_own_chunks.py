"""What an engine has in its own blocks is no gain of the cache: it is not counted, and not read from lower tiers."""

from kv_core.cost import Costs
from kv_core.coverage import ChunkShape
from kv_testing.tower import Tower, key_chain

SHAPE = ChunkShape(256)
KEYS = key_chain(4)


def test_what_the_engine_has_itself_is_neither_asked_nor_found_nor_saved() -> None:
    tower = Tower()
    tower.store(KEYS)
    for computed_tokens, chunks, tokens in ((1024, 0, 0), (600, 2, 424), (0, 4, 1024)):
        before = tower.cache.counts()
        assert tower.cache.lookup(KEYS, "r", shape=SHAPE, costs=Costs(computed_tokens)).chunks == 4
        after = tower.cache.counts()
        assert after.chunks_asked - before.chunks_asked == chunks
        assert after.chunks_hit - before.chunks_hit == chunks
        assert after.tokens_saved - before.tokens_saved == tokens
    tower.close()


def test_chunks_that_are_quicker_to_compute_save_nothing() -> None:
    tower = Tower()
    tower.store(KEYS)
    dear = Costs(0, compute=(1e-9, 0.0), load=(9.0, 0.0))
    plan = tower.cache.lookup(KEYS, "r", shape=SHAPE, costs=dear)
    assert plan.choice is not None and plan.choice.chunks == 0
    assert tower.cache.counts().tokens_saved == 0
    tower.close()


def test_bytes_count_once_an_engine_has_read_them() -> None:
    tower = Tower()
    tower.store(KEYS)
    tower.cache.lookup(KEYS, "r", shape=SHAPE)
    assert tower.cache.counts().bytes_loaded == 0
    tower.read(KEYS[2:])
    assert tower.cache.counts().bytes_loaded == 2 * tower.cache.pool.chunk_bytes
    tower.close()


def test_a_lower_tier_is_not_read_for_tokens_that_the_engine_has() -> None:
    tower = Tower()
    tower.store_below(KEYS)
    tower.cache.lookup(KEYS, "r", shape=SHAPE, wait_for_promotion=True, costs=Costs(1024))
    tower.run()
    assert tower.cache.lower.states()[0].lane.loaded == 0
    tower.cache.lookup(KEYS, "s", shape=SHAPE, wait_for_promotion=True, costs=Costs(256))
    tower.run()
    assert tower.cache.lower.states()[0].lane.loaded == 4, "beyond its own, all that the hit needs is read"
    tower.close()
