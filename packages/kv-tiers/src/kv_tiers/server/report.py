"""What a server says of itself: over its socket (`Stated`), over HTTP (`/status`) and, of two in a row, in `kv top`."""

from dataclasses import dataclass, field
from typing import Final

from kv_core.service import CacheCounts

MAX_TENANTS: Final = 1000
"""That a report lists though they have no name and no quota: there may be as many as there are chunks."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One session. pid: 0 if its process is not in sight, as in another container."""

    session: int
    pid: int
    engine: str
    chunk_bytes: int
    fingerprint: str
    shards: int
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class TierReport:
    """health: the name of a `Health`, and why. waiting, under_way: chunks on their way there.

    What follows only grows. In chunks, but for downs; lost: evicted from the pool before they could be stored here.
    """

    name: str
    health: str
    why: str
    chunks: int | None
    used_bytes: int | None
    capacity_bytes: int | None
    waiting: int
    under_way: int
    loaded: int = 0
    stored: int = 0
    damaged: int = 0
    refused: int = 0
    lost: int = 0
    downs: int = 0


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What a tenant has of the pool. name: from the settings, "" if it is not there. tag: hex, as in keys' paths.

    quota_bytes: None for one that shares what the quotas leave.
    """

    name: str
    tag: str
    chunks: int
    used_bytes: int
    quota_bytes: int | None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """One format's cache. sessions: of clients that use it now.

    tenants: those with a name or a quota, and of all others the `MAX_TENANTS` that have most, as `tenants_known`
    counts all.
    """

    chunk_bytes: int
    fingerprint: str
    pool: str
    sessions: int
    counts: CacheCounts
    tiers: list[TierReport]
    tenants: list[TenantReport] = field(default_factory=list)
    tenants_known: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """The server at this moment. orphans: sessions that ended while their process lived and might still write.

    opening: caches that are being opened.
    """

    pid: int
    package: str
    sessions: list[Registration]
    orphans: int
    caches: list[CacheReport]
    opening: int = 0
    uptime_s: float = 0.0
