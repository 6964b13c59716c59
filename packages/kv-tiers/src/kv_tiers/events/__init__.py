"""Events: what a cache did, published on a bounded bus."""
