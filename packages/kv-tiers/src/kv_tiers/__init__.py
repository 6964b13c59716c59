"""Where KV chunks live: a host pool, its index, leases and eviction. Keeps; decides nothing and copies nothing."""

from kv_tiers.build import build_local_cache
from kv_tiers.clock import MonotonicClock
from kv_tiers.config import ColdConfig, HostConfig
from kv_tiers.eviction import EvictionPolicy, LruPolicy
from kv_tiers.local import LocalCache
from kv_tiers.pool import HostPool
from kv_tiers.tenants import Tenant

__all__ = [
    "ColdConfig",
    "EvictionPolicy",
    "HostConfig",
    "HostPool",
    "LocalCache",
    "LruPolicy",
    "MonotonicClock",
    "Tenant",
    "build_local_cache",
]
