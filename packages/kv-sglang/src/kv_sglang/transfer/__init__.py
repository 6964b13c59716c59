"""SGLang's disaggregated prefill (`--disaggregation-mode`) with a hand-over that is a hit in our cache
(`--disaggregation-transfer-backend kv`)."""
