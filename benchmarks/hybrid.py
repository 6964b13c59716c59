"""Models that are not full attention alone on real vLLM: what a hit saves, what a store costs, and which prompts hit.

`first token`: 2,048 known tokens and one more, found in the pool, against computing them. `unique`: prompts that never
come again, with us and without, in turn. `hits of 64`: prompts that share a prefix and go on alone, at the shift of the
shared length at which fewest of them find it all; the limit is what vLLM's own prefix cache finds of them, alone.
`refused`: a model that we leave alone, with us and without.

    make bench-hybrid [JSON=1]
    python benchmarks/hybrid.py --only "Qwen3-Next, unique" --starts 6
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "models")]

import _child
import _engines
from _child import Child, progress
from _report import Row, parser, report
from models import BY_NAME
from shift import REQUESTS, hits

CACHE: dict[str, Any] = {"use": "always", "host": {"capacity_bytes": "512MiB"}}
SMALL: dict[str, Any] = {"host": {"capacity_bytes": "2MiB"}}
"""Full after a few prompts, as a pool that has served for a while is."""
KNOWN_TOKENS = 2048
SHIFTS = range(0, 256, 25)


def serve(name: str, model: str, cache: dict[str, Any] | None, arguments: dict[str, Any]) -> None:
    """A child: one engine, asked by lines of JSON."""
    engine = _engines.vllm(model, cache, **(dict(BY_NAME[name].arguments) | {"max_model_len": 4096} | arguments))
    _child.serve(lambda asked: _engines.ask_vllm(engine, asked, 1)[0], lambda: engine.reset_prefix_cache() and None)


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(tokens)]


def started(name: str, model: str, cache: dict[str, Any] | None, **arguments: Any) -> Child:
    environ = _engines.ENVIRON | _engines.threads_environ(1)
    return Child(__file__, [name, model, json.dumps(cache), json.dumps(arguments)], environ)


def first_token(name: str, model: str) -> Row:
    child = started(name, model, CACHE)
    computed, found = [], []
    try:
        child.ask(prompt(999, KNOWN_TOKENS))
        for number in range(5):
            progress(f"{name}: prompt {number + 1} of 5")
            asked = [*prompt(number, KNOWN_TOKENS), 3]
            for seconds in (computed, found):
                child.forget()
                took, hit = child.ask(asked)
                seconds.append(took)
            assert hit == KNOWN_TOKENS, f"{hit} of {KNOWN_TOKENS} tokens found"
    finally:
        child.close()
    value, limit = statistics.median(found), statistics.median(computed)
    return Row(f"{name}, first token of {KNOWN_TOKENS:,}", value, "s", limit, value / limit, 0.5, at_most=True)


def unique(name: str, model: str, label: str, starts: int, **arguments: Any) -> Row:
    """Means over requests to engines that are started in turn."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for start in range(starts):
        for with_us in (start % 2 == 0, start % 2 == 1):
            child = started(name, model, SMALL if with_us else None, **arguments)
            try:
                for warm_up in range(3):
                    child.ask(prompt(9000 + warm_up, 560))
                for number in range(24):
                    progress(f"{label}, start {start + 1}, {'with us' if with_us else 'without'}: {number + 1} of 24")
                    seconds[with_us].append(child.ask(prompt(100 + number, 560))[0])
            finally:
                child.close()
    value, limit = statistics.fmean(seconds[True]), statistics.fmean(seconds[False])
    return Row(f"{label}, mean", value, "s", limit, value / limit, 1.05, at_most=True)


def fewest_hits(name: str, model: str) -> Row:
    """With us, vLLM's own cache is emptied before each request, so that what is found is found with us."""
    fewest = {}
    for with_us in (True, False):
        child, found = started(name, model, CACHE if with_us else None), []
        try:
            for shift in SHIFTS:
                progress(f"hits of {REQUESTS}, {'with us' if with_us else 'without'}, shift {shift}")
                found.append(hits(child, shift, empties=with_us))
        finally:
            child.close()
        fewest[with_us] = min(found)
    value, limit = float(fewest[True]), float(fewest[False])
    return Row(
        f"{name}, hits of {REQUESTS} at the worst shift", value, "", limit, value / REQUESTS, 52 / 64, at_most=False
    )


def main() -> int:
    if "--serve" in sys.argv:
        name, model, cache, arguments = sys.argv[2:]
        serve(name, model, json.loads(cache), json.loads(arguments))
        return 0
    asked = parser(__doc__.split("\n\n")[0])
    asked.add_argument("--starts", type=int, default=2, help="how often each engine is started (default: 2)")
    asked.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="rows whose names begin so (default: all)"
    )
    chosen = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as scratch:
        written = {
            name: str(BY_NAME[name].write(Path(scratch) / name.replace(" ", "-")))
            for name in ("Gemma 3", "Qwen3-Next", "Falcon-H1")
        }
        made: dict[str, Callable[[], Row]] = {}
        for name in ("Gemma 3", "Qwen3-Next"):
            made[f"{name}, first"] = partial(first_token, name, written[name])
            made[f"{name}, unique"] = partial(unique, name, written[name], f"{name}, unique", chosen.starts)
        made["Qwen3-Next, hits"] = partial(fewest_hits, "Qwen3-Next", written["Qwen3-Next"])
        refused = {"enable_prefix_caching": False}
        made["Falcon-H1, refused"] = partial(
            unique, "Falcon-H1", written["Falcon-H1"], "Falcon-H1, refused", chosen.starts, **refused
        )
        rows = [make() for name, make in made.items() if name.startswith(tuple(chosen.only))]
    return report(rows, chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
