"""Policies by name, for settings and command lines."""

import difflib
from collections.abc import Callable
from typing import Final

from kv_core.errors import ConfigError

from kv_tiers.eviction.arc import ArcPolicy
from kv_tiers.eviction.fifo import FifoPolicy
from kv_tiers.eviction.lfu import LfuPolicy
from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.eviction.mru import MruPolicy
from kv_tiers.eviction.policy import EvictionPolicy
from kv_tiers.eviction.prefix import PrefixPolicy

_MAKERS: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity_chunks: LruPolicy(),
    "arc": ArcPolicy,
    "lfu": lambda capacity_chunks: LfuPolicy(),
    "fifo": lambda capacity_chunks: FifoPolicy(),
    "prefix": PrefixPolicy,
    "mru": lambda capacity_chunks: MruPolicy(),
}

POLICY_NAMES: tuple[str, ...] = tuple(_MAKERS)
DEFAULT_POLICY: Final = "prefix"


def make_policy(name: str, capacity_chunks: int) -> EvictionPolicy:
    """A policy that has seen nothing, for a tier of so many chunks.

    Raises:
        ConfigError: there is no policy of that name.
    """
    if name not in _MAKERS:
        near = difflib.get_close_matches(name.lower(), POLICY_NAMES, n=1, cutoff=0.3)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"there is no eviction policy {name!r}; {meant}write one of {', '.join(POLICY_NAMES)}")
    return _MAKERS[name](capacity_chunks)
