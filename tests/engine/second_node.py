"""The second of two nodes: its rank of an engine whose scheduler is on the first, as `vllm serve --headless` has it.

    python second_node.py ARGUMENTS

ARGUMENTS: JSON of what `EngineArgs` takes, with `cache` for the connector's settings, None for an engine without us.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import CHUNK_TOKENS, Engine, started
from kv_connect.engine import engines
from kv_core.keys import ChunkKey
from kv_core.service import Holder, LoadFailed, ReadLease
from kv_server.remote_cache import RemoteCache
from stages import Stages

LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


class OnNode(Stages):
    """For `worker_extension_cls`: what the tests do on either node."""

    kv_leaves_weights_alone = Stages.kv_leaves_weights_alone | {"kv_on_node"}

    def kv_on_node(self, what: str, keys: Sequence[str] = ()) -> list[str]:
        """what: `follow`, which returns the keys that have entered this node's pool since the first such call, or what
        is done on the second node only: `evict` these keys, `corrupt` its pool, or `lose` a chunk of the next load
        between the answer and the load. Keys are in hex: vLLM carries no subclasses of bytes."""
        (engine,) = engines().values()
        cache = engine.cache
        assert isinstance(cache, RemoteCache)
        if what == "follow":
            return [key.hex() for change in cache.changes_since(0).changes if change.entered for key in change.keys]
        if engine.share.node == 1:
            match what:
                case "evict":
                    cache.forget(list(map(ChunkKey.from_hex, keys)))
                case "corrupt":
                    self.kv_corrupt()
                case "lose":
                    _lose_next(cache)
        return []


def _lose_next(cache: RemoteCache) -> None:
    real = cache.load

    def load(keys: Sequence[ChunkKey], holder: Holder, *, lasting: bool = False) -> ReadLease | LoadFailed:
        cache.load = real  # type: ignore[method-assign]
        cache.forget(keys[-1:])
        return real(keys, holder, lasting=lasting)

    cache.load = load  # type: ignore[method-assign]


@contextmanager
def two_nodes(
    model: str,
    port: int,
    caches: tuple[dict[str, Any], dict[str, Any]] | None,
    *,
    chunk_tokens: int | None = CHUNK_TOKENS,
    **more: Any,
) -> Iterator[Engine]:
    """An engine of two ranks, one on each node. caches: the settings on either; None: without us. chunk_tokens: as for
    `started`."""
    parallel = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "nnodes": 2,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "worker_extension_cls": "second_node.OnNode",
    } | more
    here, there = caches or (None, None)
    if there is not None and chunk_tokens is not None:
        there = {"chunk_tokens": chunk_tokens} | there
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        if caches is None:
            del parallel["worker_extension_cls"]
        given = json.dumps({"model": model, "cache": there, **parallel})
        node = subprocess.Popen([sys.executable, str(Path(__file__)), given], start_new_session=True)
        try:
            first: dict[str, Any] = {"chunk_tokens": chunk_tokens, "own_process": True, "node_rank": 0}
            with started(model, cache=here, **first, **parallel) as engine:
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
