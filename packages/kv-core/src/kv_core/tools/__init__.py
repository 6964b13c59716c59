"""The command line. Only this part of the package may do I/O."""
