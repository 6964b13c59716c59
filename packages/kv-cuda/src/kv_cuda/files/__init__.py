"""Chunks between files and a device's blocks, by GPUDirect Storage or through the host."""
