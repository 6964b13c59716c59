"""Contracts of a tier or a codec, as test classes to inherit."""
