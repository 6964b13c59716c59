"""The cache's verbs, on one lock: lookup, load, store, promotion, spilling."""
