"""The demo on real vLLM with its own prefix cache off. Needs no GPU."""

import itertools
import os
import time
from pathlib import Path

from demo import Answer, Ask, Demo, Wanted, run


def start(wanted: Wanted) -> Ask:
    """An engine in this process."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    transfer = None
    if wanted.cache is not None:
        transfer = KVTransferConfig(
            kv_connector="KVTiersConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=wanted.cache,
        )
    engine = LLM(
        wanted.model,
        dtype=wanted.dtype,
        max_model_len=wanted.prompt_tokens + wanted.new_tokens,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_transfer_config=transfer,
    ).llm_engine
    sampling = SamplingParams(
        temperature=0,
        max_tokens=wanted.new_tokens,
        detokenize=False,
        stop_token_ids=list(wanted.stop),
        ignore_eos=not wanted.stop,
    )
    numbers = itertools.count()

    def ask(prompt: list[int]) -> Answer:
        began_s, first_s, outputs = time.perf_counter(), 0.0, []
        engine.add_request(str(next(numbers)), TokensPrompt(prompt_token_ids=prompt), sampling)
        while engine.has_unfinished_requests():
            if step := engine.step():
                outputs, first_s = step, first_s or time.perf_counter() - began_s
        (output,) = outputs
        return Answer(output.num_cached_tokens or 0, first_s, list(output.outputs[0].token_ids))

    return ask


def write_tiny(directory: Path) -> Path:
    from kv_testing.tiny import TinyLlama

    return TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536).write(directory)


def main(arguments: list[str] | None = None) -> int:
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in one process, where they share the cache
    }
    return run(Demo(Path(__file__), "vLLM", environ, start, write_tiny), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
