"""Real vLLM over a server whose lower tier is elsewhere: what an earlier server stored there is found by the next.

The servers run in the workspace's environment, which has the clients of all media.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from engines import PROMPTS, WARM_HITS, Answer, Engine, started
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess, launch
from kv_server.report import CacheReport
from kv_testing.servers import ValkeyServer, free_port
from kv_testing.wait import line, until

pytestmark = pytest.mark.slow
WORKSPACE = Path(__file__).parents[2] / ".venv" / "bin"
POOL = {"capacity_bytes": "2MiB"}  # four of the six chunks that the prompts make

S3 = """
import json, sys
from pathlib import Path
from kv_testing.s3_server import s3_server
with s3_server(Path(sys.argv[1])) as options:
    print(json.dumps(options), flush=True)
    sys.stdin.read()
"""
MOONCAKE = """
import json, subprocess, sys
from pathlib import Path
import mooncake.store
from kv_testing.wait import until
port, metrics = sys.argv[1:]
binary = Path(mooncake.store.__file__).parent / "mooncake_master"
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
master = subprocess.Popen([binary, f"--rpc_port={port}", f"--metrics_port={metrics}"], **quiet)
try:
    node, sizes = mooncake.store.MooncakeDistributedStore(), (64 << 20, 16 << 20)
    until(lambda: node.setup("127.0.0.1", "P2PHANDSHAKE", *sizes, "tcp", "", f"127.0.0.1:{port}") == 0)
    print(json.dumps({"master": f"127.0.0.1:{port}"}), flush=True)
    sys.stdin.read()
finally:
    master.kill()
"""


@contextmanager
def running(program: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """A program of the workspace's environment that prints a tier's options when it is ready, until its input ends."""
    command = [str(WORKSPACE / "python"), "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            while not (said := line(process.stdout)).startswith(b"{"):  # its library may have something to say first
                assert said, "it ended"
            yield json.loads(said)
        finally:
            process.kill()


@contextmanager
def s3(home: Path) -> Iterator[dict[str, Any]]:
    with running(S3, str(home)) as options:
        yield {"type": "s3", **options}


@contextmanager
def mooncake(home: Path) -> Iterator[dict[str, Any]]:
    probe = [WORKSPACE / "python", "-c", "import mooncake.store"]
    if subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("Mooncake's client is not installed (scripts/setup.sh mooncake)")
    with running(MOONCAKE, str(free_port()), str(free_port())) as options:
        yield {"type": "mooncake", **options}


@contextmanager
def shared_fs(home: Path) -> Iterator[dict[str, Any]]:
    (shared := home / "shared").mkdir(mode=0o700)  # as a mount, which no server makes
    yield {"type": "shared_fs", "directory": str(shared), "capacity_bytes": "64MiB"}


def serve(socket: Path, config: dict[str, Any]) -> ServerProcess:
    python = socket.with_suffix(".python")
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(str(WORKSPACE / "python"))} "$@"\n')
    python.chmod(0o700)
    with mock.patch.object(sys, "executable", str(python)):
        return launch(config, socket=socket)


def cache_of(server: ServerProcess) -> CacheReport:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    return answer.report.caches[0]


def ask_all(engine: Engine, server: ServerProcess) -> list[Answer]:
    """Each prompt, once what those before it left is in the lower tiers."""
    answers, hits = [], []
    for prompt in PROMPTS:
        answers += engine.ask([prompt])
        hits += engine.hits
        until(lambda: all(tier.spill.waiting == tier.spill.under_way == 0 for tier in cache_of(server).tiers))
    engine.hits = hits
    return answers


def is_joined(server: ServerProcess) -> bool:
    answer = ask_server(server.socket, wire.Status())
    return isinstance(answer, wire.Stated) and bool(answer.report.sessions and answer.report.caches)


@pytest.mark.parametrize("medium", [s3, mooncake, shared_fs], ids=lambda medium: medium.__name__)
def test_the_next_server_finds_what_the_last_one_stored(
    tiny_llama: str,
    reference: list[Answer],
    tmp_path: Path,
    medium: Callable[[Path], AbstractContextManager[dict[str, Any]]],
) -> None:
    (home := tmp_path / "home").mkdir(mode=0o700)
    with ExitStack() as stack:
        tier = stack.enter_context(medium(tmp_path))
        config = {"host": POOL, "tiers": [tier], "cold": {"wait_s": 20.0}}
        first = serve(home / "s", config)
        stack.callback(first.stop)
        engine = stack.enter_context(started(tiny_llama, cache={"server": {"socket": str(first.socket)}}))
        assert ask_all(engine, first) == reference
        assert engine.hits == [0, 512, 512, 768, 0, 0]
        first.stop()
        second = serve(home / "s", config)
        stack.callback(second.stop)
        until(lambda: is_joined(second), 30)
        assert ask_all(engine, second) == reference
        assert engine.hits == WARM_HITS
        assert cache_of(second).tiers[0].lane.loaded > 0
        second.stop()
        assert engine.ask(PROMPTS) == reference


def test_what_a_drained_host_had_is_found_by_another_that_a_directory_lists(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """Two servers with certificates of `kv peers`, who know each other from a directory in Valkey."""
    made = subprocess.run(
        [WORKSPACE / "kv", "peers", "init", tmp_path / "peers", "localhost"], check=True, capture_output=True
    )
    assert b"localhost: copy" in made.stdout
    ours = tmp_path / "peers" / "localhost"
    files = {f"tls_{kind}_file": str(ours / f"{kind}.pem") for kind in ("ca", "cert", "key")}
    valkey = ValkeyServer()
    with ExitStack() as stack:
        stack.callback(valkey.remove)

        def host(name: str) -> ServerProcess:
            (home := tmp_path / name).mkdir(mode=0o700)
            port = free_port()
            directory = {"url": valkey.url, "address": f"localhost:{port}", "interval_s": 0.05, "lease_s": 5.0}
            peers = {"type": "peers", "directory": directory, "answer_timeout_s": 10.0, **files}
            disk = {"type": "disk", "directory": str(home / "kv"), "capacity_bytes": "64MiB"}
            config = {
                "host": {"capacity_bytes": "64MiB"},
                "tiers": [disk, peers],
                "cold": {"wait_s": 20.0},
                "peers": {"listen": f"localhost:{port}", **files},
            }
            server = serve(home / "s", config)
            stack.callback(server.stop)
            return server

        first, second = host("first"), host("second")
        with started(tiny_llama, cache={"server": {"socket": str(first.socket)}}) as engine:
            assert ask_all(engine, first) == reference
        with started(tiny_llama, cache={"server": {"socket": str(second.socket)}}) as engine:
            until(lambda: cache_of(first).directories["peers"].hosts == 1, 30)
            done = subprocess.run(
                [WORKSPACE / "kv", "drain", "--socket", first.socket, "--json"], check=False, capture_output=True
            )
            assert done.returncode == 0, done
            first.stop()
            assert ask_all(engine, second) == reference
            assert engine.hits == WARM_HITS
