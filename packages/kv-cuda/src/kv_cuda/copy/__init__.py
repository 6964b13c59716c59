"""Copiers: chunks between host memory and the blocks of an engine."""
