"""kv_cuda."""
