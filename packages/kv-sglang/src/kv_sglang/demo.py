"""`python -m kv_sglang.demo`: the running example on real SGLang, whose own caches are emptied before each request."""

import time
from pathlib import Path
from typing import Any

from kv_tiers.attach.demo import NEW_TOKENS, Ask, Demo, run

from kv_sglang.cli import engine_arguments

_PAGE_TOKENS = 64
_REST_S = 30.0


def start(model: str, dtype: str, cache: dict[str, Any] | None) -> tuple[Ask, int]:
    """An engine that this process started, and the size of its vocabulary."""
    import sglang
    import torch
    from transformers import AutoConfig

    arguments: dict[str, Any] = {
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "page_size": _PAGE_TOKENS,
        "log_level": "error",
    }
    if not torch.cuda.is_available():
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "max_total_tokens": 4096,
            "mem_fraction_static": 0.1,
        }
    if cache is not None:
        arguments |= engine_arguments(cache, page_size=_PAGE_TOKENS)
        # A size of its own, or SGLang takes most of what memory is left, or refuses to start.
        arguments |= {"hicache_storage_prefetch_policy": "wait_complete", "hicache_ratio": 2.0}
    engine = sglang.Engine(model_path=model, **arguments)
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}

    def empty() -> None:
        until = time.monotonic() + _REST_S
        while not engine.flush_cache().success:
            if time.monotonic() > until:
                raise SystemExit("SGLang does not come to rest")
            time.sleep(0.02)

    def ask(prompt: list[int]) -> tuple[int, list[int]]:
        output = engine.generate(input_ids=prompt, sampling_params=sampling)
        empty()
        return int(output["meta_info"]["cached_tokens"]), list(output["output_ids"])

    return ask, int(AutoConfig.from_pretrained(model).vocab_size)


def write_tiny(directory: Path) -> Path:
    from kv_cuda.tiny import TinyLlama

    return TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536).write(directory)


def main(arguments: list[str] | None = None) -> int:
    import torch

    environ = {} if torch.cuda.is_available() else {"SGLANG_USE_CPU_ENGINE": "1"}
    return run(Demo("kv_sglang.demo", "SGLang", environ, start, write_tiny), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
