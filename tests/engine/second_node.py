"""The second of two nodes: its rank of an engine whose scheduler is on the first, as `vllm serve --headless` has it.

    python second_node.py ARGUMENTS

ARGUMENTS: JSON of what `EngineArgs` takes, with `cache` for the connector's settings, None for an engine without us.
"""

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
from engines import Engine, started

LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@contextmanager
def two_nodes(model: str, port: int, caches: tuple[dict[str, Any], dict[str, Any]] | None, **more: Any) -> Iterator[Engine]:
    """An engine of two ranks, one on each node. caches: the settings on either; None: without us."""
    parallel = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "nnodes": 2,
        "master_addr": "127.0.0.1",
        "master_port": port,
    } | more
    here, there = caches or (None, None)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        given = json.dumps({"model": model, "cache": there, **parallel})
        node = subprocess.Popen([sys.executable, str(Path(__file__)), given], start_new_session=True)
        try:
            with started(model, cache=here, own_process=True, node_rank=0, **parallel) as engine:
                yield engine
        finally:
            os.killpg(node.pid, signal.SIGKILL)  # its worker waits for ever for the first node
            node.wait()


def main() -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    given = json.loads(sys.argv[1])
    cache = given.pop("cache")
    if cache is not None:
        given["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVTiersConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=cache,
        )
        given.setdefault("worker_extension_cls", "kv_vllm.testing.inspect.Inspect")
    plain = {
        "dtype": "float32",
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    }
    load_general_plugins()
    config = EngineArgs(**(plain | given), node_rank=1).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


if __name__ == "__main__":
    main()
