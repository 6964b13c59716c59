"""Storage that SGLang detaches, and attaches while it runs: what happened to the weights meanwhile counts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import COLD_HITS, PROMPTS, WARM_HITS, Answer, Engine, started
from kv_testing.tiny import TinyLlama

NORM = "model.layers.1.input_layernorm.weight"


def negate_a_norm(engine: Engine) -> None:
    engine.update_tensor(NORM, -torch.ones(TinyLlama().hidden))


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, Any]:
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    return {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}


@pytest.mark.slow
def test_weights_updated_while_it_is_detached_are_others_once_it_is_attached(
    tiny_llama: str, reference: list[Answer], cache: dict[str, Any]
) -> None:
    """Whether by the same engine or by one that had no storage before."""
    with started(tiny_llama, cache=cache, enable_metrics=True) as engine:
        assert engine.ask_in_turn(PROMPTS) == reference
        engine.flush()
        engine.detach()
        engine.attach(cache)
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS  # the same weights, the same pages
        engine.flush()
        engine.detach()
        negate_a_norm(engine)
        others = engine.ask_in_turn(PROMPTS)
        engine.flush()
        engine.attach(cache)
        assert engine.ask_in_turn(PROMPTS) == others != reference
        assert engine.hits == COLD_HITS
        assert engine.ask_in_turn(PROMPTS) == others
        assert engine.hits == WARM_HITS
    with started(tiny_llama, cache=cache) as engine:
        assert engine.ask_in_turn(PROMPTS) == reference
        assert engine.hits == WARM_HITS


@pytest.mark.long
def test_what_was_served_before_the_first_storage_was_attached_is_not_known(
    tiny_llama: str, reference: list[Answer], cache: dict[str, Any]
) -> None:
    with started(tiny_llama, cache=cache) as engine:
        assert engine.ask_in_turn(PROMPTS) == reference
    alone = {"enable_hierarchical_cache": True, "hicache_size": 1}
    with started(tiny_llama, **alone) as engine:
        negate_a_norm(engine)
        others = engine.ask_in_turn(PROMPTS)
        engine.attach(cache)
        assert engine.ask(PROMPTS) == others  # in doubt until it is flushed: not stored
        assert engine.ask_in_turn(PROMPTS) == others != reference
        assert engine.hits == COLD_HITS
        assert engine.ask_in_turn(PROMPTS) == others
        assert engine.hits == WARM_HITS
