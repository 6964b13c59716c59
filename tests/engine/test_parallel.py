"""One model on one, two and four processes: each shape finds what engines of its own shape have stored, no others."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, WARM_HITS, Answer, Engine, started
from kv_core.errors import TierDown
from kv_server import wire
from kv_server.connection import ask_server
from kv_testing.forked import in_new_interpreters
from kv_testing.wait import until
from models import BY_NAME

STAGES: dict[str, Any] = {"worker_extension_cls": "stages.Stages", "distributed_executor_backend": "mp"}
SHAPES: dict[str, dict[str, Any]] = {
    "alone": {},
    "TP=2": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "PP=2": {"pipeline_parallel_size": 2} | STAGES,
    "TP=2, PP=2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} | STAGES,
}
PROCESSES = {"TP=2": 2, "PP=2": 2, "TP=2, PP=2": 4}
COLD_HITS = [0, 512, 512, 768, 0, 0]


@contextmanager
def shaped(model: str, shape: str, cache: dict[str, Any] | None) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        if shape in PROCESSES:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(n % 2) for n in range(PROCESSES[shape])))
        with started(model, cache=cache, own_process=shape in PROCESSES, **SHAPES[shape]) as engine:
            if "PP" in shape:
                engine.inside_all("kv_make_buffers")
            yield engine


def disk(directory: Path) -> dict[str, Any]:
    tier = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "256MiB"}
    # The disk's threads may wait for long where processes share cores.
    return {"host": {"capacity_bytes": "128MiB"}, "tiers": [tier], "cold": {"wait_s": 30}}


def hits_by_shape(model: str, shapes: Sequence[str], directory: Path, reference: list[Answer]) -> dict[str, list[int]]:
    """Start an engine of each shape in turn, all on one disk; what each finds."""
    found = {}
    for shape in shapes:
        with shaped(model, shape, disk(directory)) as engine:
            assert engine.ask_in_turn(PROMPTS) == reference, shape
            found[shape] = engine.hits
            assert engine.ask(PROMPTS) == reference, shape
            engine.assert_at_rest()
    return found


@pytest.mark.long
def test_every_shape_finds_its_own_chunks_after_a_restart_and_no_others(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    shapes = ("alone", "TP=2", "PP=2")
    assert hits_by_shape(tiny_llama, shapes, tmp_path, reference) == dict.fromkeys(shapes, COLD_HITS)
    assert hits_by_shape(tiny_llama, shapes, tmp_path, reference) == dict.fromkeys(shapes, WARM_HITS)


@pytest.mark.long
def test_ranks_in_stages_find_their_own_chunks_after_a_restart(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """Four processes on two cores: an answer of the server may take more than the second after which it is a miss."""
    shape = "TP=2, PP=2"
    for most, at_least in ((COLD_HITS, 0), (WARM_HITS, 3)):
        hits = hits_by_shape(tiny_llama, [shape], tmp_path, reference)[shape]
        assert all(hit in (0, whole) for hit, whole in zip(hits, most, strict=True)), hits
        assert sum(hit > 0 for hit in hits) >= at_least, hits


def answers(socket: Path) -> bool:
    """Whether there is a server."""
    try:
        ask_server(socket, wire.Ping())
    except TierDown:
        return False
    return True


@pytest.mark.slow
def test_a_private_server_that_is_killed_costs_hits_until_its_successor_has_them(
    tiny_llama: str, reference: list[Answer]
) -> None:
    """The ranks' sets of names have other orders, as in other tests they have not."""
    # A second is not much for an answer where three processes share two cores.
    cache = {"host": {"capacity_bytes": "128MiB"}, "server": {"answer_s": 20}}
    with in_new_interpreters(), shaped(tiny_llama, "TP=2", cache) as engine:
        assert engine.ask_in_turn(PROMPTS) == reference
        first, none = engine.inside_all("kv_server")
        assert first and not none
        words = Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")
        socket = Path(os.fsdecode(words[words.index(b"--socket") + 1]))
        os.kill(first, signal.SIGKILL)
        assert engine.ask_in_turn(PROMPTS) == reference
        # Not by asking the engine: its workers then yield their processors to each other for ever, and with a scheduler
        # of Linux 6.18 a process of another session gets none of them for up to a minute.
        until(lambda: answers(socket), within_s=60)
        until(lambda: engine.inside("kv_server") != first, within_s=60)
        until(lambda: engine.ask_in_turn(PROMPTS) == reference and engine.hits == WARM_HITS, within_s=60)


@pytest.mark.slow
def test_with_stages_a_wrong_byte_of_either_changes_tokens(tiny_llama: str, reference: list[Answer]) -> None:
    """The control."""
    with shaped(tiny_llama, "PP=2", {"host": {"capacity_bytes": "128MiB"}}) as engine:
        assert engine.ask_in_turn(PROMPTS) == reference
        engine.inside("kv_corrupt")
        assert engine.ask_in_turn(PROMPTS)[:4] != reference[:4]


@pytest.mark.long
def test_ranks_have_a_share_of_every_state(tmp_path: Path) -> None:
    """Falcon-H1 has attention and states in every layer. What is found may be less where processes share cores."""
    row = BY_NAME["Falcon-H1"]
    model = str(row.write(tmp_path / "model"))
    (tmp_path / "cache").mkdir()
    tokens = [3 + (7919 * i) % 1900 for i in range(900)]
    prompts = [tokens[:700], tokens[:520] + [5 + (31 * i) % 1900 for i in range(200)], tokens]

    def ask(running: Engine) -> tuple[list[Answer], list[int]]:
        answers, hits = [], []
        for prompt in prompts:
            running.llm.reset_prefix_cache()
            answers += running.ask([prompt], 6)
            hits += running.hits
        return answers, hits

    arguments = {**SHAPES["TP=2"], **row.arguments, "own_process": True, "chunk_tokens": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with started(model, cache=None, **arguments) as plain:
            expected, _ = ask(plain)
        with started(model, cache=disk(tmp_path / "cache"), **arguments) as engine:
            assert ask(engine)[0] == expected
            answers, hits = ask(engine)
            assert answers == expected and max(hits) >= 640, hits
            engine.assert_at_rest()
        with started(model, cache=disk(tmp_path / "cache"), **arguments) as restarted:
            answers, hits = ask(restarted)
            assert answers == expected and max(hits) >= 640, hits
            restarted.inside("kv_corrupt")
            restarted.llm.reset_prefix_cache()
            assert restarted.ask([prompts[2]], 6) != expected[2:]
