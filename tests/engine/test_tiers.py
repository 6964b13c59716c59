"""Real vLLM over real tiers: what left the pool comes back from disk and Valkey with the same tokens, or not at all.

The pool holds four of the six chunks that the prompts make, so something is always below.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, SHARED, WARM_HITS, Answer, Engine, empty_the_pool, started
from kv_testing.servers import Proxy, ValkeyServer
from kv_testing.wait import until

POOL = {"capacity_bytes": "2MiB"}
PATIENT = {"wait_s": 20.0}


def disk(path: Path, **options: Any) -> dict[str, Any]:
    return {"type": "disk", "directory": str(path), "capacity_bytes": "64MiB", **options}


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.remove()


@pytest.mark.parametrize(
    ("write", "host", "cold"),
    [
        pytest.param("through", POOL, PATIENT, marks=pytest.mark.slow),
        ("back", {"capacity_bytes": "8MiB"}, PATIENT | {"spill_share": 0.8}),  # 16 chunks, of which 12 are kept free
    ],
    ids=["through", "back"],
)
def test_through_disk_cold_warm_and_after_a_restart(
    tiny_llama: str, reference: list[Answer], tmp_path: Path, write: str, host: dict[str, Any], cold: dict[str, Any]
) -> None:
    cache = {"host": host, "tiers": [disk(tmp_path / "kv", write=write)], "cold": cold}
    with started(tiny_llama, cache=cache) as first:
        assert first.ask_in_turn(PROMPTS, settles=True) == reference
        assert first.hits == [0, 512, 512, 768, 0, 0]
        assert first.ask_in_turn(PROMPTS, settles=True) == reference
        assert first.hits == WARM_HITS
        assert first.ask(PROMPTS) == reference
        assert first.assert_at_rest()["tiers"]["disk"]["lane"]["loaded"] > 0
    with started(tiny_llama, cache=cache) as second:
        assert second.ask_in_turn(PROMPTS, settles=True) == reference
        assert second.hits == WARM_HITS
        second.assert_at_rest()


@pytest.fixture(scope="class")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "kv"


@pytest.fixture(scope="class")
def engine(tiny_llama: str, reference: list[Answer], directory: Path) -> Iterator[Engine]:
    cache = {"host": POOL, "tiers": [disk(directory, direct="never")], "cold": {"wait_s": 5.0}}
    with started(tiny_llama, cache=cache) as running:
        yield running


class TestOneEngineOverDisk:
    """One engine, its disk broken in one way after another."""

    @pytest.fixture(autouse=True)
    def _filled(self, engine: Engine, reference: list[Answer]) -> None:
        engine.llm.reset_prefix_cache(reset_connector=True)
        engine.inside("kv_settle")
        assert engine.ask_in_turn(PROMPTS, settles=True) == reference
        assert engine.hits == [0, 512, 512, 768, 0, 0]
        engine.inside("kv_settle")
        empty_the_pool()

    def test_what_was_reset_is_gone_from_disk_too(self, engine: Engine, reference: list[Answer]) -> None:
        assert engine.ask_in_turn(PROMPTS, settles=True) == reference
        assert engine.hits == WARM_HITS
        engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.ask([PROMPTS[0]]) == [reference[0]]
        assert engine.hits == [0]
        engine.assert_at_rest()

    def test_flipped_bytes_are_a_miss_and_the_same_tokens(
        self, engine: Engine, reference: list[Answer], directory: Path
    ) -> None:
        damaged = engine.assert_at_rest()["tiers"]["disk"]["lane"]["damaged"]
        for file in directory.rglob("*"):
            if file.is_file() and file.stat().st_size > 1 << 20:
                flip_the_middle_of_every_slot(file)
        assert engine.ask_in_turn(PROMPTS[:1]) == reference[:1]
        assert engine.hits == [0]
        assert engine.assert_at_rest()["tiers"]["disk"]["lane"]["damaged"] > damaged
        assert engine.ask_in_turn(PROMPTS) == reference  # and stored again

    def test_the_control_that_corrupts_what_was_promoted_changes_the_tokens(
        self, engine: Engine, reference: list[Answer]
    ) -> None:
        """Without this the comparisons above could not fail."""
        assert engine.ask([PROMPTS[2]]) == [reference[2]]
        engine.inside("kv_corrupt")
        assert engine.ask([PROMPTS[2]]) != [reference[2]]

    def test_a_vanished_directory_is_a_miss(self, engine: Engine, reference: list[Answer], directory: Path) -> None:
        shutil.rmtree(directory)
        for _ in range(2):
            assert engine.ask_in_turn(PROMPTS) == reference
        engine.assert_at_rest()


def flip_the_middle_of_every_slot(file: Path) -> None:
    with file.open("r+b") as slots:
        for at in range(0, file.stat().st_size, 1 << 16):
            slots.seek(at + (1 << 15))
            byte = slots.read(1)
            if byte:
                slots.seek(at + (1 << 15))
                slots.write(bytes([byte[0] ^ 1]))


def test_through_valkey_from_another_engine_and_through_its_faults(
    tiny_llama: str, reference: list[Answer], valkey: ValkeyServer
) -> None:
    tier = {"type": "valkey", "url": valkey.url}
    with started(tiny_llama, cache={"host": POOL, "tiers": [tier], "cold": PATIENT}) as first:
        assert first.ask_in_turn(PROMPTS, settles=True) == reference
        first.assert_at_rest()
    with started(tiny_llama, cache={"host": POOL, "tiers": [tier], "cold": PATIENT}) as second:
        assert second.ask_in_turn(PROMPTS, settles=True) == reference
        assert second.hits == WARM_HITS
        # Stopped under load: misses, and never an error.
        empty_the_pool()
        valkey.stop()
        assert second.ask(PROMPTS * 2) == reference * 2
        assert second.assert_at_rest()["tiers"]["valkey"]["health"] == "DOWN"
        # And back again, by itself.
        valkey.start()
        until(lambda: second.inside("kv_snapshot")["tiers"]["valkey"]["health"] == "UP", within_s=2.0)
        second.llm.reset_prefix_cache(reset_connector=True)
        second.inside("kv_settle")
        assert second.ask_in_turn(PROMPTS, settles=True) == reference
        second.inside("kv_settle")
        empty_the_pool()
        assert second.ask_in_turn(PROMPTS, settles=True) == reference
        assert second.hits == WARM_HITS
        second.assert_at_rest()


def test_a_valkey_that_does_not_answer_delays_no_step(
    tiny_llama: str, reference: list[Answer], valkey: ValkeyServer
) -> None:
    """While one request waits for it, another generates to its end. When it answers at last, that is a hit."""
    from vllm import SamplingParams, TokensPrompt

    line = Proxy(valkey.port)
    tier = {"type": "valkey", "url": f"redis://127.0.0.1:{line.port}", "timeout_s": 30.0}
    try:
        with started(tiny_llama, cache={"host": POOL, "tiers": [tier], "cold": {"wait_s": 600.0}}) as engine:
            engine.ask_in_turn(PROMPTS)
            engine.inside("kv_settle")
            empty_the_pool()
            line.stall()
            sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
            long = SamplingParams(temperature=0, max_tokens=40, detokenize=False, ignore_eos=True)
            inner = engine.llm.llm_engine
            inner.add_request("busy", TokensPrompt(prompt_token_ids=SHARED[7:100]), long)
            inner.step()
            inner.add_request("waits", TokensPrompt(prompt_token_ids=PROMPTS[0]), sampling)
            finished: dict[str, Any] = {}
            while inner.has_unfinished_requests():
                finished |= {output.request_id: output for output in inner.step() if output.finished}
                if list(finished) == ["busy"]:
                    line.flow()
            assert list(finished) == ["busy", "waits"]
            assert tuple(finished["waits"].outputs[0].token_ids) == reference[0]
            assert finished["waits"].num_cached_tokens == 512
            engine.assert_at_rest()
    finally:
        line.close()
