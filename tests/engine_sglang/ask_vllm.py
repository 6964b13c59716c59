"""Real vLLM, asked in an environment of its own: one JSON object in, one line of JSON out.

In: model, prompts, new_tokens, cache (our extra config, or null), params (of each prompt what a proxy says, or null).
Out: tokens and hits of each prompt.
"""

import json
import os
import sys
from typing import Any

MARK = "VLLM-ANSWERS "


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    transfer = None
    if asked["cache"] is not None:
        transfer = KVTransferConfig(
            kv_connector="KVTiersConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=asked["cache"],
        )
    engine = LLM(
        asked["model"],
        dtype="float32",
        max_model_len=4096,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_transfer_config=transfer,
    )
    answers = []
    for prompt, params in zip(asked["prompts"], asked["params"] or [None] * len(asked["prompts"]), strict=True):
        sampling = SamplingParams(
            temperature=0,
            max_tokens=asked["new_tokens"],
            detokenize=False,
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        answers.append({"tokens": list(output.outputs[0].token_ids), "hits": output.num_cached_tokens or 0})
    print(MARK + json.dumps(answers), flush=True)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
