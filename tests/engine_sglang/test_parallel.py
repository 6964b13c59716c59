"""What a process takes for its share of the engine, and which kinds of parallelism are refused, by what SGLang itself
resolved and not by the arguments as they were spelt."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from kv_core.errors import ConfigError
from kv_sglang import linker
from kv_sglang.attach import Rank
from kv_sglang.storage import rank_of
from kv_sglang.transfer import refuse_what_is_not_served
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

NONE: Final = {
    **dict.fromkeys(("tp_size", "pp_size", "attn_tp_size", "attn_cp_size", "attn_dcp_size", "attn_dp_size"), 1),
    **dict.fromkeys(("moe_tp_size", "moe_ep_size", "moe_dp_size"), 1),
    "attn_dp_rank": 0,
}
"""Of parallelism, as SGLang resolved it."""
TWO: Final = {"tp_size": 2, "moe_tp_size": 2}
"""Ranks, to be divided in some way."""


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
    resolved = NONE | TWO | {"attn_dp_size": 2, "attn_dp_rank": 1}
    with get_parallel().override(dp_rank=1, num_dp_ranks=2, nnodes=1, **resolved):
        ranks = [rank_of(config(tp_size=1, dp_rank=1)), linker.rank_of(False, SimpleNamespace())]
    assert [(rank.replica, rank.replicas) for rank in ranks] == [(1, 2)] * 2


@pytest.mark.parametrize(
    ("resolved", "said"),
    [
        ({"pp_size": 2}, "pipeline parallelism"),
        (TWO | {"attn_cp_size": 2}, "context parallelism"),
        ({"attn_dcp_size": 2}, "context parallelism"),
        # `--attn-dp-size 2`, which leaves the older flag alone.
        (TWO | {"attn_dp_size": 2}, "data-parallel attention"),
    ],
)
def test_a_hand_over_with_parallelism_that_it_does_not_serve_is_refused(
    resolved: dict[str, int], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    args = SimpleNamespace(state_types=[], num_draft_entries=0)
    with get_parallel().override(**NONE | resolved), pytest.raises(ConfigError, match=f"with {said}: choose"):
        refuse_what_is_not_served(args, ServerArgs(model_path=str(tmp_path), device="cpu"))


def test_the_linker_refuses_pages_that_ranks_share_row_by_row() -> None:
    """Pages of latents count as the same on all ranks: each would have been given what the first one has."""
    params = SimpleNamespace(pp_size=1, attn_cp_size=1, mtp_draft_device_pools=(), sidecar_draft_device_pools=())
    with get_parallel().override(**NONE):
        linker.refuse_what_is_not_served(params, ())
    refused = pytest.raises(ConfigError, match="does not serve context parallelism")
    with get_parallel().override(**NONE | {"attn_dcp_size": 2}), refused:
        linker.refuse_what_is_not_served(params, ())
