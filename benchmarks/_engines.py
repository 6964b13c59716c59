"""Real engines for the benchmarks, with us and without: nothing of their own that would hide what a cache does."""

from typing import Any

ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}
"""For the process that an engine is in, when it starts.

The last two have glibc's allocator keep what it has, as the allocators do that vLLM's and SGLang's documentation
advise on a CPU. Without them it gives the large temporaries of a forward pass back to the kernel or not by how its heap
happens to lie: 0.35 to 2.0 million page faults for the same twelve prompts of 1,600 tokens, up to 5 % of their time,
with a cache and without.
"""


def threads_environ(threads: int) -> dict[str, str]:
    """So that every engine computes with as many threads, with us and without.

    Left to themselves they differ: SGLang alone ran two OpenMP threads, which got in each other's way, where SGLang
    with HiCache ran one.
    """
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def vllm(
    model: str,
    cache: dict[str, Any] | None,
    *,
    own: dict[str, Any] | None = None,
    dtype: str = "float32",
    engine_id: str | None = None,
    **arguments: Any,
) -> Any:
    """A `vllm.LLM`, its own prefix caching off. cache: our settings; None: without us. own: `own_offloading` instead.
    engine_id: its name for us."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if own is not None:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=own
        )
    elif cache is not None:
        transfer = KVTransferConfig(
            kv_connector="KVTiersConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=cache,
            engine_id=engine_id,
        )
    chosen: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": 2048,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "kv_transfer_config": transfer,
    }
    return LLM(model, **chosen | arguments)


def blending(model: str, **arguments: Any) -> Any:
    """A `vllm.LLM` that blends requests which ask for it."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="KVBlendConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"host": {"capacity_bytes": "4GiB"}, "chunk_tokens": 128},
    )
    return vllm(model, None, kv_transfer_config=transfer, gpu_memory_utilization=0.2, **arguments)


def own_offloading(capacity_bytes: int, directory: str = "") -> dict[str, Any]:
    """Settings of vLLM's own offloading. directory: of its file tier below; empty: none."""
    extra: dict[str, Any] = {
        "spec_name": "MemcpyOffloadingSpec",
        "spec_module_path": "kv_testing.vllm_offloading",
        "cpu_bytes_to_use": capacity_bytes,
    }
    return extra | ({"secondary_tiers": [{"type": "fs", "root_dir": directory}]} if directory else {})


def ask_vllm(engine: Any, prompt: list[int], new_tokens: int) -> tuple[int, list[int]]:
    """How many tokens were found, and what was made."""
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False, ignore_eos=True)
    (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
    return output.num_cached_tokens or 0, list(output.outputs[0].token_ids)


def sglang(
    model: str,
    cache: dict[str, Any] | None,
    *,
    page_tokens: int,
    linker: bool = False,
    blends: bool = False,
    **arguments: Any,
) -> Any:
    """A `sglang.Engine`. cache: our settings for HiCache's storage, or for the external linker; None: without us.
    blends: requests that ask for it."""
    import sglang
    from kv_sglang.cli import engine_arguments

    chosen: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "dtype": "float32",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 4096,
        "page_size": page_tokens,
        "mem_fraction_static": 0.5,
        "log_level": "error",
    }
    if cache is not None and linker:
        chosen |= engine_arguments(cache, page_size=page_tokens, linker=True)
    elif cache is not None and blends:
        from kv_blend.sglang import plugin as blending_on_sglang

        chosen |= blending_on_sglang.engine_arguments(cache, page_size=page_tokens)
    elif cache is not None:
        chosen |= engine_arguments({"prefetch_threshold": page_tokens, **cache}, page_size=page_tokens)
        chosen["hicache_storage_prefetch_policy"] = "wait_complete"
    return sglang.Engine(model_path=model, **chosen | arguments)


def ask_sglang(engine: Any, prompt: list[int], new_tokens: int) -> int:
    """How many tokens were found."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    (output,) = engine.generate(input_ids=[prompt], sampling_params=sampling)
    return int(output["meta_info"].get("cached_tokens") or 0)
