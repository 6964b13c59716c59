"""Where KV chunks live: a host pool, an index over it, leases on what it holds, and an order in which it goes.

`LocalCache` is the cache in this process; it implements `kv_core.service.CacheService`.
"""

from kv_tiers.build import build_local_cache
from kv_tiers.clock import MonotonicClock
from kv_tiers.config import HostConfig
from kv_tiers.local import LocalCache
from kv_tiers.pool import HostPool

__all__ = ["HostConfig", "HostPool", "LocalCache", "MonotonicClock", "build_local_cache"]
