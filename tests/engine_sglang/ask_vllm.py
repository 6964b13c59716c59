"""Real vLLM, asked in an environment of its own: one process imports it, and forks another for each job.

A job is a line of JSON: model, prompts, new_tokens, cache (our extra config, or null), params (of each prompt what a
proxy says, or null), log (a file for all that is written). Into this comes also a line of the tokens and hits of each
prompt. The answer to a job is the status with which its process ended.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

MARK = "VLLM-ANSWERS "


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    sys.path[0] = str(Path(__file__).parents[1] / "engine")  # whose modules have names that are here, too
    from forked import import_vllm, prepare_engines

    import_vllm()
    prepare_engines()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            answer(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def answer(asked: dict[str, Any]) -> None:
    """Do a job, and end."""
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        print(MARK + json.dumps(answers(asked)), flush=True)
        status = 0
    except BaseException:  # noqa: BLE001 - it would go on as the process that forks
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def answers(asked: dict[str, Any]) -> list[dict[str, Any]]:
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
    found = []
    for prompt, params in zip(asked["prompts"], asked["params"] or [None] * len(asked["prompts"]), strict=True):
        sampling = SamplingParams(
            temperature=0,
            max_tokens=asked["new_tokens"],
            detokenize=False,
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        found.append({"tokens": list(output.outputs[0].token_ids), "hits": output.num_cached_tokens or 0})
    engine.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    main()
