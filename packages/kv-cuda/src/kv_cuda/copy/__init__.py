"""Copiers: the same plan on a CPU, by a kernel, or by the driver."""
