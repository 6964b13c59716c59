"""The index of a pool: which chunk is in which slot, and the states of a chunk."""
