"""With the cache on, no workload may be slower than with it off: the ones that a cache can only lose, on real engines.

`unique`: prompts that never come again, so every store is for nothing. `1.8 ×`: prompts in turn whose chunks take 1.8
times the host tier, so that least-recently-used never hits. `1.8 × on disk`: the same with a disk tier below, stored
eagerly. `linker`: SGLang's external linker in place of HiCache's storage; a second pair of rows compares it with a
linker that stores nothing, as any linker costs SGLang time of its own. Value and limit are seconds a request, with us
and without.

`--throttled [BANDWIDTH …]`: the same prompts over a disk that brings only so many bytes in a second, with `use: auto`.
The limit is the better of the engine without us and of `use: always`, which loads and waits for whatever is held. For
SGLang a second pair of rows compares it with HiCache without storage, as HiCache costs SGLang time of its own.

`--elsewhere [LINK …]`: the same prompts where only another host has a server (`type: peers` with `stores`), over links
of these bandwidths: once with nothing there, and once by a second engine, as after a restart. The limit is the engine
without us. Server and link are on this machine too, so engines compute with one core less than there are.

One engine is alive at a time, as an idle one may keep a core busy: without us, with us, with us, without us, … so that
the machine's drift meets both. Both have the same number of threads to compute with. What each start took of the CPU,
and how many threads it had and used, is printed on standard error: where the two differ, the times compare something
else than a cache.

    make bench-engine [ENGINE=sglang] [JSON=1]
    python benchmarks/never_slower.py --engine sglang --threads 1 --starts 4
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path.append(str(Path(__file__).parent))

import _child
import _engines
from _child import Child, progress
from _processes import Meter
from _report import Row, parser, report

POOL_TOKENS = 20 * 256
BLOCK_TOKENS, PAGE_TOKENS = 128, 64  # vLLM's block on a CPU, of which a chunk is one, and SGLang's page
PROMPT_TOKENS = 560  # four chunks and a tail, or eight pages and a tail
NEW_TOKENS = 8
ROUNDS = 4
ALLOWED = 1.05
THROTTLES = {"unthrottled": 0.0, "1 GB/s": 1e9, "100 MB/s": 1e8, "10 MB/s": 1e7}
"""Bytes a second that the tier brings; 0: as many as it can."""
LINKS = {"10 Gb/s": 1.25e9, "1 Gb/s": 1.25e8, "100 Mb/s": 1.25e7}
"""Bytes a second, in each direction."""
ALLOWED_ELSEWHERE = 1.02


def serve(engine: str, model: str, way: str, cache: dict[str, Any] | None) -> None:
    """A child: one engine, asked by lines of JSON."""
    if engine == "vllm":
        running = _engines.vllm(model, cache)
        _child.serve(lambda asked: _engines.ask_vllm(running, asked, NEW_TOKENS)[0])
        return
    arguments: dict[str, Any] = {}
    if way == "null linker":
        arguments["enable_unified_cache_external_linker"] = True
        arguments["unified_cache_external_linker_backend"] = "dynamic"
        arguments["unified_cache_external_linker_config"] = {
            "linker": "NullLinker",
            "linker_module_path": "_null_linker",
            "linker_extra_config": {},
        }
    if way == "hicache":
        arguments["enable_hierarchical_cache"] = True
    # So little memory of its own that prompts in turn find nothing there; HiCache has twice as much on the host.
    running = _engines.sglang(
        model, cache, page_tokens=PAGE_TOKENS, linker=way == "linker", max_total_tokens=2048, **arguments
    )
    _child.serve(lambda asked: _engines.ask_sglang(running, asked, NEW_TOKENS))
    running.shutdown()


def prompt(number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(PROMPT_TOKENS)]


def one_start(
    label: str, engine: str, way: str, cache: dict[str, Any] | None, numbers: list[int], model: str, threads: int
) -> tuple[list[float], int]:
    """Seconds of each request to an engine that is started for them, and tokens that were found."""
    environ = _engines.ENVIRON | _engines.threads_environ(threads)
    folders = (str(Path(model).parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    child = Child(__file__, [engine, model, way, json.dumps(cache)], environ)
    try:
        for warm_up in (9001, 9002, 9003):
            child.ask(prompt(warm_up))
        meter, began = Meter(child.pid), time.perf_counter()
        seconds, found = [], 0
        for count, number in enumerate(numbers):
            progress(f"{label}: {count + 1} of {len(numbers)}")
            took, hit = child.ask(prompt(number))
            seconds.append(took)
            found += hit
        wall_s = time.perf_counter() - began
        cost = meter.read(wall_s)
    finally:
        child.close()
    print(
        f"\r{label}: {wall_s:.1f} s, CPU {cost.cpu_s:.1f} s ({cost.cpu_s / wall_s:.2f} cores), {cost.threads} threads, "
        f"{cost.busy} of them busy, {len(numbers)} requests, {found} tokens found",
        file=sys.stderr,
    )
    return seconds, found


def rows(
    name: str,
    engine: str,
    way: str,
    cache: dict[str, Any],
    numbers: list[int],
    model: str,
    disk: Path,
    chosen: argparse.Namespace,
) -> list[Row]:
    """disk: what a start with us leaves there is removed, so that the next begins with nothing."""
    ways = {"without": ("", None), "with us": (way, cache)}
    if way == "linker":
        ways["null linker"] = ("null linker", None)
    seconds: dict[str, list[float]] = {label: [] for label in ways}
    for start in range(chosen.starts):
        for label in list(ways)[:: 1 if start % 2 == 0 else -1]:
            label_of_start = f"{name}, start {start + 1}, {label}"
            seconds[label] += one_start(label_of_start, engine, *ways[label], numbers, model, chosen.threads)[0]
            shutil.rmtree(disk, ignore_errors=True)
    made = compared(name, seconds["with us"], [seconds["without"]])
    if way == "linker":
        made += compared(f"{name}, beside one that stores nothing", seconds["with us"], [seconds["null linker"]])
    return made


def compared(name: str, mine: list[float], others: list[list[float]]) -> list[Row]:
    """Seconds a request with us, and the best of what else there is."""
    made = []
    for which, of in (("mean", statistics.fmean), ("95 %", lambda values: statistics.quantiles(values, n=20)[-1])):
        value, limit = of(mine), min(map(of, others))
        made.append(Row(f"{name}, {which}", value, "s", limit, value / limit, ALLOWED, at_most=True))
    return made


def throttled_rows(
    engine: str, host: dict[str, str], numbers: list[int], model: str, disk: Path, chosen: argparse.Namespace
) -> list[Row]:
    """Every way in turn, in this order and back."""
    made = []
    for name in chosen.throttled or THROTTLES:
        bytes_per_s = THROTTLES[name]
        below = {"type": "disk", "directory": str(disk), "capacity_bytes": "512MiB"}
        cache = {"host": host, "tiers": [{"type": "throttled", "load_bytes_per_s": bytes_per_s, "tier": below}]}
        ways: dict[str, dict[str, Any] | None] = {
            "without": None,
            **({"hicache": None} if engine == "sglang" else {}),
            "auto": cache | {"use": "auto"},
            "always": cache | {"use": "always"},
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for start in range(chosen.starts):
            for way in list(ways)[:: 1 if start % 2 == 0 else -1]:
                label = f"a tier of {name}, start {start + 1}, {way}"
                seconds[way] += one_start(label, engine, way, ways[way], numbers, model, chosen.threads)[0]
                shutil.rmtree(disk, ignore_errors=True)
        made += compared(f"a tier of {name}", seconds["auto"], [seconds["without"], seconds["always"]])
        if "hicache" in ways:
            others = [seconds["hicache"], seconds["always"]]
            made += compared(f"a tier of {name}, beside HiCache without storage", seconds["auto"], others)
    return made


def throttle(bytes_per_s: float) -> Callable[[bytes], bytes]:
    """One direction of a link, for all connections through a `Proxy` together."""
    lock, free_s = threading.Lock(), [time.monotonic()]

    def carry(data: bytes) -> bytes:
        with lock:
            free_s[0] = until_s = max(free_s[0], time.monotonic()) + len(data) / bytes_per_s
        if (wait_s := until_s - time.monotonic()) > 1e-3:  # shorter ones would take longer
            time.sleep(wait_s)
        return data

    return carry


def elsewhere_rows(
    engine: str, host: dict[str, str], numbers: list[int], model: str, disk: Path, chosen: argparse.Namespace
) -> list[Row]:
    from kv_server import launch
    from kv_testing.servers import Proxy

    made = []
    for link in chosen.elsewhere or LINKS:
        seconds: dict[str, list[float]] = {"without": [], "cold": [], "restarted": []}
        for start in range(chosen.starts):
            label = f"a server behind {link}, start {start + 1}"
            peers = {"listen": "127.0.0.1:0", "unprotected": True, "take_stores": True}
            server = launch({"host": {"capacity_bytes": "512MiB"}, "peers": peers}, socket=disk.parent / "s")
            proxy = Proxy(int(server.peers.rpartition(":")[2]))
            proxy.spoil, proxy.spoil_questions = throttle(LINKS[link]), throttle(LINKS[link])
            tier = {"type": "peers", "hosts": [f"127.0.0.1:{proxy.port}"], "stores": True, "unprotected": True}
            cache = {"host": host, "tiers": [tier], "use": "auto"}
            try:
                for way in ("cold", "restarted", "without"):
                    settings = None if way == "without" else cache
                    seconds[way] += one_start(f"{label}, {way}", engine, "", settings, numbers, model, chosen.threads)[
                        0
                    ]
            finally:
                proxy.close()
                server.stop()
        for way in ("cold", "restarted"):
            mean, without = statistics.fmean(seconds[way]), statistics.fmean(seconds["without"])
            name = f"a server behind {link}, {way}, mean"
            made.append(Row(name, mean, "s", without, mean / without, ALLOWED_ELSEWHERE, at_most=True))
    return made


def main() -> int:
    if "--serve" in sys.argv:
        engine, model, way, cache = sys.argv[2:]
        serve(engine, model, way, json.loads(cache))
        return 0
    asked = parser(__doc__.split("\n\n")[0])
    asked.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    asked.add_argument("--rounds", type=int, default=ROUNDS, help="how often the working set is asked for (default: 4)")
    asked.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names begin so (default: all)")
    asked.add_argument("--starts", type=int, default=2, help="how often each engine is started (default: 2)")
    asked.add_argument(
        "--throttled",
        nargs="*",
        choices=THROTTLES,
        metavar="BANDWIDTH",
        help=f"over tiers of these bandwidths instead, of all where none is named: {', '.join(THROTTLES)}",
    )
    asked.add_argument(
        "--elsewhere",
        nargs="*",
        choices=LINKS,
        metavar="LINK",
        help=f"with a server of another host instead, over links of these bandwidths, or all: {', '.join(LINKS)}",
    )
    asked.add_argument(
        "--threads",
        type=int,
        help="threads that each engine computes with (default: the cores of this process; one less with --elsewhere)",
    )
    chosen = asked.parse_args()
    if chosen.threads is None:
        chosen.threads = max(1, len(os.sched_getaffinity(0)) - (chosen.elsewhere is not None))
    from kv_testing.throttled import offer
    from kv_testing.tiny import TinyLlama

    shape = TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536)
    chunk_tokens = BLOCK_TOKENS if chosen.engine == "vllm" else PAGE_TOKENS
    chunk_bytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * chunk_tokens * 4
    pool_chunks = POOL_TOKENS // chunk_tokens
    working_set = round(1.8 * pool_chunks / (PROMPT_TOKENS // chunk_tokens))
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as scratch:
        model = str(shape.write(Path(scratch) / "model"))
        host = {"capacity_bytes": str(pool_chunks * chunk_bytes), "policy": "lru"}
        directory = Path(scratch) / "kv"
        disk = {"type": "disk", "directory": str(directory), "capacity_bytes": "512MiB"}
        turns = list(range(working_set)) * chosen.rounds
        unique = list(range(100, 100 + len(turns)))
        runs: list[tuple[str, str, dict[str, Any], list[int]]] = [
            ("unique", "", {"host": host}, unique),
            ("1.8 × the host tier", "", {"host": host}, turns),
            ("1.8 ×, on disk too", "", {"host": host, "tiers": [disk]}, turns),
        ]
        if chosen.engine == "sglang":
            runs.append(("linker, unique", "linker", {"host": host}, unique))
        if chosen.only:
            runs = [run for run in runs if run[0].startswith(tuple(chosen.only))]
            if not runs:
                asked.error(f"no row begins with {' or '.join(chosen.only)}")
        if chosen.throttled is not None:
            offer(Path(scratch))
            return report(throttled_rows(chosen.engine, host, turns, model, directory, chosen), chosen.json)
        if chosen.elsewhere is not None:
            return report(elsewhere_rows(chosen.engine, host, turns, model, directory, chosen), chosen.json)
        made = [row for name, *run in runs for row in rows(name, chosen.engine, *run, model, directory, chosen)]
    return report(made, chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
