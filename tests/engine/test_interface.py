"""vLLM's interface is looked at when an engine starts: another than kv_vllm was written for turns the cache off."""

import inspect
import logging
import re
from typing import Any

import pytest
from engines import started
from kv_connect.engine import engines
from kv_vllm import interface
from kv_vllm.connector import KVTiersConnector
from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.version import __version__ as version

PROMPTS = [[3 + (7919 * i) % 2000 for i in range(300)]] * 2
CACHE: dict[str, Any] = {"chunk_tokens": 64, "host": {"capacity_bytes": "64MiB"}}


def test_this_vllm_is_one_that_was_tested() -> None:
    assert interface.is_tested(version)
    assert list(interface.interface_differences()) == []
    assert interface.check_interface() == ""


def test_every_call_that_is_checked_is_implemented_with_these_names() -> None:
    for name, parameters in interface.CALLS.items():
        assert name in vars(KVTiersConnector), name
        hook = vars(KVTiersConnector)[name]
        hook = getattr(hook, "__wrapped__", hook)
        assert hook.__code__.co_varnames[1 : 1 + len(parameters)] == tuple(parameters), name


def described(member: Any) -> str:
    """A hook's parameters, as the lists have them."""
    call = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    parameters = inspect.signature(call).parameters.values()
    named = [p.name for p in parameters if p.name not in ("self", "cls") and p.kind is not p.VAR_KEYWORD]
    return f"({', '.join(named)})"


USED = """
bind_connector_metadata(connector_metadata)
bind_kv_cache_manager(kv_cache_manager)
build_connector_meta(scheduler_output)
build_connector_worker_meta()
build_kv_connector_stats(data)
build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
get_block_ids_with_load_errors()
get_external_cache_hit_sources(request, num_external_tokens)
get_kv_connector_stats()
get_num_new_matched_tokens(request, num_computed_tokens)
get_transfer_results(finished_req_ids)
has_pending_block_frees()
has_pending_push_work()
on_new_request(request)
register_kv_caches(kv_caches)
request_finished(request, block_ids)
request_finished_all_groups(request, block_ids)
requires_kv_delivery()
requires_piecewise_for_cudagraph(extra_config)
reset_cache()
save_kv_layer(layer_name, kv_layer, attn_metadata)
shutdown()
start_load_kv(forward_context)
take_events()
update_connector_output(connector_output)
update_state_after_alloc(request, blocks, num_external_tokens)
wait_for_layer_load(layer_name)
wait_for_save()
"""
LEFT = """
bind_gpu_block_pool(gpu_block_pool)
clear_connector_metadata()
finish_forward()
get_finished(finished_req_ids)
get_finished_count()
get_handshake_metadata()
get_kv_connector_kv_cache_events()
get_loaded_kv_cache_group_ids(request)
get_mem_pool_context()
get_required_kvcache_layout(vllm_config)
handle_preemptions(kv_connector_metadata)
has_connector_metadata()
register_finished_partial_tail(request, block_ids, partial_tail_offloads)
reset_capture_state()
restore_kv_caches()  # from 0.33
role()
set_host_xfer_buffer_ops(copy_operation)
set_xfer_handshake_metadata(metadata)
set_xfer_handshake_metadata_pp_aware(metadata)
supports_divergent_local_hybrid_hits()
supports_sleep_mode(kv_transfer_config)  # from 0.33
unregister_kv_caches()  # from 0.33
"""
"""Every hook of vLLM's interface: ours, and those whose default is right."""


def test_the_lists_of_hooks_are_vllms_and_say_which_are_ours() -> None:
    here = Version(version)
    used, left = (
        {
            name: parameters
            for name, parameters, since in re.findall(r"^(\w+)(\(.*?\))(?:  # from (\S+))?$", listed, re.MULTILINE)
            if here >= Version(since or "0")
        }
        for listed in (USED, LEFT)
    )
    hooks = {
        name: described(member)
        for owner in (KVConnectorBase_V1, SupportsHMA)
        for name, member in vars(owner).items()
        if not name.startswith("_")
    }
    assert used | left == hooks
    assert used.keys() == hooks.keys() & vars(KVTiersConnector).keys()


def other_match(self: Any, waiting: Any, computed: int) -> None:
    """Another release's."""


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (KVConnectorBase_V1, "get_num_new_matched_tokens", other_match, r"takes \['waiting', 'computed'\]"),
        (KVConnectorBase_V1, "wait_for_save", None, "has no wait_for_save"),
        (KVConnectorTransferResults, "failed_recving", None, "has no failed_recving"),
        (SchedulerOutput, "kv_connector_block_state", None, "has no kv_connector_block_state"),
    ],
)
def test_what_differs_is_said_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, value: Any, said: str
) -> None:
    if value is None:
        monkeypatch.delattr(owner, name, raising=False)
        if name in getattr(owner, "__annotations__", {}):
            monkeypatch.delitem(owner.__annotations__, name)
    else:
        monkeypatch.setattr(owner, name, value)
    assert re.search(said, interface.check_interface())
    assert f"install '{interface.INSTALL}'" in interface.check_interface()


def test_another_version_with_the_same_interface_is_served_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.version.__version__", "0.99.1")
    with caplog.at_level(logging.WARNING, logger="kv_vllm.interface"):
        assert interface.check_interface() == ""
    assert "tested with vLLM 0.32 and 0.33, and this is 0.99.1" in caplog.text


def test_an_engine_with_another_interface_runs_without_us_and_says_why(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tiny_llama, cache=None) as plain:
        expected = plain.ask_in_turn(PROMPTS)
    monkeypatch.setattr(KVConnectorBase_V1, "update_connector_output", lambda self, other: None)
    with started(tiny_llama, cache=CACHE) as ours:
        assert ours.ask_in_turn(PROMPTS) == expected
        assert ours.hits == [0, 0]
        (inner,) = engines().values()
        assert "update_connector_output takes ['other']" in inner.off
        assert inner.cache is None and inner.faults == []
