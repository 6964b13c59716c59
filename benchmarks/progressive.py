"""Time to the first token over slow links, with a trained model on real vLLM: computed, loaded as it is, by `floats`,
by `progressive`, and as an approximation.

    .venvs/vllm/bin/python benchmarks/progressive.py --model "$(scripts/setup.sh smollm2 | tail -n 1)"

An engine stores this repository's documents on a disk, and for every way of reading another one, whose pool is empty,
is asked each of them once, over a link that brings only so many bytes in a second. Ways with `auto` load what is
estimated to pay, as by default; the others load whatever is held, and show what loading costs. The first few prompts
of an engine are for it to learn what computing and loading take, and do not count. Times are medians.

--calibration: a file of `kv judge --calibrate` for this model, in bfloat16; chunks are then read by `kvtc` too.
--way, --bandwidth: of these alone. --prompts: how many count. --tokens: of each prompt. What is computed whatever is
loaded, the prompt's tail and a step's own cost, is the same for all: with short prompts it hides what loading gains.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import json
import statistics
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import _child, _engines
from benchmarks._child import Child, progress
from benchmarks._report import Row, parser, report

ROOT = Path(__file__).parents[1]
BANDWIDTHS = {"1 GB/s": 1e9, "200 MB/s": 2e8, "50 MB/s": 5e7}
SLOWEST = "50 MB/s"
PROMPT_TOKENS = 1600
"""Six chunks and a tail."""
MOST_TOKENS = 8192
LEARNING = 5
"""Prompts that an engine computes, and as many that it loads, before any counts."""
NEVER_SLOWER = 1.05
LEAST_EXACT, LEAST_APPROXIMATE = 1.4, 3.5
"""Times faster than raw, over the slowest link."""


@dataclass(frozen=True)
class Way:
    """codec: of what is read. approximate: read as an approximation. use: as in settings."""

    codec: str
    use: str
    approximate: bool = False


WAYS: dict[str, Way | None] = {
    "computing": None,
    "raw": Way("", "always"),
    "floats": Way("floats", "always"),
    "exact": Way("progressive", "always"),
    "exact, auto": Way("progressive", "auto"),
    "approximate": Way("progressive", "always", approximate=True),
    "approximate, auto": Way("progressive", "auto", approximate=True),
}
CALIBRATED = {"kvtc": Way("kvtc", "always"), "kvtc, auto": Way("kvtc", "auto")}


def cache_over(directory: Path, way: Way, bytes_per_s: float, calibration: Path | None) -> dict[str, Any]:
    """Settings. bytes_per_s: of the link; 0: as quick as the disk is."""
    disk = {"type": "disk", "directory": str(directory / (way.codec or "raw")), "capacity_bytes": "2GiB"}
    tier: dict[str, Any] = {"type": "throttled", "load_bytes_per_s": bytes_per_s, "tier": disk}
    codec = {"type": way.codec, "calibration": str(calibration)} if way.codec == "kvtc" else way.codec
    tier |= {"codec": codec} if codec else {}
    tier |= {"approximate": True, "write": "never"} if way.approximate else {}
    return {"host": {"capacity_bytes": "1GiB"}, "tiers": [tier], "use": way.use, "cold": {"wait_s": 60.0}}


def serve(model: str, cache: dict[str, Any] | None) -> None:
    """A child: one engine, asked by lines of JSON. It ends when everything is stored."""
    engine = _engines.vllm(model, cache, dtype="bfloat16", max_model_len=MOST_TOKENS, max_num_batched_tokens=2048)
    _child.serve(lambda prompt: _engines.ask_vllm(engine, prompt, 1)[0])
    if cache is not None:
        from kv_connect.engine import engines

        for inner in engines().values():
            inner.cache.lower.drain(60.0)


def prompts(model: str, count: int, prompt_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Different text of this repository's documents each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    pages = [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md"))]
    tokens = tokenizer.encode("\n\n".join(page.read_text(encoding="utf-8") for page in pages))
    made = [tokens[at : at + prompt_tokens] for at in range(0, len(tokens) - prompt_tokens, prompt_tokens)]
    if len(made) < count:
        raise SystemExit(f"the documents make {len(made)} prompts, and {count} are needed: fewer --prompts")
    return made[:count]


def started(model: str, cache: dict[str, Any] | None, scratch: Path) -> Child:
    environ = _engines.ENVIRON | {"PYTHONPATH": str(scratch)}
    return Child(__file__, [model, json.dumps(cache)], environ)


def first_token_s(label: str, model: str, cache: dict[str, Any] | None, asked: list[list[int]], scratch: Path) -> float:
    """The median of those prompts that count."""
    child = started(model, cache, scratch)
    try:
        seconds = []
        for number, prompt in enumerate(asked):
            progress(f"{label}: {number + 1} of {len(asked)}")
            took, found = child.ask(prompt)
            seconds.append(took)
            if number >= 2 * LEARNING and cache is not None and cache["use"] == "always" and not found:
                raise SystemExit(f"{label}: prompt {number} was not found, so the figures would mean nothing")
    finally:
        child.close()
    median = statistics.median(seconds[2 * LEARNING :])
    print(f"\r{label}: {median:.3f} s, {max(seconds[2 * LEARNING :]):.3f} at most", file=sys.stderr)
    return median


def main() -> int:
    if "--serve" in sys.argv:
        model, cache = sys.argv[2:]
        serve(model, json.loads(cache))
        return 0
    made = parser(__doc__.split("\n\n")[0])
    made.add_argument("--model", required=True, help="a model's folder, as `scripts/setup.sh smollm2` prints it")
    made.add_argument("--calibration", type=Path, metavar="FILE", help="for kvtc")
    made.add_argument("--way", action="append", choices=[*WAYS, *CALIBRATED], help="of these alone; raw is one of them")
    made.add_argument("--prompts", type=int, default=10, help="how many count (default: 10)")
    made.add_argument("--bandwidth", action="append", choices=BANDWIDTHS, help="of these links alone")
    made.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="of each prompt (default: 1600)")
    options = made.parse_args()
    from kv_codecs.calibration import read_calibration
    from kv_core.errors import ConfigError
    from kv_testing.throttled import offer

    if options.calibration is None and set(options.way or ()) & set(CALIBRATED):
        made.error("kvtc needs --calibration")
    if options.calibration is not None:
        try:
            read_calibration(options.calibration)
        except ConfigError as error:
            made.error(f"--calibration: {error}")
    ways = WAYS | (CALIBRATED if options.calibration else {})
    ways = {name: way for name, way in ways.items() if name in {"raw", *(options.way or ways)}}
    asked = prompts(options.model, 2 * LEARNING + options.prompts, options.tokens)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as folder:
        scratch = Path(folder)
        offer(scratch)
        for codec in dict.fromkeys(way.codec for way in ways.values() if way is not None):
            cache = cache_over(scratch, Way(codec, "never"), 0.0, options.calibration)
            child = started(options.model, cache, scratch)
            for number, prompt in enumerate(asked[LEARNING:]):  # the first are for computing
                progress(f"storing {codec or 'raw'}: {number + 1}")
                child.ask(prompt)
            child.close()
        engines = count()
        for name in options.bandwidth or BANDWIDTHS:
            took = {}
            for which, way in ways.items():
                cache = None if way is None else cache_over(scratch, way, BANDWIDTHS[name], options.calibration)
                # Each engine computes prompts that no engine before it has stored.
                new = [[next(engines), *prompt[1:]] for prompt in asked[:LEARNING]]
                took[which] = first_token_s(
                    f"{name}, {which}", options.model, cache, [*new, *asked[LEARNING:]], scratch
                )
            rows += rows_of(name, took)
    return report(rows, options.json)


def rows_of(link: str, took: dict[str, float]) -> list[Row]:
    """took: seconds by way."""
    better = min(took["raw"], took.get("computing", took["raw"]))
    made = []
    for which, value in took.items():
        judged = which.endswith("auto") and "computing" in took
        made.append(
            Row(
                f"{link}: {which}", value, "s", better, value / better, NEVER_SLOWER if judged else None, at_most=judged
            )
        )
    for which, least in (("exact", LEAST_EXACT), ("approximate", LEAST_APPROXIMATE), ("kvtc", 0)):
        if which not in took:
            continue
        times = took["raw"] / took[which]
        made.append(
            Row(
                f"{link}: {which}, faster than raw",
                times,
                "x",
                1,
                times,
                least if link == SLOWEST else 0,
                at_most=False,
            )
        )
    return made


if __name__ == "__main__":
    raise SystemExit(main())
