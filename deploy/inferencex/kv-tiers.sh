# A branch for benchmarks/single_node/agentic/minimaxm3_fp8_h200_mtp.sh of SemiAnalysisAI/InferenceX, to go before the one
# of Mooncake, which is chosen by the same KV_OFFLOADING.
if [ "$KV_OFFLOADING" = "dram" ] && [ "${KV_OFFLOAD_BACKEND:-}" = "kv-tiers" ]; then
    require_agentic_kv_offload_backend kv-tiers
    # One pool for all ranks, in a private server that ends with the engine.
    POOL_GIB=$((TOTAL_CPU_DRAM_GB * 1000000000 / 1073741824 - MODEL_CHECKPOINT_PAGE_CACHE_GIB))
    if (( POOL_GIB <= 0 )); then
        echo "Error: CPU DRAM budget is too small for checkpoint cache and KV offload" >&2
        exit 1
    fi
    agentic_pip_install --quiet --no-cache-dir "kv-vllm==0.1.0"
    OFFLOAD_ARGS=(
        --kv-transfer-config
        '{"kv_connector":"KVTiersConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"host":{"capacity_bytes":"'"$POOL_GIB"'GiB"}}}'
    )
fi
