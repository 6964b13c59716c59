"""What a process takes for its share of the engine, and which kinds of parallelism are refused, by what SGLang itself
resolved and not by the arguments as they were spelt."""

from types import SimpleNamespace
from typing import Any

import pytest
from kv_sglang.attach import Rank
from kv_sglang.linker import linker
from kv_sglang.storage import rank_of
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_parallel


def config(**given: Any) -> HiCacheStorageConfig:
    """As SGLang makes it for a replica of the whole engine: `dp_rank` counts groups of attention, and there is one."""
    usual = {"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    others = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": None}
    return HiCacheStorageConfig(**usual | others | given)


@pytest.mark.parametrize(("number", "replica"), [(None, 0), (0, 0), (1, 1)])
def test_replicas_of_the_whole_engine_have_numbers_of_their_own(number: int | None, replica: int) -> None:
    """All of them are children of one process, so they would otherwise start their private servers at one socket."""
    replicas = 1 if number is None else 2
    with get_parallel().override(dp_rank=number, num_dp_ranks=replicas, attn_dp_rank=0, nnodes=1):
        ranks: list[Rank] = [rank_of(config()), linker.rank_of(False, SimpleNamespace())]
    assert [(rank.replica, rank.replicas) for rank in ranks] == [(replica, replicas)] * 2


def test_groups_of_attention_are_replicas_too() -> None:
    """Which `--dp-size` does not count."""
    with get_parallel().override(dp_rank=1, num_dp_ranks=2, attn_dp_rank=1, nnodes=1):
        ranks = [rank_of(config(tp_size=1, dp_rank=1)), linker.rank_of(False, SimpleNamespace())]
    assert [(rank.replica, rank.replicas) for rank in ranks] == [(1, 2)] * 2
