"""Prompts of more chunks than a lane takes at a time: chunks are small, or `cold.batch_bytes` is large."""

from kv_core.testing import key_chain
from kv_testing.tower import Tower
from kv_tiers.config import ColdConfig


def test_a_prompt_of_many_small_chunks_comes_up_as_far_as_the_lane_has_room() -> None:
    tower = Tower(slots=1100, below=2400, cold=ColdConfig(prefetch_share=1.0, drain_s=0.2))
    keys = key_chain(1100)
    tower.store_below(keys)
    assert tower.fetch(keys).chunks == 1024
    assert tower.fetch(keys, "s").chunks == 1100
    tower.close()
