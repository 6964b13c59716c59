"""What of a load is hidden behind the computation, layer by layer, on real vLLM.

A prompt of which the first half is in the pool, one token generated. The device is a queue on a thread of the CPU
(`tests/engine/slow_device.py`), which takes so long for each layer: a factor of what computing a layer of the other
half takes. With n layers, copies of x seconds and layers of c seconds, a copy and a computation at once, nothing is
quicker than n·c + x, or n·x + c where copies are slower: the limit.

    layerwise   first token against that limit, and what part of the copy that can be hidden is
    auto        first token against the quickest of layerwise, between steps and computing all

    make bench-layerwise [JSON=1]
"""

import os
import sys
from pathlib import Path

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "engine")]

import _engines

os.environ |= (
    {"VLLM_LOGGING_LEVEL": "ERROR"} | _engines.ENVIRON | _engines.threads_environ(1)
)  # the device's thread has another core

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from _child import progress
from _report import Row, parser, report
from kv_testing.tiny import TinyLlama
from slow_device import SlowDevice, slow_device

FACTORS = (0.1, 0.5, 1.0, 2.0)
LAYERS = 8
HALF_TOKENS = 1024
PROMPT_TOKENS = 2 * HALF_TOKENS
LEARN = 6
"""Loads between steps, and computed prompts, after which the engine's estimates stand."""


def prompt(known: int, own: int) -> list[int]:
    """One whose first half is `known`'s and whose second half is its own."""
    return [3 + (7919 * (known + 1) + 104729 * i) % 2000 for i in range(HALF_TOKENS)] + [
        3 + (7907 * (own + 1) + 104723 * i) % 2000 for i in range(HALF_TOKENS)
    ]


class Engine:
    """One that loads in one of the three ways."""

    def __init__(self, model: str, load: str, device: SlowDevice) -> None:
        self._queue, self._number = device.queue, 1000
        cache = {
            "load": load,
            "use": "auto" if load == "auto" else "always",
            "chunk_tokens": 256,
            "host": {"capacity_bytes": "256MiB"},
            "max_store_tokens": HALF_TOKENS,  # else stores would be in the way of loads, which a GPU has apart
        }
        arguments = {"max_model_len": PROMPT_TOKENS + 8, "max_num_batched_tokens": PROMPT_TOKENS + 8}
        self._engine = _engines.vllm(model, cache, **arguments)
        device.go_on(copy_s=0.0)
        self.seconds()

    def seconds(self, copy_s: float = 0.0, known: int = 0) -> float:
        """To the first token. copy_s: of a layer."""
        self._queue.copy_s = 0.0
        while self._queue.pending:
            time.sleep(0.001)
        self._queue.copy_s = copy_s
        self._number += 1
        began = time.perf_counter()
        _engines.ask_vllm(self._engine, prompt(known, self._number), 1)
        return time.perf_counter() - began

    def close(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()


@contextmanager
def started(model: str, load: str) -> Iterator[Engine]:
    with slow_device(layerwise=True) as device:
        engine = Engine(model, load, device)
        yield engine
        engine.close()


def medians(engine: Engine, layer_s: float, repeats: int, name: str) -> dict[float, float]:
    """Seconds to the first token by factor, in turn, so that a drift of the machine's speed meets all."""
    seconds: dict[float, list[float]] = {factor: [] for factor in (0.0, *FACTORS)}
    for repeat in range(repeats):
        for factor, taken in seconds.items():
            progress(f"{name}: {repeat + 1} of {repeats}, {factor}        ")
            taken.append(engine.seconds(factor * layer_s))
    return {factor: statistics.median(taken) for factor, taken in seconds.items()}


def main() -> int:
    asked = parser(__doc__.split("\n\n")[0])
    asked.add_argument("--repeats", type=int, default=9, help="of which the median counts (default: 9)")
    repeats = (chosen := asked.parse_args()).repeats
    rows = []
    with tempfile.TemporaryDirectory(prefix="kv-layerwise-") as home:
        shape = TinyLlama(hidden=512, layers=LAYERS, head_dim=64, intermediate=1536)
        model = str(shape.write(Path(home) / "model"))
        with started(model, "layerwise") as engine:
            layer_s = statistics.median(engine.seconds() for _ in range(repeats)) / LAYERS
            layerwise = medians(engine, layer_s, repeats, "layerwise")
            computed_s = statistics.median(engine.seconds(known=1 + number) for number in range(repeats))
        with started(model, "async") as engine:
            between = medians(engine, layer_s, repeats, "between steps")
        alone_s = layerwise[0.0]
        for factor in FACTORS:
            copy_s, took = factor * layer_s, layerwise[factor]
            limit_s = max(alone_s + copy_s, LAYERS * copy_s + alone_s / LAYERS)
            hidden = (alone_s + LAYERS * copy_s - took) / (alone_s + LAYERS * copy_s - limit_s)
            with started(model, "auto") as engine:
                for number in range(LEARN):
                    progress(f"auto learns: {number + 1} of {LEARN}, {factor}        ")
                    engine.seconds(copy_s, known=1 + number)
                    engine.seconds(copy_s)
                auto_s = statistics.median(engine.seconds(copy_s) for _ in range(repeats))
            best_s = min(took, between[factor], computed_s)
            name = f"copies of {factor} of a layer's computation"
            rows += [
                Row(f"{name}: layerwise", took * 1e3, "ms", limit_s * 1e3, took / limit_s, 1.05, at_most=True),
                Row(f"{name}: hidden", hidden * 100, "%", 100.0, hidden, 0.9, at_most=False),
                Row(f"{name}: auto", auto_s * 1e3, "ms", best_s * 1e3, auto_s / best_s, 1.05, at_most=True),
            ]
    print(
        f"\ra layer computes for {layer_s * 1e3:.1f} ms, the prompt for {computed_s * 1e3:.0f} ms; between steps "
        + ", ".join(f"{factor}: {seconds * 1e3:.0f} ms" for factor, seconds in between.items()),
        file=sys.stderr,
    )
    return report(rows, chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
