"""The engine-neutral scheduler half and worker half of a connector: what to look up, load and store."""
