"""`python -m kv_vllm.demo`: the running example on real vLLM, its own prefix cache off. Needs no GPU."""

import os
from pathlib import Path
from typing import Any

from kv_tiers.attach.demo import NEW_TOKENS, Ask, Demo, run


def start(model: str, dtype: str, cache: dict[str, Any] | None) -> tuple[Ask, int]:
    """An engine in this process, and the size of its vocabulary."""
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
        dtype=dtype,
        max_model_len=2048,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_transfer_config=transfer,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)

    def ask(prompt: list[int]) -> tuple[int, list[int]]:
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        return output.num_cached_tokens or 0, list(output.outputs[0].token_ids)

    return ask, int(engine.llm_engine.model_config.get_vocab_size())


def write_tiny(directory: Path) -> Path:
    from kv_cuda.tiny import TinyLlama

    return TinyLlama(hidden=512, layers=8, head_dim=64, intermediate=1536).write(directory)


def main(arguments: list[str] | None = None) -> int:
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in one process, where they share the cache
    }
    return run(Demo("kv_vllm.demo", "vLLM", environ, start, write_tiny), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
