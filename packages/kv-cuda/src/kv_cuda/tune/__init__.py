"""`kv bench copy`: measures the cost of copies on this machine."""
