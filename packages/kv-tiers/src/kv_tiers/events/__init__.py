"""Events of a cache, and the bus that delivers them to subscribers."""
