"""The index of a pool: which chunk is in which slot, in which state."""
