"""The built-in codecs, each found by its entry point."""
