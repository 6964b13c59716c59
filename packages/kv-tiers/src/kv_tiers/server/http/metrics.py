"""`GET /metrics`, for Prometheus."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

from kv_tiers.cache.local import LocalCache
from kv_tiers.directory_state import DirectoryState
from kv_tiers.drain_state import DrainState
from kv_tiers.server.caches import cache_name
from kv_tiers.server.http.operation import Operation
from kv_tiers.server.http.relay import Relay
from kv_tiers.server.report import PeersServed
from kv_tiers.watch.metrics import Metrics


def operations(relay: Relay) -> list[Operation]:
    """Metrics that come from events are counted from this call on."""
    known: list[LocalCache] = []
    others: list[Metric] = []
    counted = Metrics(relay.bus, lambda: list(known), lambda: others)

    async def metrics() -> Response:
        known[:] = (await relay.caches()).values()
        report = await relay.report()
        others[:] = [
            *([] if report.peers is None else peer_families(report.peers)),
            *directory_families(
                (cache_name((cache.group_bytes, cache.fingerprint)), tier.name, tier.directory)
                for cache in report.caches
                for tier in cache.tiers
                if tier.directory is not None
            ),
            *drain_families(
                (cache_name((cache.group_bytes, cache.fingerprint)), cache.drain)
                for cache in report.caches
                if cache.drain is not None
            ),
        ]
        text, media_type = await relay.call(counted.exposition)
        return Response(text, headers={"content-type": media_type})

    about = "Counters and gauges in Prometheus's text format"
    return [Operation("GET", "/metrics", about, metrics, Response, failures=(503,))]


def peer_families(served: PeersServed) -> Iterator[Metric]:
    """Metrics of what a server with `peers.listen` has served to other hosts' servers."""
    yield GaugeMetricFamily("kv_peer_connections", "Connections of other hosts' servers.", value=served.connections)
    counters = {
        "turned_away": ("Connections that were refused.", served.turned_away),
        "chunks_asked": ("Chunks that peers asked about.", served.asked),
        "chunks_held": ("Those of these chunks that were held here.", served.held),
        "chunks_sent": ("Chunks that were sent to peers.", served.sent),
        "sent_bytes": ("Bytes of the payloads of these chunks.", served.sent_bytes),
    }
    for name, (about, value) in counters.items():
        yield CounterMetricFamily(f"kv_peer_{name}", about, value=value)


def directory_families(states: Iterable[tuple[str, str, DirectoryState]]) -> Iterator[Metric]:
    """Metrics of what tiers with a directory know of other hosts. states: for each tier its cache, its name and its
    state."""
    known = list(states)
    if not known:
        return
    for name, (about, is_counter, value_of) in _DIRECTORY.items():
        kind = CounterMetricFamily if is_counter else GaugeMetricFamily
        family = kind(f"kv_directory_{name}", about, labels=("cache", "tier"))
        for cache, tier, state in known:
            family.add_metric((cache, tier), float(value_of(state)))
        yield family


def drain_families(states: Iterable[tuple[str, DrainState]]) -> Iterator[Metric]:
    """Metrics of caches that are being drained, or were. states: for each its name and its progress."""
    known = list(states)
    if not known:
        return
    under_way = GaugeMetricFamily("kv_drain_under_way", "1 while chunks are offered to other hosts.", labels=("cache",))
    chunks = GaugeMetricFamily(
        "kv_drain_chunks", "Chunks that the pool held when the drain began.", labels=("cache", "state")
    )
    moved = GaugeMetricFamily("kv_drain_moved_bytes", "Bytes that other hosts have fetched since.", labels=("cache",))
    for cache, state in known:
        under_way.add_metric((cache,), state.phase == "draining")
        moved.add_metric((cache,), state.moved_bytes)
        for name in ("moved", "elsewhere", "refused", "gone", "left"):
            chunks.add_metric((cache, name), getattr(state, name))
    yield from (under_way, chunks, moved)


_DIRECTORY: Final[dict[str, tuple[str, bool, Callable[[DirectoryState], float]]]] = {
    "up": ("1 while the directory can be read and written, else 0.", False, lambda of: not of.why),
    "lag_seconds": ("Seconds since the directory was last read to its end.", False, lambda of: of.lag_s),
    "hosts": ("Other hosts that are known.", False, lambda of: of.hosts),
    "exact_hosts": ("Other hosts whose chunks are known exactly.", False, lambda of: of.exact),
    "left_out_hosts": ("Other hosts whose chunks are not tracked for lack of room.", False, lambda of: of.left_out),
    "chunks": ("Known chunks of other hosts, counted once per host.", False, lambda of: of.names),
    "used_bytes": ("Memory that the known chunks take.", False, lambda of: of.used_bytes),
    "listed_chunks": ("Chunks of this server that are announced to other hosts.", False, lambda of: of.listed or 0),
    "entries": ("Entries of other hosts that were applied.", True, lambda of: of.entries),
    "gaps": ("Times that entries of a host were missing.", True, lambda of: of.gaps),
    "repairs": ("Times that a host was queried for missing entries.", True, lambda of: of.repairs),
    "failed_repairs": ("Times that a host did not answer such a query.", True, lambda of: of.failed_repairs),
    "repair_bytes": ("Bytes transferred by repairs.", True, lambda of: of.repair_bytes),
    "not_here": ("Chunks that a host lacked although the directory listed them.", True, lambda of: of.not_here),
}
"""For each metric its description, whether it only grows, and its value."""
