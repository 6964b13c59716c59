"""What quantised chunks lose on real KV: a tiny Llama in real vLLM stores and loads by each format.

    .venvs/vllm/bin/python benchmarks/quantised.py [--json]

The model's weights are random and scaled so that attention matters. Each engine answers prompts once cold, which is
what it answers without us, and once more when their first 512 tokens are loaded. Everything that is loaded is compared
in the engine's own blocks with what it held when it was stored.

`rms`: root of the mean squared error, of the numbers'; `mean`: mean error, of the mean magnitude; `worst`: the largest
error of all, of its row's largest magnitude; all against the documented bound. `answers`: prompts whose tokens were all
the same when loaded; the limit is what the canonical format reaches in the same dtype (less than all in bfloat16, where
a prefill that is split elsewhere rounds otherwise).
"""

import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path.append(str(Path(__file__).parent))

import _engines

os.environ |= _engines.ENVIRON | {"VLLM_LOGGING_LEVEL": "ERROR"}

from _report import Row, parser, report
from kv_core.format import ChunkFormat
from kv_cuda import bind
from kv_testing.tiny import TinyLlama
from kv_testing.vllm_witness import Errors, Witness

PROMPTS = 16
PROMPT_TOKENS = 560
HIT_TOKENS = 512
NEW_TOKENS = 12
BOUND = {"canonical": 0.0, "int8": 1 / 254, "fp8": 1 / 16}
LAST_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
MAY_DIFFER = 1e-4
"""Of the bound: what float32 rounds on the way."""


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = str(TinyLlama().write(Path(scratch)))
        return report([row for dtype in LAST_ROUNDING for row in _rows(model, dtype)], arguments.json)


def _rows(model: str, dtype: str) -> Iterator[Row]:
    seen = {kind: _measure(model, kind, dtype) for kind in BOUND}
    exact_format, _, as_exact = seen["canonical"]
    for kind, (described, errors, same) in seen.items():
        name = f"{kind}, {dtype}"
        yield Row(f"{name}: answers", same, f"of {PROMPTS}", as_exact, same / as_exact, None, at_most=False)
        if kind == "canonical":
            continue
        kib, exact_kib = described.nbytes / 1024, exact_format.nbytes / 1024
        yield Row(f"{name}: chunk", kib, "KiB", exact_kib, kib / exact_kib, 0.6, at_most=True)
        bound = (BOUND[kind] + (1 + BOUND[kind]) * LAST_ROUNDING[dtype]) * (1 + MAY_DIFFER)
        for what in ("rms", "mean", "worst"):
            error = getattr(errors, what)
            target = 1 if what == "worst" else 2
            yield Row(f"{name}: {what}", 100 * error, "%", 100 * bound, error / bound, target, at_most=True)


def _measure(model: str, kind: str, dtype: str) -> tuple[ChunkFormat, Errors, int]:
    """The format, the errors, and how many prompts were answered with the same tokens as before."""
    witness = Witness()
    bind.make_copier = witness.make_copier  # type: ignore[assignment]
    engine = _engines.vllm(model, {"use": "always", "format": kind, "host": {"capacity_bytes": "512MiB"}}, dtype=dtype)
    chosen = random.Random(5)
    prompts = [[chosen.randrange(3, 2000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]

    def ask(prompt: list[int], hits: int) -> tuple[int, ...]:
        found, made = _engines.ask_vllm(engine, prompt, NEW_TOKENS)
        assert found == hits
        return tuple(made)

    cold = [ask(prompt, 0) for prompt in prompts]
    warm = [ask(prompt, HIT_TOKENS) for prompt in prompts]
    engine.llm_engine.engine_core.shutdown()
    gc.collect()
    (described,) = witness.formats
    return described, witness.errors, sum(one == other for one, other in zip(cold, warm, strict=True))


if __name__ == "__main__":
    sys.exit(main())
