"""Device operations: one Triton kernel, and the driver's batched copies."""
