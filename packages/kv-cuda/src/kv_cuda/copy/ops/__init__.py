"""What moves bytes on a device: one Triton kernel, and the driver's own batched copies."""
