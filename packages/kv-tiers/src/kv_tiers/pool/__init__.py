"""Host memory that holds chunks: pools, the directory of a named one, and what the machine allows."""
