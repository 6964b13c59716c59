"""Beside other connectors under vLLM's MultiConnector: a cache, which leaves hand-overs to those. Two answers to one
proxy would end the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from engines import CHUNK_TOKENS, PROMPTS, Answer, Engine, empty_the_pool, started
from kv_tiers.settings import Settings, load
from kv_vllm.handover import with_protocol
from kv_vllm.trials import Trials
from oracle import Oracle
from unreliable import Behaviour, Unreliable, beside
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import KVCacheConfig

QUICK = [("middle", "sync", False), ("first", "late", True), ("last", "async", False)]
"""The failures of others that the fast tests look at."""
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
        assert oracle.engine.scheduler.counts.loaded_tokens == 192  # whole chunks, as of any request
        oracle.assert_at_rest()
    finally:
        oracle.close()


# What others report as failed.

FOUND = [512, 512, 1023, 896, 0, 512]
"""Tokens of each prompt that are found once all are stored: by us, or by vLLM in its own blocks."""


@contextmanager
def beside_unreliable(model: str, cache: dict[str, Any], **arguments: Any) -> Iterator[Engine]:
    """An engine with a connector that may fail, which is asked first and holds all prompts, and ours, which is empty.

    cache: our settings.
    """
    ours = {"chunk_tokens": CHUNK_TOKENS, "host": {"capacity_bytes": "256MiB"}} | cache
    Unreliable.now = Behaviour(offers=False)
    with started(model, **beside(ours), **{"enable_prefix_caching": True} | arguments) as engine:
        engine.ask(PROMPTS)
        behave(engine)
        yield engine


def behave(engine: Engine, **behaviour: Any) -> None:
    """The other connector does as it is told from now on, and nothing is found elsewhere."""
    engine.inside("kv_settle")
    empty_the_pool()
    engine.llm.reset_prefix_cache()
    Unreliable.now = Behaviour(held=Unreliable.now.held, **behaviour)


def asked_of_us_alone(engine: Engine) -> list[Answer]:
    """The tokens of all prompts, of which only our cache has something."""
    Unreliable.now.offers = False
    engine.llm.reset_prefix_cache()
    return engine.ask_in_turn(PROMPTS)


@pytest.fixture(scope="class", params=[{}, {"max_num_batched_tokens": 256}], ids=["whole", "chunked"])
def engine(request: pytest.FixtureRequest, tiny_llama: str, reference: list[Answer]) -> Iterator[Engine]:
    with beside_unreliable(tiny_llama, {}, **request.param) as engine:
        yield engine


WAYS: dict[str, dict[str, Any]] = {
    "sync": {},
    "late": {"late": True},
    "async": {"is_async": True},
    "async by request": {"is_async": True, "whole_requests": True},
}


class TestLoadsOfOthersThatFail:
    @pytest.mark.parametrize(
        ("fails", "way", "at_once"),
        [
            pytest.param(
                *case, marks=() if case in QUICK else pytest.mark.slow if number % 3 == 1 else pytest.mark.long
            )
            for number, case in enumerate(product(("", "first", "middle", "last"), WAYS, (False, True)))
        ],
    )
    def test_nothing_wrong_is_stored_and_what_is_computed_instead_is(
        self, engine: Engine, reference: list[Answer], fails: str, way: str, at_once: bool
    ) -> None:
        """vLLM's own tokens may be wrong where requests share failed blocks, and where the report is late: not looked
        at."""
        behave(engine, fails=fails, **WAYS[way])
        (engine.ask if at_once else engine.ask_in_turn)(PROMPTS)
        assert Unreliable.now.loaded_blocks > 0 and bool(Unreliable.now.failed_requests) == bool(fails)
        assert asked_of_us_alone(engine) == reference
        assert asked_of_us_alone(engine) == reference
        assert engine.hits == FOUND
        engine.inside("kv_settle")
        assert engine.inside("kv_snapshot")["faults"] == []

    def test_without_the_trials_wrong_bytes_are_stored(
        self, engine: Engine, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else the tests above could not fail."""
        behave(engine, fails="middle")
        monkeypatch.setattr(Trials, "begin", lambda *_args, **_named: 0)
        monkeypatch.setattr(Trials, "failed", lambda *_args: None)
        engine.ask_in_turn(PROMPTS)
        assert asked_of_us_alone(engine) != reference


@pytest.mark.slow
def test_right_from_disk_after_a_restart_and_when_requests_are_preempted(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    disk = {"tiers": [{"type": "disk", "directory": str(tmp_path), "capacity_bytes": "256MiB", "write": "through"}]}
    with beside_unreliable(
        tiny_llama, disk, num_gpu_blocks_override=14, max_model_len=1280
    ) as engine:  # of 128 tokens: not for all
        for fails in ("first", "middle", "last"):
            behave(engine, fails=fails)
            engine.ask(PROMPTS)
            engine.ask_in_turn(PROMPTS)
            assert Unreliable.now.failed_requests
    with started(tiny_llama, cache={"host": {"capacity_bytes": "256MiB"}, **disk}) as engine:
        assert engine.ask_in_turn(PROMPTS) == reference
        assert sum(engine.hits) > 0
