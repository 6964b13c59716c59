"""Prompts of more chunks than a lane takes at a time: each group and shard counts, and chunks may be small."""

from kv_core.testing import key_chain, keys_of
from kv_testing.tower import Tower
from kv_tiers.config import ColdConfig


def test_a_prompt_of_many_small_chunks_comes_up() -> None:
    tower = Tower(slots=1100, below=2400, cold=ColdConfig(prefetch_share=1.0, drain_s=0.2))
    keys = key_chain(1100)
    tower.store_below(keys)
    assert tower.fetch(keys).chunks == 1100
    tower.close()


def test_what_a_lane_has_no_room_for_is_loaded_once_it_has() -> None:
    """Of a prompt of two shards. The request may wait, and its wait is not over."""
    tower = Tower(slots=24, below=96)
    tower.lanes[0]._jobs._max_load_chunks = 6
    keys = key_chain(8, shards=2)
    tower.store_below(keys)
    assert tower.fetch(keys, shape=keys_of(2)).chunks == 8
    tower.read(keys)
    tower.close()
