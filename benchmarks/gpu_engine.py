"""vLLM on a GPU, with a model of Llama 3.1 8B's shape and random weights: what a prompt costs that is new, and one that
was asked before, without a cache, with vLLM's own offloading, and with us.

    python benchmarks/gpu_engine.py [--json] [--ways alone "own offloading" "between steps" "by layers"]

Each way is an engine of its own, alone on the GPU, vLLM's own prefix cache off, whose host memory was filled before. A
row is the median time until a prompt has its first token, or its 33rd where it says so, or until all of eight that come
at once have their first. Ratios are to the engine alone with prompts that are new.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path.append(str(Path(__file__).parent))

import _child
import _engines
from _child import Child, progress
from _report import Row, parser, report

WAYS = ("alone", "own offloading", "between steps", "by layers")
REPEATS = 4
POOL_BYTES = 12 << 30
LONGEST = 16384
BYTES_A_TOKEN = 128 << 10
CASES: dict[str, tuple[int, int, int]] = {
    "4,096 tokens": (1, 4096, 1),
    "4,096 tokens and 32 more": (1, 4096, 33),
    "16,384 tokens": (1, LONGEST, 1),
    "8 at once of 4,096 tokens": (8, 4096, 1),
}
"""By name: prompts, tokens of each, tokens generated."""
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


def serve(model: str, way: str) -> None:
    from vllm import SamplingParams, TokensPrompt

    ours: dict[str, Any] = {"use": "always", "host": {"capacity_bytes": POOL_BYTES}}
    if way == "by layers":
        ours |= {"load": "layerwise", "store": "layerwise"}
    engine = _engines.vllm(
        model,
        None if way == "alone" else ours,
        own={"cpu_bytes_to_use": POOL_BYTES} if way == "own offloading" else None,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=LONGEST + 64,
        max_num_batched_tokens=LONGEST,
        kv_cache_memory_bytes=16 << 30,
        # A layer has no hook in a graph, and the piecewise ones need vLLM's compiler.
        **({} if way == "by layers" else {"enforce_eager": False, "compilation_config": GRAPHS}),
    )

    def ask(asked: Any) -> int:
        prompts, new_tokens = asked
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False, ignore_eos=True)
        tokens = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return sum(output.num_cached_tokens or 0 for output in engine.generate(tokens, sampling, use_tqdm=False))

    _child.serve(ask)


def measure(way: str, model: str) -> dict[str, float]:
    """Median seconds by case, new and found."""
    # In its caller's process an engine is not stepped without requests, so its last step waits for what it stores.
    child = Child(__file__, [model, way], _engines.ENVIRON | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    times: dict[str, list[float]] = {}
    try:
        for number in range(1 + POOL_BYTES // (BYTES_A_TOKEN * LONGEST)):
            progress(f"{way}: filling the host's memory        ")
            child.ask([[prompt(LONGEST, number)], 33])
            time.sleep(1.0)
        for case, (prompts, tokens, new_tokens) in CASES.items():
            for repeat in range(REPEATS):
                progress(f"{way}, {case}: {repeat + 1} of {REPEATS}        ")
                seeds = [1000 * tokens + 100 * new_tokens + 10 * repeat + number for number in range(prompts)]
                asked = [[prompt(tokens, 3 + seed) for seed in seeds], new_tokens]
                for turn in ("new", "found"):
                    seconds, found = child.ask(asked)
                    times.setdefault(f"{case}, {turn}", []).append(seconds)
                    if way != "alone" and (found > prompts * (tokens - 512)) != (turn == "found"):
                        print(f"\n{way}, {case}, {turn}: {found} tokens were found", file=sys.stderr)
                    time.sleep(0.1)
    finally:
        child.close()
    print(
        f"\r{way}: {json.dumps({case: [round(1e3 * one, 1) for one in of] for case, of in times.items()})}",
        file=sys.stderr,
    )
    return {case: statistics.median(of) for case, of in times.items()}


def prompt(tokens: int, number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * (i + 1) * (number % 97 + 1)) % 120_000 for i in range(tokens)]


def main() -> int:
    if "--serve" in sys.argv:
        serve(*sys.argv[2:])
        return 0
    made = parser(__doc__ or "")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)")
    chosen = made.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kv-gpu-") as home:
        (Path(home) / "config.json").write_text(json.dumps(LLAMA))
        alone = measure("alone", home)
        for way in chosen.ways:
            times = alone if way == "alone" else measure(way, home)
            for case, seconds in times.items():
                limit = alone[case.rpartition(",")[0] + ", new"]
                target = 1.0 if case.endswith("found") and way != "alone" else 1.02
                name = f"{way}, {case}"
                rows.append(Row(name, seconds * 1e3, "ms", limit * 1e3, seconds / limit, target, at_most=True))
    return report(rows, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
