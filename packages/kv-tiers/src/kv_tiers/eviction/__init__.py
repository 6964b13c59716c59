"""Orders in which chunks leave when room is needed."""

from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.eviction.policy import EvictionPolicy

__all__ = ["EvictionPolicy", "LruPolicy"]
