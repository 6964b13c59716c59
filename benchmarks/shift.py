"""Prompts that share a prefix and go on alone, on tiny Qwen3-Next: of 64, how many find all that they share.

A state serves hits at one boundary only, and vLLM's issue 45238 counted 52 hits, and none with the shared prefix 100
tokens shorter.

Ours, vLLM's own prefix cache, vLLM's own offloading (with copies by memcpy, as its own refuse a CPU) and LMCache's
connectors: the one in the engine's process, and the one to its server, which is started for it, with each way that it
has of moving bytes on a CPU. With a connector vLLM's own cache is emptied before each request, so that what is found is
found with the connector. Of one that does not start, what it says. LMCache's packages are behind the engine's own on
the path, as installing them beside vLLM 0.32 downgrades some of its own.

    make bench-shift
    python benchmarks/shift.py "kv-vllm" "LMCache's server"     only these rows
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "models")]

import _child
import _engines
from _child import Child, progress
from models import BY_NAME

MODEL: Final = "Qwen3-Next"
REQUESTS, TOKENS, SHARED_TOKENS = 64, 1100, 800
CHUNK_TOKENS: Final = 256
"""Of a hit of ours, and a block of vLLM's for this model."""
SHIFTS: Final = (0, 31, 64, 100, 128, 177, 200, 255)
POOL_BYTES: Final = 512 << 20
OURS: Final = {
    "kv_connector": "KVTiersConnector",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"use": "always", "host": {"capacity_bytes": POOL_BYTES}},
}
SYSTEMS: Final[dict[str, dict[str, Any] | None]] = {
    "kv-vllm": OURS,
    "vLLM's prefix cache": None,
    "vLLM's offloading": {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": _engines.own_offloading(POOL_BYTES),
    },
    "LMCache": {"kv_connector": "LMCacheConnectorV1"},
    "LMCache's server": {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_extra_config": {"lmcache.mp.mq_timeout": 30},
    },
    "LMCache's server, shared memory": {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_extra_config": {"lmcache.mp.mq_timeout": 30, "lmcache.mp.mp_transfer_mode": "lmcache_driven"},
    },
}
"""By name, the connector's configuration; None: no connector."""
PEER: Final = Path(__file__).parents[1] / ".venvs/lmcache"
PEER_ENVIRON: Final = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
"""It reports to its makers otherwise."""
PEER_STARTS_S: Final = 120


def serve(model: str, transfer: dict[str, Any] | None, reason: Path) -> None:
    """A child: one engine. reason: where it says why there is none."""
    from vllm.config import KVTransferConfig

    if transfer is not None and "LMCache" in transfer["kv_connector"]:
        sys.path += map(str, PEER.glob("lib/python*/site-packages"))  # behind the engine's own packages
        _let_vllm_look_at_llvmlite()
    arguments = dict(BY_NAME[MODEL].arguments) | {"max_model_len": 4096}
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(kv_role="kv_both", **transfer)
    try:
        engine = _engines.vllm(model, None, **arguments)
    except BaseException as error:
        lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        reason.write_text(lines[0])
        raise
    _child.serve(lambda asked: _engines.ask_vllm(engine, asked, 1)[0], lambda: engine.reset_prefix_cache() and None)


def _let_vllm_look_at_llvmlite() -> None:
    """LMCache imports numba before vLLM's worker starts. On a CPU without Triton vLLM 0.32 then looks at every object
    of every module (`_rebind_kernels`), and llvmlite's library has an answer to any name, `__dict__` too, which ends in
    an AttributeError of vLLM's."""
    from llvmlite.binding import ffi

    library = type(ffi.lib)
    answer = library.__getattr__

    def look_up(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(self, name)

    library.__getattr__ = look_up


@contextmanager
def peer_server(scratch: Path) -> Iterator[int]:
    """LMCache's server, with room for as much as the others have; its port. It ends with the block.

    Raises:
        SystemExit: it does not start; with what it says.
    """
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        port, http_port = (each.getsockname()[1] for each in (first, second))
    words = [str(PEER / "bin/lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--disable-observability"]
    words += ["--l1-size-gb", str(POOL_BYTES / (1 << 30)), "--eviction-policy", "LRU"]
    words += ["--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "auto"]
    log = scratch / "server.log"
    with log.open("w") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, env=dict(os.environ) | PEER_ENVIRON)
    try:
        end = time.monotonic() + PEER_STARTS_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end:
                lines = log.read_text().splitlines()
                raise SystemExit(f"its server: {lines[-1] if lines else 'says nothing'}")
            time.sleep(0.5)
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def hits(child: Child, shift: int, *, empties: bool) -> int:
    """Of the requests at this shift, how many find every whole chunk that they share. empties: vLLM's own cache is
    emptied before each."""
    shared = [3 + (7919 * i + shift) % 2000 for i in range(SHARED_TOKENS - shift)]
    found = 0
    for number in range(REQUESTS):
        own = [3 + (104729 * i + 31 * number + shift) % 2000 for i in range(TOKENS - len(shared))]
        if empties:
            child.forget()
        found += child.ask(shared + own)[1] >= len(shared) // CHUNK_TOKENS * CHUNK_TOKENS
    return found


def row(name: str, model: str, scratch: Path, say: Callable[[str], None]) -> str:
    transfer, reason = SYSTEMS[name], scratch / "reason"
    reason.unlink(missing_ok=True)
    has_server = transfer is not None and transfer["kv_connector"] == "LMCacheMPConnector"
    try:
        with peer_server(scratch) if has_server else nullcontext() as port:
            if transfer is not None and port is not None:
                at = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
                transfer = transfer | {"kv_connector_extra_config": transfer["kv_connector_extra_config"] | at}
            environ = _engines.ENVIRON | _engines.threads_environ(1) | PEER_ENVIRON
            child = Child(__file__, [model, json.dumps(transfer), str(reason)], environ)
            try:
                found = []
                for shift in SHIFTS:
                    say(f"{name}, shift {shift}")
                    found.append(hits(child, shift, empties=transfer is not None))
            finally:
                child.close()
    except SystemExit as ended:
        why = reason.read_text() if reason.exists() else str(ended)
        return f"| {name} | does not start: {why[:160]} |" + " |" * (len(SHIFTS) - 1)
    return f"| {name} | " + " | ".join(map(str, found)) + " |"


def main() -> int:
    if "--serve" in sys.argv:
        model, transfer, reason = sys.argv[2:]
        serve(model, json.loads(transfer), Path(reason))
        return 0
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as scratch:
        model = str(BY_NAME[MODEL].write(Path(scratch) / "model"))
        print(
            f"| hits of {REQUESTS}, shared tokens | "
            + " | ".join(str(SHARED_TOKENS - shift) for shift in SHIFTS)
            + " |"
        )
        print("|---" * (len(SHIFTS) + 1) + "|")
        for name in sys.argv[1:] or SYSTEMS:
            print(row(name, model, Path(scratch), progress), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
