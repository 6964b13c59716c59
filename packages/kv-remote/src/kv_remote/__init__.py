"""Tiers in the services of other machines: Redis or Valkey, S3, Mooncake, a shared file system. Also what protocols
between processes and hosts have in common."""
