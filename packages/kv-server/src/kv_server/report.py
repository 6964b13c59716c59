"""A server's report of itself: over its socket (`Stated`), over HTTP (`/status`) and, as the difference of two, in `kv
top`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kv_core.service import CacheCounts
from kv_observe.lookup_uses import LookupUse
from kv_tiers.tier_state import Held, TierState


@dataclass(slots=True)
class DrainState:
    """The current state of one cache's drain. Counts are of chunks, counting every group and shard separately.

    phase: `drained`: nothing is left to offer. `stopped`: it ended before that, for the reason in `why`.
    why: the reason why it stopped, or left chunks behind.
    chunks: those that the pool held, and those held only by the host's own tiers whose turn has come.
    elsewhere: of these, already on another host.
    moved, moved_bytes: fetched by another host since.
    refused: no host took them, or none that took them had them in time.
    gone: no longer here, so they could not be offered.
    left: not offered or not fetched when it stopped. While it runs: still to do.
    """

    phase: Literal["draining", "drained", "stopped"]
    why: str = ""
    chunks: int = 0
    elsewhere: int = 0
    moved: int = 0
    moved_bytes: int = 0
    refused: int = 0
    gone: int = 0
    left: int = 0

    def spelled(self) -> str:
        """In one line, for people."""
        parts = [
            f"{self.moved:,} chunks ({self.moved_bytes:,} bytes) moved",
            f"{self.elsewhere:,} on other hosts already",
        ]
        counts = ((self.refused, "refused"), (self.gone, "gone"), (self.left, "left"))
        parts += [f"{count:,} {what}" for count, what in counts if count]
        why = f" ({self.why})" if self.why else ""
        return f"{self.phase}{why}: of {self.chunks:,} chunks {', '.join(parts)}"


def nothing_moved(keeps: Sequence[str]) -> str:
    """What a drain of no cache says. keeps: as for `Report`."""
    return (
        "nothing was moved: no engine has registered since this server started, so it does not know what "
        f"{' and '.join(keeps)} may hold. Drain it before it is stopped, or start an engine first"
    )


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """What has become of settings that were read again.

    changed: what is in force from now on and was not before, in words.
    refused: the settings that stay as they are although the file has others, and what each takes.
    why: why nothing could be taken, and all stays as it is; empty: it could.
    """

    changed: list[str]
    refused: Mapping[str, Literal["take-over", "restart"]]
    why: str = ""

    def refusals(self) -> list[str]:
        """For people."""
        words = {"take-over": "kv reload --take-over, or a restart", "restart": "a restart"}
        return [f"{path} stays as it is: a change takes {words[needed]}" for path, needed in self.refused.items()]


@dataclass(slots=True)
class MirrorCounts:
    """What is known of other hosts. The figures from `entries` on only grow.

    hosts, exact: other hosts that are known, and those among them whose names are known exactly.
    left_out: hosts for whose names there is no room.
    names: (name, host) pairs in memory.
    entries, gaps: other hosts' entries that were applied, and those found to be missing.
    repairs, failed_repairs: repairs of a host's names; `shards_fetched` and `repair_bytes` are what they took.
    """

    hosts: int = 0
    exact: int = 0
    left_out: int = 0
    names: int = 0
    entries: int = 0
    gaps: int = 0
    repairs: int = 0
    failed_repairs: int = 0
    shards_fetched: int = 0
    repair_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class DirectoryState(MirrorCounts):
    """The directory as this server sees it.

    why: why it cannot be reached, or refuses what is written; empty: all is well.
    lag_s: seconds since it was last read up to its end.
    used_bytes: memory that the names take.
    listed: chunks of this server in the directory; None: it is not listed.
    not_here: chunks that a host did not have although its names listed them; it only grows.
    """

    why: str
    lag_s: float
    used_bytes: int
    listed: int | None
    not_here: int

    def spelled(self) -> str:
        """In one line, for people."""
        away = f"fails ({self.why}), and what is known is retained: " if self.why else ""
        listed = "this server is not listed" if self.listed is None else f"{self.listed:,} chunks of this server listed"
        return (
            f"{away}{self.hosts:,} other hosts, {self.exact:,} of them known exactly, with {self.names:,} chunks; "
            f"read {self.lag_s:.1f} s ago; {self.gaps:,} gaps, {self.repairs:,} repairs "
            f"of {self.repair_bytes:,} bytes; {listed}"
        )


MAX_TENANTS: Final = 1000
"""The most tenants that a report lists: the thread that serves engines makes it every second for the page."""


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


def chunk_tokens_of(sessions: Iterable[Registration]) -> list[int]:
    """The different numbers of tokens in chunks of these engines, as far as they say."""
    stated = {one.facts.get("chunk_tokens", "") for one in sessions}
    return sorted(int(size) for size in stated if size.isascii() and size.isdigit() and len(size) < 10)


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
    tenants: at most `MAX_TENANTS`, first those with a name or a quota, then the others, the most chunks first.
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
    staged: those of these chunks that peers read by NIXL.
    stored, stored_bytes: chunks that engines of other hosts stored here, and their bytes.
    """

    connections: int = 0
    turned_away: int = 0
    asked: int = 0
    held: int = 0
    sent: int = 0
    sent_bytes: int = 0
    staged: int = 0
    stored: int = 0
    stored_bytes: int = 0


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
    frozen: nothing new is stored, and nothing evicted.
    for_s: how long it has been `frozen` or `leaving` (a drain).
    engines, prefixes: those for which most was found, the greatest first.
    saved_s: seconds of prefill that engines were advised to save, as they measured.
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
    frozen: bool = False
    for_s: dict[str, float] = field(default_factory=dict)
    engines: list[LookupUse] = field(default_factory=list)
    prefixes: list[LookupUse] = field(default_factory=list)
    saved_s: float = 0.0
