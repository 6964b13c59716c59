"""For tests, the demo and the benchmarks: tiny models, and access to the inside of a running engine."""
