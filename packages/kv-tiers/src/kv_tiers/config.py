"""What a host tier needs to know, frozen and strict."""

from typing import Literal

import msgspec

from kv_tiers.local import DEFAULT_LEASE_S


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host pool and the cache on it."""

    capacity_bytes: int
    """How much host memory holds chunks."""
    name: str = ""
    """Empty: the pool ends with its process. A name: it outlives it, in shared memory."""
    lease_s: float = DEFAULT_LEASE_S
    """How long a promise or a read lease lasts without being renewed."""
    policy: Literal["lru"] = "lru"
    """Which chunk goes first when room is needed."""
