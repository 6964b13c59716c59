"""Host memory for chunks: pools, the directory of a named pool, and the machine's limits."""
