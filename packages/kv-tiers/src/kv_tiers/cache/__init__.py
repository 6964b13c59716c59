"""The cache of one process: leases, promotion from the lower tiers and writes to them."""
