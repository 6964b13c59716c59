"""How long after the last layer of a step its chunks can be found, stored behind the step and layer by layer.

A prompt of 1,024 tokens in one step on real vLLM, and then some answer. From the end of its forward pass (vLLM calls
`wait_for_save`) to the commit of its chunks, once on a device that is a queue on a thread of the CPU
(`tests/engine/slow_device.py`) and takes so long for each layer: a factor of what computing a layer takes; and once on
the CPU as it is, whose copies a thread makes; there the forward pass is timed too, which they share the memory with.

    make bench-layerwise [JSON=1]
"""

import os
import sys
from pathlib import Path

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "engine")]

import _engines

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR"} | _engines.ENVIRON | _engines.threads_environ(1)

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _child import progress
from _report import Row, parser, report
from kv_connect.engine import engines
from kv_testing.tiny import TinyLlama
from slow_device import SlowDevice, slow_device

FACTORS = (0.1, 0.5, 1.0)
LAYERS = 8
TOKENS = 1024
ANSWER_TOKENS = 96
"""So that vLLM goes on stepping, as an engine that has other requests: what has arrived is committed in a step."""


def prompt(number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(TOKENS)]


class Timed:
    """An engine, and when its forward passes ended, and its chunks could be found."""

    def __init__(self, model: str, store: str, device: SlowDevice | None) -> None:
        cache = {"store": store, "use": "never", "chunk_tokens": 256, "host": {"capacity_bytes": "256MiB"}}
        sizes = {"max_model_len": TOKENS + ANSWER_TOKENS + 8, "max_num_batched_tokens": TOKENS + 8}
        self._engine = _engines.vllm(model, cache, **sizes)
        self._device, self._number = device, 0
        (inner,) = engines().values()
        worker, pool = inner.worker, inner.cache
        assert worker is not None and pool is not None
        self._ended_s = self._found_s = 0.0
        start, commit = worker.stores.start, pool.commit

        def start_stores(plan: Any) -> None:
            if plan.stores:
                self._ended_s = time.perf_counter()
            start(plan)

        def committed(lease: Any) -> None:
            commit(lease)
            self._found_s = time.perf_counter()

        worker.stores.start, pool.commit = start_stores, committed  # type: ignore[method-assign]
        if device is not None:
            device.go_on(copy_s=0.0)

    def ask(self, copy_s: float) -> tuple[float, float]:
        """Seconds of the forward pass, and from its end until its chunks were found. copy_s: of a layer."""
        if self._device is not None:
            self._device.queue.copy_s = copy_s
        self._number += 1
        began = time.perf_counter()
        _engines.ask_vllm(self._engine, prompt(self._number), ANSWER_TOKENS)
        return self._ended_s - began, self._found_s - self._ended_s

    def medians(self, copy_s: float, repeats: int) -> tuple[float, float]:
        self.ask(copy_s)
        computed, found = zip(*(self.ask(copy_s) for _ in range(repeats)), strict=True)
        return statistics.median(computed), statistics.median(found)

    def close(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()


@contextmanager
def started(model: str, store: str, *, slow: bool) -> Iterator[Timed]:
    if not slow:
        timed = Timed(model, store, None)
        yield timed
        timed.close()
        return
    with slow_device(layerwise=True) as device:
        timed = Timed(model, store, device)
        yield timed
        timed.close()


def main() -> int:
    asked = parser(__doc__.split("\n\n")[0])
    asked.add_argument("--repeats", type=int, default=9, help="of which the median counts (default: 9)")
    repeats = (chosen := asked.parse_args()).repeats
    rows = []
    found: dict[tuple[str, float], tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="kv-layer-stores-") as home:
        shape = TinyLlama(hidden=512, layers=LAYERS, head_dim=64, intermediate=1536)
        model = str(shape.write(Path(home) / "model"))
        layer_s = 0.0
        for store in ("async", "layerwise"):
            with started(model, store, slow=True) as engine:
                layer_s = layer_s or engine.medians(0.0, repeats)[0] / LAYERS
                for factor in FACTORS:
                    progress(f"{store}, {factor}        ")
                    found[store, factor] = engine.medians(factor * layer_s, repeats)
            with started(model, store, slow=False) as engine:
                progress(f"{store}, the CPU as it is        ")
                found[store, 0.0] = engine.medians(0.0, repeats)
    for factor in (*FACTORS, 0.0):
        (plain_s, behind_s), (layers_s, layered_s) = found["async", factor], found["layerwise", factor]
        name = f"copies of {factor} of a layer's computation" if factor else "the CPU as it is"
        rows.append(
            Row(f"{name}: found after", layered_s * 1e3, "ms", behind_s * 1e3, layered_s / behind_s, 0.5, at_most=True)
        )
        if not factor:  # the stand-in copies all layers of a chunk for each
            ratio = layers_s / plain_s
            rows.append(Row(f"{name}: forward pass", layers_s * 1e3, "ms", plain_s * 1e3, ratio, 1.05, at_most=True))
    print(f"\ra layer computes for {layer_s * 1e3:.1f} ms", file=sys.stderr)
    return report(rows, chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
