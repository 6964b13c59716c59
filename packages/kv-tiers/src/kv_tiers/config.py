"""Settings of the host tier, strict: an unknown name or a wrong type is refused where the settings are read."""

from typing import Annotated, Literal

import msgspec
from kv_core.errors import ConfigError

from kv_tiers.eviction.registry import DEFAULT_POLICY, PolicySpec


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host pool and how long its promises last."""

    capacity_bytes: int
    """How much of the pool's memory holds chunks; taken from the machine as it is used. Whole chunks count."""
    name: str = ""
    """Empty: the pool ends with its process. A name: a file in shared memory, which the next process finds full."""
    lease_s: float = 300.0
    """Seconds that chunks stay put for a holder from whom nothing more is heard."""
    policy: PolicySpec = DEFAULT_POLICY
    """What leaves when room is needed: the name of an eviction policy, or a mapping of `name` and its parameters."""


def check_lease(lease_s: float) -> None:
    """
    Raises:
        ConfigError: it would be over before anything could be read.
    """
    if not lease_s > 0:
        raise ConfigError(f"lease_s={lease_s}: a lease must last longer than nothing; 300 is the default")


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tenant that is told apart in reports, or has a part of the pool for itself. One of salt, salt_file and tag."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """What reports call it."""
    quota_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How much of the pool is this tenant's alone, and all it gets there. Left out: it shares what the quotas leave."""
    salt: str | None = None
    """What its requests carry. Better in a file."""
    salt_file: str | None = None
    """The file that the salt is in, readable by its owner alone. A newline at its end does not count."""
    tag: str | None = None
    """Instead of the salt: 14 hex digits of its hash. Zeros: requests without a salt."""

    def __repr__(self) -> str:
        return f"TenantConfig(name={self.name!r}, quota_bytes={self.quota_bytes})"  # and never a salt


class LaneConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every tier has, whatever its type; the rest of its options are its own."""

    name: str = ""
    """What it is called in logs and metrics; its type where nothing is said."""
    write: Literal["through", "back", "never"] = "through"
    """When chunks are stored there: as soon as may be, when the pool is about to evict them, or not at all."""
    threads: int = 2
    """How many calls to it may be under way at a time."""


class ColdConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the tiers below the host pool are used."""

    wait_s: float = 1.0
    """How long a request may wait for chunks on their way up before it gets what has arrived. 0: never waits."""
    prefetch_share: float = 0.5
    """The part of the pool that may be waiting for bytes from below."""
    spill_share: float = 0.25
    """The part of the pool that may be held in place while it is stored below."""
    batch_bytes: int = 32 << 20
    """How much one call to a tier carries. At least one chunk."""
    drain_s: float = 5.0
    """How long closing waits for what is still to be stored below."""
