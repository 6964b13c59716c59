"""Metrics of what this host has to do with others: peers, the directory, and drains."""

from collections.abc import Iterable, Iterator
from typing import Final

from kv_core.errors import MisuseError
from kv_observe.metrics import Labels, Table, counter, gauge, tabulated
from kv_tiers.cache.local import LocalCache
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kv_server.peers.side import PeerSide, directories_of
from kv_server.report import DirectoryState, DrainState, PeersServed


def peer_families(served: PeersServed) -> Iterator[Metric]:
    """Metrics of what a server with `peers.listen` has served to other hosts' servers."""
    yield GaugeMetricFamily("kv_peer_connections", "Connections of other hosts' servers.", value=served.connections)
    counters = {
        "turned_away": ("Connections that were refused.", served.turned_away),
        "chunks_asked": ("Chunks that peers asked about.", served.asked),
        "chunks_held": ("Those of these chunks that were held here.", served.held),
        "chunks_sent": ("Chunks that were sent to peers.", served.sent),
        "sent_bytes": ("Bytes of the payloads of these chunks.", served.sent_bytes),
        "chunks_staged": ("Those of the chunks sent that peers read by NIXL.", served.staged),
        "chunks_stored": ("Chunks that engines of other hosts stored here.", served.stored),
        "stored_bytes": ("Bytes of these chunks.", served.stored_bytes),
    }
    for name, (about, value) in counters.items():
        yield CounterMetricFamily(f"kv_peer_{name}", about, value=value)


def network_families(caches: Iterable[LocalCache]) -> Iterator[Metric]:
    """Metrics of what these caches know of other hosts and pass on to them."""
    directories: list[tuple[str, str, DirectoryState]] = []
    drains: list[tuple[str, DrainState]] = []
    for cache in caches:
        try:
            cache.admin.check_open()
        except MisuseError:  # it was closed just now
            continue
        name = cache.events.name
        directories += [(name, tier, state) for tier, state in directories_of(cache).items()]
        sides = [extension for extension in cache.extensions if isinstance(extension, PeerSide)]
        drains += [(name, state) for side in sides if (state := side.drain.state()) is not None]
    yield from directory_families(directories)
    yield from drain_families(drains)


def directory_families(states: Iterable[tuple[str, str, DirectoryState]]) -> Iterator[Metric]:
    """Metrics of what tiers with a directory know of other hosts. states: for each tier its cache, its name and its
    state."""
    if known := [((cache, tier), state) for cache, tier, state in states]:
        yield from tabulated("directory", _DIRECTORY, known)


def drain_families(states: Iterable[tuple[str, DrainState]]) -> Iterator[Metric]:
    """Metrics of caches that are being drained, or were. states: for each its name and its progress."""
    if not (known := list(states)):
        return
    under_way: dict[Labels, float] = {(cache,): state.phase == "draining" for cache, state in known}
    yield gauge("drain_under_way", "1 while chunks are offered to other hosts", under_way)
    fates = ("moved", "elsewhere", "refused", "gone", "left")
    chunks: dict[Labels, float] = {(cache, fate): getattr(state, fate) for cache, state in known for fate in fates}
    about = "Chunks of the pool and, when their turn has come, of the host's own tiers, by what became of them"
    yield gauge("drain_chunks", about, chunks, "state")
    moved: dict[Labels, float] = {(cache,): state.moved_bytes for cache, state in known}
    yield gauge("drain_moved_bytes", "Bytes that other hosts have fetched since", moved)


_DIRECTORY: Final[Table[DirectoryState]] = {
    "up": (gauge, "1 while the directory can be read and written, else 0", lambda of: not of.why),
    "lag_seconds": (gauge, "Seconds since the directory was last read to its end", lambda of: of.lag_s),
    "hosts": (gauge, "Other hosts that are known", lambda of: of.hosts),
    "exact_hosts": (gauge, "Other hosts whose chunks are known exactly", lambda of: of.exact),
    "left_out_hosts": (gauge, "Other hosts whose chunks are not tracked for lack of room", lambda of: of.left_out),
    "chunks": (gauge, "Known chunks of other hosts, counted once per host", lambda of: of.names),
    "used_bytes": (gauge, "Memory that the known chunks take", lambda of: of.used_bytes),
    "listed_chunks": (gauge, "Chunks of this server that are announced to other hosts", lambda of: of.listed or 0),
    "entries": (counter, "Entries of other hosts that were applied", lambda of: of.entries),
    "gaps": (counter, "Times that entries of a host were missing", lambda of: of.gaps),
    "repairs": (counter, "Times that a host was queried for missing entries", lambda of: of.repairs),
    "failed_repairs": (counter, "Times that a host did not answer such a query", lambda of: of.failed_repairs),
    "repair_bytes": (counter, "Bytes transferred by repairs", lambda of: of.repair_bytes),
    "not_here": (counter, "Chunks that a host lacked although the directory listed them", lambda of: of.not_here),
}
