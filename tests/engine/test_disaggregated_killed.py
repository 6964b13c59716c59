"""A hand-over whose sides die, or are stopped, in the middle of it: right tokens all the same, and nothing stays leased
or kept."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import killed_handover
import pytest
from engines import Answer, Engine, started
from killed_handover import CHUNK, PREFILL, prompt_of
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess, launch
from kv_server.report import CacheReport, Report
from kv_testing.wait import line, until

pytestmark = pytest.mark.slow

AT_CHUNKS = (0, 2, 4)
"""The last of them is the partial one."""
STOPPED, DECODED, LOST = 3, 7, 9
"""Numbers of prompts: of the prefill engine that goes on, of the decode engine, and of the server that is killed."""


@pytest.fixture(scope="module")
def expected(tiny_llama: str) -> dict[int, Answer]:
    numbers = (*AT_CHUNKS, STOPPED, DECODED, LOST)
    with started(tiny_llama, cache=None) as engine:
        return dict(zip(numbers, engine.ask_in_turn([prompt_of(number) for number in numbers]), strict=True))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = tmp_path_factory.mktemp("killed")
    made = launch(
        {"host": {"capacity_bytes": "64MiB"}, "peers": {"listen": "127.0.0.1:0", "unprotected": True}},
        socket=home / "s",
    )
    yield made
    made.stop()


@pytest.fixture(scope="module")
def engine(tiny_llama: str, server: ServerProcess, expected: dict[int, Answer]) -> Iterator[Engine]:
    """Both sides of whatever the killed one is not."""
    cache = {"server": {"socket": str(server.socket), "answer_s": 20}, "handover": {"hold_s": 2.0}}
    with started(tiny_llama, cache=cache) as running:
        yield running


@contextmanager
def stopped(model: str, server: ServerProcess, side: str, number: int) -> "Iterator[subprocess.Popen[str]]":
    """An engine that is stopped there."""
    child = subprocess.Popen(
        [sys.executable, killed_handover.__file__, model, str(server.socket), side, str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(killed_handover.__file__).parent,
    )
    try:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        until(lambda: os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT), 180)
        assert child.poll() is None, "it ended before"
        yield child
    finally:
        child.kill()
        child.communicate()


def go_on_after(child: "subprocess.Popen[str]") -> None:
    """Until it has ended by itself."""
    child.send_signal(signal.SIGCONT)
    while (said := line(child.stdout, 180)).strip() != "it is done":
        assert said, "it ended before"
    child.wait(60)


def report(server: ServerProcess) -> Report:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    return answer.report


def cache_of(server: ServerProcess) -> CacheReport:
    return report(server).caches[0]


def assert_nothing_is_left_of(pid: int, server: ServerProcess) -> None:
    until(lambda: pid not in [session.pid for session in report(server).sessions] and not report(server).orphans, 20)
    counts = cache_of(server).counts
    assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0
    assert counts.slots_used == counts.chunks_resident


def go_on(engine: Engine, prompt: list[int], stored_tokens: int) -> tuple[Answer, int]:
    before = engine.inside("kv_snapshot")["scheduler"]["loaded_tokens"]
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": stored_tokens}
    (answer,) = engine.ask([prompt], extra_args={"kv_transfer_params": params})
    return answer, engine.inside("kv_snapshot")["scheduler"]["loaded_tokens"] - before


@pytest.mark.parametrize("chunks", AT_CHUNKS)
def test_a_prefill_engine_killed_at_a_chunk_costs_that_chunk_and_those_behind_it(
    tiny_llama: str, server: ServerProcess, engine: Engine, expected: dict[int, Answer], chunks: int
) -> None:
    prompt = prompt_of(chunks)
    with stopped(tiny_llama, server, "prefill", chunks) as child:
        assert cache_of(server).counts.write_leases == 1
        child.kill()
        child.wait()
        assert_nothing_is_left_of(child.pid, server)
    assert go_on(engine, prompt, len(prompt)) == (expected[chunks], chunks * CHUNK)
    engine.assert_at_rest()
    until(lambda: cache_of(server).handed_over == 0)


def test_a_prefill_engine_that_is_stopped_costs_the_same_and_nothing_is_lost_once_it_goes_on(
    tiny_llama: str, server: ServerProcess, engine: Engine, expected: dict[int, Answer]
) -> None:
    prompt = prompt_of(STOPPED)
    with stopped(tiny_llama, server, "prefill", STOPPED) as child:
        assert go_on(engine, prompt, len(prompt)) == (expected[STOPPED], STOPPED * CHUNK)
        assert cache_of(server).counts.write_leases == 1
        go_on_after(child)
        assert_nothing_is_left_of(child.pid, server)
    assert go_on(engine, prompt, len(prompt)) == (expected[STOPPED], len(prompt) - 1)
    engine.assert_at_rest()
    until(lambda: cache_of(server).handed_over == 0)


@pytest.mark.parametrize("goes_on", [False, True], ids=["killed", "stopped"])
def test_a_decode_engine_that_is_gone_while_it_loads_leaves_all_of_it_to_another(
    tiny_llama: str, server: ServerProcess, engine: Engine, expected: dict[int, Answer], goes_on: bool
) -> None:
    prompt = prompt_of(DECODED)
    engine.ask([prompt], 1, extra_args={"kv_transfer_params": PREFILL})
    with stopped(tiny_llama, server, "decode", DECODED) as child:
        assert cache_of(server).counts.read_leases > 0
        if goes_on:
            assert go_on(engine, prompt, len(prompt)) == (expected[DECODED], len(prompt) - 1)
            go_on_after(child)
        else:
            child.kill()
            child.wait()
        assert_nothing_is_left_of(child.pid, server)
    assert go_on(engine, prompt, len(prompt)) == (expected[DECODED], len(prompt) - 1)
    engine.assert_at_rest()
    until(lambda: cache_of(server).handed_over == 0)


def test_a_server_killed_between_both_costs_the_hit_and_no_token(
    server: ServerProcess, engine: Engine, expected: dict[int, Answer]
) -> None:
    prompt = prompt_of(LOST)
    engine.ask([prompt], 1, extra_args={"kv_transfer_params": PREFILL})
    os.kill(server.pid, signal.SIGKILL)
    assert go_on(engine, prompt, len(prompt)) == (expected[LOST], 0)
    until(lambda: not is_listened_at(server.peers))
    seen = engine.inside("kv_snapshot")
    assert seen["off"] == "" and seen["faults"] == [] and seen["phases"] == {}


def is_listened_at(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0
