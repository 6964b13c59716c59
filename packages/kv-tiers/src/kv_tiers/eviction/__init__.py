"""Eviction policies: the order in which chunks leave a full tier."""

from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.eviction.policy import EvictionPolicy
from kv_tiers.eviction.registry import DEFAULT_POLICY, POLICY_NAMES, PolicySpec, make_policy

__all__ = ["DEFAULT_POLICY", "POLICY_NAMES", "EvictionPolicy", "LruPolicy", "PolicySpec", "make_policy"]
