"""Quantised chunks: one byte per element."""
