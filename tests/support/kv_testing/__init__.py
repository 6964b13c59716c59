"""Servers, faults, models and fuzzers that tests and benchmarks share."""
