"""The `kv` command, the only part of this package that may do I/O."""
