"""The tiers that come with the package, a file each."""
