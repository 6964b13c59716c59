"""Chunks in one byte an element."""
