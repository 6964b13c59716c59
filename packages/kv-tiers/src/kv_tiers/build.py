"""Settings in, a cache out. The only file that names concrete pools and policies."""

import itertools
import os

from kv_core.clock import Clock
from kv_core.errors import ConfigError

from kv_tiers.config import HostConfig
from kv_tiers.eviction.registry import make_policy
from kv_tiers.local import LocalCache
from kv_tiers.machine import spelled
from kv_tiers.pool import HostPool, slot_bytes_for

_NUMBERS = itertools.count()


def build_local_cache(
    config: HostConfig, *, chunk_nbytes: int, fingerprint: str, clock: Clock | None = None
) -> LocalCache:
    """A cache of chunks of `chunk_nbytes` each, whose bytes mean what `fingerprint` says.

    Raises:
        ConfigError: the settings cannot be honoured on this machine.
    """
    if chunk_nbytes <= 0:
        raise ConfigError(f"chunks of {chunk_nbytes} bytes; a chunk's size must be positive")
    slots = config.capacity_bytes // slot_bytes_for(chunk_nbytes)
    if slots < 1:
        smallest = slot_bytes_for(chunk_nbytes)
        raise ConfigError(
            f"a capacity of {config.capacity_bytes} bytes holds no chunk of this model, which takes {smallest} "
            f"({spelled(smallest)}); write a capacity of at least {smallest} bytes, and for use a thousand times that"
        )
    policy = make_policy(config.policy, slots)
    if config.name:
        pool = HostPool.named(config.name, chunk_nbytes, slots, fingerprint=fingerprint)
    else:
        # The name is only what extents say; this process has no other pool of this number.
        pool = HostPool.anonymous(f"host-{os.getpid()}-{next(_NUMBERS)}", chunk_nbytes, slots)
    try:
        return LocalCache(pool, policy=policy, lease_s=config.lease_s, clock=clock)
    except BaseException:
        pool.close()
        raise
