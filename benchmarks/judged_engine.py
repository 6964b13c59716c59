"""The judge's order of formats, checked on real vLLM by the log-probabilities behind contexts whose KV was loaded.

    .venvs/vllm/bin/python benchmarks/judged_engine.py --model "$(scripts/setup.sh smollm2 | tail -n 1)"

`kv judge` predicts in transformers, with every number restored by the formats' own code. Here a real engine stores the
context of each window and then loads it again for every token of the text behind it, through connector, pool and tier.
Exact KV that was loaded is the reference. The first rows are what an engine's own rounding makes of a context that was
computed in other steps: hardly anything in float32, in which the judge computes and `int8` and `fp8` are measured here,
and more in bfloat16, of which chunks of `progressive` have to be. `kvtc` is calibrated on other text, for each step.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _engines
from benchmarks._child import progress
from benchmarks._report import Row, parser, report

ROOT = Path(__file__).parents[1]
CHUNK_TOKENS = 256
CONTEXT_TOKENS = 1024
STEPS = (0.25, 0.4, 0.8)
"""Of `kvtc`."""
SLOW_BYTES_PER_S = 5e7
"""Of the disk that approximations are read from: slow enough for the least of each chunk to be read."""


@dataclass(frozen=True)
class Way:
    """dtype: of the engine and its KV. cache: settings; None: without us. stored_by: those of an engine that stores the
    contexts before, if not this one.
    """

    dtype: str
    cache: dict[str, Any] | None
    stored_by: dict[str, Any] | None = None


def ways(scratch: Path) -> dict[str, Way]:
    host = {"capacity_bytes": "1GiB"}

    def below(tier: dict[str, Any]) -> dict[str, Any]:
        return {**exact, "tiers": [tier], "cold": {"wait_s": 60.0}}

    def disk(name: str) -> dict[str, Any]:
        return {"type": "disk", "directory": str(scratch / name), "capacity_bytes": "2GiB"}

    def over_slow_disk(bytes_per_s: float, **options: Any) -> dict[str, Any]:
        throttled = {"type": "throttled", "load_bytes_per_s": bytes_per_s, "tier": disk("progressive"), **options}
        return below(throttled)

    def transformed(step: float) -> Way:
        codec = {"type": "kvtc", "calibration": str(calibration(scratch, step))}
        cache = below({**disk(f"kvtc {step}"), "codec": codec})
        return Way("bfloat16", cache, stored_by=cache)

    exact = {"chunk_tokens": CHUNK_TOKENS, "host": host, "use": "always"}
    return {
        "exact float32": Way("float32", exact),
        "exact bfloat16": Way("bfloat16", exact),
        "computed float32": Way("float32", None),
        "computed bfloat16": Way("bfloat16", None),
        "int8": Way("float32", exact | {"format": "int8"}),
        "fp8": Way("float32", exact | {"format": "fp8"}),
        "progressive": Way(
            "bfloat16",
            over_slow_disk(SLOW_BYTES_PER_S, approximate=True, write="never"),
            stored_by=over_slow_disk(0.0, codec="progressive"),
        ),
        **{f"kvtc {step}": transformed(step) for step in STEPS},
    }


def calibration(scratch: Path, step: float) -> Path:
    return scratch / f"{step}.kvtc"


def serve(model: str, dtype: str, cache: dict[str, Any] | None, windows: list[list[list[int]]], out: str) -> None:
    """A child: save the log-probabilities [windows × tokens, vocabulary] of what follows each token behind a context.

    out: a file; "": only store the contexts.
    """
    from vllm import SamplingParams, TokensPrompt

    engine = _engines.vllm(model, cache, dtype=dtype, max_num_batched_tokens=2048, max_logprobs=-1)
    sampling = SamplingParams(
        temperature=0, max_tokens=1, logprobs=-1, flat_logprobs=True, detokenize=False, ignore_eos=True
    )
    caches = []
    if cache is not None:
        from kv_connect.engine import engines

        caches = [inner.cache for inner in engines().values()]
    for kept in caches:
        kept.lower.upgrades.stop()  # what is measured is what was read, not what it is made into later
    rows = []
    for context, continuation in windows:
        _engines.ask_vllm(engine, [*context, continuation[0]], 1)  # it is stored, or brought from the tier
        for known in range(len(continuation) if out else 0):
            prompt = TokensPrompt(prompt_token_ids=context + continuation[:known])
            (output,) = engine.generate([prompt], sampling, use_tqdm=False)
            whole = (len(prompt["prompt_token_ids"]) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
            if cache is not None and output.num_cached_tokens != whole:
                raise SystemExit(f"{output.num_cached_tokens} tokens were loaded instead of {whole}")
            given = output.outputs[0].logprobs
            row = np.empty(max(given.token_ids) + 1, np.float32)
            row[given.token_ids] = given.logprobs
            rows.append(row)
    if out:
        np.save(out, np.stack(rows))
    for kept in caches:
        kept.lower.drain(60.0)
        lanes = [tier.lane for tier in kept.lower.states()]
        if out and lanes and sum(lane.loaded for lane in lanes) < sum(len(c) // CHUNK_TOKENS for c, _ in windows):
            raise SystemExit("chunks were computed that should have been read, so the figures would mean nothing")
        if any(lane.approximate < lane.loaded for lane in lanes if "approximate" in json.dumps(cache)):
            raise SystemExit("whole chunks were read, so the figures would mean nothing")


def run(model: str, dtype: str, cache: dict[str, Any] | None, windows: Path, out: str, scratch: Path) -> None:
    command = [sys.executable, __file__, "--serve", model, dtype, json.dumps(cache), str(windows), out]
    environ = os.environ | _engines.ENVIRON | {"PYTHONPATH": str(scratch)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"an engine failed:\n{done.stderr[-4000:]}")


def main() -> int:
    if "--serve" in sys.argv:
        model, dtype, cache, windows, out = sys.argv[2:]
        serve(model, dtype, json.loads(cache), json.loads(Path(windows).read_text()), out)
        return 0
    made = parser(__doc__.split("\n\n")[0])
    made.add_argument("--model", required=True, help="a model's folder, as `scripts/setup.sh smollm2` prints it")
    made.add_argument("--windows", type=int, default=4, help="contexts (default: 4)")
    made.add_argument("--tokens", type=int, default=32, help="predicted behind each context (default: 32)")
    options = made.parse_args()
    return report(rows_of(options.model, options.windows, options.tokens), options.json)


def rows_of(model: str, most: int, tokens: int) -> list[Row]:
    from kv_codecs.judge.calibrate import calibrate, through_calibrated
    from kv_codecs.judge.measure import FirstParts, Model, RoundTrip, Trip, Windows, cut_windows, judge
    from kv_testing.throttled import offer

    pages = (ROOT / "docs" / "settings.md", ROOT / "docs" / "observability.md")
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in pages)
    other_text = (ROOT / "docs" / "contracts" / "vllm.md").read_text(encoding="utf-8")
    # The judge stores all of a context but its last token.
    windows = Windows(CONTEXT_TOKENS + 1, tokens, greedy_tokens=1, most=most)
    judged = Model(model)
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as folder:
        scratch = Path(folder)
        offer(scratch)
        progress("the judge")
        trips: list[Trip] = [RoundTrip("int8"), RoundTrip("fp8"), FirstParts()]
        learnt = calibrate(judged, judged.tokens(other_text))
        for step in STEPS:
            learnt.learnt(step).write(calibration(scratch, step))
            trip = through_calibrated(str(calibration(scratch, step)))
            trip.name = f"kvtc {step}"
            trips.append(trip)
        by_judge = {finding.format: finding.kl for finding in judge(judged, text, trips, windows).findings}
        cut = scratch / "windows.json"
        cut.write_text(json.dumps(list(cut_windows(judged, text, windows))))
        exact: dict[str, Any] = {}
        by_engine: dict[str, float] = {}
        for name, way in ways(scratch).items():
            progress(f"{name}: {most} contexts")
            if way.stored_by is not None:
                run(model, way.dtype, way.stored_by, cut, "", scratch)
            run(model, way.dtype, way.cache, cut, str(scratch / "said.npy"), scratch)
            said = np.load(scratch / "said.npy").astype(np.float64)
            reference = exact.setdefault(way.dtype, said)
            by_engine[name] = float((np.exp(reference) * (reference - said)).sum(-1).mean())
    rows = []
    for dtype in exact:
        del by_engine[f"exact {dtype}"]
        kl = by_engine.pop(f"computed {dtype}")
        rows.append(Row(f"computed instead of loaded, {dtype}: KL", kl, "nats", 0, 0, None, at_most=False))
    for name, kl in by_engine.items():
        rows.append(
            Row(
                f"{name}: KL, against the judge's", kl, "nats", by_judge[name], kl / by_judge[name], None, at_most=False
            )
        )
    same = sorted(by_engine, key=by_engine.__getitem__) == sorted(by_judge, key=by_judge.__getitem__)
    rows.append(Row("the judge's order of formats", float(same), "", 1, float(same), 1, at_most=False))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
