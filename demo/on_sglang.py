"""The demo on real SGLang, whose own caches are emptied before each request."""

import time
from pathlib import Path
from typing import Any

from kv_sglang.cli import engine_arguments

from demo import Answer, Ask, Demo, Wanted, run

_PAGE_TOKENS = 64
_REST_S = 30.0


def start(wanted: Wanted) -> Ask:
    """Start an engine in processes of its own."""
    import sglang
    import torch

    cache = None if wanted.cache is None else dict(wanted.cache)
    page_tokens = _PAGE_TOKENS if cache is None else cache.pop("chunk_tokens", _PAGE_TOKENS)  # a page is a chunk
    arguments: dict[str, Any] = {
        "dtype": wanted.dtype,
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "page_size": page_tokens,
        "log_level": "error",
    }
    if not torch.cuda.is_available():
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "max_total_tokens": max(4096, wanted.prompt_tokens + wanted.new_tokens + 1024),
            "mem_fraction_static": 0.5,
        }
    if cache is not None:
        arguments |= engine_arguments(cache, page_size=page_tokens)
        # Set the size explicitly, else SGLang takes most of the free memory, or refuses to start.
        arguments |= {"hicache_storage_prefetch_policy": "wait_complete", "hicache_ratio": 2.0}
    engine = sglang.Engine(model_path=wanted.model, **arguments)
    sampling = {
        "temperature": 0,
        "max_new_tokens": wanted.new_tokens,
        "stop_token_ids": list(wanted.stop),
        "ignore_eos": not wanted.stop,
    }

    def empty() -> None:
        until = time.monotonic() + _REST_S
        while not engine.flush_cache().success:
            if time.monotonic() > until:
                raise SystemExit("SGLang does not become idle")
            time.sleep(0.02)

    def ask(prompt: list[int]) -> Answer:
        began_s, first_s, output = time.perf_counter(), 0.0, {}
        for part in engine.generate(input_ids=prompt, sampling_params=sampling, stream=True):
            output, first_s = part, first_s or time.perf_counter() - began_s
        empty()
        return Answer(int(output["meta_info"]["cached_tokens"]), first_s, list(output["output_ids"]))

    return ask


def write_tiny(directory: Path) -> Path:
    from kv_testing.tiny import TinyLlama

    return TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536).write(directory)


def main(arguments: list[str] | None = None) -> int:
    import torch

    environ = {} if torch.cuda.is_available() else {"SGLANG_USE_CPU_ENGINE": "1"}
    return run(Demo(Path(__file__), "SGLang", environ, start, write_tiny), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
