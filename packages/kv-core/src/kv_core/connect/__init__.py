"""The engine-neutral halves of a connector: what to look up, load and store, said without naming an engine."""
