"""Fixtures of the real engine. Without vLLM in the environment this folder is left out, and says so."""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engines import Answer

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
    print("tests/engine: left out, vLLM is not installed here; `make test-engine` runs them where it is")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with grouped-query attention and weights that make attention matter."""
    from kv_cuda.tiny import TinyLlama

    directory: Path = tmp_path_factory.mktemp("tiny-llama")
    return str(TinyLlama().write(directory))


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with multi-head latent attention."""
    from kv_cuda.tiny import write_tiny_deepseek

    return str(write_tiny_deepseek(tmp_path_factory.mktemp("tiny-deepseek")))


@pytest.fixture(scope="session")
def reference(tiny_llama: str) -> "list[Answer]":
    """What an engine without us answers."""
    from engines import PROMPTS, started

    with started(tiny_llama, cache=None) as engine:
        return engine.ask_in_turn(PROMPTS)
