"""kv_tiers."""
