"""Real SGLang with tensor parallelism over two nodes, each with a `kv-server`: SGLang's ranks agree by themselves on
what all of them have."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import COLD_HITS, PROMPTS, WARM_HITS, Answer, Engine, started
from kv_server.process import ServerProcess, launch
from kv_testing.servers import free_port
from kv_testing.wait import until

ENVIRON = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo"}


def serve(directory: Path, node: int) -> ServerProcess:
    return launch({"host": {"capacity_bytes": 64 << 20}}, socket=directory / f"node{node}" / "s")


@contextmanager
def two_nodes(model: str, servers: list[ServerProcess]) -> Iterator[Engine]:
    address = f"127.0.0.1:{free_port()}"
    shared: dict[str, Any] = {"tp_size": 2, "nnodes": 2, "dist_init_addr": address, "environ": ENVIRON}
    here, there = ({"server": {"socket": str(server.socket), "answer_s": 20}} for server in servers)
    given = json.dumps({"model": model, "cache": there, **shared})
    script = str(Path(__file__).with_name("second_node.py"))
    node = subprocess.Popen([sys.executable, script, given], start_new_session=True)
    try:
        with started(model, cache=here, node_rank=0, **shared) as engine:
            yield engine
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()


@pytest.mark.long
def test_a_hit_is_what_both_nodes_hold(tiny_llama: str, reference: list[Answer], tmp_path: Path) -> None:
    servers = [serve(tmp_path, node) for node in range(2)]
    try:
        with two_nodes(tiny_llama, servers) as engine:
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == COLD_HITS
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == WARM_HITS
            # The second node's server dies: everything is computed. Its successor is found, and filled again.
            os.kill(servers[1].pid, signal.SIGKILL)
            servers[1].stop()
            assert engine.ask_in_turn(PROMPTS) == reference
            assert engine.hits == [0] * len(PROMPTS)
            servers[1] = serve(tmp_path, 1)
            until(lambda: engine.ask_in_turn(PROMPTS) == reference and engine.hits == WARM_HITS, within_s=120)
    finally:
        for server in servers:
            server.stop()
