"""What copies cost on this machine: `kv bench copy`."""
