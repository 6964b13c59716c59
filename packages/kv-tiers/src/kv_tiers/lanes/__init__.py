"""Lanes: the queue in front of each tier, its threads, batching, and the health of the tier."""
