"""SGLang's own disaggregated prefill, with a hand-over that is a hit in our cache.

It serves `--disaggregation-mode` with `--disaggregation-transfer-backend kv`.
"""
