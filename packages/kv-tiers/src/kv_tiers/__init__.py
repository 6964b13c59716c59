"""The complete cache of one process: a pool of host memory above its lower tiers.

It computes no keys and copies nothing to a device.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_tiers.build import build_local_cache
    from kv_tiers.cache.local import LocalCache
    from kv_tiers.clock import MonotonicClock
    from kv_tiers.config import ColdConfig, HostConfig
    from kv_tiers.pool.host_pool import HostPool
    from kv_tiers.tenants import Tenant
else:
    from kv_core.lazy import exports

    __getattr__ = exports(
        __name__,
        {
            "kv_tiers.build": ("build_local_cache",),
            "kv_tiers.clock": ("MonotonicClock",),
            "kv_tiers.config": ("ColdConfig", "HostConfig"),
            "kv_tiers.cache.local": ("LocalCache",),
            "kv_tiers.pool.host_pool": ("HostPool",),
            "kv_tiers.tenants": ("Tenant",),
        },
    )

__all__ = ["ColdConfig", "HostConfig", "HostPool", "LocalCache", "MonotonicClock", "Tenant", "build_local_cache"]
