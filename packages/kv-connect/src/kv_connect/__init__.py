"""Attaching a cache to an engine, for every engine's package: settings, where the cache runs, the model's identity."""
