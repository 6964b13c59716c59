"""Blending on SGLang, by phases."""
