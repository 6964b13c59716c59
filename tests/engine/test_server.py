"""Real vLLM whose cache is in another process: a private server for an engine of several, and a shared one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import killed
import pytest
from engines import PROMPTS, WARM_HITS, Answer, started
from killed import PHASES
from kv_core import ChainScheme, digests_of
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess, launch
from kv_server.report import Report
from kv_testing.wait import until

CACHE: dict[str, Any] = {"host": {"capacity_bytes": "256MiB"}}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def serve(directory: Path) -> ServerProcess:
    disk = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "64MiB"}
    return launch({"host": {"capacity_bytes": 64 << 20}, "tiers": [disk]}, socket=directory / "private" / "s")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    made = serve(tmp_path)
    yield made
    made.stop()


def joined(server: ServerProcess) -> dict[str, Any]:
    return {"server": {"socket": str(server.socket)}}


@pytest.mark.slow
def test_a_worker_in_a_process_of_its_own(tiny_llama: str, reference: list[Answer]) -> None:
    """vLLM's default on CPUs: scheduler and worker meet at a private server."""
    with started(tiny_llama, cache=CACHE, own_process=True) as apart:
        assert apart.ask_in_turn(PROMPTS) == reference
        assert apart.ask_in_turn(PROMPTS) == reference
        assert apart.hits == WARM_HITS
        apart.assert_at_rest()
        apart.inside("kv_corrupt")
        assert apart.ask_in_turn(PROMPTS)[:4] != reference[:4]


@pytest.mark.slow
def test_two_ranks_each_with_its_share(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with started(tiny_llama, cache=None, **TWO_RANKS) as plain:
        expected = plain.ask_in_turn(PROMPTS)
    # Two ranks, the scheduler and the server, beside another engine's tests: an answer has taken more than a second.
    with started(tiny_llama, cache=CACHE | {"server": {"answer_s": 20}}, **TWO_RANKS) as ranks:
        assert ranks.ask_in_turn(PROMPTS) == expected
        assert ranks.hits == [0, 512, 512, 768, 0, 0]
        assert ranks.ask_in_turn(PROMPTS) == expected
        assert ranks.hits == WARM_HITS
        assert ranks.ask(PROMPTS) == expected
        assert ranks.assert_at_rest()["cache"]["chunks_resident"] == 12  # six chunks, two shares of each
        ranks.inside("kv_corrupt")
        assert ranks.ask_in_turn(PROMPTS)[:4] != expected[:4]


def test_two_engines_on_one_server(
    tiny_llama: str, reference: list[Answer], server: ServerProcess, tmp_path: Path
) -> None:
    """At the same time, in two processes; a third with another model finds nothing."""
    from kv_testing.tiny import TinyLlama

    with started(tiny_llama, cache=joined(server)) as one:
        assert one.ask_in_turn(PROMPTS) == reference
        with started(tiny_llama, cache=joined(server), own_process=True) as two:
            assert two.ask_in_turn(PROMPTS) == reference
            assert two.hits == WARM_HITS
            assert one.ask(PROMPTS) == reference
            two.assert_at_rest()
    other_model = str(TinyLlama(seed=1).write(tmp_path / "other"))
    with started(other_model, cache=joined(server)) as other:
        assert other.ask_in_turn(PROMPTS) != reference
        assert other.hits == [0, 512, 512, 768, 0, 0]


def test_a_server_killed_under_load_costs_hits_only_and_its_successor_has_the_disk(
    tiny_llama: str, reference: list[Answer], server: ServerProcess, tmp_path: Path
) -> None:
    with started(tiny_llama, cache=joined(server)) as engine:
        assert engine.ask_in_turn(PROMPTS) == reference
        os.kill(server.pid, signal.SIGKILL)
        assert engine.ask(PROMPTS * 2) == reference * 2
        assert engine.hits == [0] * (2 * len(PROMPTS))
        server.stop()
        successor = serve(tmp_path)
        try:
            until = time.monotonic() + 20
            while engine.hits[0] == 0 and time.monotonic() < until:
                assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits[0] == 512
            engine.assert_at_rest()
        finally:
            successor.stop()


@pytest.mark.slow
def test_a_router_is_told_what_a_prompt_would_take(tiny_llama: str, tmp_path: Path) -> None:
    """By what the engine itself has measured: with a prompt that is held, and with one that nobody has seen."""
    token_file = tmp_path / "token"
    http = {"listen": "127.0.0.1:0", "token_file": str(token_file)}
    made = launch({"host": {"capacity_bytes": 64 << 20}, "http": http}, socket=tmp_path / "private" / "s")
    try:
        with started(tiny_llama, cache=joined(made) | {"use": "auto"}) as engine:
            for number in range(8):
                engine.ask_in_turn([unseen(number)])

            def first_token(prompt: list[int]) -> dict[str, Any]:
                digests = [digest.hex() for digest in digests_of(ChainScheme(chunk_tokens=256), prompt)]
                answer = httpx.post(
                    f"{made.url}route",
                    json={"digests": digests, "tokens": len(prompt)},
                    headers={"authorization": f"Bearer {token_file.read_text().strip()}"},
                )
                (one,) = answer.json()["engines"]
                assert isinstance(one, dict)
                return one

            held, new = first_token(unseen(7)), first_token(unseen(8))
            assert (held["held_chunks"], new["held_chunks"], new["loaded_chunks"]) == (3, 0, 0)
            assert new["compute_s"] > 0 and new["load_s"] == 0.0
            assert held["ttft_s"] < new["ttft_s"]
    finally:
        made.stop()


def unseen(number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(900)]


def is_over(seen: Report, pid: int) -> bool:
    """The server has given back all that this process held."""
    return not seen.orphans and pid not in {session.pid for session in seen.sessions}


def report_of(server: ServerProcess) -> Report:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    return answer.report


@pytest.mark.slow
def test_an_engine_killed_in_any_phase_leaves_nothing_with_the_server(tiny_llama: str, server: ServerProcess) -> None:
    """Its leases are counted while it hangs there, and gone with it; what was committed stays."""
    with started(tiny_llama, cache=joined(server)) as engine:
        engine.ask_in_turn(PROMPTS)
    held_before = report_of(server).caches[0].counts.chunks_resident
    assert held_before == 6
    children = {phase: engine_that_stops(tiny_llama, server, phase) for phase in PHASES}  # they start side by side
    try:
        for phase, child in children.items():
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            assert any(line.strip() == phase for line in child.stdout), f"{phase}: it ended before"
            counts = report_of(server).caches[0].counts
            assert bool(counts.read_leases) == (phase in ("planned", "reading")), (phase, counts)
            assert bool(counts.write_leases) == (phase == "writing"), (phase, counts)
            child.kill()
            child.wait()
            until(lambda pid=child.pid: is_over(report_of(server), pid), within_s=20)
            counts = report_of(server).caches[0].counts
            assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0, (phase, counts)
            assert counts.slots_used == counts.chunks_resident == held_before, (phase, counts)
        assert not report_of(server).sessions
    finally:
        for child in children.values():
            child.kill()
            child.communicate()


def engine_that_stops(model: str, server: ServerProcess, phase: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, killed.__file__, model, str(server.socket), phase],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(killed.__file__).parent,
    )


def test_tenants_share_an_engine_and_a_server_but_no_chunk(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """vLLM's cache_salt is the tenant's; the noisy one, at its limit, pushes nobody else out."""
    chunk = 1 << 19  # more than one of the tiny model's; the server rounds to whole slots
    tenants = [
        {"name": "quiet", "salt": "s-quiet", "quota_bytes": 4 * chunk},
        {"name": "noisy", "salt": "s-noisy", "quota_bytes": 4 * chunk},
    ]
    server = launch({"host": {"capacity_bytes": 64 << 20}, "tenants": tenants}, socket=tmp_path / "private" / "t")
    try:
        with started(tiny_llama, cache=joined(server)) as engine:
            for salt in ("s-quiet", "s-noisy"):
                assert engine.ask(PROMPTS[:1], salt=salt) == reference[:1]
                assert engine.hits == [0]  # although the same prompt is held, for somebody else
            for number in range(40):
                engine.ask([[7 + number + (13 * i) % 1700 for i in range(520)]], 1, salt="s-noisy")
            assert engine.ask(PROMPTS[:1], salt="s-quiet") == reference[:1]
            assert engine.hits == [512]
            engine.assert_at_rest()
        (cache,) = report_of(server).caches
        used = {tenant.name: tenant for tenant in cache.tenants}
        assert used["quiet"].chunks == 2
        assert used["noisy"].used_bytes <= 4 * chunk
        assert cache.counts.chunks_evicted > 0
        assert sum(tenant.chunks for tenant in cache.tenants) == cache.counts.slots_used
    finally:
        server.stop()
