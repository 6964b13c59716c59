"""Blending on vLLM."""
