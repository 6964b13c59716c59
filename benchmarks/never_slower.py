"""With the cache on, no workload may be slower than with it off: the ones that a cache can only lose, on real vLLM.

`unique`: prompts that never come again, so every store is for nothing. `1.8 ×`: prompts in turn whose chunks take 1.8
times the host tier, so that least-recently-used never hits. `1.8 × on disk`: the same with a disk tier below, stored
eagerly. An engine with us and one without answer the same prompts in turn, each in a process of its own, so that the
machine's drift meets both; value and limit are seconds a request, with us and without. Needs vLLM:

    make bench-engine
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
sys.path.append(str(Path(__file__).parent))

import _child
from _child import Child, progress
from _report import Row, parser, report

POOL_CHUNKS = 20
PROMPT_TOKENS = 560  # two chunks and a tail
NEW_TOKENS = 8
ROUNDS = 4
ALLOWED = 1.05


def serve(model: str, cache: dict[str, Any] | None) -> None:
    """A child: one engine, asked by lines of JSON."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    transfer = None
    if cache is not None:
        transfer = KVTransferConfig(
            kv_connector="KVTiersConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=cache,
        )
    engine = LLM(
        model,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_transfer_config=transfer,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)

    def ask(prompt: list[int]) -> int:
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        return output.num_cached_tokens or 0

    _child.serve(ask)


def engine_of(model: str, cache: dict[str, Any] | None) -> Child:
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return Child(__file__, [model, json.dumps(cache)], environ)


def prompt(number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(PROMPT_TOKENS)]


def rows(name: str, cache: dict[str, Any], numbers: list[int], model: str) -> list[Row]:
    without, ours = engine_of(model, None), engine_of(model, cache)
    try:
        for warm_up in (9001, 9002, 9003):
            without.ask(prompt(warm_up)), ours.ask(prompt(warm_up))
        pairs = []
        found = 0
        for count, number in enumerate(numbers):
            progress(f"{name}: {count + 1} of {len(numbers)}")
            engines = (without, ours) if count % 2 else (ours, without)
            answers = {engine: engine.ask(prompt(number)) for engine in engines}
            pairs.append((answers[ours][0], answers[without][0]))
            found += answers[ours][1]
        print(f"\r{name}: {len(numbers)} requests, {found} tokens found", file=sys.stderr)
    finally:
        without.close()
        ours.close()
    mine, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    made = []
    for which, of in (("mean", statistics.fmean), ("95 %", lambda values: statistics.quantiles(values, n=20)[-1])):
        value, limit = of(mine), of(theirs)
        made.append(Row(f"{name}, {which}", value, "s", limit, value / limit, ALLOWED, at_most=True))
    return made


def main() -> int:
    if "--serve" in sys.argv:
        serve(sys.argv[2], json.loads(sys.argv[3]))
        return 0
    chosen = parser(__doc__.split("\n\n")[0]).parse_args()
    from kv_cuda.tiny import TinyLlama

    shape = TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536)
    chunk_nbytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * 256 * 4
    working_set = round(1.8 * POOL_CHUNKS / (PROMPT_TOKENS // 256))
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as scratch:
        model = str(shape.write(Path(scratch) / "model"))
        host = {"capacity": str(POOL_CHUNKS * chunk_nbytes), "policy": "lru"}
        disk = {"type": "disk", "path": f"{scratch}/kv", "capacity_bytes": "512MiB"}
        turns = list(range(working_set)) * ROUNDS
        made = rows("unique", {"host": host}, list(range(100, 100 + len(turns))), model)
        made += rows("1.8 × the host tier", {"host": host}, turns, model)
        made += rows("1.8 ×, on disk too", {"host": host, "tiers": [disk]}, turns, model)
    return report(made, chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
