"""The tiers that need only this machine."""
