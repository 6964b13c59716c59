"""Settings of the host tier, strict: an unknown name or a wrong type is refused where the settings are read."""

from typing import Literal

import msgspec


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host pool and how long its promises last."""

    capacity_bytes: int
    """How much of the pool's memory holds chunks; taken from the machine as it is used. Whole chunks count."""
    name: str = ""
    """Empty: the pool ends with its process. A name: a file in shared memory, which the next process finds full."""
    lease_s: float = 300.0
    """Seconds that chunks stay put for a holder from whom nothing more is heard."""
    policy: Literal["lru"] = "lru"
    """What leaves when room is needed."""
