"""Sixteen prompts with one long prefix that arrive together: who computes or loads it, and how often.

    python benchmarks/convoy.py [--json]      (in .venvs/vllm)

Real vLLM on the CPU, prefix caching on, a small random model, each engine in a process of its own; all prompts start
with the same 4,096 tokens and end with 60 of their own. Before each round vLLM's own prefix cache is emptied. A row is
the time until all sixteen have their first token:

    alone     without us: vLLM computes the prefix once and shares its blocks
    pool      ours, the prefix in the host pool
    disk      ours, the prefix on disk only: the pool is crowded out before each round
"""

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

PREFIX_TOKENS, OWN_TOKENS, TOGETHER = 4096, 60, 16
ROUNDS = 7
WAYS = ("alone", "pool", "disk")


def prompt(number: int, family: int = 0) -> list[int]:
    prefix = [3 + (7919 * (family + 1) + 104729 * i) % 2000 for i in range(PREFIX_TOKENS)]
    return prefix + [3 + (31 * number + 17 * i) % 2000 for i in range(OWN_TOKENS)]


def serve(model: str, way: str, directory: str) -> None:
    from vllm import SamplingParams, TokensPrompt

    cache: dict[str, Any] | None = None
    if way != "alone":
        cache = {"use": "always", "chunk_tokens": 128, "host": {"capacity_bytes": "1GiB" if way == "pool" else "48MiB"}}
    if cache is not None and way == "disk":
        cache["tiers"] = [{"type": "disk", "directory": directory, "capacity_bytes": "1GiB"}]
    engine = _engines.vllm(
        model, cache, enable_prefix_caching=True, max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=TOGETHER
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def ask(numbers: list[int]) -> int:
        """Each number is a prompt's; negative: the prompt of another family, alone."""
        prompts = [prompt(0, -one) if one < 0 else prompt(one) for one in numbers]
        engine.generate([TokensPrompt(prompt_token_ids=one) for one in prompts], sampling, use_tqdm=False)
        return 0

    _child.serve(ask, lambda: engine.reset_prefix_cache() and None)


def measure(way: str, model: str, directory: str) -> float:
    child = Child(__file__, [model, way, directory], _engines.ENVIRON)
    try:
        child.ask([1])
        seconds = []
        for number in range(ROUNDS + 1):
            progress(f"{way}: {number} of {ROUNDS}   ")
            if way == "disk":
                for other in (1, 2, 3):
                    child.ask([-other])
            child.forget()
            seconds.append(child.ask([2 + TOGETHER * number + one for one in range(TOGETHER)])[0])
    finally:
        child.close()
    return statistics.median(seconds[1:])


def main() -> int:
    if "--serve" in sys.argv:
        serve(*sys.argv[2:])
        return 0
    chosen = parser(__doc__.split("\n\n")[0]).parse_args()
    from kv_testing.tiny import TinyLlama

    with tempfile.TemporaryDirectory(prefix="kv-convoy-") as home:
        model = str(TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536).write(Path(home) / "model"))
        times = {way: measure(way, model, str(Path(home) / way)) for way in WAYS}
    alone = times["alone"]
    rows = [
        Row(f"{TOGETHER} with one prefix, {way}", 1e3 * seconds, "ms", 1e3 * alone, seconds / alone, 1.0, at_most=True)
        for way, seconds in times.items()
        if way != "alone"
    ]
    return report(rows, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
