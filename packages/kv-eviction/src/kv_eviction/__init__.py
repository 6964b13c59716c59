"""Eviction policies: the order in which chunks leave a full tier."""

from kv_eviction.policy import EvictionPolicy
from kv_eviction.registry import DEFAULT_POLICY, POLICY_NAMES, PolicySpec, make_policy
from kv_eviction.simple import LruPolicy

__all__ = ["DEFAULT_POLICY", "POLICY_NAMES", "EvictionPolicy", "LruPolicy", "PolicySpec", "make_policy"]
