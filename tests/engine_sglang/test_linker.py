"""SGLang's external linker on the real engine: the same answers, and the same pages as HiCache's storage."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import COLD_HITS, ON_A_CORE_EACH, PROMPTS, WARM_HITS, Answer, Engine, started
from kv_server.process import launch
from kv_sglang.lanes import LayerGate
from kv_sglang.linker import KVLinker
from kv_tiers import HostPool
from one_engine import OneEngine

POOL = f"sglang-linker-{os.getpid()}"


def settings(directory: Path, **host: Any) -> dict[str, Any]:
    tier = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "64MiB"}
    return {"host": {"capacity_bytes": "32MiB", **host}, "tiers": [tier], "cold": {"wait_s": 10.0}}


@pytest.fixture(scope="class")
def engine(tiny_llama: str, reference: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cache = settings(tmp_path_factory.mktemp("linker"), name=POOL)
    try:
        with started(tiny_llama, cache=cache, linker=True) as running:
            yield running
    finally:
        HostPool.unlink(POOL)


class TestLinker(OneEngine):
    pool = POOL


def test_loads_that_are_not_started_have_not_landed_and_are_never_written() -> None:
    """SGLang would use what is in their slots, and their copies would come when others have these."""
    linker, given_back = KVLinker.__new__(KVLinker), list[str]()
    linker._loads = SimpleNamespace(start=None, give_all_back=lambda: given_back.append("all"), gate=LayerGate())
    linker._attached = SimpleNamespace(figures=SimpleNamespace(off=lambda: None))

    def failing() -> None:
        raise RuntimeError("the device failed")

    linker.record_offload_ready = failing
    assert linker.start_layer_wise_loading() == -1
    assert given_back == ["all"] and "the device failed" in linker.off
    assert linker.finish_layer_wise_loading(-1) is False


@pytest.mark.long
def test_what_hicache_stored_the_linker_finds_and_the_reverse(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """From a directory, in processes that come after each other, and with no room for it all in between.

    A page that only the disk has is a miss to the linker, and there the next time.
    """
    with started(tiny_llama, cache=settings(tmp_path)) as hicache:
        assert hicache.ask_in_turn(PROMPTS[:3]) == reference[:3]
    with started(tiny_llama, cache=settings(tmp_path), linker=True) as linker:
        assert linker.ask_in_turn(PROMPTS) == reference
        assert linker.hits[:3] == [0, 512, 512]  # the first brings up what is its own
        assert linker.ask_in_turn(PROMPTS) == reference
        assert linker.hits == WARM_HITS
    with started(tiny_llama, cache=settings(tmp_path)) as again:
        assert again.ask_in_turn(PROMPTS) == reference
        assert again.hits == WARM_HITS
    with started(tiny_llama, cache=settings(tmp_path, capacity_bytes="1280KiB"), linker=True) as small:
        for _ in range(3):
            assert small.ask_in_turn(PROMPTS) == reference
        small.flush()
        assert small.ask(PROMPTS) == reference


@pytest.mark.slow
def test_two_ranks_and_a_server_that_dies(tiny_llama: str, tmp_path: Path) -> None:
    apart = {"tp_size": 2, "environ": ON_A_CORE_EACH}
    with started(tiny_llama, **apart) as plain:
        expected = plain.ask_in_turn(PROMPTS)
    socket = tmp_path / "private" / "s"
    server = launch({"host": {"capacity_bytes": 32 << 20}}, socket=socket)
    cache = {"server": {"socket": str(socket)}}
    try:
        with started(tiny_llama, cache=cache, linker=True, **apart) as ranks:
            assert ranks.ask_in_turn(PROMPTS) == expected
            assert ranks.hits == COLD_HITS
            assert ranks.ask_in_turn(PROMPTS) == expected
            assert ranks.hits == WARM_HITS
            os.kill(server.pid, signal.SIGKILL)
            assert ranks.ask_in_turn(PROMPTS) == expected
            assert ranks.hits == [0] * len(PROMPTS)
    finally:
        server.stop()


@pytest.mark.long
def test_a_model_with_latents(tiny_deepseek: str, tmp_path: Path) -> None:
    with started(tiny_deepseek) as plain:
        expected = plain.ask_in_turn(PROMPTS)
    with started(tiny_deepseek, cache=settings(tmp_path), linker=True) as ours:
        assert ours.ask_in_turn(PROMPTS) == expected
        assert ours.hits == COLD_HITS
        assert ours.ask_in_turn(PROMPTS) == expected
        assert ours.hits == WARM_HITS
