"""With the cache on, no workload may be slower than with it off: the ones that a cache can only lose, on real engines.

`unique`: prompts that never come again, so every store is for nothing. `1.8 ×`: prompts in turn whose chunks take 1.8
times the host tier, so that least-recently-used never hits. `1.8 × on disk`: the same with a disk tier below, stored
eagerly. `linker`: SGLang's external linker in place of HiCache's storage. An engine with us and one without answer the
same prompts in turn, each in a process of its own, so that the machine's drift meets both; value and limit are seconds
a request, with us and without.

    make bench-engine [ENGINE=sglang] [JSON=1]
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path.append(str(Path(__file__).parent))

import _child
import _engines
from _child import Child, progress
from _report import Row, parser, report

POOL_TOKENS = 20 * 256
PAGE_TOKENS = 64
PROMPT_TOKENS = 560  # two chunks and a tail, or eight pages and a tail
NEW_TOKENS = 8
ROUNDS = 4
ALLOWED = 1.05


def serve(engine: str, model: str, way: str, cache: dict[str, Any] | None) -> None:
    """A child: one engine, asked by lines of JSON."""
    if engine == "vllm":
        running = _engines.vllm(model, cache)
        _child.serve(lambda asked: _engines.ask_vllm(running, asked, NEW_TOKENS)[0])
        return
    # So little memory of its own that prompts in turn find nothing there; HiCache has twice as much on the host.
    running = _engines.sglang(model, cache, page_tokens=PAGE_TOKENS, linker=way == "linker", max_total_tokens=2048)
    _child.serve(lambda asked: _engines.ask_sglang(running, asked, NEW_TOKENS))
    running.shutdown()


def prompt(number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(PROMPT_TOKENS)]


def rows(name: str, engine: str, way: str, cache: dict[str, Any], numbers: list[int], model: str) -> list[Row]:
    without, ours = (
        Child(__file__, [engine, model, way, json.dumps(each)], _engines.ENVIRON) for each in (None, cache)
    )
    try:
        for warm_up in (9001, 9002, 9003):
            without.ask(prompt(warm_up)), ours.ask(prompt(warm_up))
        pairs = []
        found = 0
        for count, number in enumerate(numbers):
            progress(f"{name}: {count + 1} of {len(numbers)}")
            engines = (without, ours) if count % 2 else (ours, without)
            answers = {engine: engine.ask(prompt(number)) for engine in engines}
            pairs.append((answers[ours][0], answers[without][0]))
            found += answers[ours][1]
        print(f"\r{name}: {len(numbers)} requests, {found} tokens found", file=sys.stderr)
    finally:
        without.close()
        ours.close()
    mine, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    made = []
    for which, of in (("mean", statistics.fmean), ("95 %", lambda values: statistics.quantiles(values, n=20)[-1])):
        value, limit = of(mine), of(theirs)
        made.append(Row(f"{name}, {which}", value, "s", limit, value / limit, ALLOWED, at_most=True))
    return made


def main() -> int:
    if "--serve" in sys.argv:
        engine, model, way, cache = sys.argv[2:]
        serve(engine, model, way, json.loads(cache))
        return 0
    asked = parser(__doc__.split("\n\n")[0])
    asked.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    asked.add_argument("--rounds", type=int, default=ROUNDS, help="how often the working set is asked for (default: 4)")
    chosen = asked.parse_args()
    from kv_cuda.tiny import TinyLlama

    shape = TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536)
    chunk_tokens = 256 if chosen.engine == "vllm" else PAGE_TOKENS
    chunk_nbytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * chunk_tokens * 4
    pool_chunks = POOL_TOKENS // chunk_tokens
    working_set = round(1.8 * pool_chunks / (PROMPT_TOKENS // chunk_tokens))
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as scratch:
        model = str(shape.write(Path(scratch) / "model"))
        host = {"capacity": str(pool_chunks * chunk_nbytes), "policy": "lru"}
        disk = {"type": "disk", "path": f"{scratch}/kv", "capacity_bytes": "512MiB"}
        turns = list(range(working_set)) * chosen.rounds
        unique = list(range(100, 100 + len(turns)))
        runs: list[tuple[str, str, dict[str, Any], list[int]]] = [
            ("unique", "", {"host": host}, unique),
            ("1.8 × the host tier", "", {"host": host}, turns),
            ("1.8 ×, on disk too", "", {"host": host, "tiers": [disk]}, turns),
        ]
        if chosen.engine == "sglang":
            runs.append(("linker, unique", "linker", {"host": host}, unique))
        made = [row for name, *run in runs for row in rows(name, chosen.engine, *run, model)]
    return report(made, chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
