"""Commands of `kv` and `kv-server`."""
