"""A server's report of itself: over its socket (`Stated`), over HTTP (`/status`) and, as the difference of two, in `kv
top`.
"""

from dataclasses import dataclass, field
from typing import Final

from kv_core.service import CacheCounts
from kv_tiers.tier_state import Held, TierState

from kv_server.directory.state import DirectoryState
from kv_server.drain.state import DrainState

MAX_TENANTS: Final = 1000
"""The most tenants without a name or quota that a report lists: there may be as many as there are chunks."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One session.

    session: its number, never reused.
    pid: of the client's process; 0 if it is not visible, as in another container.
    engine: the engine that the process belongs to.
    group_bytes, fingerprint: the format that it registered: the chunk size of each group of layers, and what the bytes
        mean.
    shards: number of shards in which each of its chunks is stored.
    facts: what the engine's other processes may query.
    """

    session: int
    pid: int
    engine: str
    group_bytes: tuple[int, ...]
    fingerprint: str
    shards: int
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class TenantReport:
    """A tenant's use of the pool.

    name: from the settings; "" if it is not listed there.
    tag: hex, as in paths of keys.
    chunks: in slots.
    used_bytes: of those.
    quota_bytes: None for a tenant that uses the common share.
    """

    name: str
    tag: str
    chunks: int
    used_bytes: int
    quota_bytes: int | None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """One format's cache.

    group_bytes, fingerprint: the format.
    chunk_bytes: of the largest chunk: what a slot has room for.
    pool: its name.
    sessions: of clients that use it now.
    counts: of the whole cache.
    held: what lookups can find in the pool. `counts` counts every group and shard separately, except in lookups.
    tiers: below the pool, hottest first. Counts are since the start, as are those of `counts`.
    directories: what tiers with a directory know of other hosts, by the tier's name.
    tenants: those with a name or a quota, and of all others the `MAX_TENANTS` with the most chunks.
    tenants_known: how many there are in all.
    handed_over: chunks that are held for another engine now (`kv_tiers.cache.leases`).
    drain: the progress if this host is to leave.
    name: as in metrics, logs and traces.
    models: the models of engines that have registered this format.
    """

    chunk_bytes: int
    group_bytes: tuple[int, ...]
    fingerprint: str
    pool: str
    sessions: int
    counts: CacheCounts
    held: Held
    tiers: list[TierState]
    directories: dict[str, DirectoryState] = field(default_factory=dict)
    tenants: list[TenantReport] = field(default_factory=list)
    tenants_known: int = 0
    handed_over: int = 0
    drain: DrainState | None = None
    name: str = ""
    models: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PeersServed:
    """What other hosts' servers read from this one. All but `connections` only grow.

    connections: currently open.
    turned_away: connections refused for lack of room or authentication.
    asked, held: chunks looked up, and those of them that were here.
    sent, sent_bytes: chunks sent, and the bytes of their payloads.
    """

    connections: int = 0
    turned_away: int = 0
    asked: int = 0
    held: int = 0
    sent: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """The server at this moment.

    pid: its process.
    package: its version.
    sessions: of clients that have registered a cache.
    orphans: sessions that ended while their process lived and might still be copying.
    caches: one for each format.
    opening: how many caches are being opened.
    uptime_s: since it began.
    peers: what is served to other hosts' servers; None: there is no address for them.
    keeps: places that may hold chunks from before this process, of formats that no engine has registered yet.
    """

    pid: int
    package: str
    sessions: list[Registration]
    orphans: int
    caches: list[CacheReport]
    opening: int = 0
    uptime_s: float = 0.0
    peers: PeersServed | None = None
    keeps: list[str] = field(default_factory=list)
