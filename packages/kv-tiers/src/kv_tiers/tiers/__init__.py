"""The built-in tiers: disk, memory, Redis, S3, Mooncake, a shared file system."""
