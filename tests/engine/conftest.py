"""Fixtures of the real engine. Without vLLM in the environment this folder is left out, and says so."""

import gc
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kv_testing.order import longest_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engines import Answer
    from vllm.config import VllmConfig

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Even an eager vLLM compiles a function of its sampler when a request wants log-probabilities: 15 s a process.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# These tests count what is found. Whether loading it pays, on a tiny model and a busy machine, is another matter.
os.environ.setdefault("KV_USE", "always")

# What vLLM finds out about a class of models, for which it imports all of itself in another process: once a machine.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "vllm_cache"))

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
    print("tests/engine: left out, vLLM is not installed here; `make test-engine` runs them where it is")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)


@pytest.fixture(scope="session", autouse=True)
def _digests_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What weights' files hold is remembered for these tests, and not in the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _quick_engines(_digests_of_this_run: None) -> "Iterator[None]":
    """Engines start sooner, in this process and in others."""
    import torch
    from forked import VLLM, import_vllm, prepare_engines
    from kv_testing.forked import fork_from, overlook_what_is_there

    unfreeze = gc.unfreeze
    import_vllm()
    if not torch.cuda.is_available():
        prepare_engines()
        fork_from(VLLM)
    overlook_what_is_there()
    yield
    unfreeze()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with grouped-query attention and weights that make attention matter."""
    from kv_testing.tiny import TinyLlama

    directory: Path = tmp_path_factory.mktemp("tiny-llama")
    return str(TinyLlama().write(directory))


@pytest.fixture(scope="session")
def spelling_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a tokenizer, whose token 17 is the word w17: for what of vLLM does not start without one."""
    from kv_testing.spelling import with_words
    from kv_testing.tiny import TinyLlama

    return with_words(TinyLlama().write(tmp_path_factory.mktemp("spelling-llama")))


@pytest.fixture(scope="session")
def spelling_model(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], str]":
    """Makes one of `models` with such a tokenizer."""
    from kv_testing.spelling import with_words
    from models import BY_NAME

    def make(name: str) -> str:
        return with_words(BY_NAME[name].write(tmp_path_factory.mktemp("spelling")))

    return make


@pytest.fixture(scope="module")
def newer_runner() -> "Iterator[None]":
    """Configures vLLM's newer model runner, which GPUs have by default, where a CPU's configuration may: from 0.33 on.
    For schedulers without an engine."""
    from oracle import HAS_NEWER_RUNNER

    with pytest.MonkeyPatch.context() as patch:
        if HAS_NEWER_RUNNER:
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        yield


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with multi-head latent attention."""
    from kv_testing.tiny_deepseek import write_tiny_deepseek

    return str(write_tiny_deepseek(tmp_path_factory.mktemp("tiny-deepseek")))


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of which every other layer has a sliding window."""
    from models import BY_NAME

    return str(BY_NAME["Gemma 3"].write(tmp_path_factory.mktemp("tiny-gemma")))


@pytest.fixture(scope="session")
def reference(tiny_llama: str) -> "list[Answer]":
    """What an engine without us answers."""
    from engines import PROMPTS, started

    with started(tiny_llama, cache=None) as engine:
        return engine.ask_in_turn(PROMPTS)


@pytest.fixture(scope="module")
def config(tiny_llama: str) -> "VllmConfig":
    """vLLM's own, as an engine of two layers would have it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        tiny_llama,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(kv_connector="KVTiersConnector", kv_role="kv_both"),
    )
    return arguments.create_engine_config()
