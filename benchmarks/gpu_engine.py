"""vLLM on a GPU, with a model of Llama 3.1 8B's shape and random weights: what a prompt costs that is new, and one that
was asked before, without a cache, with vLLM's own offloading, and with us.

    python benchmarks/gpu_engine.py [--json] [--ways alone "own offloading" "between steps" "by layers"]
        [--seconds 480] [--raw FILE] [--device cpu]

Each way is an engine of its own, alone on the GPU, whose host memory was filled before. vLLM's own prefix cache is on,
so that its cost is in all of them, and emptied before each prompt. A row is the median time until a prompt has its
first token, or its 33rd where it says so, or until all of eight that come at once have their first. Ratios are to the
engine alone with prompts that are new.

Cases are asked in turn, as often as the time allows. `--device cpu` goes through all of it with a small model in a few
minutes, to try the script where there is no GPU; its figures mean nothing.
"""

import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, TextIO

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path.append(str(Path(__file__).parent))

from dataclasses import dataclass  # which imports the standard library's copy

import _child
import _engines
from _child import Child, progress
from _report import Row, parser, report

WAYS = ("alone", "own offloading", "between steps", "by layers")
LEAST_REPEATS, MOST_REPEATS = 2, 24
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Scale:
    """What is measured on one kind of device: the model, the host's memory, and what of it a token takes, the tokens of
    the shorter and the longer prompts, and how an engine is started."""

    model: dict[str, Any]
    pool_bytes: int
    token_bytes: int
    short: int
    long: int
    engine: dict[str, Any]

    @property
    def cases(self) -> dict[str, tuple[int, int, int]]:
        """By name: prompts, tokens of each, tokens generated."""
        return {
            f"{self.short:,} tokens": (1, self.short, 1),
            f"{self.short:,} tokens and 32 more": (1, self.short, 33),
            f"{self.long:,} tokens": (1, self.long, 1),
            f"8 at once of {self.short:,} tokens": (8, self.short, 1),
        }


SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
ON_GPU: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 16 << 30}
SCALES = {
    "cuda": Scale(LLAMA, 12 << 30, 128 << 10, 4096, 16384, ON_GPU),
    "cpu": Scale(LLAMA | SMALL | {"intermediate_size": 512}, 64 << 20, 2 << 10, 512, 2048, {}),
}


def serve(model: str, way: str, device: str) -> None:
    from vllm import SamplingParams, TokensPrompt

    scale = SCALES[device]
    own = {"cpu_bytes_to_use": scale.pool_bytes} if device == "cuda" else _engines.own_offloading(scale.pool_bytes)
    ours: dict[str, Any] = {"use": "always", "host": {"capacity_bytes": scale.pool_bytes}}
    if way == "by layers":
        ours |= {"load": "layerwise", "store": "layerwise"}
    engine = _engines.vllm(
        model,
        None if way == "alone" else ours,
        own=own if way == "own offloading" else None,
        load_format="dummy",
        max_model_len=scale.long + 64,
        max_num_batched_tokens=scale.long,
        enable_prefix_caching=True,
        **scale.engine,
        # A layer has no hook in a graph, and the piecewise ones need vLLM's compiler.
        **({} if way == "by layers" or device == "cpu" else {"enforce_eager": False, "compilation_config": GRAPHS}),
    )

    def ask(asked: Any) -> int:
        prompts, new_tokens = asked
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False, ignore_eos=True)
        tokens = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return sum(output.num_cached_tokens or 0 for output in engine.generate(tokens, sampling, use_tqdm=False))

    _child.serve(ask, lambda: engine.reset_prefix_cache() and None)


def measure(way: str, model: str, device: str, seconds: float, raw: TextIO | None) -> dict[str, float]:
    """Median seconds by case, new and found. seconds: about how long it may take."""
    scale, until_s = SCALES[device], time.monotonic() + seconds
    # In its caller's process an engine is not stepped without requests, so its last step waits for what it stores.
    child = Child(__file__, [model, way, device], _engines.ENVIRON | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    times: dict[str, list[float]] = {}
    try:
        for number in range(1 + scale.pool_bytes // (scale.token_bytes * scale.long)):
            progress(f"{way}: filling the host's memory        ")
            child.ask([[prompt(scale.long, number)], 33])
            time.sleep(0.5)
        for repeat, (number, case) in product(range(MOST_REPEATS), enumerate(scale.cases)):
            if repeat >= LEAST_REPEATS and time.monotonic() > until_s:
                break
            progress(f"{way}, {case}: {repeat + 1}        ")
            prompts, tokens, new_tokens = scale.cases[case]
            first = 1000 * (1 + number) + 10 * repeat  # no two cases have a prompt in common
            asked = [[prompt(tokens, seed) for seed in range(first, first + prompts)], new_tokens]
            for turn in ("new", "found"):
                child.forget()
                seconds, found = child.ask(asked)
                times.setdefault(f"{case}, {turn}", []).append(seconds)
                if raw is not None:
                    line = {"way": way, "case": case, "turn": turn, "ms": round(1e3 * seconds, 2), "found": found}
                    print(json.dumps(line), file=raw, flush=True)
                if way != "alone" and (found > prompts * tokens // 2) != (turn == "found"):
                    print(f"\n{way}, {case}, {turn}: {found} tokens were found", file=sys.stderr)
                time.sleep(0.1)
    finally:
        child.close()
    return {case: statistics.median(of) for case, of in times.items()}


def prompt(tokens: int, number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * (i + 1) * (number % 97 + 1)) % 120_000 for i in range(tokens)]


def main() -> int:
    if "--serve" in sys.argv:
        serve(*sys.argv[2:])
        return 0
    made = parser(__doc__ or "")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)")
    made.add_argument("--seconds", type=float, default=480.0, help="how long it may take (default: 480)")
    made.add_argument("--raw", type=Path, metavar="FILE", help="also append every single time to this file")
    made.add_argument("--device", choices=SCALES, default="cuda", help="cpu: to try the script (default: cuda)")
    chosen = made.parse_args()
    rows = []
    ways = ["alone", *(way for way in chosen.ways if way != "alone")]
    until_s = time.monotonic() + chosen.seconds
    with ExitStack() as ending:
        home = ending.enter_context(tempfile.TemporaryDirectory(prefix="kv-gpu-"))
        raw = None if chosen.raw is None else ending.enter_context(chosen.raw.open("a"))
        (Path(home) / "config.json").write_text(json.dumps(SCALES[chosen.device].model))
        alone: dict[str, float] = {}
        for number, way in enumerate(ways):
            share_s = (until_s - time.monotonic()) / (len(ways) - number)
            times = measure(way, home, chosen.device, share_s, raw)
            alone = alone or times
            for case, seconds in times.items():
                limit = alone[case.rpartition(",")[0] + ", new"]
                target = 1.0 if case.endswith("found") and way != "alone" else 1.02
                name = f"{way}, {case}"
                rows.append(Row(name, seconds * 1e3, "ms", limit * 1e3, seconds / limit, target, at_most=True))
    return report(rows, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
