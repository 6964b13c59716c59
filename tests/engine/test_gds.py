"""Real vLLM over a tier of type `gds`: hits are read in its files, with the same tokens, or computed.

There is no cuFile on a CPU, so the host's files stand in for it; all else is the same code.
"""

import errno
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import NEW_TOKENS, PROMPTS, WARM_HITS, Answer, Engine, empty_the_pool, started
from kv_connect.engine import engines
from kv_cuda.files import direct, host_files
from kv_testing.wait import until

POOL = {"capacity_bytes": "8MiB"}
LOADED = [hit for hit in WARM_HITS if hit]
CHUNK_BYTES = 1 << 17


def over(path: Path, **options: Any) -> dict[str, Any]:
    tier = {"type": "gds", "directory": str(path), "capacity_bytes": "64MiB", **options}
    return {"host": POOL, "tiers": [tier], "cold": {"wait_s": 20.0}}


def at_rest(engine: Engine) -> dict[str, Any]:
    """As of any engine, and nothing is leased in the files."""
    seen = engine.assert_at_rest()
    (one,) = engines().values()
    assert one.direct is not None
    files: Any = one.direct._files
    assert one.direct._leased == {}
    until(lambda: not files._leases and not files._index._reading)
    return seen


@pytest.mark.slow
def test_an_engine_of_several_processes_promotes_what_is_there(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """vLLM's engine on a CPU has its worker in another process when it is served."""
    with started(tiny_llama, cache=over(tmp_path), own_process=True) as served:
        assert served.ask_in_turn(PROMPTS) == reference
        assert served.ask_in_turn(PROMPTS) == reference
        assert served.hits == WARM_HITS
        assert served.inside("kv_snapshot")["worker"]["loaded_file_bytes"] == 0


def test_after_a_restart_of_the_process_files_are_all_there_is(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    with started(tiny_llama, cache=over(tmp_path / "kv")) as first:
        assert first.ask_in_turn(PROMPTS, settles=True) == reference
    with started(tiny_llama, cache=over(tmp_path / "kv")) as second:
        assert second.ask_in_turn(PROMPTS, settles=True) == reference
        assert second.hits == WARM_HITS
        assert at_rest(second)["worker"]["loaded_file_bytes"] > 0
        assert at_rest(second)["worker"]["loaded_bytes"] == 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "kv"


@pytest.fixture(scope="module")
def engine(tiny_llama: str, directory: Path) -> Iterator[Engine]:
    with started(tiny_llama, cache=over(directory)) as running:
        yield running


@pytest.fixture
def filled(engine: Engine, reference: list[Answer]) -> Engine:
    """All prompts are in the tier, and nothing is in the pool."""
    engine.llm.reset_prefix_cache(reset_connector=True)
    engine.inside("kv_settle")
    assert engine.ask_in_turn(PROMPTS, settles=True) == reference
    engine.inside("kv_settle")
    empty_the_pool()
    return engine


def test_hits_are_read_in_files_and_never_enter_the_pool(filled: Engine, reference: list[Answer]) -> None:
    before = at_rest(filled)
    assert filled.ask_in_turn(PROMPTS) == reference
    assert filled.hits == WARM_HITS
    after = at_rest(filled)
    assert after["cache"]["chunks_resident"] == 0
    read = after["worker"]["loaded_file_bytes"] - before["worker"]["loaded_file_bytes"]
    assert read == sum(-(-hit // 256) for hit in WARM_HITS) * filled_chunk_bytes()
    assert after["worker"]["loaded_bytes"] == before["worker"]["loaded_bytes"]
    assert after["scheduler"]["tokens_by_tier"]["gds"] - before["scheduler"]["tokens_by_tier"].get("gds", 0) == sum(
        WARM_HITS
    )
    assert after["cache"]["chunks_hit"] - before["cache"]["chunks_hit"] == 13


def filled_chunk_bytes() -> int:
    (one,) = engines().values()
    assert one.cache is not None
    return one.cache.pool.chunk_bytes


def test_all_at_once_and_a_hit_of_pool_and_files(filled: Engine, reference: list[Answer]) -> None:
    assert filled.ask(PROMPTS) == reference
    assert filled.ask([PROMPTS[0][:300]]) and filled.hits == [256]
    at_rest(filled)


class Gate:
    """Reads of files wait until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.is_open = threading.Event(), threading.Event()
        read = host_files._read

        def waits(*arguments: Any) -> int:
            self.has_begun.set()
            assert self.is_open.wait(60)
            return read(*arguments)

        patch.setattr(host_files, "_read", waits)


def test_a_request_that_is_aborted_while_it_is_read_leaves_nothing(
    filled: Engine, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams, TokensPrompt

    gate, core = Gate(monkeypatch), filled.llm.llm_engine
    core.add_request(
        "lost", TokensPrompt(prompt_token_ids=PROMPTS[2]), SamplingParams(max_tokens=NEW_TOKENS, detokenize=False)
    )
    while not gate.has_begun.is_set():
        core.step()
    core.abort_request(["lost"])
    core.step()
    (one,) = engines().values()
    assert one.direct is not None
    assert one.direct._leased, "its files stay leased while they are being read"
    gate.is_open.set()
    assert filled.ask_in_turn(PROMPTS) == reference
    at_rest(filled)


def test_what_is_reset_while_it_is_read_is_not_delivered(
    filled: Engine, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams, TokensPrompt

    gate, core = Gate(monkeypatch), filled.llm.llm_engine
    failed = at_rest(filled)["worker"]["loads_failed"]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    core.add_request("late", TokensPrompt(prompt_token_ids=PROMPTS[2]), sampling)
    while not gate.has_begun.is_set():
        core.step()
    (one,) = engines().values()
    assert one.cache is not None
    one.cache.clear()
    gate.is_open.set()
    answers: list[Any] = []
    while core.has_unfinished_requests():
        answers += [output for output in core.step() if output.finished]
    assert tuple(answers[0].outputs[0].token_ids) == reference[2]
    assert at_rest(filled)["worker"]["loads_failed"] == failed + 1


def slabs(directory: Path) -> list[Path]:
    return [file for file in directory.rglob("slab-*") if file.is_file()]


def test_a_damaged_page_costs_its_chunk_and_no_token(filled: Engine, reference: list[Answer], directory: Path) -> None:
    for file in slabs(directory):
        with file.open("r+b") as slots:
            for at in range(0, file.stat().st_size, 1 << 16):
                slots.seek(at + (1 << 15))
                byte = slots.read(1)
                if byte:
                    slots.seek(at + (1 << 15))
                    slots.write(bytes([byte[0] ^ 1]))
    failed = at_rest(filled)["worker"]["loads_failed"]
    assert filled.ask_in_turn(PROMPTS[:1]) == reference[:1]
    assert at_rest(filled)["worker"]["loads_failed"] == failed + 1
    assert filled.ask_in_turn(PROMPTS, settles=True) == reference
    filled.inside("kv_settle")
    empty_the_pool()
    assert filled.ask_in_turn(PROMPTS) == reference, "what was computed has been stored again"
    assert filled.hits == WARM_HITS
    at_rest(filled)


def test_a_read_that_fails_is_computed_and_the_tier_is_back_later(
    filled: Engine, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "the device is broken")

    with monkeypatch.context() as patch:
        patch.setattr(host_files, "_read", broken)
        assert filled.ask(PROMPTS[:1]) == reference[:1]
    seen = at_rest(filled)
    assert seen["tiers"]["gds"]["lane"]["read_failed"] > 0
    assert seen["tiers"]["gds"]["lane"]["downs"] > 0
    assert seen["tiers"]["gds"]["chunks"] > 0, "what cannot be read is not forgotten"
    until(lambda: filled.inside("kv_snapshot")["tiers"]["gds"]["health"] == "UP")
    assert filled.ask_in_turn(PROMPTS) == reference


def test_the_control_that_corrupts_what_was_verified_changes_the_tokens(
    filled: Engine, reference: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this the comparisons above could not fail."""
    plan = direct._Ring._plan

    def corrupt(ring: Any, rows: Any) -> Any:
        ring._rows.view(torch.float32).mul_(0.5)
        return plan(ring, rows)

    monkeypatch.setattr(direct._Ring, "_plan", corrupt)
    assert filled.ask([PROMPTS[2]]) != [reference[2]]


def test_a_vanished_directory_is_a_miss(filled: Engine, reference: list[Answer], directory: Path) -> None:
    """Last: the engine above is without its tier afterwards."""
    shutil.rmtree(directory)
    for _ in range(2):
        assert filled.ask_in_turn(PROMPTS) == reference
    at_rest(filled)
