"""The built-in tiers, one file each."""
