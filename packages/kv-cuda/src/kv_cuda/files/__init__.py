"""Chunks between files and blocks of a device, by GPUDirect Storage or through the host."""
