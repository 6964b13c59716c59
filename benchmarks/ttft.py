"""Time to the first token of a prompt that was asked before, by its length: computed again, or loaded.

    make bench-ttft [ENGINE=sglang] [JSON=1]

A small random model on a real engine in a process of its own. Every prompt is asked once, the engine's own caches are
emptied or crowded out, and it is asked again; one token is generated.

    recompute   the engine with no cache at all: the limit of every row
    own host    SGLang's HiCache alone, its host memory (vLLM's offloading refuses the CPU, so it is here on a GPU only)
    own file    SGLang's HiCache with its own file backend
    pool        ours, found in the host pool
    linker      ours, found in the host pool through SGLang's external linker
    disk        ours, pushed out of the pool and found on disk

Ratios are times with a cache over times without: below 1 loading pays, and ours is asked to from 1,024 tokens on.
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

LENGTHS = (256, 512, 1024, 2048)
REPEATS = 4
PAYS_FROM = 1024
CHUNK_TOKENS = 64  # SGLang's page; vLLM's block on a CPU is 128, so there a chunk has two
LONGEST = max(LENGTHS)
TOKENS_ON_DEVICE = 2 * LONGEST
WAYS = {
    "vllm": ["recompute", "pool", "disk"],
    "sglang": ["recompute", "own host", "own file", "pool", "linker", "disk"],
}


def settings(way: str, directory: str, chunk_tokens: int) -> dict[str, Any]:
    """Ours, with a pool for everything, or one that two of the longest prompts (16 MiB each) fill anew, and a disk."""
    made: dict[str, Any] = {"chunk_tokens": chunk_tokens, "host": {"capacity": "1GiB"}}
    if way == "disk":
        disk = {"type": "disk", "path": str(Path(directory) / "disk"), "capacity_bytes": "2GiB"}
        made |= {"host": {"capacity": "24MiB"}, "tiers": [disk]}
    return made


def serve_vllm(model: str, way: str, directory: str) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    transfer = None
    if way != "recompute":
        transfer = KVTransferConfig(
            kv_connector="KVTiersConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings(way, directory, 2 * CHUNK_TOKENS),
        )
    engine = LLM(
        model,
        dtype="float32",
        max_model_len=LONGEST + 8,
        max_num_batched_tokens=LONGEST + 8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_transfer_config=transfer,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)

    def ask(prompt: list[int]) -> int:
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        return output.num_cached_tokens or 0

    _child.serve(ask)


def serve_sglang(model: str, way: str, directory: str) -> None:
    import sglang
    from kv_sglang.cli import engine_arguments

    chosen: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "dtype": "float32",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "max_total_tokens": TOKENS_ON_DEVICE,
        "chunked_prefill_size": 4096,
        "page_size": CHUNK_TOKENS,
        "mem_fraction_static": 0.1,
        "log_level": "error",
    }
    if way == "recompute":
        chosen["disable_radix_cache"] = True
    else:
        ours = settings(way, directory, CHUNK_TOKENS)
        del ours["chunk_tokens"]
        if way == "linker":
            chosen |= engine_arguments(ours, page_size=CHUNK_TOKENS, linker=True)
        else:
            chosen |= engine_arguments({"prefetch_threshold": CHUNK_TOKENS, **ours}, page_size=CHUNK_TOKENS)
            chosen["hicache_storage_prefetch_policy"] = "wait_complete"
    if way in ("own host", "own file"):
        del chosen["hicache_storage_backend"], chosen["hicache_storage_backend_extra_config"]
    if way == "own file":
        chosen["hicache_storage_backend"] = "file"
        chosen["hicache_storage_backend_extra_config"] = json.dumps({"prefetch_threshold": CHUNK_TOKENS})
    engine = sglang.Engine(model_path=model, **chosen)

    def ask(prompt: list[int]) -> int:
        (output,) = engine.generate(
            input_ids=[prompt], sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        )
        return int(output["meta_info"].get("cached_tokens") or 0)

    def forget() -> None:
        if way == "own host":  # flushing would empty the host's memory too, so the device is crowded out instead
            for number in range(2):
                ask(prompt(LONGEST, 10**6 + number))
        else:
            while not engine.flush_cache().success:
                pass

    _child.serve(ask, forget)
    engine.shutdown()


def prompt(tokens: int, number: int) -> list[int]:
    return [3 + (7919 * (number + 1) + 104729 * i) % 2000 for i in range(tokens)]


def measure(engine: str, way: str, model: str, directory: str) -> dict[int, float]:
    """Median seconds by length."""
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(Path(directory) / "own")}
    child = Child(__file__, [engine, model, way, directory], environ)
    medians = {}
    try:
        child.ask(prompt(600, 77))
        for tokens in LENGTHS:
            times = []
            for repeat in range(REPEATS + 1):
                progress(f"{engine}, {way}, {tokens} tokens: {repeat + 1} of {REPEATS + 1}        ")
                asked = prompt(tokens, 1000 * tokens + repeat)
                child.ask(asked)
                for other in range(2 if way == "disk" else 0):  # what comes after pushes it out of the pool
                    child.ask(prompt(LONGEST, 500_000 + 10 * repeat + other + tokens))
                if engine == "sglang" and way != "recompute":
                    child.forget()
                seconds, found = child.ask(asked)
                if repeat:
                    times.append(seconds)
                if way != "recompute" and found < tokens - 2 * CHUNK_TOKENS - 1:
                    print(f"\n{engine}, {way}: {found} of {tokens} tokens were found", file=sys.stderr)
            medians[tokens] = statistics.median(times)
    finally:
        child.close()
    return medians


def main() -> int:
    if "--serve" in sys.argv:
        engine, *words = sys.argv[2:]
        {"vllm": serve_vllm, "sglang": serve_sglang}[engine](*words)
        return 0
    made = parser(__doc__.split("\n\n")[0])
    made.add_argument("--engine", choices=sorted(WAYS), default="vllm")
    chosen = made.parse_args()
    from kv_cuda.tiny import TinyLlama

    rows = []
    with tempfile.TemporaryDirectory(prefix="kv-ttft-") as home:
        model = str(TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536).write(Path(home) / "model"))
        limits: dict[int, float] = {}
        for way in WAYS[chosen.engine]:
            directory = Path(home) / way.replace(" ", "-")
            directory.mkdir()
            times = measure(chosen.engine, way, model, str(directory))
            limits = limits or times
            pays = [tokens for tokens in LENGTHS if times[tokens] < limits[tokens]]
            if way != "recompute":
                print(f"\r{chosen.engine}, {way}: loading pays from {min(pays, default=0)} tokens on", file=sys.stderr)
            for tokens in LENGTHS:
                if way != "recompute":
                    ratio = times[tokens] / limits[tokens]
                    target = 1.0 if tokens >= PAYS_FROM and not way.startswith("own") else float("inf")
                    name = f"{chosen.engine}, {way}, {tokens} tokens"
                    rows.append(Row(name, times[tokens] * 1e3, "ms", limits[tokens] * 1e3, ratio, target, at_most=True))
    return report(rows, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
