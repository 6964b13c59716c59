"""Fixtures of the real engine. Without SGLang in the environment this folder is left out, and says so."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kv_testing.order import longest_first

if TYPE_CHECKING:
    from engines import Answer
    from nursery import Nursery

STANDINS = Path(__file__).parent / "standins"
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
    print("tests/engine_sglang: left out, SGLang is not installed here; `make test-sglang` runs them where it is")
else:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))  # compiled once a machine
    # As tests/engine has it, for the tests in which vLLM takes part.
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix).parent / "vllm" / "vllm_cache"))
    os.environ["KV_TESTS_SLEEP_WHEN_IDLE"] = "1"  # `standins.hicache_on_cpu`
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each start takes three minutes
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STANDINS), os.environ.get("PYTHONPATH")]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)


@pytest.fixture(scope="session", autouse=True)
def _digests_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What weights' files hold is remembered for these tests, and not in the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _quick_servers(_digests_of_this_run: None) -> None:
    """They start without the half minute of importing SGLang, too."""
    from forked import SGLANG
    from kv_testing.forked import fork_from

    fork_from(SGLANG)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with grouped-query attention and weights that make attention matter."""
    from kv_testing.tiny import TinyLlama

    directory: Path = tmp_path_factory.mktemp("tiny-llama")
    return str(TinyLlama().write(directory))


@pytest.fixture(scope="session")
def engines() -> "Nursery":
    """They start without the half minute of importing SGLang."""
    from nursery import nursery

    return nursery()


@pytest.fixture(scope="session")
def reference(tiny_llama: str) -> "list[Answer]":
    """What an engine without HiCache answers, with nothing cached."""
    from engines import PROMPTS, started

    with started(tiny_llama) as engine:
        return engine.ask_in_turn(PROMPTS)


def written(config: Any, directory: Path) -> str:
    """A model of this configuration with weights of its own, the same each time; where it is."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with multi-head latent attention and no experts."""
    from kv_testing.tiny_deepseek import write_tiny_deepseek

    return str(write_tiny_deepseek(tmp_path_factory.mktemp("tiny-deepseek"), kv_lora_rank=64, rope_dim=16))


@pytest.fixture(scope="session")
def tiny_mellum(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of which every other layer has a sliding window, and no layer experts."""
    from transformers import MellumConfig

    config = MellumConfig(
        architectures=["MellumForCausalLM"],
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.15,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] * 4,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return written(config, tmp_path_factory.mktemp("tiny-mellum"))
