"""Fixtures of the real engine. Without SGLang in the environment this folder is left out, and says so."""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engines import Answer

STANDINS = Path(__file__).parent / "standins"
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
    print("tests/engine_sglang: left out, SGLang is not installed here; `make test-sglang` runs them where it is")
else:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each start takes three minutes
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STANDINS), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with grouped-query attention and weights that make attention matter."""
    from kv_cuda.tiny import TinyLlama

    directory: Path = tmp_path_factory.mktemp("tiny-llama")
    return str(TinyLlama().write(directory))


@pytest.fixture(scope="session")
def reference(tiny_llama: str) -> "list[Answer]":
    """What an engine without HiCache answers, with nothing cached."""
    from engines import PROMPTS, started

    with started(tiny_llama) as engine:
        return engine.ask_in_turn(PROMPTS)
