"""Time to the first token of a prompt that was asked before, by its length: computed again, or loaded.

    make bench-ttft [ENGINE=sglang] [JSON=1]

A small random model on a real engine in a process of its own. Every prompt is asked once, the engine's own caches are
emptied or crowded out, and it is asked again; one token is generated.

    recompute   the engine with no cache at all: the limit of every row
    own host    the engine's own: vLLM's offloading to the CPU, with copies by memcpy; SGLang's HiCache in host memory
    own file    the engine's own with files below: vLLM's `fs` tier, pushed out of its memory; HiCache's file backend
    pool        ours, found in the host pool
    linker      ours, found in the host pool through SGLang's external linker
    disk        ours, pushed out of the pool and found on disk

Ratios are times with a cache over times without: below 1 loading pays, and ours is asked to from 1,024 tokens on.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path.append(str(Path(__file__).parent))

import _child
import _engines
from _child import Child, progress
from _processes import Meter
from _report import Row, parser, report

LENGTHS = (256, 512, 1024, 2048)
REPEATS = 4
PAYS_FROM = 1024
CHUNK_TOKENS = 64  # SGLang's page; vLLM's block on a CPU is 128, so there a chunk has two
LONGEST = max(LENGTHS)
TOKENS_ON_DEVICE = 2 * LONGEST
WAYS = {
    "vllm": ["recompute", "own host", "own file", "pool", "disk"],
    "sglang": ["recompute", "own host", "own file", "pool", "linker", "disk"],
}


LARGE_BYTES, SMALL_BYTES, FILLERS = 1 << 30, 40 << 20, 3
"""Memory for everything, or what so many of the longest prompts (16 MiB each) fill anew. vLLM's tiers find nothing with
less than twice a prompt."""


def settings(way: str, directory: str, chunk_tokens: int) -> dict[str, Any]:
    """Ours, with a pool for everything, or a small one and a disk."""
    made: dict[str, Any] = {"use": "always", "chunk_tokens": chunk_tokens, "host": {"capacity_bytes": LARGE_BYTES}}
    if way == "disk":
        disk = {"type": "disk", "directory": str(Path(directory) / "disk"), "capacity_bytes": "2GiB"}
        made |= {"host": {"capacity_bytes": SMALL_BYTES}, "tiers": [disk]}
    return made


def serve_vllm(model: str, way: str, directory: str) -> None:
    cache = settings(way, directory, 2 * CHUNK_TOKENS) if way in ("pool", "disk") else None
    own = {
        "own host": _engines.own_offloading(LARGE_BYTES),
        "own file": _engines.own_offloading(SMALL_BYTES, str(Path(directory) / "own")),
    }.get(way)
    longest = LONGEST + 8
    engine = _engines.vllm(model, cache, own=own, max_model_len=longest, max_num_batched_tokens=longest)
    _child.serve(lambda asked: _engines.ask_vllm(engine, asked, 1)[0])


def serve_sglang(model: str, way: str, directory: str) -> None:
    ours = settings(way, directory, CHUNK_TOKENS)
    del ours["chunk_tokens"]
    arguments: dict[str, Any] = {"max_total_tokens": TOKENS_ON_DEVICE}
    if way == "recompute":
        arguments["disable_radix_cache"] = True
    elif way.startswith("own"):
        arguments["enable_hierarchical_cache"] = True
    if way == "own file":
        arguments |= {
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": CHUNK_TOKENS}),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
    cache = ours if way in ("pool", "linker", "disk") else None
    engine = _engines.sglang(model, cache, page_tokens=CHUNK_TOKENS, linker=way == "linker", **arguments)

    def forget() -> None:
        if way == "own host":  # flushing would empty the host's memory too, so the device is crowded out instead
            for number in range(2):
                _engines.ask_sglang(engine, prompt(LONGEST, 10**6 + number), 1)
        else:
            while not engine.flush_cache().success:
                pass

    _child.serve(lambda asked: _engines.ask_sglang(engine, asked, 1), forget)
    engine.shutdown()


def prompt(tokens: int, number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(tokens)]


def measure(engine: str, way: str, model: str, directory: str, threads: int) -> dict[int, float]:
    """Median seconds by length, of one engine that is alive alone."""
    environ = (
        _engines.ENVIRON
        | _engines.threads_environ(threads)
        | {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(Path(directory) / "own")}
    )
    child = Child(__file__, [engine, model, way, directory], environ)
    medians = {}
    try:
        child.ask(prompt(600, 77))
        meter, began = Meter(child.pid), time.perf_counter()
        for tokens in LENGTHS:
            times = []
            for repeat in range(REPEATS + 1):
                progress(f"{engine}, {way}, {tokens} tokens: {repeat + 1} of {REPEATS + 1}        ")
                asked = prompt(tokens, 1000 * tokens + repeat)
                child.ask(asked)
                pushes_out = way == "disk" or (engine, way) == ("vllm", "own file")
                for other in range(FILLERS if pushes_out else 0):  # what comes after pushes it out of the pool
                    child.ask(prompt(LONGEST, 500_000 + 10 * repeat + other + tokens))
                if engine == "sglang" and way != "recompute":
                    child.forget()
                seconds, found = child.ask(asked)
                if repeat:
                    times.append(seconds)
                if way != "recompute" and found < tokens - 2 * CHUNK_TOKENS - 1:
                    print(f"\n{engine}, {way}: {found} of {tokens} tokens were found", file=sys.stderr)
            medians[tokens] = statistics.median(times)
        wall_s = time.perf_counter() - began
        cost = meter.read(wall_s)
        print(
            f"\r{engine}, {way}: {wall_s:.1f} s, CPU {cost.cpu_s:.1f} s, {cost.threads} threads, {cost.busy} busy",
            file=sys.stderr,
        )
    finally:
        child.close()
    return medians


def main() -> int:
    if "--serve" in sys.argv:
        engine, *words = sys.argv[2:]
        {"vllm": serve_vllm, "sglang": serve_sglang}[engine](*words)
        return 0
    made = parser(__doc__.split("\n\n")[0])
    made.add_argument("--engine", choices=sorted(WAYS), default="vllm")
    made.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="threads that each engine computes with (default: the cores of this process)",
    )
    chosen = made.parse_args()
    from kv_testing.tiny import TinyLlama

    rows = []
    with tempfile.TemporaryDirectory(prefix="kv-ttft-") as home:
        model = str(TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536).write(Path(home) / "model"))
        limits: dict[int, float] = {}
        for way in WAYS[chosen.engine]:
            directory = Path(home) / way.replace(" ", "-")
            directory.mkdir()
            times = measure(chosen.engine, way, model, str(directory), chosen.threads)
            limits = limits or times
            pays = [tokens for tokens in LENGTHS if times[tokens] < limits[tokens]]
            if way != "recompute":
                print(f"\r{chosen.engine}, {way}: loading pays from {min(pays, default=0)} tokens on", file=sys.stderr)
            for tokens in LENGTHS:
                if way != "recompute":
                    ratio = times[tokens] / limits[tokens]
                    target = 1.0 if tokens >= PAYS_FROM and not way.startswith("own") else None
                    name = f"{chosen.engine}, {way}, {tokens} tokens"
                    rows.append(Row(name, times[tokens] * 1e3, "ms", limits[tokens] * 1e3, ratio, target, at_most=True))
    return report(rows, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
