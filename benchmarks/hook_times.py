"""What each of our hooks costs a request on real vLLM whose prompt never returns, by the name that vLLM calls it by.

The first rows need no engine: what the host does for a GPU (`_hooks_on_gpu`). Then there is one engine in one process.
Every other request runs without us: the connector is taken out before it and put back after, so that both sides meet
the same drift of the machine's speed. The limit is what a request takes without us; all hooks together may take 2 % of
that. `--functions` lists what takes longest inside them, by Python's profiler, which makes all of it slower.

    make bench-hook-times [FUNCTIONS=1] [JSON=1]
"""

import os
import sys
from pathlib import Path

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = str(Path(__file__).parents[1])
sys.path.append(str(Path(__file__).parents[1] / "tests" / "models"))

import cProfile
import json
import pstats
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from typing import Any

from benchmarks._engines import ENVIRON, ask_vllm, threads_environ, vllm
from benchmarks._hooks_on_gpu import host_rows
from benchmarks._report import Row, parser, report

MODELS = ("Llama", "Gemma 3", "Qwen3-Next")
TOKENS = 560
REQUESTS = 250
WARM_UP = 40
HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
    "get_kv_connector_stats",
    "update_connector_output",
    "take_events",
    "has_pending_push_work",
    "has_pending_block_frees",
    "request_finished",
    "request_finished_all_groups",
)


class Timed:
    """The hooks of connectors, each under a clock. A hook that calls another counts once."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._is_inside = False
        self._profile = profile

    def watch(self, connector: Any) -> None:
        for name in HOOKS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, hook: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return hook(*arguments, **named)
            self._is_inside = True
            if self._profile is not None:
                self._profile.enable()
            start = time.perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                self.seconds[name] += time.perf_counter() - start
                if self._profile is not None:
                    self._profile.disable()
                self._is_inside = False

        return call


def prompt(number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(TOKENS)]


def measured(name: str, profile: cProfile.Profile | None) -> dict[str, Any]:
    """Medians in seconds: of a request with us and without, and of each hook's sum over a request."""
    import vllm.distributed.kv_transfer.kv_transfer_state as workers
    from models import BY_NAME

    with tempfile.TemporaryDirectory(prefix="kv-bench-") as directory:
        model = str(BY_NAME[name].write(Path(directory) / "model"))
        engine = vllm(model, {"host": {"capacity_bytes": "24MiB"}}, **BY_NAME[name].arguments)
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        connectors = scheduler.connector, workers._KV_CONNECTOR_AGENT

        def asked(number: int, *, with_us: bool) -> float:
            scheduler.connector, workers._KV_CONNECTOR_AGENT = connectors if with_us else (None, None)
            start = time.perf_counter()
            ask_vllm(engine, prompt(number), 1)
            return time.perf_counter() - start

        for number in range(WARM_UP):
            asked(number, with_us=True)
        samples: dict[bool, list[float]] = {True: [], False: []}
        for number in range(WARM_UP, WARM_UP + 2 * REQUESTS, 2):
            for with_us in (number % 4 == 0, number % 4 != 0):
                samples[with_us].append(asked(number + with_us, with_us=with_us))
        timed, hooks = Timed(profile), []
        for connector in connectors:
            timed.watch(connector)
        for number in range(WARM_UP + 2 * REQUESTS, WARM_UP + 3 * REQUESTS):
            timed.seconds.clear()
            asked(number, with_us=True)
            hooks.append(dict(timed.seconds))
        of_hook = {hook: statistics.median(each.get(hook, 0.0) for each in hooks) for hook in HOOKS}
        of_hook["all hooks"] = statistics.median(sum(each.values()) for each in hooks)
        return {"with us": statistics.median(samples[True]), "without": statistics.median(samples[False])} | of_hook


def rows(name: str, seconds: dict[str, float]) -> list[Row]:
    without = seconds.pop("without")
    request = seconds.pop("with us")
    return [
        Row(f"{name}: a request", request * 1e6, "us", without * 1e6, request / without, 1.02, at_most=True),
        *(
            Row(f"{name}: {hook}", each * 1e6, "us", without * 1e6, each / without, 0.02, at_most=True)
            for hook, each in seconds.items()
            if each > 0
        ),
    ]


def main() -> int:
    asked = parser((__doc__ or "").split("\n\n")[0])
    asked.add_argument("--functions", action="store_true", help="also list the functions that take longest")
    asked.add_argument("--model", action="append", choices=MODELS, help="only this model; may be given again")
    asked.add_argument("--serve", metavar="MODEL", help="used by the benchmark itself: measure here, print JSON")
    chosen = asked.parse_args()
    if chosen.serve:
        profile = cProfile.Profile() if chosen.functions else None
        print("MEASURED " + json.dumps(measured(chosen.serve, profile)), flush=True)
        if profile is not None:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(60)
        return 0
    found = list(host_rows())
    for name in chosen.model or MODELS:
        words = [sys.executable, __file__, "--serve", name, *(["--functions"] if chosen.functions else [])]
        environ = dict(os.environ) | ENVIRON | threads_environ(1)
        log = None if chosen.functions else subprocess.DEVNULL
        ran = subprocess.run(words, stdout=subprocess.PIPE, stderr=log, text=True, check=True, env=environ)
        (line,) = (line for line in ran.stdout.splitlines() if line.startswith("MEASURED "))
        found += rows(name, json.loads(line.removeprefix("MEASURED ")))
    return report(found, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
