"""Config → objects. The only file that names concrete tiers and policies."""

from kv_core.clock import Clock
from kv_core.errors import ConfigError

from kv_tiers.config import HostConfig
from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.local import LocalCache
from kv_tiers.pool import PAGE_BYTES, HostPool, round_up


def build_local_cache(
    config: HostConfig, *, chunk_nbytes: int, fingerprint: str, clock: Clock | None = None
) -> LocalCache:
    """The cache that `config` describes, for chunks of one size and format.

    fingerprint: of the chunks' format; a named pool that was made for another one starts empty.

    Raises:
        ConfigError: the pool cannot hold one chunk, is larger than memory, or its name cannot be had.
    """
    slot_bytes = round_up(chunk_nbytes, PAGE_BYTES)
    slots = config.capacity_bytes // slot_bytes
    if slots < 1:
        raise ConfigError(
            f"a host capacity of {config.capacity_bytes} bytes holds no chunk: one takes {slot_bytes} bytes; "
            f"write at least {-(-slot_bytes >> 20) or 1}MiB"
        )
    if config.name:
        pool = HostPool.named(config.name, slot_bytes=slot_bytes, slots=slots, fingerprint=fingerprint)
    else:
        pool = HostPool.anonymous("host", slot_bytes=slot_bytes, slots=slots)
    return LocalCache(pool, chunk_nbytes=chunk_nbytes, policy=LruPolicy(), lease_s=config.lease_s, clock=clock)
