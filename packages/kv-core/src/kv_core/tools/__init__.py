"""The command line, which may read the world; the rest of the package may not."""
