"""Beside other connectors under vLLM's MultiConnector: a cache, which leaves hand-overs to those. Two answers to one
proxy would end the engine."""

from typing import Any

import pytest
from kv_tiers.settings import Settings, load
from kv_vllm.handover import with_protocol
from oracle import Oracle
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import KVCacheConfig

PROMPT = [3 + (7 * i) % 40 for i in range(240)]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


class Other(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Decides its settings as ours does, and does nothing else."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = with_protocol(load(vllm_config.kv_transfer_config.kv_connector_extra_config, {})[0])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def transfer(connector: str, **extra: Any) -> dict[str, Any]:
    where = {"kv_connector_module_path": __name__} if connector == "Other" else {}
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra} | where


@pytest.mark.parametrize(("chosen", "protocol"), [({}, "never"), ({"handover": {"protocol": "always"}}, "always")])
def test_under_a_multi_connector_hand_overs_are_for_the_others_unless_they_are_asked_of_us(
    chosen: dict[str, Any], protocol: str
) -> None:
    config = VllmConfig()
    extra = {"connectors": [transfer("Other", **chosen), transfer("Other", **chosen)]}
    config.kv_transfer_config = KVTransferConfig(**transfer("MultiConnector", **extra))
    multi = MultiConnector(config, KVConnectorRole.WORKER, KVCacheConfig(8, [], []))
    assert [one.settings.handover.protocol for one in multi._connectors] == [protocol] * 2


def test_a_connector_that_is_alone_hands_over() -> None:
    assert with_protocol(Settings()).handover.protocol == "always"


def test_without_the_protocol_a_proxys_words_change_nothing(tiny_llama: str) -> None:
    oracle = Oracle(tiny_llama, handover={"protocol": "never"})
    try:
        oracle.ask("prefill", PROMPT, 1, params=PREFILL)
        oracle.ask("decode", PROMPT, 4, params={"do_remote_prefill": True, "do_remote_decode": False})
        assert oracle.answers == {}
        assert oracle.engine.scheduler is not None
        assert oracle.engine.scheduler.counts.tokens_loaded == 192  # whole chunks, as of any request
        oracle.assert_at_rest()
    finally:
        oracle.close()
