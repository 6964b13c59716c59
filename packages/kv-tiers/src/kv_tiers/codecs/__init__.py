"""Codecs that come with kv-tiers, each found by its entry point."""
