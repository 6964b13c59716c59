"""Which chunk is in which slot, and the states it goes through."""
