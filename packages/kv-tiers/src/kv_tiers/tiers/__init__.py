"""The tiers of this machine: disk, memory."""
