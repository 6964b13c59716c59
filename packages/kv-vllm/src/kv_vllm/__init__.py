"""kv_vllm."""
